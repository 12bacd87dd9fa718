"""A model that a run wrote brings that run's settings, and a toy's preset takes no path, in every command."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.load import MODEL_FILE, RunSettings, expand_sets, load, load_config, load_configs
from megarl.config.overrides import write_value
from megarl.config.schema.root import Config
from megarl.files import RUN_FILE
from megarl.run.command import check_command_line, check_training, save_run

RUN = (
    *("model=smollm2_135m", "algo=grpo", "data=jsonl", "reward=function", "reward.path=mine.py:score", "seed=7"),
    *("data.path=mine.jsonl", "data.num_heldout=9", "data.prompt_length=99", "data.response_prefix='Answer:'"),
    *('data.instruction="{question}\n\\boxed{}, please."', "data.system=''", "data.chat_template=false"),
    *("rollout.response_length=33", "rollout.stop_token_ids=[5,6]", "rollout.dtype=bfloat16", "policy.dtype=float32"),
    *("train.num_eval_prompts=8", "policy.optimizer.lr=3e-5"),
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """RUN_DIR/policy of a run with the settings RUN."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", RUN)
    return tmp_path / "run" / "policy"


def write_run(directory: Path, overrides: tuple[str, ...]) -> None:
    save_run(directory, load_config(overrides), overrides)
    (directory / "policy").mkdir()
    shutil.copyfile(directory / RUN_FILE, directory / "policy" / MODEL_FILE)


def load_evaluation(*overrides: str) -> Config:
    (config,) = load_configs(expand_sets(overrides)).values()
    return config


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_evaluation(*overrides)
    return str(caught.value)


def test_a_runs_model_brings_its_settings_and_one_line_says_which(model: Path) -> None:
    run, own = load_config(RUN), ("model=checkpoint", f"model.path={model}")
    trained, evaluated = load_config([*own, "algo=grpo"]), load_evaluation(*own)
    for config in (trained, evaluated):
        for name in ("data", "reward", "environment", "seed"):
            assert getattr(config, name) == getattr(run, name), name
        for name in ("response_length", "stop_token_ids", "dtype", "kv_cache_tokens", "max_running_requests"):
            assert getattr(config.rollout, name) == getattr(run.rollout, name), name
        assert config.cluster.gpus_per_node == 0
    assert (trained.policy.dtype, trained.evaluate.heldout) == (run.policy.dtype, False)
    assert trained.policy.optimizer.lr == load_config(["model=checkpoint", "model.path=x"]).policy.optimizer.lr
    assert (evaluated.evaluate.heldout, evaluated.train.num_eval_prompts) == (True, 8)
    loaded = load(own, "evaluate")
    (line,) = loaded.lines
    assert line.startswith(f"model.path: {model} was written by a run; taken from {model.parent / RUN_FILE}: ")
    for word in ("data=jsonl", "rollout.response_length=33", "rollout.stop_token_ids=[5,6]", "evaluate.heldout=true"):
        assert word in line.split()
    again = load(loaded.overrides, "evaluate")
    assert (again.overrides, again.lines) == (loaded.overrides, [])


def test_what_is_typed_wins_an_experiments_file_included(model: Path, tmp_path: Path) -> None:
    own = ("model=checkpoint", f"model.path={model}")
    typed = load_evaluation(*own, "rollout.response_length=5", "data.response_prefix=null", "reward=exact", "seed=2")
    assert (typed.rollout.response_length, typed.data.response_prefix, typed.seed) == (5, None, 2)
    assert type(typed.reward).__name__ == "ExactRewardConfig"
    # Another seed holds out other problems.
    assert not typed.evaluate.heldout
    assert load_evaluation(*own, "evaluate.heldout=false").evaluate.heldout is False
    assert load_evaluation(*own, "cluster=gpu").cluster.gpus_per_node == 1
    assert load_evaluation(*own, "reward.path=other.py:f").reward.path == "other.py:f"
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [override /reward: numeric]\nrollout: {response_length: 44}\n"
    (tmp_path / "conf" / "experiment" / "other.yaml").write_text(text)
    path = f"hydra.searchpath=[{tmp_path}/conf]"
    other = load_evaluation(path, "experiment=other", *own, "data=jsonl", "data.path=x")
    assert (other.rollout.response_length, type(other.reward).__name__) == (44, "NumericRewardConfig")
    assert other.data.prompt_length == 99


def test_another_set_is_asked_as_the_policy_was_trained_and_is_whole(model: Path) -> None:
    own = ("model=checkpoint", f"model.path={model}")
    gsm8k = load_evaluation(*own, "data=gsm8k")
    assert (gsm8k.data.response_prefix, gsm8k.data.path) == ("Answer:", "openai/gsm8k")
    assert (gsm8k.reward.path, gsm8k.evaluate.heldout) == ("mine.py:score", False)
    file = load_evaluation(*own, "data.path=other.jsonl")
    assert (file.data.path, file.data.prompt_length, file.evaluate.heldout) == ("other.jsonl", 99, False)
    # A reward of files scores no generated problems.
    assert type(load_evaluation(*own, "data=addition").reward).__name__ == "AdditionRewardConfig"


def test_a_model_brings_what_its_data_and_reward_require_where_responses_are_saved(model: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "toy", ("model=tiny",))
    saved = ("model=checkpoint", "algo=topr", "rollout.file=saved.jsonl")
    own, toy = (load_config([*saved, f"model.path={path}"]) for path in (model, tmp_path / "toy" / "policy"))
    assert (own.reward.path, own.data.prompt_length, own.data.num_heldout) == ("mine.py:score", 99, None)
    assert toy.data.path == "megarl.examples.toys.problems:letter_count"


def test_a_moved_model_brings_its_settings_and_neither_code_nor_a_server(model: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    moved = shutil.move(model, tmp_path / "models" / "best")
    own = ("model=checkpoint", f"model.path={moved}")
    assert "reward.path: the run that wrote the model had 'mine.py:score'" in problems_of(*own)
    typed = load_evaluation(*own, "reward=exact")
    assert (typed.rollout.response_length, typed.data.num_heldout, typed.evaluate.heldout) == (33, 9, True)


def test_of_code_that_makes_data_a_moved_model_brings_megarls_own_alone(tmp_path: Path) -> None:
    for kind, path in (("Jsonl", "mine.jsonl"), ("Function", "megarl.examples.toys.problems:addition")):
        RunSettings(tmp_path / MODEL_FILE, {"data": f"{kind}DataConfig", "data.path": path}).check_trust(("data.",))
    for path in ("megarl.examples.mine.py:make", "mine.py:make", "package.module:make"):
        settings = RunSettings(tmp_path / MODEL_FILE, {"data": "FunctionDataConfig", "data.path": path})
        with pytest.raises(ConfigError, match=r"data\.path: the run that wrote the model had"):
            settings.check_trust(("data.",))


def test_files_are_those_that_the_run_named_from_where_it_was_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine.jsonl", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_evaluation("model=checkpoint", "model.path=../run/policy")
    assert (config.data.path, config.reward.path) == (f"{tmp_path}/mine.jsonl", f"{tmp_path}/mine.py:score")
    assert config.evaluate.heldout


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}', "[" * 100_000])
def test_a_record_that_no_run_wrote_is_named_and_any_other_model_brings_nothing(model: Path, text: str) -> None:
    own = ("model=checkpoint", f"model.path={model}")
    (model.parent / RUN_FILE).write_text(text)
    assert f"model.path: {model.parent / RUN_FILE} is not what a run writes" in problems_of(*own)
    (model.parent / RUN_FILE).unlink()
    (model / MODEL_FILE).unlink()
    assert "brings that run's" in problems_of(*own)


@pytest.mark.parametrize(
    "value",
    [
        *("", "a", "it's", "\\boxed{}", "a\\'b", "end\\", "\\\\", "two\nlines"),
        *("null", "True", "12", "1e3", ".5", "a,b", "[x]"),
        *("{k: v}", '"q"', "x=y", "a:b", "#1", " s ", "é", "${x}", "/a/b-c.jsonl", "-x", "mine.py:score"),
        *(None, True, 3, 2.5, 1e-9, [], ["a b", 1], {}, {"k": ["it's", None], "n": {"m": 1.5}}),
    ],
    ids=repr,
)
def test_a_value_is_read_back_by_hydra_as_it_was(value: object) -> None:
    override = OverridesParser.create().parse_override(f"key={write_value(value)}")
    tree = OmegaConf.create()
    OmegaConf.update(tree, "key", override.value(), force_add=True)
    assert OmegaConf.to_container(tree, resolve=True) == {"key": value}


def test_each_run_of_a_sweep_over_models_gets_what_its_own_model_brings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "other", (*RUN, "rollout.response_length=12"))
    words = ["-m", "algo=grpo", "model=checkpoint", f"model.path={model},{tmp_path}/other/policy"]
    monkeypatch.setattr(sys, "argv", ["megarl.train", *words])
    check_command_line(check_training)
    assert sys.argv[1:] == words
    paths = (model, tmp_path / "other" / "policy")
    lengths = [load_config([*words[1:3], f"model.path={path}"]).rollout.response_length for path in paths]
    assert lengths == [33, 12]


def test_a_resumed_run_repeats_what_its_model_has_brought(model: Path, tmp_path: Path) -> None:
    completed = load(["algo=grpo", "model=checkpoint", f"model.path={model}"]).overrides
    save_run(tmp_path / "next", load_config(completed), completed)
    (model.parent / RUN_FILE).unlink()
    (model / MODEL_FILE).unlink()
    recorded = json.loads((tmp_path / "next" / RUN_FILE).read_text())
    assert load_config(recorded["overrides"]) == load_config(completed)
