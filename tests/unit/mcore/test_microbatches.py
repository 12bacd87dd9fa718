"""Rows in micro-batches: how they are packed, what they cost, and what a step tells of its work; packed batches, whole
and shared among the ranks of a context-parallel group.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import build_sequences, build_spec, write_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import megarl.mcore  # noqa: F401
from megarl.config.schema.algo import AlgoConfig, ValueLoss
from megarl.config.schema.roles import LoraConfig
from megarl.cpu.layers import Rectangle
from megarl.mcore.batch import ContextGroup, PackedBatch, build_batch, choose_length, find_owners
from megarl.mcore.microbatches import COMPUTED, REAL, compute_row_costs, describe_work, pack, plan_microbatches
from megarl.mcore.spec import Role, read_architecture
from megarl.models.architecture import Architecture, Experts
from megarl.models.rope import Rope
from megarl.types import Sequences

ROWS = st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 100.0)), max_size=60)


def total_costs(ranks: list[list[list[int]]], costs: list[float]) -> list[float]:
    return [math.fsum(costs[row] for rows in microbatches for row in rows) for microbatches in ranks]


@settings(max_examples=200)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 5), with_costs=st.booleans())
def test_every_row_is_packed_once_within_the_budget_and_equally_often(
    rows: list[tuple[int, float]], budget: int, num_ranks: int, with_costs: bool
) -> None:
    lengths, costs = [length for length, _ in rows], [cost for _, cost in rows]
    ranks = pack(lengths, budget, num_ranks, costs if with_costs else None)
    assert len(ranks) == num_ranks
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert len(ranks[0]) >= 1
    packed = [row for microbatches in ranks for chosen in microbatches for row in chosen]
    assert sorted(packed) == list(range(len(lengths)))
    for microbatches in ranks:
        for chosen in microbatches:
            assert len(chosen) <= 1 or sum(lengths[row] for row in chosen) <= budget


@settings(max_examples=200)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 5))
def test_no_rank_costs_more_than_the_mean_and_a_share_of_the_costliest_row(
    rows: list[tuple[int, float]], budget: int, num_ranks: int
) -> None:
    costs = [cost for _, cost in rows]
    ranks = pack([length for length, _ in rows], budget, num_ranks, costs)
    bound = sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs, default=0.0)
    assert max(total_costs(ranks, costs)) <= bound * (1 + 1e-9)


@pytest.mark.parametrize(("tokens", "num_ranks"), [(10_000, 1), (40, 1), (40, 3), (1, 2)])
def test_a_pair_is_in_one_micro_batch(tokens: int, num_ranks: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    spec = build_spec(
        tmp_path, Role.critic, algo=AlgoConfig(value_loss=ValueLoss.bradley_terry), tokens_per_microbatch=tokens
    )
    sequences = build_sequences(14)
    planned = plan_microbatches(spec, read_architecture(tmp_path), sequences, num_ranks)
    assert sorted(row for own in planned for rows in own for row in rows) == list(range(14))
    for rows in (rows for own in planned for rows in own):
        assert sorted(rows) == sorted(row ^ 1 for row in rows)
        assert len(rows) <= 2 or int(sequences.lengths[rows].sum()) <= tokens


@settings(max_examples=100)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 4), random=st.randoms(use_true_random=False))
def test_neither_the_order_of_the_rows_nor_the_unit_of_cost_changes_what_lies_together(
    rows: list[tuple[int, float]], budget: int, num_ranks: int, random: object
) -> None:
    shuffled = rows.copy()
    random.shuffle(shuffled)
    found, again = (
        [
            [sorted(keys[row] for row in chosen) for chosen in microbatches]
            for microbatches in pack([x for x, _ in keys], budget, num_ranks, [unit * cost for _, cost in keys])
        ]
        for keys, unit in ((rows, 1), (shuffled, 4))
    )
    assert found == again


def test_microbatches_of_a_rank_are_balanced_by_cost_and_its_costliest_is_first() -> None:
    costs = [9.0, 7.0, 6.0, 5.0, 5.0, 1.0]
    # 9, 1 | 7, 5 | 6, 5 by hand: each to the cheapest of three.
    assert pack([10] * 6, 20, 1, costs) == [[[1, 4], [2, 3], [0, 5]]]


def test_a_microbatch_without_room_is_passed_over_for_the_next_cheapest() -> None:
    # 30 tokens more find no room beside 90, which cost less than 20 did.
    assert pack([20, 90, 30], 100, 1, [3.0, 2.0, 1.0]) == [[[0, 2], [1]]]


SIZES = {"num_layers": 2, "hidden_size": 10, "ffn_size": 7, "num_heads": 4, "num_kv_heads": 2, "head_size": 3}
OTHERS = {"max_length": 64, "norm_eps": 1e-6, "rope": Rope(1e4), "qkv_bias": False}
COUNTS = {"tokens/real": 1.0, "tokens/computed": 1.0}


def build_architecture(experts: Experts | None = None) -> Architecture:
    flags = {"family": "qwen3", "vocab_size": 50, "qk_norm": True, "tied": False}
    return Architecture(**SIZES, **OTHERS, **flags, experts=experts)


def one_row(length: int, response: int) -> Sequences:
    return Sequences(torch.zeros(length, dtype=torch.int64), torch.tensor([length]), torch.tensor([length - response]))


def test_the_cost_of_a_row_by_hand() -> None:
    # Per token and layer: query and output 2 * 10 * 12, key and value 2 * 10 * 6, MLP 3 * 10 * 7; attention 12 L^2.
    body = 2 * (5 * (240 + 120 + 210) + 12 * 25)
    assert compute_row_costs(build_architecture(), one_row(5, 3)) == [body + 3 * 10 * 50]
    assert compute_row_costs(build_architecture(), one_row(5, 3), with_value_head=True) == [body + 3 * 10]
    # Of a mixture the experts of a token, those that all tokens share, and the router count.
    experts = Experts(num_experts=8, top_k=2, ffn_size=6, normalized=True, shared_ffn_size=5)
    body = 2 * (5 * (240 + 120 + (2 * 6 + 5) * 3 * 10 + 10 * 8) + 12 * 25)
    assert compute_row_costs(build_architecture(experts), one_row(5, 3)) == [body + 3 * 10 * 50]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("length", "response"), [(3, 1), (40, 25)])
def test_costs_are_the_products_that_transformers_computes(family: str, length: int, response: int, tmp_path) -> None:
    model = write_checkpoint(tmp_path, family)
    model.set_attn_implementation("eager")
    arch = read_architecture(tmp_path)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.int64), logits_to_keep=response)
    (cost,) = compute_row_costs(arch, one_row(length, response))
    # transformers also computes the half of the scores that the causal mask hides.
    hidden = arch.num_layers * length**2 * arch.num_heads * arch.head_size
    assert counter.get_total_flops() == 2 * (cost + hidden)


@pytest.mark.parametrize(("multiple", "cp"), [(1, 1), (8, 1), (8, 2)])
def test_the_share_of_real_tokens_is_that_of_what_is_computed(multiple: int, cp: int) -> None:
    sequences = build_sequences(40)
    (rows,) = pack(sequences.lengths.tolist(), 200, 1)
    batches = [build_batch(sequences, chosen, multiple, ContextGroup(cp, 0)) for chosen in rows]
    real = [sequences.lengths[batch.rows].sum() for batch in batches]
    sums = {REAL: float(sum(real)), COMPUTED: float(sum(batch.params.cu_seqlens_q[-1] for batch in batches))}
    metrics = describe_work({"policy/loss": 1.0, **sums}, build_spec(role=Role.policy), build_architecture(), sequences)
    computed = sum(batch.tokens.numel() * cp for batch in batches)
    assert metrics["policy/loss"] == 1.0
    assert metrics["policy/real_tokens_frac"] == int(sequences.lengths.sum()) / computed
    assert 0.8 < metrics["policy/real_tokens_frac"] <= 1


@pytest.mark.parametrize("role", [Role.policy, Role.critic])
def test_an_optimizer_step_counts_three_forward_passes_of_two_operations_a_multiply_add(role: Role) -> None:
    sequences, arch = build_sequences(), build_architecture()
    metrics = describe_work(COUNTS, build_spec(role=role), arch, sequences)
    multiply_adds = sum(compute_row_costs(arch, sequences, with_value_head=role is Role.critic))
    assert metrics[f"{role.value}/model_tflop_sum"] == pytest.approx(6 * multiply_adds / 1e12)


@pytest.mark.parametrize(("role", "head"), [(Role.policy, 4 * 3 * 10 * 50), (Role.critic, 6 * 3 * 10)])
def test_a_step_of_adapters_counts_no_products_for_the_gradients_of_frozen_weights(role: Role, head: int) -> None:
    spec = build_spec(role=role, lora=LoraConfig(rank=2))
    metrics = describe_work(COUNTS, spec, build_architecture(), one_row(5, 3))
    # Two operations for the multiply-adds of `test_the_cost_of_a_row_by_hand`: forward, and by the inputs; attention's
    # two inputs both have gradients, and so have a value head's.
    linear, attention = 2 * 5 * (240 + 120 + 210), 2 * 12 * 25
    assert metrics[f"{role.value}/model_tflop_sum"] == pytest.approx((4 * linear + 6 * attention + head) / 1e12)


CPU = torch.device("cpu")


def build_batches(rows: list[int], cp: int, multiple: int = 1) -> list[PackedBatch]:
    """The batch of every rank."""
    return [build_batch(build_sequences(), rows, multiple, ContextGroup(cp, rank)) for rank in range(cp)]


def list_cells(rectangle: Rectangle) -> list[int]:
    """The token in each cell of a rectangle, counted within it."""
    return list(range(rectangle.num_tokens)) if rectangle.source is None else rectangle.source.tolist()


@settings(max_examples=100)
@given(cp=st.integers(1, 4), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_ranks_have_as_many_tokens_and_as_many_pairs_of_causal_attention(cp: int, chunks: list[int]) -> None:
    lengths = torch.tensor(chunks) * 2 * cp
    positions = torch.cat([torch.arange(length) for length in lengths])
    owners = find_owners(positions, lengths.repeat_interleave(lengths), cp)
    for sequence, owner in zip(positions.split(lengths.tolist()), owners.split(lengths.tolist()), strict=True):
        seen = [(int((owner == rank).sum()), int((sequence + 1)[owner == rank].sum())) for rank in range(cp)]
        assert len(set(seen)) == 1


def test_a_rank_has_the_first_and_the_last_chunk() -> None:
    owners = find_owners(torch.arange(8), torch.full((8,), 8), 2)
    assert owners.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (2, 1), (3, 1), (2, 4)])
def test_ranks_share_the_tokens_and_every_response_token_has_one_predictor(cp: int, multiple: int) -> None:
    sequences, rows = build_sequences(), [4, 1, 7, 0]
    batches, (whole,) = build_batches(rows, cp, multiple), build_batches(rows, 1)
    texts = sequences.tokens.split(sequences.lengths.tolist())
    assert whole.num_rows == 4
    assert whole.targets.numel() == int(sequences.response_lengths[rows].sum())
    pairs = [
        (token, position)
        for batch in batches
        for token, position in zip(batch.tokens[0].tolist(), batch.positions[0].tolist(), strict=True)
    ]
    for row in rows:
        for position, token in enumerate(texts[row].tolist()):
            assert (token, position) in pairs
    assert len({batch.tokens.shape for batch in batches}) == 1
    assert batches[0].tokens.shape[1] % multiple == 0
    assert sum(batch.own_targets.numel() for batch in batches) == whole.targets.numel()
    for batch in batches:
        assert torch.equal(batch.targets, whole.targets)
        assert torch.equal(batch.columns, whole.columns)
        mine = range(batch.targets.numel()) if batch.share is None else batch.share.mine.tolist()
        for number, predictor in zip(mine, batch.params.predictors.tolist(), strict=True):
            row = int(batch.rows[batch.token_rows[number]])
            position = int(sequences.prompt_lengths[row] + batch.columns[number])
            assert batch.positions[0, predictor] == position - 1
            assert batch.tokens[0, predictor] == texts[row][position - 1]
            assert batch.targets[number] == texts[row][position]


@pytest.mark.parametrize("cp", [2, 3])
def test_every_token_sees_the_tokens_before_it_in_its_sequence_and_itself(cp: int) -> None:
    batches = build_batches([4, 1, 7, 0, 3], cp)
    ends = batches[0].params.cu_seqlens_q.tolist()
    keys = [(sequence, place) for sequence, (a, b) in enumerate(itertools.pairwise(ends)) for place in range(b - a)]
    seen: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, batch in enumerate(batches):
        plan, first = batch.params.attention, 0
        share = plan.share
        gathered = torch.arange(len(keys))[share.inverse]
        assert torch.equal(gathered[share.order], torch.arange(len(keys)))
        own = gathered[rank * len(keys) // cp :][: len(keys) // cp].tolist()
        for whole, queries, mask in zip(plan.rectangles, share.queries, share.masks, strict=True):
            columns = torch.tensor(list_cells(whole)).view(whole.num_rows, whole.width) + first
            rows = torch.tensor(own[: queries.num_tokens])[list_cells(queries)].view(queries.num_rows, queries.width)
            for number, width in itertools.product(range(queries.num_rows), range(queries.width)):
                allowed = columns[number][mask[number, 0, width]].tolist()
                seen.setdefault(keys[rows[number, width]], set()).update(keys[key] for key in allowed)
            own, first = own[queries.num_tokens :], first + whole.num_tokens
    assert seen == {(s, p): {(s, before) for before in range(p + 1)} for s, p in keys}


@pytest.mark.parametrize("cp", [1, 2])
def test_no_rows_make_padding_on_every_rank(cp: int) -> None:
    for batch in build_batches([], cp, multiple=2):
        assert batch.tokens.shape == (1, 2)
        assert batch.num_rows == 0
        assert batch.targets.numel() == batch.own_targets.numel() == 0
        assert batch.gather(torch.zeros(0)).numel() == 0


def test_padding_to_a_multiple_is_a_sequence_of_its_own() -> None:
    sequences = build_sequences()
    batch = build_batch(sequences, [0, 1], multiple=64)
    num_tokens = int(sequences.lengths[:2].sum())
    assert batch.tokens.shape == (1, 64)
    assert batch.params.cu_seqlens_q.tolist()[-2:] == [num_tokens, 64]
    assert int(batch.params.predictors.max()) < num_tokens
    numbers = batch.params.sequence_numbers.tolist()
    lengths = sequences.lengths[batch.rows].tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert numbers == [0] * lengths[0] + [1] * lengths[1] + [-1] * (64 - num_tokens)


@pytest.mark.parametrize("cp", [1, 2])
def test_micro_batches_get_one_length_where_little_of_it_is_padding(cp: int) -> None:
    lengths = torch.tensor([16, 15, 16, 5])
    sequences = Sequences(torch.zeros(52, dtype=torch.int64), lengths, torch.ones(4, dtype=torch.int64))
    assert choose_length(sequences, [[0], [1], [2]], 1, cp) == 16 // cp
    assert choose_length(sequences, [[0], [3]], 1, cp) == 0
    assert choose_length(sequences, [[0], [1]], 3, cp) == 18 // cp if cp == 1 else 12
    batch = build_batch(sequences, [3], 1, ContextGroup(cp, 0), 16 // cp)
    assert batch.tokens.shape == (1, 16 // cp)
    assert batch.params.cu_seqlens_q.tolist() == ([0, 5, 16] if cp == 1 else [0, 8, 16])


def test_a_multiple_of_micro_batches_shares_the_rows_and_leaves_none_empty() -> None:
    ((one, two, *others),) = pack([5, 4, 3, 3, 3, 2], 10, 1, multiple=4)
    assert (len(others), min(map(len, (one, two, *others)))) == (2, 1)
    assert [len(each) for each in pack([9] * 5, 10, 2, multiple=4)] == [4, 4]


def test_a_sequence_without_a_prompt_is_refused() -> None:
    sequences = Sequences(torch.arange(3), torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="row 0 has no prompt token"):
        build_batch(sequences, [0])
