"""What an unfinished value pretraining is gone on with: its own, whole, its files as they were; others by name."""

from pathlib import Path

import pytest

from megarl.algo.statistics import RunningMoments
from megarl.checkpoint.folder import open_pretraining, remove_pretraining
from megarl.checkpoint.manifest import CheckpointError, write_manifest
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.algo import ValuePretrainConfig
from megarl.mcore.worker_spec import Role
from megarl.report.metrics import MetricsWriter
from megarl.report.report import build_report
from megarl.rollout.source import SourceState
from megarl.run.inputs import load_models, load_specs
from megarl.run.trainer_state import TrainerState, measure_files, save_trainer_state
from megarl.value_pretraining.checkpoints import (
    EXPLAINED,
    ResumePoint,
    begin_job,
    find_checkpoint,
    load_threads,
    resume_from,
)
from megarl.value_pretraining.job import run_value_pretraining
from megarl.value_pretraining.loop import find_end

CURVE = [0.1, 0.1 + 0.2, 1 / 3, 0.2, 0.25, 0.31, 0.34, 0.341, 0.339]


def write_steps(run_dir: Path, first: int, last: int) -> None:
    writer = MetricsWriter(run_dir / "value_pretrain.jsonl")
    for step in range(first, last + 1):
        writer.write(step, {EXPLAINED: CURVE[step - 1], "time/update": 0.5 * step})
    writer.close()


def save_step(run_dir: Path, step: int) -> TrainerState:
    """A checkpoint of this step, but for what Megatron would write."""
    moments, source = RunningMoments(step, 1 / 7, 2 / 7), SourceState({"seed": 1, "position": step}, ())
    state = TrainerState(step, {}, 256 * step, None, 0.001, moments, source, measure_files(run_dir))
    building = open_pretraining(run_dir).begin(step)
    save_trainer_state(building, state)
    (building / "critic").mkdir()
    (building / "critic" / "weights").write_text("numbers")
    write_manifest(building / "critic", {})
    write_manifest(building, {})
    open_pretraining(run_dir).publish(step)
    return state


def begin(run_dir: Path, *overrides: str) -> ResumePoint | None:
    config = load_config(["algo=vapo", "model=tiny", "logger.terminal=false", "logger.tensorboard=false", *overrides])
    report = build_report(config.logger, run_dir, 1)
    try:
        return begin_job(config, run_dir, load_specs(config, load_models(config))[Role.critic], report)
    finally:
        report.close()


@pytest.mark.parametrize("saved", range(1, 9))
def test_one_that_goes_on_after_any_step_ends_where_an_uninterrupted_one_does(tmp_path, saved):
    settings = ValuePretrainConfig(steps=9, patience=3, min_improvement=0.05)
    ends = [find_end(settings, CURVE[:n]) for n in range(1, 10)]
    # Only the last three are level without much noise.
    assert [reason is not None for reason in ends] == [False] * 8 + [True]
    write_steps(tmp_path, 1, saved)
    save_step(tmp_path, saved)
    write_steps(tmp_path, saved + 1, 9)
    found = find_checkpoint(tmp_path, print)
    assert found is not None
    report = build_report(load_config(["logger.terminal=false", "logger.tensorboard=false"]).logger, tmp_path, 1)
    curve = list(resume_from(tmp_path, *found, report).curve)
    report.close()
    assert curve == CURVE[:saved]
    assert [find_end(settings, curve + CURVE[saved:n]) for n in range(saved, 10)] == ends[saved - 1 :]


def test_the_job_goes_on_in_its_folder_with_its_files_cut_back(tmp_path):
    assert begin(tmp_path) is None
    write_steps(tmp_path, 1, 2)
    state = save_step(tmp_path, 2)
    write_steps(tmp_path, 3, 3)
    resume_point = begin(tmp_path, "cluster.worker_start_deadline_s=77", "checkpoint.save_every=1")
    assert resume_point is not None
    assert resume_point.state == state
    assert resume_point.directory == tmp_path / "value_pretraining" / "iteration-000002"
    assert len((tmp_path / "value_pretrain.jsonl").read_text().splitlines()) == 2


def test_the_job_resumes_with_the_numbers_of_threads_that_it_began_with(tmp_path):
    assert load_threads(tmp_path) == {}
    begin(tmp_path, "cluster.cpu_threads_per_worker=1", "rollout.num_threads=1")
    write_steps(tmp_path, 1, 1)
    save_step(tmp_path, 1)
    assert load_threads(tmp_path) == {"cluster.cpu_threads_per_worker": 1, "rollout.num_threads": 1}
    assert begin(tmp_path) is not None


def test_another_value_pretraining_is_refused_by_what_differs(tmp_path):
    begin(tmp_path)
    write_steps(tmp_path, 1, 1)
    save_step(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match=r"belongs to another .*: algo\.gamma \(1\.0 there, now 0\.9\), seed \(1 there, now 2\) differ",
    ):
        begin(tmp_path, "seed=2", "algo.gamma=0.9")
    (tmp_path / "value_pretraining" / "begun.json").unlink()
    with pytest.raises(CheckpointError, match=r"belongs to a training run; python -m megarl\.train resume="):
        begin(tmp_path)


def test_a_damaged_one_is_named_and_what_to_do(tmp_path):
    begin(tmp_path)
    write_steps(tmp_path, 1, 1)
    save_step(tmp_path, 1)
    (tmp_path / "value_pretraining" / "iteration-000001" / "critic" / "weights").write_text("numbere")
    with pytest.raises(CheckpointError, match=r"damaged: weights; remove \S*value_pretraining to start .* over"):
        begin(tmp_path)


def test_what_a_start_left_that_came_to_no_checkpoint_is_cut_off_and_what_was_before_it_stays(tmp_path):
    write_steps(tmp_path, 1, 3)
    before = (tmp_path / "value_pretrain.jsonl").read_text()
    assert begin(tmp_path) is None
    write_steps(tmp_path, 1, 2)
    assert begin(tmp_path) is None
    assert (tmp_path / "value_pretrain.jsonl").read_text() == before


def test_what_a_start_of_other_inputs_left_is_not_cut_off(tmp_path):
    begin(tmp_path)
    write_steps(tmp_path, 1, 2)
    left = (tmp_path / "value_pretrain.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"seed \(1 there, now 2\) differ; .* or remove the folder"):
        begin(tmp_path, "seed=2")
    assert (tmp_path / "value_pretrain.jsonl").read_text() == left


def test_a_folder_with_a_finished_one_is_not_written_to_again(tmp_path):
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "manifest.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"finished value pretraining; training starts from it with algo\.value_pretrain\.taken_from="
    ):
        run_value_pretraining(load_config(["algo=vapo", "model=tiny"]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pretrained"]


@pytest.mark.parametrize("number", [3, 9])
def test_tensorboard_shows_each_step_once_with_what_came_of_it_last(tmp_path, monkeypatch, number):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # The number of a process's event file is the end of its name: .10 is sorted before .9.
    monkeypatch.setattr(event_file_writer._global_uid, "_value", number)
    report = build_report(load_config(["logger.terminal=false"]).logger, tmp_path, 1)
    for step in (1, 2, 3):
        report.log_pretraining(step, 4, {EXPLAINED: 0.25 * step})
    report.rewind_pretraining(2)
    for step in (3, 4):
        report.log_pretraining(step, 4, {EXPLAINED: 0.125 * step})
    report.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars(EXPLAINED)]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.375), (4, 0.5)]


def test_the_folder_goes_whole(tmp_path):
    write_steps(tmp_path, 1, 1)
    save_step(tmp_path, 1)
    remove_pretraining(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["value_pretrain.jsonl"]
    remove_pretraining(tmp_path)


def test_without_checkpoints_nothing_is_noted(tmp_path):
    assert begin(tmp_path, "checkpoint.save_every=null") is None
    assert not (tmp_path / "value_pretraining").exists()
