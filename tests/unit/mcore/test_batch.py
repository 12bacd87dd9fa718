import pytest
import torch
from tiny_checkpoints import build_samples, build_sequences

from megarl.mcore.batch import build_batch
from megarl.types import Sequences


def test_every_response_token_has_its_predictor_row_and_column() -> None:
    sequences = build_sequences()
    batch = build_batch(sequences, [4, 1, 7])
    rows = sequences.tokens.split(sequences.lengths.tolist())
    packed = batch.tokens[0]
    assert batch.num_rows == 3
    assert batch.targets.numel() == int(sequences.response_lengths[[4, 1, 7]].sum())
    for place, row, column, target, predictor in zip(
        batch.token_rows,
        batch.rows[batch.token_rows],
        batch.columns,
        batch.targets,
        batch.params.predictors,
        strict=True,
    ):
        position = int(sequences.prompt_lengths[row] + column)
        assert rows[row][position] == target == packed[predictor + 1]
        assert batch.positions[0, predictor] == position - 1
        assert batch.rows[place] == row


def test_rows_are_packed_longest_first_without_gaps() -> None:
    sequences = build_sequences()
    batch = build_batch(sequences, list(range(9)))
    lengths = sequences.lengths[batch.rows]
    assert torch.equal(lengths, lengths.sort(descending=True).values)
    assert batch.params.cu_seqlens_q.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert torch.equal(batch.positions[0], torch.cat([torch.arange(n) for n in lengths.tolist()]))


def test_padding_to_a_multiple_is_a_sequence_of_its_own() -> None:
    sequences = build_sequences()
    batch = build_batch(sequences, [0, 1], multiple=64)
    num_tokens = int(sequences.lengths[:2].sum())
    assert batch.tokens.shape == (1, 64)
    assert batch.params.cu_seqlens_q.tolist()[-2:] == [num_tokens, 64]
    assert int(batch.params.predictors.max()) < num_tokens
    numbers = batch.params.sequence_numbers.tolist()
    lengths = sequences.lengths[batch.rows].tolist()
    assert numbers == [0] * lengths[0] + [1] * lengths[1] + [-1] * (64 - num_tokens)


def test_no_rows_make_a_batch_of_padding_without_targets() -> None:
    batch = build_batch(build_sequences(), [], multiple=2)
    assert batch.tokens.shape == (1, 2)
    assert batch.num_rows == batch.targets.numel() == 0


def test_flatten_takes_the_values_of_the_batchs_response_tokens() -> None:
    samples = build_samples()
    batch = build_batch(samples.sequences, [3, 11])
    expected = samples.advantages[batch.rows[batch.token_rows], batch.columns]
    assert torch.equal(batch.flatten(samples.advantages), expected)


def test_a_sequence_without_a_prompt_is_refused() -> None:
    sequences = Sequences(torch.arange(3), torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="row 0 has no prompt token"):
        build_batch(sequences, [0])


def build_shared() -> Sequences:
    """Rows 0, 2 and 3 have the prompt 7 8 9, row 1 another one; row 4 has the prompt of row 1 and no response."""
    rows = [[7, 8, 9, 20, 21], [4, 5, 30], [7, 8, 9, 22], [7, 8, 9, 23, 24, 25], [4, 5]]
    lengths, prompts = torch.tensor([len(row) for row in rows]), torch.tensor([3, 2, 3, 3, 2])
    return Sequences(
        torch.tensor([token for row in rows for token in row]), lengths, prompts, prompts=torch.tensor([0, 1, 0, 0, 1])
    )


def test_a_shared_prompt_is_packed_once_and_each_response_goes_on_at_its_position() -> None:
    batch = build_batch(build_shared(), [0, 1, 2, 3], share_prompts=True)
    # The prompt and the lone row, longest first, then the responses, longest first.
    assert batch.tokens.tolist() == [[7, 8, 9, 4, 5, 30, 23, 24, 25, 20, 21, 22]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 3]]
    assert batch.targets.tolist() == [30, 23, 24, 25, 20, 21, 22]
    assert batch.params.predictors.tolist() == [4, 2, 6, 7, 2, 9, 2]
    assert batch.rows[batch.token_rows].tolist() == [1, 3, 3, 3, 0, 0, 2]
    assert batch.columns.tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert batch.left_out.tolist() == [3, 3]


def test_each_token_of_a_response_sees_its_prompt_and_its_own_tokens_up_to_itself() -> None:
    *_, responses = build_batch(build_shared(), [0, 1, 2, 3], share_prompts=True).params.rectangles
    keys = responses.keys.view(3, 6)
    assert keys.tolist() == [[0, 1, 2, 6, 7, 8], [0, 1, 2, 9, 10, 10], [0, 1, 2, 11, 11, 11]]
    assert responses.mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


def test_an_empty_response_and_a_prompt_of_one_row_are_packed_as_whole_rows() -> None:
    whole, shared = (build_batch(build_shared(), [0, 1, 4], share_prompts=share) for share in (False, True))
    assert torch.equal(shared.tokens, whole.tokens)
    assert len(shared.left_out) == 0
    assert all(rectangle.keys is None for rectangle in shared.params.rectangles)
