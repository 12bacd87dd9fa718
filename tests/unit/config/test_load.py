"""Every preset composes; overrides and what they compose to (composed.yaml), or the message by which they are refused
(refused.yaml); what is refused before anything starts is listed completely and apart; megarl.api in a script.
"""

import pickle
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from megarl.api import compose, train
from megarl.config.checks import ALLOWED_VALUES, REFUSED_OPTIONS, TOY_MODELS
from megarl.config.errors import ConfigError
from megarl.config.load import expand_sweep, load_config
from megarl.config.overrides import CONF_DIR
from megarl.rollout.server import load_options
from megarl.run.command import save_run


def problems_of(*overrides: str, command: str = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, command)
    return str(caught.value)


@pytest.mark.parametrize("override", ["experiment=foo", "+experiment=foo", "+nogroup=foo"])
def test_a_mistyped_option_of_any_group_is_refused_without_an_empty_list_of_choices(override):
    message = problems_of(override)
    assert message.startswith(f"{override.lstrip('+').split('=')[0]}: ")
    assert not message.rstrip().endswith("are")


def test_the_toys_are_the_presets_with_random_weights():
    texts = {path.stem: path.read_text() for path in (CONF_DIR / "model").glob("*.yaml")}
    random = {name for name, text in texts.items() if "source: random" in text}
    built_on = {name for name, text in texts.items() if any(f"\n  - {toy}\n" in text for toy in random)}
    assert random | built_on == set(TOY_MODELS)


def test_every_refused_server_argument_is_one_of_the_installed_sglang():
    not_its_own = {"top_p", "top_k", "min_p"}
    assert {*REFUSED_OPTIONS, *ALLOWED_VALUES} - not_its_own <= load_options().keys()
    assert any(name.startswith("speculative_") for name in load_options())


def test_all_problems_are_reported_at_once_and_stay_apart_in_another_process():
    no_loss = "algo.rl_loss_coef=0", "algo.positive_lm_coef=0"
    message = problems_of("train.samples_per_minibatch=100", "policy.optimizer.min_lr=1", *no_loss)
    assert all(key in message for key in ("samples_per_minibatch", "optimizer.min_lr", "algo.rl_loss_coef"))
    assert pickle.loads(pickle.dumps(ConfigError(["a: one", "b: two"]))).problems == ("a: one", "b: two")


@pytest.mark.parametrize(("model", "tokens"), [("tiny", 6), ("smollm2_135m", 2), ("qwen3_8b", 1638), ("qwen32b", 3277)])
def test_dapos_penalty_grows_over_a_share_of_the_length_limit(model, tokens):
    config = load_config(["algo=dapo", f"model={model}"])
    assert config.algo.overlong.count_buffer(config.rollout.response_length) == tokens


def read_table(name: str) -> list[Any]:
    """A parameter (claim, row) for each row; a row of one word may be the word alone."""
    table = yaml.safe_load(Path(__file__).with_name(name).read_text())
    rows = [(claim, row if isinstance(row, list) else [row]) for claim, rows in table.items() for row in rows]
    return [pytest.param(claim, row, id=f"{claim}-{'-'.join(map(str, row))}") for claim, row in rows]


COMPOSED, REFUSED = read_table("composed.yaml"), read_table("refused.yaml")


@pytest.mark.parametrize(("claim", "row"), COMPOSED)
def test_it_composes_to_the_values(claim: str, row: list[Any]) -> None:
    *overrides, expected = row
    config = load_config(overrides)
    found = {key: reduce(getattr, key.split("."), config) for key in expected}
    assert {key: getattr(value, "name", value) for key, value in found.items()} == expected, claim


@pytest.mark.parametrize(("claim", "row"), REFUSED)
def test_it_is_refused_with_the_message(claim: str, row: list[str]) -> None:
    overrides, message = (row[:-1], row[-1]) if len(row) > 1 else (row, row[0].split("=")[0] + ": found ")
    for run in expand_sweep(overrides):
        with pytest.raises(ConfigError) as caught:
            load_config(run)
        assert message in str(caught.value), claim
        if len(row) == 1:  # once
            assert len([problem for problem in caught.value.problems if problem.startswith(message)]) == 1


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


PRINTED = """
from megarl.algo.objective import format_objective
from megarl.config.load import list_options, load_config
for config in [load_config([f"algo={preset}"]) for preset in list_options("algo")]:
    print(format_objective(config.algo, config.train.responses_per_prompt))"""


@pytest.mark.parametrize("code", ["import megarl.api; megarl.api.compose()", PRINTED], ids=["api", "objectives"])
def test_composing_by_the_api_and_checking_and_printing_every_objective_need_no_torch(code):
    code = f"import sys\n{code}\nsys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
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
