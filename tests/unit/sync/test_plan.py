"""The plan of the weight sync, carried out on real tensors, gives what SGLang would load; checksums over parts."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tool_loading import load_tool
from torch import Tensor

from megarl.config.checks import check_parallel
from megarl.config.schema.roles import ParallelConfig, RandomModelConfig
from megarl.mcore.checkpoints import describe, list_entries, to_megatron
from megarl.mcore.spec import check_layout
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, Split, build_random_fields, parse_architecture
from megarl.sync.ends import compute_checksum, empty_bucket, fill_bucket
from megarl.sync.pieces import check_server_rank, check_serving_layout, find_vocab_rows, predict_server_rank
from megarl.sync.plan import (
    MASK,
    LayoutError,
    Piece,
    TensorSlice,
    as_matrix,
    build_plan,
    compute_bound,
    cut_buckets,
    decode_bucket,
    encode_bucket,
)

policy_pieces = load_tool("bench/policy_pieces.py")
predict_ranks, count_bytes = policy_pieces.predict_ranks, policy_pieces.count_bytes


def build_architecture(family: str, num_kv_heads: int = 2, tied: bool = False, vocab_size: int = 70) -> Architecture:
    sizes = RandomModelConfig(
        family=family,
        num_layers=4,
        hidden_size=16,
        ffn_size=24,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        max_length=64,
        tie_embeddings=tied,
    )
    # Some have no heads of another size.
    fields = build_random_fields(sizes, vocab_size)
    fields["head_dim"] = 4 if "head_dim" in fields else 2
    fields |= {"moe_intermediate_size": 8} if "moe_intermediate_size" in fields else {}
    return parse_architecture({"model_type": family, **fields}, Path("config.json"))


def build_wholes(arch: Architecture) -> dict[str, Tensor]:
    """A checkpoint with every number in it once."""
    pairs = [zip(entry.hf_names, entry.shapes, strict=True) for entry in list_entries(arch, False)]
    shapes = dict(itertools.chain(*pairs))
    wholes, start = {}, 0
    for name, shape in sorted(shapes.items()):
        wholes[name] = torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)
        start += math.prod(shape)
    return wholes


def build_training_tensors(pieces: list[Piece], arch: Architecture, wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors, filled from the pieces it is said to hold."""
    sizes: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        rows, _ = sizes.get(piece.tensor, (0, 0))
        sizes[piece.tensor] = (max(rows, piece.row + piece.region.num_rows), piece.region.num_cols)
    tensors = {name: torch.full(size, -1.0) for name, size in sizes.items()}
    for piece in pieces:
        TensorSlice(piece.row, piece.col, piece.region.num_rows, piece.region.num_cols).of(tensors[piece.tensor]).copy_(
            piece.region.of(wholes[piece.whole])
        )
    return tensors


def build_gpt_oss_mlp(wholes: dict[str, Tensor], p: str) -> dict[str, Tensor]:
    """As the server's end of a sync sees them: a gate row and an up row in one."""
    held = {name: x for name, x in wholes.items() if name.startswith(f"{p}mlp.router.")}
    p, held_rows = f"{p}mlp.experts.", {}
    for kind, name in (("weight", ""), ("weight_bias", "_bias")):
        gate, up, down = (
            [wholes[f"{p}{x}_proj{name}#{expert}/4,{part}"] for expert in range(4)]
            for x, part in (("gate_up", "0/2"), ("gate_up", "1/2"), ("down", "0/1"))
        )
        held_rows[f"{p}w13_{kind}"] = torch.stack(
            [torch.cat([a, b], 1) if a.ndim > 1 else torch.stack([a, b], 1) for a, b in zip(gate, up, strict=True)]
        )
        held_rows[f"{p}w2_{kind}"] = torch.cat(down) if name else torch.stack(down)
    return held | held_rows


def build_latent_attention(wholes: dict[str, Tensor], p: str, tp: int, rank: int) -> dict[str, Tensor]:
    """Heads are split, and what makes the vectors is on every rank, as one matrix."""
    p = f"{p}self_attn."
    first = torch.cat([wholes[f"{p}q_a_proj.weight"], wholes[f"{p}kv_a_proj_with_mqa.weight"]])
    held = {f"{p}{x}_b_proj.weight": wholes[f"{p}{x}_b_proj.weight"].chunk(tp)[rank] for x in ("q", "kv")}
    return held | {f"{p}fused_qkv_a_proj_with_mqa.weight": first}


def build_server_mlp(wholes: dict[str, Tensor], p: str, tp: int, rank: int) -> dict[str, Tensor]:
    """Of the layer whose names begin with `p`: its MLP, or its router, experts and shared experts."""
    if f"{p}mlp.router.weight" in wholes:
        return build_gpt_oss_mlp(wholes, p)
    held = {name: x for name, x in wholes.items() if name.startswith(f"{p}mlp.gate.")}
    num_experts = len({name.split(".")[5] for name in wholes if name.startswith(f"{p}mlp.experts.")})
    mlp = f"{p}mlp.shared_experts." if num_experts else f"{p}mlp."
    if f"{mlp}down_proj.weight" in wholes:
        fused = wholes.get(f"{mlp}gate_up_proj.weight")
        halves = [wholes[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")] if fused is None else fused.chunk(2)
        held[f"{mlp}gate_up_proj.weight"] = torch.cat([x.chunk(tp)[rank] for x in halves])
        held[f"{mlp}down_proj.weight"] = wholes[f"{mlp}down_proj.weight"].chunk(tp, 1)[rank]
    if num_experts:
        owns = [f"{p}mlp.experts.{expert}." for expert in range(num_experts)]
        w13 = [torch.cat([wholes[f"{own}{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")]) for own in owns]
        held[f"{p}mlp.experts.w13_weight"] = torch.stack(w13)
        w2 = [wholes[f"{own}down_proj.weight"].chunk(tp, 1)[rank] for own in owns]
        held[f"{p}mlp.experts.w2_weight"] = torch.stack(w2)
    return held


def build_server_tensors(arch: Architecture, wholes: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """What SGLang's weight loaders make of the checkpoint on one rank; written without the code under test."""

    def rows_of(x: Tensor) -> Tensor:
        return x.chunk(tp)[rank]

    def vocabulary(x: Tensor) -> Tensor:
        if arch.serves_whole_embedding:
            return x
        rows = -(-arch.vocab_size // 64) * 64
        rows = rows if rows % tp == 0 else -(-arch.vocab_size // (64 * tp)) * 64 * tp
        return rows_of(torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])]))

    def key_value(x: Tensor) -> Tensor:
        heads = x.view(arch.num_kv_heads, -1, *x.shape[1:])
        if tp > arch.num_kv_heads:
            heads = heads.repeat_interleave(tp // arch.num_kv_heads, 0)
        return heads.chunk(tp)[rank].flatten(0, 1)

    held = {"model.embed_tokens.weight": vocabulary(wholes["model.embed_tokens.weight"])}
    if not arch.tied:
        held["lm_head.weight"] = vocabulary(wholes["lm_head.weight"])
    held["model.norm.weight"] = wholes["model.norm.weight"]
    for layer in range(arch.num_layers):
        p = f"model.layers.{layer}."
        held |= {name: x for name, x in wholes.items() if name.startswith(p) and "norm" in name}
        if arch.has_biases:
            held |= {f"{p}self_attn.{x}": wholes[f"{p}self_attn.{x}"] for x in ("sinks", "o_proj.bias")}
        if arch.latent is not None:
            held |= build_latent_attention(wholes, p, tp, rank)
        for kind in () if arch.latent else ("weight", "bias") if arch.qkv_bias else ("weight",):
            fused, sizes = wholes.get(f"{p}self_attn.qkv_proj.{kind}"), [arch.num_heads] + 2 * [arch.num_kv_heads]
            q, k, v = (
                [wholes[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                if fused is None
                else fused.split([size * arch.head_size for size in sizes])  # type: ignore[no-untyped-call]
            )
            held[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([rows_of(q), key_value(k), key_value(v)])
        held[f"{p}self_attn.o_proj.weight"] = wholes[f"{p}self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        held |= build_server_mlp({name: x for name, x in wholes.items() if name.startswith(f"{p}mlp.")}, p, tp, rank)
    return held


PARALLELS = st.builds(
    lambda tp, pp, dp, vpp, ep, etp: ParallelConfig(
        num_processes=tp * pp * dp * ep, tp=tp, sp=tp > 1, pp=pp, vpp=vpp if pp > 1 else 1, ep=ep, etp=etp
    ),
    *(st.sampled_from(sizes) for sizes in ([1, 2, 4], [1, 2], [1, 2], [1, 2], [1, 1, 2], [1, 1, 2])),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    family=st.sampled_from(list(FAMILIES)),
    tied=st.booleans(),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    parallel=PARALLELS,
    tp=st.sampled_from([1, 2, 4, 8]),
    num_servers=st.sampled_from([1, 2]),
    bucket=st.sampled_from([64, 1000, 1 << 20]),
    vocab_size=st.sampled_from([30, 64, 70, 200]),
)
def test_carried_out_the_plan_gives_every_server_rank_what_sglang_would_load_and_moves_no_byte_twice(
    family: str, tied: bool, num_kv_heads: int, parallel: ParallelConfig, tp: int, num_servers: int, bucket: int,
    vocab_size: int,
) -> None:  # fmt: skip
    arch = build_architecture(family, num_kv_heads, tied, vocab_size)
    assume(not list(check_serving_layout(arch, tp)))
    assume(not [*check_parallel("policy.parallel", parallel, 64), *check_layout(arch, parallel, "policy.parallel")])
    wholes = build_wholes(arch)
    sources = predict_ranks(arch, parallel)
    tensors = {rank: build_training_tensors(pieces, arch, wholes) for rank, pieces in sources.items()}
    ranks = range(num_servers * tp)
    expected = {rank: build_server_tensors(arch, wholes, tp, rank % tp) for rank in ranks}
    targets = {rank: predict_server_rank(arch, tp, rank % tp) for rank in ranks}
    dtypes = dict.fromkeys(expected[0], "float32")
    plan = build_plan(sources, targets, dtypes)
    found = {rank: {name: torch.zeros_like(x) for name, x in held.items()} for rank, held in expected.items()}
    for each in cut_buckets(plan, bucket):
        message = torch.zeros(each.num_bytes, dtype=torch.uint8)
        fill_bucket(each, message, tensors[each.source], dict.fromkeys(expected[0], torch.float32))
        assert len(each.copies) == 1 or each.num_bytes <= bucket
        empty_bucket(decode_bucket(encode_bucket(each)), message, found[each.target])
    for rank, held in expected.items():
        assert not check_server_rank(targets[rank], {n: (x.shape, "float32") for n, x in held.items()}, arch, tp)
        for name, x in held.items():
            assert torch.equal(found[rank][name], x), (rank, name)
    # Each element of the vocabulary reaches one rank of every server; further rows of its tensors are padding.
    padding = num_servers * (find_vocab_rows(arch, tp) * tp - vocab_size) * arch.hidden_size
    padding *= 0 if arch.serves_whole_embedding else 1 if arch.tied else 2
    least = 4 * (sum(x.numel() for held in expected.values() for x in held.values()) - padding)
    assert count_bytes(plan, 0).total() == least == compute_bound(targets, dtypes)
    assert sum(each.num_bytes for each in cut_buckets(plan, bucket)) == least


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_of_a_training_rank_are_its_shard_as_the_bridge_cuts_it(family: str, tp: int) -> None:
    arch = build_architecture(family)
    wholes = build_wholes(arch)
    parallel = ParallelConfig(num_processes=tp, tp=tp, sp=tp > 1, etp=tp if arch.experts and not arch.has_biases else 1)
    for rank, pieces in predict_ranks(arch, parallel).items():
        tensors = build_training_tensors(pieces, arch, wholes)
        for name, x in tensors.items():
            entry = describe(name, arch, False)
            cut = (tp, rank) if entry.expert is None or parallel.etp == tp else (1, 0)
            shard = as_matrix(to_megatron(entry, [wholes[hf] for hf in entry.hf_names], arch, *cut))
            # Vocabulary padding is no piece of the checkpoint.
            assert torch.equal(x, shard[: len(x)]), (rank, name)
            assert len(x) == len(shard) or entry.split is Split.vocab


def test_replicas_share_the_sending_and_one_on_the_receivers_node_sends_before_one_elsewhere() -> None:
    arch = build_architecture("qwen3", num_kv_heads=8, vocab_size=128)
    targets = {rank: predict_server_rank(arch, 2, rank % 2) for rank in range(4)}
    dtypes = {piece.tensor: "bfloat16" for pieces in targets.values() for piece in pieces}
    # Two nodes with two training ranks, replicas of the other two, and a server of two ranks each.
    sources = predict_ranks(arch, ParallelConfig(num_processes=4, tp=2, sp=True))
    plan = build_plan(sources, targets, dtypes, lambda source, target: source // 2 == target // 2)
    assert {source // 2 == target // 2 for source, target in plan} == {True}
    sent = count_bytes(plan, 0)
    assert sent.total() == compute_bound(targets, dtypes)
    assert (sent[0], sent[1]) == (sent[2], sent[3])


def test_a_server_of_another_model_is_refused_naming_the_tensor() -> None:
    arch, other = build_architecture("qwen3"), build_architecture("qwen2")
    targets = {0: predict_server_rank(other, 1, 0)}
    dtypes = dict.fromkeys((piece.tensor for piece in targets[0]), "float32")
    with pytest.raises(LayoutError, match=r"qkv_proj.bias, made of model.layers.0.self_attn.q_proj.bias"):
        build_plan(predict_ranks(arch, ParallelConfig()), targets, dtypes)
    half = predict_ranks(arch, ParallelConfig(num_processes=2, tp=2, sp=True))[0]
    targets = {0: predict_server_rank(arch, 1, 0)}
    dtypes = dict.fromkeys((piece.tensor for piece in targets[0]), "float32")
    with pytest.raises(LayoutError, match=r"the training ranks hold \d+ of its \d+ elements"):
        build_plan({0: half}, targets, dtypes)


def test_what_a_server_rank_says_it_holds_is_checked_against_the_policys_model() -> None:
    arch = build_architecture("qwen3")
    pieces = predict_server_rank(arch, 1, 0)
    held = {
        name: (tuple(x.shape), "bfloat16") for name, x in build_server_tensors(arch, build_wholes(arch), 1, 0).items()
    }
    assert check_server_rank(pieces, held, arch, 1) == []
    wrong = held | {"model.norm.weight": ((17,), "bfloat16"), "model.layers.0.mlp.down_proj.weight": ((16, 24), "int8")}
    del wrong["lm_head.weight"]
    wrong["model.extra"] = ((1,), "float32")
    assert check_server_rank(pieces, wrong, arch, 1) == [
        "has no tensor lm_head.weight, which the policy's model has",
        "has a tensor model.extra, which the policy's model lacks",
        "holds model.layers.0.mlp.down_proj.weight in int8; it must be in float32, bfloat16, float16",
        "holds model.norm.weight as 17; the policy's model makes it 16 x 1",
    ]
    with pytest.raises(ValueError, match=r"rollout.tp: found 3, .* 8 attention heads.*; the nearest that does is 2"):
        predict_server_rank(arch, 3, 0)


def whole(x: torch.Tensor, word: int) -> int:
    return compute_checksum(x, TensorSlice(0, 0, *x.shape), word)


@settings(max_examples=40)
@given(
    rows=st.integers(2, 40),
    cols=st.integers(2, 9),
    row=st.integers(1, 39),
    col=st.integers(1, 8),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    aligned=st.booleans(),
)
def test_the_checksum_of_a_tensor_is_the_sum_of_those_of_its_parts(
    rows: int, cols: int, row: int, col: int, dtype: torch.dtype, aligned: bool
) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    unit, word = (8 // size, 8) if aligned else (1, size)
    x = torch.randn(rows, cols * unit, generator=torch.Generator().manual_seed(rows)).to(dtype)
    row, col = min(row, rows - 1), min(col, cols - 1) * unit
    regions = [
        TensorSlice(0, 0, row, col),
        TensorSlice(0, col, row, x.shape[1] - col),
        TensorSlice(row, 0, rows - row, col),
        TensorSlice(row, col, rows - row, x.shape[1] - col),
    ]
    assert sum(compute_checksum(region.of(x), region, word) for region in regions) & MASK == whole(x, word)


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, 2), (torch.bfloat16, 8), (torch.float32, 8)])
def test_one_changed_bit_two_swapped_elements_rows_or_columns_change_it(dtype: torch.dtype, word: int) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = whole(x, word)
    assert whole(x.clone(), word) == before
    for bit in range(8 * x.element_size()):
        changed = x.clone()
        changed.view(torch.uint8)[17, 5 * x.element_size() + bit // 8] ^= 1 << bit % 8
        assert whole(changed, word) != before, bit
    swapped = x.clone()
    swapped[3, 4], swapped[50, 9] = x[50, 9], x[3, 4]
    rows, cols = x.clone(), x.clone()
    rows[[1, 60]] = x[[60, 1]]
    cols[:, [0, 31]] = x[:, [31, 0]]
    for other in (swapped, rows, cols, x.roll(1, 0), x.roll(4, 1)):
        assert whole(other, word) != before


def test_what_a_server_loads_to_receive_weights_imports_no_training_engine_and_no_ray():
    """A server has its own torch; Megatron's import hook would refuse what it has already loaded."""
    code = "import sys, megarl.sync.ends; sys.exit(bool({'megarl.mcore', 'megatron', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
