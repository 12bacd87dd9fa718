"""The loop's own state on disk, and the files that grow with a run."""

from concurrent.futures import wait

import pytest
from fakes.backend import FakeBackend
from fakes.run import load

from megarl.algo.statistics import RunningMoments
from megarl.files import CheckpointError, Folder
from megarl.mcore.spec import Role
from megarl.rollout.source import SourceState
from megarl.run.checkpoint import (
    CheckpointWriter,
    TrainerState,
    cut_files,
    load_trainer_state,
    measure_files,
    save_trainer_state,
)
from megarl.types import FinishReason, Prompt, Response, Sample, Score


def build_group(number: int) -> tuple[Sample, ...]:
    prompt = Prompt(f"p{number}", "?", (1, 2), "x")
    response = Response((5, 6), "ab", (-0.1, -1 / 3), (True, False), (number, number), FinishReason.length)
    return tuple(Sample(prompt, response, Score(reward, reward > 0), 0) for reward in (0.0, 0.1))


def build_state(replay=()) -> TrainerState:
    return TrainerState(
        iteration=7,
        metrics={"policy/loss": 1 / 3, "reward/mean": 1e-17},
        num_samples=1792,
        heldout_reward=None,
        kl_coef=0.1 + 0.2,
        reward_moments=RunningMoments(3, 1 / 7, 2 / 7),
        source=SourceState({"seed": 1, "epoch": 0, "position": 12, "prompts": "f00"}, replay),
        sizes={"metrics.jsonl": 120},
    )


@pytest.mark.parametrize("replay", [(), ([build_group(1), build_group(2)], [build_group(3)])])
def test_a_state_comes_back_bit_by_bit(tmp_path, replay):
    save_trainer_state(tmp_path, build_state(replay))
    found = load_trainer_state(tmp_path)
    assert [[[s.prompt.id for s in g] for g in groups] for groups in found.source.replay] == [
        [[s.prompt.id for s in g] for g in groups] for groups in replay
    ]
    assert [[[s.response for s in g] for g in groups] for groups in found.source.replay] == [
        [[s.response for s in g] for g in groups] for groups in replay
    ]
    bare = SourceState(found.source.sampler, ())
    assert vars(found) | {"source": bare} == vars(build_state())


def test_a_state_of_other_fields_is_an_error_that_names_the_file(tmp_path):
    save_trainer_state(tmp_path, build_state())
    path = tmp_path / "state.json"
    path.write_text(path.read_text().replace("num_samples", "num_sample"))
    with pytest.raises(CheckpointError, match=r"state\.json: is not the state of a run"):
        load_trainer_state(tmp_path)


def test_files_are_cut_back_to_what_they_were_and_those_of_later_are_emptied(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("one\n")
    sizes = measure_files(tmp_path)
    assert sizes == {"metrics.jsonl": 4}
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "rollouts.jsonl").write_text("later\n")
    cut_files(tmp_path, sizes)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


def test_a_file_that_has_lost_lines_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("o")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: has 1 bytes; when the checkpoint was written it had 4"):
        cut_files(tmp_path, {"metrics.jsonl": 4})


def test_a_checkpoint_is_said_when_it_is_complete_and_not_when_the_loop_comes_by(tmp_path):
    """Otherwise its line stands behind those of a later iteration."""
    _, inputs = load(["algo=grpo"])
    said, roles = [], {"policy": FakeBackend(inputs.specs[Role.policy])}
    writer = CheckpointWriter(
        tmp_path,
        Folder(tmp_path / "checkpoints", keep_last=2),
        roles,
        inputs.specs,
        lambda _oldest: None,
        say=said.append,
    )
    writer.begin(build_state())
    writer.proceed()
    wait([writer._publishing], 60)
    assert said == [f"checkpoint of iteration 7: {writer.folder.path / 'iteration-000007'}"]
    writer.settle()
    assert len(said) == 1
    writer.close()
