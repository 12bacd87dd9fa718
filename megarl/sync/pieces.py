"""What each rank of a Megatron model and of an SGLang server holds of the whole model.

SGLang (0.5.23) stacks query, key and value heads and gate and up rows of a rank, pads the vocabulary, repeats key-value
heads where there are fewer than ranks, and keeps the experts of a layer in two tensors: [E, gate and up rows, h] and
[E, h, rows]. The tensors and their names are in the tables of the families (megarl/models/families.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.checkpoints import EMBEDDING, FINAL_NORM, HEAD, Entry, describe, list_layer, to_megatron
from megarl.models.architecture import Architecture
from megarl.models.families import Split
from megarl.sync.plan import ITEM_SIZES, Piece, TensorSlice, find_runs

VOCAB_MULTIPLE = 64


def find_vocab_rows(arch: Architecture, tp: int) -> int:
    """Rows of the vocabulary on each rank, padding included."""
    vocab_size = arch.vocab_size
    if arch.serves_whole_embedding:
        return vocab_size
    padded = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp:
        padded = math.ceil(vocab_size / (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp
    return padded // tp


def check_serving_layout(arch: Architecture, tp: int) -> Iterator[str]:
    """What of the model the ranks of a server do not divide."""
    sizes = {**arch.mlp_sizes, **({"an expert": arch.experts.ffn_size} if arch.experts else {})}

    def fits(tp: int) -> bool:
        kv_heads = arch.num_kv_heads
        divided = [arch.num_heads, *sizes.values()]
        return not any(size % tp for size in divided) and (kv_heads % tp == 0 or tp % kv_heads == 0)

    if arch.has_biases and tp > 1:
        what = f"SGLang keeps biases of {arch.family}'s experts on one rank of several"
        yield f"rollout.tp: found {tp}; {what}; it must be 1"
    elif not fits(tp):
        nearest = min(filter(fits, range(1, arch.num_heads + 1)), key=lambda other: (abs(other - tp), other))
        rows = ", ".join(f"{size} rows of {what}" for what, size in sizes.items())
        yield (
            f"rollout.tp: found {tp}, which does not divide the model's {arch.num_heads} attention heads,"
            f" {arch.num_kv_heads} key-value heads and {rows}; the nearest that does is {nearest}"
        )


def predict_server_rank(arch: Architecture, tp: int, rank: int) -> list[Piece]:
    """The pieces of rank `rank` of a server with `tp` of them.

    Raises ValueError for a number of ranks that the model's heads or rows do not divide into.
    """
    problems = list(check_serving_layout(arch, tp))
    if problems:
        raise ValueError("; ".join(problems))
    held = [describe(EMBEDDING, arch, False), describe(FINAL_NORM, arch, False)]
    held += [] if arch.tied else [describe(HEAD, arch, False)]
    layers = (entry for layer in range(arch.num_layers) for entry in list_layer(arch, layer))
    pieces = [piece for entry in (*held, *layers) for piece in _cut_served(entry, arch, tp, rank)]
    return [piece for piece in pieces if piece.region.num_rows > 0]


def check_server_rank(
    pieces: Sequence[Piece], found: Mapping[str, tuple[Sequence[int], str]], arch: Architecture, tp: int
) -> list[str]:
    """What a server rank says it holds (name -> shape, dtype) against what it should; one message per difference."""
    expected: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        rows, cols = expected.get(piece.tensor, (0, 0))
        ends = piece.row + piece.region.num_rows, piece.col + piece.region.num_cols
        expected[piece.tensor] = (max(rows, ends[0]), max(cols, ends[1]))
    for name in ("model.embed_tokens.weight", *(() if arch.tied else ("lm_head.weight",))):
        expected[name] = (find_vocab_rows(arch, tp), arch.hidden_size)
    problems = [f"has no tensor {name}, which the policy's model has" for name in sorted(expected.keys() - found)]
    problems += [f"has a tensor {name}, which the policy's model lacks" for name in sorted(found.keys() - expected)]
    for name in sorted(expected.keys() & found.keys()):
        shape, dtype = found[name]
        rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        size = (rows, shape[-1] if len(shape) > 1 else 1)
        if size != expected[name]:
            wanted = " x ".join(map(str, expected[name]))
            problems.append(f"holds {name} as {' x '.join(map(str, shape))}; the policy's model makes it {wanted}")
        elif dtype not in ITEM_SIZES:
            problems.append(f"holds {name} in {dtype}; it must be in {', '.join(ITEM_SIZES)}")
    return problems[:5]


def _cut_served(entry: Entry, arch: Architecture, tp: int, rank: int) -> list[Piece]:
    """What the rank holds of one parameter, part by part, in SGLang's tensor."""
    regions = []
    for place, (whole, first, rows, cols) in enumerate(entry.parts):
        if entry.split is Split.columns:
            region = TensorSlice(first, rank * (cols // tp), rows, cols // tp)
        elif entry.split is Split.rows:
            region = TensorSlice(first + rank * (rows // tp), 0, rows // tp, cols)
        elif entry.split is Split.vocab:
            size = find_vocab_rows(arch, tp)
            start = 0 if arch.serves_whole_embedding else rank * size
            region = TensorSlice(start, 0, min(size, arch.vocab_size - start), cols)
        elif entry.split is Split.gate_up:
            region = TensorSlice(first + rank * (rows // tp), 0, rows // tp, cols)
        elif entry.split is Split.qkv:
            region = _take_heads(arch, place, first, cols, tp, rank)
        else:
            region = TensorSlice(first, 0, rows, cols)
        regions.append((whole, region))
    # The experts of a layer lie one after the other.
    row = entry.served_row + (entry.expert or 0) * sum(region.num_rows for _, region in regions)
    if entry.interleaved:
        row //= 2
        return [Piece(entry.served, row, i * x.num_cols, whole, x) for i, (whole, x) in enumerate(regions)]
    pieces = []
    for whole, region in regions:
        pieces.append(Piece(entry.served, row, 0, whole, region))
        row += region.num_rows
    return pieces


def _take_heads(arch: Architecture, place: int, start: int, cols: int, tp: int, rank: int) -> TensorSlice:
    """The rank's rows of the query (place 0), key (1) or value (2) weights, which begin at row `start`."""
    count, first = arch.num_heads // tp, rank * (arch.num_heads // tp)
    if place > 0:
        count = max(1, arch.num_kv_heads // tp)
        first = rank * count if arch.num_kv_heads >= tp else rank * arch.num_kv_heads // tp
    return TensorSlice(start + first * arch.head_size, 0, count * arch.head_size, cols)


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
            cuts[key] = _cut_held(entry, arch, shapes, tp, rank)
        for place, row, first, num_rows, col in cuts[key]:
            num_cols = shapes[place][1] // tp if entry.split is Split.columns else shapes[place][1]
            pieces.append(Piece(entry.name, row, 0, entry.hf_names[place], TensorSlice(first, col, num_rows, num_cols)))
    return pieces


def _cut_held(
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
