"""Cuts a minibatch into micro-batches of whole sequences, for every data-parallel rank."""

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], tokens_per_microbatch: int, num_ranks: int) -> list[list[list[int]]]:
    """Rank -> micro-batch -> row numbers; each row is in exactly one micro-batch.

    Every rank gets the same number of micro-batches (pipelines and collectives need it), the fewest that the
    greedy rule finds; where there are fewer rows than micro-batches, some are empty. No micro-batch of more
    than one row has more than `tokens_per_microbatch` tokens; a longer sequence makes one of its own.
    Micro-batches and ranks are balanced by tokens (longest first into the emptiest). A pure function: the
    same on every rank.

    Raises ValueError for a budget or number of ranks under 1, or a length under 1.
    """
    if tokens_per_microbatch < 1 or num_ranks < 1:
        raise ValueError(f"needs at least 1: tokens_per_microbatch={tokens_per_microbatch}, num_ranks={num_ranks}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"every sequence needs a token; row {min(enumerate(lengths), key=lambda x: x[1])[0]} has none")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    # A row over the budget is alone; no two of the others longer than half of it share a micro-batch.
    others = [length for length in lengths if length <= tokens_per_microbatch]
    num_long = sum(2 * length > tokens_per_microbatch for length in others)
    num_shared = max(num_long, -(-sum(others) // tokens_per_microbatch))
    fewest = max(1, len(lengths) - len(others) + num_shared)
    per_rank = -(-fewest // num_ranks)
    while True:
        bins = _fill(order, lengths, tokens_per_microbatch, per_rank * num_ranks)
        if bins is not None:
            return _deal(bins, lengths, num_ranks)
        per_rank += 1


def _fill(order: list[int], lengths: Sequence[int], budget: int, num_bins: int) -> list[list[int]] | None:
    """Longest first into the emptiest bin; None where that overflows a bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for row in order:
        tokens, number = heap[0]
        if bins[number] and tokens + lengths[row] > budget:
            return None
        bins[number].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], number))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """The same number of bins to each rank: heaviest first to the lightest rank that still lacks one."""
    per_rank = len(bins) // num_ranks
    weights = [sum(lengths[row] for row in rows) for rows in bins]
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for number in sorted(range(len(bins)), key=lambda number: (-weights[number], number)):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: (totals[r], r))
        ranks[rank].append(bins[number])
        totals[rank] += weights[number]
    return ranks
