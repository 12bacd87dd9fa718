"""Responses of several segments: what is computed of each is put where the response has it, and taken from there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.rollout.collector import build_sequences, build_tensors
from megarl.rollout.rollout_file import RolloutWriter, load_samples, read_rollouts, save_samples
from megarl.run.segments import Rows, SegmentedBackend
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Sequences, TrainingSamples, Turn


@st.composite
def build_samples(draw: Any) -> Rollout:
    samples = []
    for number in range(draw(st.integers(1, 3))):
        num_segments = draw(st.integers(1, 3))
        order = [*range(num_segments), *draw(st.lists(st.integers(0, num_segments - 1), max_size=4))]
        turns, end = [], 0
        for segment in order:
            start = end + draw(st.integers(0, 2))
            end = start + draw(st.integers(1, 3))
            turns.append(Turn(start, end, "", segment=segment))
        ids = draw(st.lists(st.integers(1, 99), min_size=end, max_size=end))
        starts = [draw(st.lists(st.integers(1, 99), min_size=1, max_size=3)) for _ in range(num_segments)]
        arrays = ([-0.5] * end, [True] * end, [0] * end)
        response = Response(ids, "", *arrays, FinishReason.stop, turns=turns, segment_prompts=starts[1:])
        samples.append(Sample(Prompt(str(number), "", tuple(starts[0]), ""), response, Score(0.0, False), number))
    return Rollout(tuple(samples), 0)


class Backend:
    """Its log-probs are the sums of all tokens up to each one."""

    def __init__(self) -> None:
        self.updates: list[tuple[TrainingSamples, list[Tensor]]] = []

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> Any:
        assert sequences.segments is None
        sums = [own.cumsum(0).float() for own in torch.split(sequences.tokens, sequences.lengths.tolist())]
        rows = [own[start:] for own, start in zip(sums, sequences.prompt_lengths.tolist(), strict=True)]
        found = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return type("Done", (), {"wait": lambda self, s: True, "result": lambda self: found})()

    def update(self, samples: TrainingSamples, minibatches: list[Tensor]) -> None:
        self.updates.append((samples, minibatches))


@given(build_samples())
def test_each_token_is_computed_behind_the_tokens_of_its_own_segment(rollout: Rollout) -> None:
    backend = Backend()
    found = SegmentedBackend(backend).logprobs(build_sequences(rollout), 1.0).result()  # type: ignore[arg-type]
    expected = torch.zeros(found.shape)
    for row, sample in enumerate(rollout.samples):
        starts = [np.array(sample.prompt.token_ids), *sample.response.segment_prompts]
        end = 0
        for turn in sample.response.turns:
            for column in range(end, turn.end):
                starts[turn.segment] = np.append(starts[turn.segment], sample.response.token_ids[column])
                expected[row, column] = float(starts[turn.segment].sum())
            end = turn.end
    assert torch.equal(found, expected)


@given(build_samples())
def test_an_update_has_every_token_once_with_its_own_targets(rollout: Rollout) -> None:
    tensors, backend = build_tensors(rollout), Backend()
    numbers = torch.arange(tensors.mask.numel()).reshape(tensors.mask.shape).float() + 1
    samples = TrainingSamples(
        *(tensors.sequences, tensors.mask, tensors.mask, torch.tensor([s.group == 1 for s in rollout.samples])),
        *(numbers, numbers, None, None, None, None, None),
    )
    half = torch.arange(len(rollout.samples))[::2]
    SegmentedBackend(backend).update(samples, [half])  # type: ignore[arg-type]
    ((given, (rows,)),) = backend.updates
    assert given.mask.sum() == tensors.mask.sum()
    assert sorted(given.advantages[given.mask].tolist()) == sorted(numbers[tensors.mask].tolist())
    chosen = given.select(rows)
    assert sorted(chosen.advantages[chosen.mask].tolist()) == sorted(numbers[half][tensors.mask[half]].tolist())
    assert torch.equal(given.sequences.response_lengths, given.mask.sum(1))
    if tensors.sequences.segments is not None:
        per_row = [len(s.response.find_segments()) for s in rollout.samples]
        assert given.positive.tolist() == np.repeat(samples.positive.numpy(), per_row).tolist()
        assert torch.equal(Rows(tensors.sequences).fold(given.advantages), numbers * tensors.mask)


@given(build_samples())
def test_segments_are_read_back_from_files(tmp_path_factory: pytest.TempPathFactory, rollout: Rollout) -> None:
    folder: Path = tmp_path_factory.mktemp("segments")
    writer = RolloutWriter(folder / "rollouts.jsonl")
    writer.write(rollout, 1)
    writer.close()
    ((read, _),) = read_rollouts(folder / "rollouts.jsonl")
    save_samples(folder / "samples", [[rollout.samples]])
    for again in (read.samples, load_samples(folder / "samples")[0][0]):
        assert [sample.response for sample in again] == [sample.response for sample in rollout.samples]


def test_a_turn_of_no_segment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turns are of the segments \[1\]; there are 1"):
        Response([1], "", [0.0], [True], [0], FinishReason.stop, turns=[Turn(0, 1, "", segment=1)])
