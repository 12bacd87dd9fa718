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
