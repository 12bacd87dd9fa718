"""megarl.api in a script or notebook."""

import subprocess
import sys

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from megarl.api import compose, train
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.command import save_run


def test_composing_gives_what_the_command_line_does_and_leaves_hydra_as_it_was(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    assert compose("algo=grpo", "seed=2") == load_config(["algo=grpo", "seed=2"])
    assert not GlobalHydra.instance().is_initialized()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("algo=grpo").algo.name == "grpo"
        assert hydra_compose("mine") == {"a": 1}


def test_files_of_ones_own_are_composed(tmp_path):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text("# @package _global_\ndefaults: [vapo]\nalgo: {name: mine}\n")
    for config_dir in (tmp_path, [tmp_path]):
        assert compose("algo=mine", config_dir=config_dir).algo.name == "mine"
    with pytest.raises(ConfigError, match="found /nowhere"):
        compose(config_dir="/nowhere")


def test_importing_the_api_and_composing_needs_no_torch():
    code = "import sys, megarl.api; megarl.api.compose(); sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_field_that_was_set_wrongly_and_another_runs_folder_are_refused_before_anything_starts(tmp_path):
    config = compose()
    config.train.samples_per_minibatch = 100
    with pytest.raises(ConfigError, match=r"train\.samples_per_minibatch: found 100"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    save_run(tmp_path / "run", compose("seed=1"), [])
    with pytest.raises(ConfigError, match="seed: the run has 1, now 2"):
        train(compose("seed=2"), tmp_path / "run")
