"""What each rank of an SGLang server holds of the whole model.

SGLang (0.5.23) stacks query, key and value heads (qkv_proj) and gate and up rows (gate_up_proj) of a rank, pads the
vocabulary, repeats key-value heads where there are fewer than ranks, and keeps the experts of a layer in two tensors:
w13_weight [E, gate and up rows, h] and w2_weight [E, h, rows].
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.entries import compute_shape
from megarl.sync.plan import ITEM_SIZES
from megarl.sync.slices import Piece, TensorSlice

VOCAB_MULTIPLE = 64


def find_vocab_rows(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary on each rank, padding included."""
    padded = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp:
        padded = math.ceil(vocab_size / (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp
    return padded // tp


def check_serving_layout(arch: Architecture, tp: int) -> Iterator[str]:
    """What of the model the ranks of a server do not divide."""
    ffn_size = arch.experts.ffn_size if arch.experts else arch.ffn_size

    def fits(tp: int) -> bool:
        kv_heads = arch.num_kv_heads
        return arch.num_heads % tp == ffn_size % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)

    if not fits(tp):
        nearest = min(filter(fits, range(1, arch.num_heads + 1)), key=lambda other: (abs(other - tp), other))
        yield (
            f"rollout.tp: found {tp}, which does not divide the model's {arch.num_heads} attention heads,"
            f" {arch.num_kv_heads} key-value heads and {ffn_size} rows of an MLP; the nearest that does is {nearest}"
        )


def predict_server_rank(arch: Architecture, tp: int, rank: int) -> list[Piece]:
    """The pieces of rank `rank` of a server with `tp` of them.

    Raises ValueError for a number of ranks that the model's heads or rows do not divide into.
    """
    problems = list(check_serving_layout(arch, tp))
    if problems:
        raise ValueError("; ".join(problems))
    pieces = [_split_vocab("model.embed_tokens.weight", arch, tp, rank)]
    if not arch.tied:
        pieces.append(_split_vocab("lm_head.weight", arch, tp, rank))
    pieces = [piece for piece in pieces if piece.region.num_rows > 0]
    for layer in range(arch.num_layers):
        pieces += _describe_layer(f"model.layers.{layer}.", arch, tp, rank)
    return [*pieces, _whole("model.norm.weight", arch)]


def check_server_rank(
    pieces: Sequence[Piece], found: Mapping[str, tuple[Sequence[int], str]], arch: Architecture, tp: int
) -> list[str]:
    """What a server rank says it holds (name -> shape, dtype) against what it should; one message per difference."""
    expected: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        rows, _ = expected.get(piece.tensor, (0, 0))
        expected[piece.tensor] = (max(rows, piece.row + piece.region.num_rows), piece.region.num_cols)
    for name in ("model.embed_tokens.weight", *(() if arch.tied else ("lm_head.weight",))):
        expected[name] = (find_vocab_rows(arch.vocab_size, tp), arch.hidden_size)
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


def _split_vocab(name: str, arch: Architecture, tp: int, rank: int) -> Piece:
    rows = find_vocab_rows(arch.vocab_size, tp)
    first = rank * rows
    return Piece(name, 0, 0, name, TensorSlice(first, 0, min(rows, arch.vocab_size - first), arch.hidden_size))


def _whole(name: str, arch: Architecture, row: int = 0, tensor: str | None = None) -> Piece:
    return Piece(tensor or name, row, 0, name, TensorSlice(0, 0, *compute_shape(name, arch)))


def _describe_layer(prefix: str, arch: Architecture, tp: int, rank: int) -> list[Piece]:
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if arch.qk_norm else []
    pieces = [_whole(prefix + name, arch) for name in names]
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        pieces += _stack_heads(prefix, kind, arch, tp, rank)
    pieces.append(_take_columns(f"{prefix}self_attn.o_proj.weight", arch, tp, rank))
    if arch.experts is None:
        pieces += _stack_rows(f"{prefix}mlp.", f"{prefix}mlp.gate_up_proj.weight", 0, arch, tp, rank)
        return [*pieces, _take_columns(f"{prefix}mlp.down_proj.weight", arch, tp, rank)]
    pieces.append(_whole(f"{prefix}mlp.gate.weight", arch))
    rows = arch.experts.ffn_size // tp
    for expert in range(arch.experts.num_experts):
        own = f"{prefix}mlp.experts.{expert}."
        pieces += _stack_rows(own, f"{prefix}mlp.experts.w13_weight", 2 * rows * expert, arch, tp, rank)
        row, tensor = arch.hidden_size * expert, f"{prefix}mlp.experts.w2_weight"
        pieces.append(_take_columns(f"{own}down_proj.weight", arch, tp, rank, tensor, row))
    return pieces


def _stack_heads(prefix: str, kind: str, arch: Architecture, tp: int, rank: int) -> list[Piece]:
    heads, kv_heads = arch.num_heads // tp, max(1, arch.num_kv_heads // tp)
    kv_first = rank * kv_heads if arch.num_kv_heads >= tp else rank * arch.num_kv_heads // tp
    pieces, row = [], 0
    for name, first, count in (("q", rank * heads, heads), ("k", kv_first, kv_heads), ("v", kv_first, kv_heads)):
        whole = f"{prefix}self_attn.{name}_proj.{kind}"
        region = TensorSlice(first * arch.head_size, 0, count * arch.head_size, compute_shape(whole, arch)[1])
        pieces.append(Piece(f"{prefix}self_attn.qkv_proj.{kind}", row, 0, whole, region))
        row += region.num_rows
    return pieces


def _stack_rows(prefix: str, tensor: str, row: int, arch: Architecture, tp: int, rank: int) -> list[Piece]:
    """Gate and up rows of an MLP or an expert."""
    pieces = []
    for name in ("gate_proj", "up_proj"):
        whole = f"{prefix}{name}.weight"
        rows, cols = compute_shape(whole, arch)
        pieces.append(Piece(tensor, row, 0, whole, TensorSlice(rank * (rows // tp), 0, rows // tp, cols)))
        row += rows // tp
    return pieces


def _take_columns(whole: str, arch: Architecture, tp: int, rank: int, tensor: str | None = None, row: int = 0) -> Piece:
    rows, cols = compute_shape(whole, arch)
    return Piece(tensor or whole, row, 0, whole, TensorSlice(0, rank * (cols // tp), rows, cols // tp))
