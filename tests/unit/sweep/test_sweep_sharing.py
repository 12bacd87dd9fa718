"""Which runs of a sweep share a value pretraining, what their folders are called, what is checked before they start."""

from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from megarl.checkpoint.manifest import write_manifest
from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR, check_overrides, expand_sweep, load_config
from megarl.config.open_keys import open_overrides
from megarl.config.run_name import name_run
from megarl.config.schema.root import register
from megarl.sweep import sharing
from megarl.sweep.command import complete_arguments
from megarl.sweep.sharing import find_folder, list_pretraining_overrides, share_pretraining

SWEEP_DIR = Path("/sweep")


@cache
def find(*overrides: str) -> Path | None:
    return find_folder(load_config(["algo=vapo", *overrides]), SWEEP_DIR)


def name(*overrides: str) -> str:
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return name_run("x", compose("config", overrides=open_overrides(overrides)))


@pytest.mark.parametrize(
    "override",
    [
        "algo.clip_high=0.32",
        "algo.lambda_policy=0.95",
        "algo.kl.in_loss=true",
        "algo.entropy_coef=0.01",
        "policy.optimizer.lr=1e-3",
        "train.num_iterations=7",
        "checkpoint.save_every=3",
        "cluster.worker_start_deadline_s=99",
        "logger.tensorboard=false",
    ],
)
def test_runs_that_would_do_the_same_value_pretraining_share_it(override):
    assert find() == find(override)
    assert str(find()).startswith("/sweep/value_pretrain_")


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "critic.optimizer.lr=1e-4",
        "algo.gamma=0.99",
        "algo.value_pretrain.steps=7",
        "algo.kl.in_reward=true",
        "rollout.response_length=64",
        "train.prompts_per_iteration=32",
        "data.num_heldout=8",
        "logger.save_rollouts=true",
        "model.random.hidden_size=128",
    ],
)
def test_runs_whose_value_pretraining_differs_have_one_each(override):
    assert find() != find(override)


@pytest.mark.parametrize("override", ["algo.value_pretrain.steps=0", "algo=grpo", "algo.value_pretrain.taken_from=/x"])
def test_a_run_that_needs_no_value_pretraining_made_has_none(override):
    assert find_folder(load_config([*([] if "grpo" in override else ["algo=vapo"]), override]), SWEEP_DIR) is None


def test_value_pretraining_gets_the_overrides_that_count_for_it():
    overrides = [
        "algo=vapo",
        "algo.clip_high=0.32",
        "algo.kl={in_loss: true, in_reward: true, coef: 0.02}",
        "++rollout.sglang.schedule_policy=fcfs",
        "critic.optimizer.lr=1e-4",
        "train.num_iterations=3",
    ]
    kept = list_pretraining_overrides(load_config(overrides), overrides)
    assert kept == [
        "algo=vapo",
        "++algo.kl.in_reward=True",
        "++algo.kl.coef=0.02",
        "++rollout.sglang.schedule_policy=fcfs",
        "critic.optimizer.lr=1e-4",
    ]
    load_config(kept, "pretrain_value")


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_value_pretraining_that_was_not_finished_is_gone_on_with_where_it_has_a_checkpoint(tmp_path, has_checkpoint):
    config = load_config(["algo=vapo"])
    folder = find_folder(config, tmp_path)
    kept = folder / "value_pretraining" / ("iteration-000003" if has_checkpoint else ".iteration-000003")
    kept.mkdir(parents=True)
    said, found = [], []

    def run(_overrides, at: Path) -> None:
        found.append(kept.is_dir())
        (at / "pretrained").mkdir(parents=True)
        (at / "pretrained" / "manifest.json").write_text("{}")

    assert share_pretraining(config, ["algo=vapo"], tmp_path, run, said.append) == folder
    assert found == [has_checkpoint]
    assert ("resumes" in said[0]) is has_checkpoint


@pytest.mark.parametrize("is_damaged", [True, False])
def test_one_that_cannot_go_on_is_made_anew_where_its_checkpoint_is_damaged(tmp_path, is_damaged):
    config = load_config(["algo=vapo"])
    folder = find_folder(config, tmp_path)
    kept = folder / "value_pretraining" / "iteration-000003"
    kept.mkdir(parents=True)
    (kept / "weights").write_text("numbers")
    write_manifest(kept, {})
    if is_damaged:
        (kept / "weights").write_text("numbere")
    said, found = [], []

    def run(_overrides, at: Path) -> str | None:
        found.append(kept.is_dir())
        if kept.is_dir():
            return "exit code 2"
        (at / "pretrained").mkdir(parents=True)
        (at / "pretrained" / "manifest.json").write_text("{}")
        return None

    try:
        shared = share_pretraining(config, ["algo=vapo"], tmp_path, run, said.append)
    finally:
        sharing._failed.clear()
    assert shared == (folder if is_damaged else None)
    assert found == ([True, False] if is_damaged else [True])
    assert any("damaged: weights; it is started over" in text for text in said) is is_damaged
    assert kept.is_dir() is not is_damaged


def test_a_folder_is_found_again_by_what_its_run_computes():
    assert name("seed=2", "algo.clip_high=0.3") == name("algo.clip_high=0.3", "seed=2", "logger.tensorboard=false")
    assert name("seed=2") != name("seed=3")
    # The default, given or not.
    assert name() == name("algo=vapo", "algo.clip_high=0.28")


def test_a_folder_has_no_name_that_a_shell_or_a_path_would_take_apart():
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose("config")
    readable, _, digits = name_run("data.path=/a b/c,reward.x='$(ls)'", composed).rpartition("_")
    assert readable == "data.path=-a-b-c,reward.x=---ls--"
    assert len(digits) == 6
    assert len(name_run("k=" + "v" * 400, composed)) < 120


def test_the_command_line_is_completed_with_the_folder_the_swept_keys_and_what_optuna_should_do(tmp_path):
    arguments = ["-m", "algo=vapo", "seed=1,2", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize"]
    completed, sweep_dir = complete_arguments([*arguments, f"hydra.sweep.dir={tmp_path}/a"])
    assert sweep_dir == tmp_path / "a"
    assert completed[:5] == arguments
    assert f"hydra.sweep.dir='{tmp_path}/a'" in completed
    assert "hydra.job.config.override_dirname.exclude_keys=[algo]" in completed
    assert "hydra.sweeper.sampler.seed=1" in completed
    assert "hydra.sweeper.direction=maximize" not in completed
    on_slurm, _ = complete_arguments(["-m", "hydra/launcher=slurm", "hydra.launcher.nodes=2"])
    assert on_slurm[2] == "hydra.launcher.additional_parameters.nodes=2"
    with pytest.raises(ConfigError, match="hydra/launcher=slurm is the same plugin"):
        complete_arguments(["-m", "hydra/launcher=submitit_slurm"])
    without, folder = complete_arguments(["-m", "seed=1,2"])
    assert folder.parent == Path("runs").resolve()
    assert not any("sweeper" in text for text in without)


def test_every_run_of_a_sweep_is_checked_and_of_an_interval_its_ends():
    assert expand_sweep(["algo=vapo", "seed=1,2", "algo.gamma=range(0.8,1,0.1)", "hydra/launcher=slurm"]) == [
        ["algo=vapo", f"seed={seed}", f"algo.gamma={gamma}"] for seed in (1, 2) for gamma in ("0.8", "0.9")
    ]
    assert expand_sweep(["hydra/sweeper=optuna", "algo.gamma=tag(log,interval(0.9,1))"]) == [
        ["algo.gamma=0.9"],
        ["algo.gamma=1.0"],
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algo.clip_hihg=0.2,0.3"], "algo.clip_hihg: no such key; did you mean algo.clip_high?"),
        (["algo=vapo,grpo", "algo.lambda_policy=0.9,0.95"], "algo.lambda_policy: has no effect"),
        (["algo.gamma=interval(0.2,0.3)"], "algo.gamma: found interval\\(0.2,0.3\\), which hydra/sweeper=optuna can"),
        (["hydra/sweeper=optuna", "algo.gama=interval(0.2,0.3)"], "algo.gama: no such key; did you mean algo.gamma?"),
        (["hydra/sweeper=optuna", "hydra.sweeper.params={algo.gama: 'interval(0.9,1)'}"], "algo.gama: no such key"),
        (["hydra/sweeper=optuna", "algo.gamma=interval(0.9,1.5)"], "algo.gamma: 1.5 found; must be at least 0"),
    ],
)
def test_a_wrong_key_or_value_of_a_sweep_is_named_before_anything_starts(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        check_overrides(overrides)
