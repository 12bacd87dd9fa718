"""Cuts a minibatch into micro-batches of whole sequences, for every data-parallel rank."""

import heapq
import math
from collections.abc import Sequence


def pack(
    lengths: Sequence[int], tokens_per_microbatch: int, num_ranks: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Rank -> micro-batch -> row numbers; each row is in exactly one micro-batch.

    lengths: tokens of each row. costs: compute of each row, in any unit; without it, the lengths. Ranks are balanced by
    cost, and so are the micro-batches of a rank: costliest row first, to what has cost least so far (Graham's LPT: no
    rank costs more than 4/3 - 1/(3 num_ranks) times what the best assignment would give). Every rank gets the same
    number of micro-batches (pipelines and collectives need it), the fewest that the greedy rule finds, its costliest
    first; where there are fewer rows than micro-batches, some are empty. No micro-batch of more than one row has more
    than `tokens_per_microbatch` tokens; a longer sequence makes one of its own. A pure function: the same on every
    rank.

    Raises ValueError for a budget or number of ranks under 1, a length under 1, or costs that are not one positive
    number a row.
    """
    if tokens_per_microbatch < 1 or num_ranks < 1:
        raise ValueError(f"needs at least 1: tokens_per_microbatch={tokens_per_microbatch}, num_ranks={num_ranks}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"every sequence needs a token; row {min(enumerate(lengths), key=lambda x: x[1])[0]} has none")
    costs = lengths if costs is None else costs
    if len(costs) != len(lengths) or not all(cost > 0 and math.isfinite(cost) for cost in costs):
        raise ValueError(f"costs: {len(costs)} for {len(lengths)} rows; one positive number a row is needed")
    order = sorted(range(len(lengths)), key=lambda row: (-costs[row], -lengths[row], row))
    shares = _assign(order, costs, num_ranks)
    num_microbatches = max(_fewest([lengths[row] for row in share], tokens_per_microbatch) for share in shares)
    while True:
        ranks = [_fill(share, lengths, costs, tokens_per_microbatch, num_microbatches) for share in shares]
        filled = [microbatches for microbatches in ranks if microbatches is not None]
        if len(filled) == num_ranks:
            return filled
        num_microbatches += 1


def _assign(order: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Give each row in turn to the rank that has cost least so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for row in order:
        cost, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (cost + costs[row], rank))
    return shares


def _fewest(lengths: Sequence[int], budget: int) -> int:
    """A number of micro-batches below which no assignment fits, 1 at least."""
    # A row over the budget is alone; no two of the others longer than half of it share a micro-batch.
    others = [length for length in lengths if length <= budget]
    num_long = sum(2 * length > budget for length in others)
    return max(1, len(lengths) - len(others) + max(num_long, -(-sum(others) // budget)))


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, num_bins: int
) -> list[list[int]] | None:
    """Give each row in turn to the bin with room that has cost least so far; costliest bin first. None: no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens, totals = [0] * num_bins, [0.0] * num_bins
    heap = [(0.0, number) for number in range(num_bins)]
    for row in order:
        full = []
        while heap and bins[heap[0][1]] and tokens[heap[0][1]] + lengths[row] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        number = heap[0][1]
        bins[number].append(row)
        tokens[number] += lengths[row]
        totals[number] += costs[row]
        heapq.heapreplace(heap, (totals[number], number))
        for entry in full:
            heapq.heappush(heap, entry)
    return [bins[number] for number in sorted(range(num_bins), key=lambda number: (-totals[number], number))]
