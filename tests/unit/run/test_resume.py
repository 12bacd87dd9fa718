"""resume=RUN_DIR: the command line a run goes on with, which keys may differ, and the loop's own state on disk."""

import json
from dataclasses import replace

import pytest
from fakes.disturbed import RUN
from fakes.run import World

from megarl.algo.statistics import RunningMoments
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.task import SCHEMAS
from megarl.cpu import process as threads
from megarl.cpu.process import list_threads
from megarl.files import CheckpointError
from megarl.rollout.source import SourceState
from megarl.run.checkpoint import TrainerState, cut_files, load_trainer_state, measure_files, save_trainer_state
from megarl.run.command import MAY_CHANGE, check_changes, list_values, load_run, may_change, save_run, take_resume

OVERRIDES = ["algo=vapo", "algo.clip_high=0.3", "+model.megatron.x=1"]


@pytest.fixture
def run_dir(tmp_path):
    save_run(tmp_path / "a run", load_config(["algo.clip_high=0.3"]), OVERRIDES)
    return tmp_path / "a run"


@pytest.mark.parametrize(("address", "is_kept"), [("10.0.0.1:6379", False), ("auto", True)])
def test_the_address_of_a_ray_is_that_of_one_start_and_auto_of_each(tmp_path, address, is_kept):
    save_run(tmp_path, load_config([]), ["algo=vapo", f"cluster.ray_address={address}"])
    assert (f"cluster.ray_address={address}" in load_run(tmp_path)["overrides"]) is is_kept


@pytest.mark.parametrize("text", ["-m", "--multirun", "--config-dir=/x", "hydra.mode=MULTIRUN", "resume=/x", 5])
def test_a_changed_record_of_a_run_starts_nothing_else(run_dir, text):
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | {"overrides": ["algo=vapo", text]}))
    with pytest.raises(ConfigError, match=r"run\.json is not what a run writes"):
        take_resume([f"resume={run_dir}"])


def test_resume_stands_for_the_overrides_of_the_run_and_given_ones_replace_them(run_dir):
    assert take_resume(["algo=vapo", "-m"]) == (["algo=vapo", "-m"], None)
    arguments, found = take_resume([f"resume={run_dir}", "algo.clip_high=0.4", "train.num_iterations=9"])
    assert found == run_dir
    given = ["algo.clip_high=0.4", "train.num_iterations=9", f"hydra.run.dir='{run_dir}'"]
    assert arguments == ["algo=vapo", "+model.megatron.x=1", *given]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume="], "resume: found nothing; one run directory is needed"),
        (["resume=a", "resume=b"], "resume: found a, b; one run directory"),
        (["resume=a", "-m"], "a sweep is resumed by its own command with hydra.sweep.dir=SWEEP_DIR"),
        (["resume=/nowhere"], "/nowhere is not a run directory: it has no run.json"),
    ],
)
def test_a_resume_that_cannot_be_is_an_error(arguments, message):
    with pytest.raises(ConfigError) as caught:
        take_resume(arguments)
    assert message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ([], None),
        (["algo.clip_high=0.28"], "algo.clip_high: the run has 0.3, now 0.28; it affects training and may not"),
        (["seed=2"], "seed: the run has 1, now 2"),
        (["reward=math"], "reward: the run has"),  # though it has the same keys
        (["policy.parallel.num_processes=2", "policy.parallel.tp=2", "train.num_iterations=500"], None),
    ],
)
def test_a_key_that_decides_what_is_learned_may_not_change_and_is_named_with_both_values(run_dir, now, problem):
    found = check_changes(load_run(run_dir)["config"], load_config(["algo.clip_high=0.3", *now]))
    assert [text[: len(problem or "")] for text in found] == ([problem] if problem else [])


@pytest.mark.parametrize(("before", "now"), [("null", "20"), ("20", "null")])
def test_a_run_without_checkpoints_does_not_go_on(tmp_path, before, now):
    save_run(tmp_path, load_config([f"checkpoint.save_every={before}"]), [])
    (problem,) = check_changes(load_run(tmp_path)["config"], load_config([f"checkpoint.save_every={now}"]))
    assert problem.startswith("checkpoint.save_every: null")


def test_the_keys_that_may_change_exist_and_what_is_learned_is_not_among_them():
    config = load_config([])
    variants = [
        *(replace(config, data=schema()) for schema in SCHEMAS["data"].values()),
        *(replace(config, reward=schema()) for schema in SCHEMAS["reward"].values()),
    ]
    keys = {key for variant in variants for key, _ in list_values(variant)}
    assert [name for name in MAY_CHANGE if not any(f"{key}.".startswith(f"{name.rstrip('.')}.") for key in keys)] == []
    may = {key for key in keys if may_change(key)}
    # One key of each reason, on both sides.
    assert may >= {
        *("train.num_iterations", "train.num_eval_prompts", "policy.parallel.tp", "rollout.request_deadline_s"),
        *("rollout.max_probe_logprob_gap", "logger.save_rollouts", "data.critic_prompt_length"),
        *("policy.optimizer.overlap_param_gather", "cluster.hardware.memory_gib", "checkpoint.best_metric"),
    }
    assert not may & {
        *("seed", "data", "reward", "reward.timeout_s", "algo.kl.coef", "algo.value_pretrain.steps", "model.path"),
        *("policy.optimizer.lr", "policy.dtype", "rollout.temperature", "rollout.sglang", "data.heldout_path"),
        "data.critic_prompt",
    }
    assert not may_change("rollout.something_new")


def test_a_run_records_its_numbers_of_threads_and_a_resumed_one_keeps_them(tmp_path, monkeypatch):
    decided = {"cluster.cpu_threads_per_worker": 3, "rollout.num_threads": 6}
    given = decided | {"rollout.num_threads": 1}
    assert list_threads(load_config([])) == dict.fromkeys(decided)
    for cores, own, expected in ((6, [], decided), (2, [], decided), (2, ["rollout.num_threads=1"], given)):
        monkeypatch.setattr(threads, "count_cores", lambda cores=cores: cores)
        World().run_job(tmp_path, [*RUN, *own])
        assert {key: load_run(tmp_path)["config"][key] for key in decided} == expected


def build_state() -> TrainerState:
    return TrainerState(
        iteration=7,
        metrics={"policy/loss": 1 / 3, "reward/mean": 1e-17},
        num_samples=1792,
        heldout_reward=None,
        kl_coef=0.1 + 0.2,
        reward_moments=RunningMoments(3, 1 / 7, 2 / 7),
        source=SourceState({"seed": 1, "epoch": 0, "position": 12, "prompts": "f00"}, ()),
        sizes={"metrics.jsonl": 120},
    )


def test_a_state_comes_back_bit_by_bit_and_one_of_other_fields_is_an_error_that_names_the_file(tmp_path):
    save_trainer_state(tmp_path, build_state())
    assert load_trainer_state(tmp_path) == build_state()
    path = tmp_path / "state.json"
    path.write_text(path.read_text().replace("num_samples", "num_sample"))
    with pytest.raises(CheckpointError, match=r"state\.json: is not the state of a run"):
        load_trainer_state(tmp_path)


def test_files_are_cut_back_to_what_they_were_and_one_that_has_lost_lines_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("one\n")
    sizes = measure_files(tmp_path)
    assert sizes == {"metrics.jsonl": 4}
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "rollouts.jsonl").write_text("later\n")
    cut_files(tmp_path, sizes)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"
    assert (tmp_path / "rollouts.jsonl").read_text() == ""
    (tmp_path / "metrics.jsonl").write_text("o")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: has 1 bytes; when the checkpoint was written it had 4"):
        cut_files(tmp_path, sizes)
