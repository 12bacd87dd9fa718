"""Which rows are computed together, what each costs, by which ranks are balanced, and the share of padding in that.

It needs no Megatron: the driver plans as the ranks do.
"""

import heapq
import math
from collections.abc import Sequence

from megarl.config.schema.algo import compares_pairs
from megarl.mcore.spec import Role, WorkerSpec
from megarl.models.architecture import Architecture
from megarl.models.families import list_weights
from megarl.types import Metrics, Sequences

REAL, COMPUTED = "tokens/real", "tokens/computed"
"""Sums over the micro-batches of a step: tokens of the sequences, and those that ranks compute, padding included"""


def pack(
    lengths: Sequence[int],
    tokens_per_microbatch: int,
    num_ranks: int,
    costs: Sequence[float] | None = None,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Rank -> micro-batch -> row numbers; each row is in exactly one micro-batch.

    lengths: tokens of each row. costs: compute of each row, in any unit; without it, the lengths. Ranks, and the
    micro-batches of a rank, are balanced by cost: costliest row first, to what has cost least so far (Graham's LPT: no
    rank costs more than 4/3 - 1/(3 num_ranks) times the best assignment). Every rank gets as many micro-batches, of the
    multiples of `multiple` the least that the greedy rule finds, its costliest first; some may be empty. None of more
    than one row has more than `tokens_per_microbatch` tokens. A pure function: the same on every rank.
    """
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda row: (-costs[row], -lengths[row], row))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for row in order:
        cost, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (cost + costs[row], rank))
    num_microbatches = max(_fewest([lengths[row] for row in share], tokens_per_microbatch) for share in shares)
    num_microbatches += -num_microbatches % multiple
    while True:
        ranks = [_fill(share, lengths, costs, tokens_per_microbatch, num_microbatches) for share in shares]
        filled = [microbatches for microbatches in ranks if microbatches is not None]
        if len(filled) == num_ranks:
            return filled
        num_microbatches += multiple


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


def plan_microbatches(
    spec: WorkerSpec, arch: Architecture, sequences: Sequences, num_ranks: int
) -> list[list[list[int]]]:
    """Data-parallel rank -> micro-batch -> row numbers, as `pack` finds them; tokens may be missing in `sequences`.

    Under algo.value_loss=bradley_terry rows 2i and 2i + 1 are a pair, and are in one micro-batch.
    """
    size = 2 if compares_pairs(spec.algo) else 1
    costs = compute_row_costs(arch, sequences, with_value_head=spec.role is Role.critic)
    given = (sequences.lengths.tolist(), costs)
    lengths, costs = ([sum(x[i : i + size]) for i in range(0, len(x), size)] for x in given)
    parallel = spec.parallel
    # The interleaved schedule takes micro-batches in groups of pp.
    multiple = parallel.pp if parallel.vpp > 1 else 1
    planned = pack(lengths, spec.tokens_per_microbatch * parallel.cp, num_ranks, costs, multiple)
    return [[[size * i + j for i in units for j in range(size)] for units in own] for own in planned]


def compute_row_costs(arch: Architecture, sequences: Sequences, with_value_head: bool = False) -> list[float]:
    """Multiply-adds of one forward pass, for each row.

    A sequence of L tokens of which R are the response, with d the size of a head, H query and K key-value heads,
    h the hidden size, f the width of a layer's MLP (of a token's experts together) and V the vocabulary: the sum over
    the layers of L * (2 h d (H + K) + 3 h f) + L^2 * H d, and R * h V; the value head's R * h in place of the last.
    Causal attention counts L^2 / 2 for the scores and as many for their product with the values.
    """
    per_token, per_square = count_layer_work(arch)
    per_response_token = arch.hidden_size * (1 if with_value_head else arch.vocab_size)
    return [
        float(length * per_token + length**2 * per_square + response * per_response_token)
        for length, response in zip(sequences.lengths.tolist(), sequences.response_lengths.tolist(), strict=True)
    ]


def count_layer_work(arch: Architecture) -> tuple[int, int]:
    """Multiply-adds of all layers for each token, and for each token times the tokens of its sequence."""
    h = arch.hidden_size
    rows = 3 * arch.ffn_size * (arch.num_layers - arch.num_expert_layers)
    if arch.experts is not None:
        ffn_size = arch.experts.top_k * arch.experts.ffn_size + arch.experts.shared_ffn_size
        rows += arch.num_expert_layers * (3 * ffn_size + arch.experts.num_experts)
    # The matrices of attention are alike in all layers.
    weights = (weight for weight in list_weights(arch, 0) if weight.name.startswith("self_attention."))
    attention = sum(math.prod(shape) for weight in weights for shape in weight.shapes if len(shape) > 1)
    pairs = arch.num_heads * (arch.head_size + arch.value_size) // 2
    return arch.num_layers * attention + h * rows, arch.num_layers * pairs


def describe_work(metrics: Metrics, spec: WorkerSpec, arch: Architecture, sequences: Sequences) -> Metrics:
    """The metrics of an optimizer step with two in place of the counts of tokens.

    ROLE/real_tokens_frac: real tokens / computed ones. ROLE/model_tflop_sum: 1e12 floating-point operations of a
    forward pass and of a backward pass of twice as many, without what is computed again; with adapters, whose own are
    not counted, without the products for the gradients of the frozen weights.
    """
    role = spec.role
    rest = {key: value for key, value in metrics.items() if not key.startswith("tokens/")}
    multiply_adds = sum(compute_row_costs(arch, sequences, with_value_head=role is Role.critic))
    operations = 6 * multiply_adds
    if spec.lora is not None:
        head = 0 if role is Role.critic else arch.hidden_size * arch.vocab_size
        tokens, responses = float(sequences.lengths.sum()), float(sequences.response_lengths.sum())
        operations -= 2 * (count_layer_work(arch)[0] * tokens + head * responses)
    return {
        **rest,
        f"{role.value}/real_tokens_frac": metrics[REAL] / metrics[COMPUTED],
        f"{role.value}/model_tflop_sum": 1e-12 * operations,
    }
