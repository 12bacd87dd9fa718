"""What each rank of a policy holds under a layout, without a process of it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.checkpoints import EMBEDDING, FINAL_NORM, HEAD, Entry, describe, list_layer
from megarl.models.architecture import Architecture
from megarl.sync.pieces import describe_rank
from megarl.sync.plan import Piece, Plan


def predict_ranks(
    arch: Architecture, parallel: ParallelConfig, megatron: Mapping[str, Any] | None = None
) -> dict[int, list[Piece]]:
    """Rank -> pieces, of a policy under Megatron's numbering of ranks, without a process of it.

    megatron: model.megatron; of its keys about stages only the numbers of layers of the first and last are known here.
    Raises ValueError for others.
    """
    held: dict[tuple[int, int, int, int], list[Piece]] = {}
    result = {}
    for rank in range(parallel.num_processes):
        tp_rank, stage = rank % parallel.tp, rank // (parallel.num_processes // parallel.pp)
        etp_rank = rank % parallel.etp
        ep_rank = rank % (parallel.num_processes // parallel.pp) // parallel.etp % parallel.ep
        key = (tp_rank, stage, etp_rank, ep_rank)
        if key not in held:
            entries = list(_list_entries(arch, parallel, stage, ep_rank, megatron or {}))
            held[key] = describe_rank(entries, arch, parallel, tp_rank, etp_rank)
        result[rank] = held[key]
    return result


def _list_entries(
    arch: Architecture, parallel: ParallelConfig, stage: int, ep_rank: int, megatron: Mapping[str, Any]
) -> Iterator[Entry]:
    """The parameters of a stage as the local layers name them."""
    if stage == 0:
        yield describe(EMBEDDING, arch, False)
    local = arch.experts.num_experts // parallel.ep if arch.experts else 0
    for layer in find_layers(arch.num_layers, parallel, stage, megatron):
        yield from list_layer(arch, layer, range(ep_rank * local, (ep_rank + 1) * local))
    if stage == parallel.pp - 1:
        yield describe(FINAL_NORM, arch, False)
        if not arch.tied:
            yield describe(HEAD, arch, False)


def find_layers(num_layers: int, parallel: ParallelConfig, stage: int, megatron: Mapping[str, Any]) -> list[int]:
    """The layers of a pipeline stage."""
    options = ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split")
    unknown = [key for key in (*options, "account_for_loss_in_pipeline_split") if megatron.get(key)]
    first = megatron.get("num_layers_in_first_pipeline_stage")
    last = megatron.get("num_layers_in_last_pipeline_stage")
    if unknown or (parallel.vpp > 1 and (first or last)):
        raise ValueError(
            f"the layers of each stage are not known from {', '.join(unknown) or 'vpp with uneven stages'}"
        )
    if first is None and last is None:
        per_piece = num_layers // (parallel.pp * parallel.vpp)
        starts = [piece * (num_layers // parallel.vpp) + stage * per_piece for piece in range(parallel.vpp)]
        return [layer for start in starts for layer in range(start, start + per_piece)]
    inner = parallel.pp - (first is not None) - (last is not None)
    each = (num_layers - (first or 0) - (last or 0)) // max(1, inner)
    sizes = [each] * parallel.pp
    sizes[0] = sizes[0] if first is None else first
    sizes[-1] = sizes[-1] if last is None else last
    return list(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))


def count_bytes(plan: Plan, side: int) -> Counter[int]:
    """Bytes that each training rank sends (side 0) or each server rank receives (side 1)."""
    found: Counter[int] = Counter()
    for pair, copies in plan.items():
        found[pair[side]] += sum(copy.num_bytes for copy in copies)
    return found
