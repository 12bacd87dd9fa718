"""Which rows are computed together: micro-batches in which the tokens of a prompt are computed once.

It needs no Megatron: the driver plans as the ranks do.
"""

from collections.abc import Sequence

from megarl.mcore.model.architecture import Architecture
from megarl.mcore.packing import pack
from megarl.mcore.row_costs import compute_row_costs, count_layer_work
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences

LONGEST_SHARING = 512
"""Tokens of a response above which it keeps a prompt of its own: the prompt is a small part of it, and what its tokens
see of both would be a large mask"""
UNITS_PER_RANK = 2
"""Of rows that stay together: so many at least for each data-parallel rank on average, so that ranks can be balanced"""


def shares_prompts(spec: WorkerSpec, arch: Architecture) -> bool:
    """Whether a prompt is computed once for several responses: neither with experts, which count tokens for their
    balance, nor with context parallelism.
    """
    return spec.share_prompts and spec.parallel.cp == 1 and arch.experts is None


def plan_microbatches(
    spec: WorkerSpec, arch: Architecture, sequences: Sequences, num_ranks: int
) -> list[list[list[int]]]:
    """Data-parallel rank -> micro-batch -> row numbers, as `pack` finds them; tokens may be missing in `sequences`.

    Where prompts are shared, what is packed are groups of rows of one prompt that fit into a micro-batch together.
    """
    costs = compute_row_costs(arch, sequences, with_value_head=spec.role is Role.critic)
    lengths, budget = sequences.lengths.tolist(), spec.tokens_per_microbatch * spec.parallel.cp
    if not shares_prompts(spec, arch) or sequences.prompts is None:
        return pack(lengths, budget, num_ranks, costs)
    prompts = sequences.prompt_lengths.tolist()
    groups = group_rows(sequences)
    total = sum(_count_tokens(group, lengths, prompts) for group in groups)
    limit = budget if num_ranks == 1 else min(budget, total // (UNITS_PER_RANK * num_ranks))
    units = [unit for group in groups for unit in _cut(group, lengths, prompts, limit)]
    per_token, per_square = count_layer_work(arch)
    unit_costs = []
    for unit in units:
        prompt, repeats = prompts[unit[0]], len(unit) - 1
        left_out = repeats * (prompt * per_token + prompt**2 * per_square)
        unit_costs.append(sum(costs[row] for row in unit) - left_out)
    packed = pack([_count_tokens(unit, lengths, prompts) for unit in units], budget, num_ranks, unit_costs)
    return [[[row for unit in microbatch for row in units[unit]] for microbatch in share] for share in packed]


def group_rows(sequences: Sequences) -> list[list[int]]:
    """The rows of each prompt, longest first; a row whose response is too long to share, or empty, by itself."""
    assert sequences.prompts is not None, "prompts were not compared"
    responses, groups = sequences.response_lengths.tolist(), dict[tuple[bool, int], list[int]]()
    for row, number in enumerate(sequences.prompts.tolist()):
        is_sharing = 0 < responses[row] <= LONGEST_SHARING
        groups.setdefault((is_sharing, number if is_sharing else row), []).append(row)
    return [sorted(rows, key=lambda row: (-responses[row], row)) for rows in groups.values()]


def _count_tokens(rows: Sequence[int], lengths: Sequence[int], prompts: Sequence[int]) -> int:
    """Of rows of one prompt, which counts once."""
    return int(sum(lengths[row] for row in rows) - (len(rows) - 1) * prompts[rows[0]])


def _cut(rows: Sequence[int], lengths: Sequence[int], prompts: Sequence[int], limit: int) -> list[list[int]]:
    """Rows of one prompt in parts of up to `limit` tokens, or of one row."""
    parts, tokens = [[rows[0]]], lengths[rows[0]]
    for row in rows[1:]:
        tokens += lengths[row] - prompts[row]
        if tokens <= limit:
            parts[-1].append(row)
        else:
            parts.append([row])
            tokens = lengths[row]
    return parts
