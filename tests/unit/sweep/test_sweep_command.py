"""What the folders of a sweep's runs are called, and what is checked before they start."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR, check_overrides
from megarl.config.overrides import open_overrides
from megarl.config.schema.root import name_run, register
from megarl.sweep import complete_arguments


def name(*overrides: str) -> str:
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return name_run("x", compose("config", overrides=open_overrides(overrides)))


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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algo.clip_hihg=0.2,0.3"], "algo.clip_hihg: no such key; did you mean algo.clip_high?"),
        (["algo=vapo,grpo", "algo.lambda_policy=0.9,0.95"], "algo.lambda_policy: has no effect"),
        (["algo.gamma=range(0.8,1.2,0.3)"], "algo.gamma: found 1.1; it must be 0 or more"),
        (["algo.gamma=interval(0.2,0.3)"], "algo.gamma: found interval\\(0.2,0.3\\), which hydra/sweeper=optuna can"),
        (["hydra/sweeper=optuna", "algo.gamma=tag(log,interval(0.9,1.5))"], "algo.gamma: found 1.5; it must be 0 or"),
    ],
)
def test_a_wrong_key_or_value_of_any_run_is_named_before_anything_starts(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        check_overrides(overrides)
