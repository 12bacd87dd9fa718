"""What each rank of a Megatron model holds of the whole model, from its layout alone or from its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megarl.config.schema.roles import ParallelConfig
from megarl.families.architecture import Architecture
from megarl.families.weights import Split
from megarl.mcore.weights.entries import EMBEDDING, FINAL_NORM, HEAD, Entry, describe, list_layer, to_megatron
from megarl.sync.slices import Piece, TensorSlice, find_runs


def describe_rank(
    entries: Sequence[Entry], arch: Architecture, parallel: ParallelConfig, tp_rank: int, etp_rank: int
) -> list[Piece]:
    """The pieces of a rank that holds the parameters `entries`, each under its entry's name."""
    cuts: dict[tuple[Any, ...], list[tuple[int, int, int, int, int]]] = {}
    pieces = []
    for entry in entries:
        tp, rank = (parallel.tp, tp_rank) if entry.expert is None else (parallel.etp, etp_rank)
        shapes = [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in entry.shapes]
        # Layers and experts are cut alike.
        key = (entry.split, entry.shapes, tp, rank)
        if key not in cuts:
            cuts[key] = _cut(entry, arch, shapes, tp, rank)
        for place, row, first, num_rows, col in cuts[key]:
            num_cols = shapes[place][1] // tp if entry.split is Split.columns else shapes[place][1]
            pieces.append(Piece(entry.name, row, 0, entry.hf_names[place], TensorSlice(first, col, num_rows, num_cols)))
    return pieces


def _cut(
    entry: Entry, arch: Architecture, shapes: Sequence[tuple[int, int]], tp: int, rank: int
) -> list[tuple[int, int, int, int, int]]:
    """(which whole tensor, row here, row there, rows, column there), from row numbers sent through `to_megatron`."""
    if entry.split is Split.columns:
        ((rows, cols),) = shapes
        return [(0, 0, 0, rows, rank * (cols // tp))]
    # Padding rows come as 0; a gap keeps the last row of one tensor and the first of the next apart.
    starts, total = [], 1
    for rows, _ in shapes:
        starts.append(total)
        total += rows + 1
    numbered = [torch.arange(start, start + rows) for start, (rows, _) in zip(starts, shapes, strict=True)]
    found = to_megatron(entry, numbered, arch, tp, rank).tolist()
    runs = []
    for row, number, length in find_runs(found):
        if number:
            place = max(i for i, start in enumerate(starts) if start <= number)
            runs.append((place, row, number - starts[place], length, 0))
    return runs


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
