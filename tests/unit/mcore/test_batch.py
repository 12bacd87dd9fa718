"""Packed batches, whole and shared among the ranks of a context-parallel group."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import build_sequences

import megarl.mcore  # noqa: F401
from megarl.cpu.layers import Rectangle
from megarl.mcore.batch import ContextGroup, PackedBatch, build_batch, find_owners
from megarl.types import Sequences

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


def test_a_sequence_without_a_prompt_is_refused() -> None:
    sequences = Sequences(torch.arange(3), torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="row 0 has no prompt token"):
        build_batch(sequences, [0])
