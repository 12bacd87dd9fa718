"""megarl evaluate: which sets, with which reward, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import expand_sets, load_config, load_configs
from megarl.config.schema.run import EvaluateConfig, check_evaluate, get_temperature, list_ks
from megarl.run.command import choose_run_dir, save_run
from megarl.run.inputs import load_evaluation_inputs, load_inputs
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[3]


def test_each_set_gets_a_configuration_of_its_own_and_the_reward_of_its_name_or_math():
    configs = load_configs(expand_sets(["model=smollm2_135m", "data=gsm8k,addition,amc23", "seed=3"]))
    assert list(configs) == ["gsm8k", "addition", "amc23"]
    rewards = {name: type(config.reward).__name__ for name, config in configs.items()}
    assert rewards == {"gsm8k": "MathRewardConfig", "addition": "AdditionRewardConfig", "amc23": "MathRewardConfig"}
    assert [config.data.prompt_length for config in configs.values()] == [512, 64, 1024]
    assert {config.seed for config in configs.values()} == {3}
    assert {config.model.name for config in configs.values()} == {"smollm2_135m"}
    configs = load_configs(expand_sets(["data=gsm8k,addition", "reward=exact"]))
    assert {type(config.reward).__name__ for config in configs.values()} == {"ExactRewardConfig"}


def test_an_experiment_is_evaluated_on_its_own_data_with_its_own_reward(monkeypatch):
    monkeypatch.chdir(ROOT / "examples" / "own_task")
    overrides = [f"hydra.searchpath=[file://{ROOT}/examples/own_task]", "experiment=own_task"]
    (own,) = load_configs(expand_sets([*overrides, "evaluate.num_samples=8"])).items()
    assert (own[0], own[1].data.path, own[1].reward.path) == ("jsonl", "prompts.jsonl", "my_reward.py:score")
    other = load_configs(expand_sets(["experiment=guess", "data=guess", "reward=exact"]))["guess"]
    assert type(other.reward).__name__ == "ExactRewardConfig"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "data: found nothing; name each set once, as in data=gsm8k,aime24"),
        (["data=gsm8k,amc"], "data: found gsm8k,amc; name each set once, as in data=gsm8k,aime24; the choices are add"),
        (["data=gsm8k,amc23,gsm8k"], "data: found gsm8k,amc23,gsm8k; name each set once"),
        (["data=gsm8k,amc23", "data.path=x"], "data.path: can be right for one set only"),
        (["data=gsm8k", "evaluate.paths.amc23=x"], "evaluate.paths.amc23: no such set; data= names gsm8k"),
        (["data=gsm8k", "evaluate.num_sample=2"], "did you mean evaluate.num_samples"),
        (["data=gsm8k", "evaluate.num_samples=0"], "evaluate.num_samples: found 0"),
        (
            ["data=gsm8k", "evaluate.num_samples=4", "evaluate.temperature=0"],
            "evaluate.num_samples: found 4; at evaluate",
        ),
        (["data=gsm8k", "evaluate.top_p=0.9"], "evaluate.top_p: has no effect on greedy responses"),
        (["data=gsm8k", "evaluate.num_samples=2", "evaluate.top_k=0"], "evaluate.top_k: found 0"),
        (["data=gsm8k", "train.num_iterations=2"], "train.num_iterations: has no effect in an evaluation"),
        (["data=gsm8k", "algo.gamma=0.9"], "algo.gamma: has no effect in an evaluation"),
        (["data=gsm8k", "rollout.temperature=0.9"], "in an evaluation, which has evaluate.temperature"),
        (["data=gsm8k", "logger.terminal=false"], "logger.terminal: has no effect in an evaluation"),
        (["data=gsm8k", "data.num_heldout=5"], "evaluate.num_problems=N takes a part"),
    ],
)
def test_a_bad_command_line_names_the_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_configs(expand_sets(overrides))
    assert message in str(error.value)


def test_one_response_is_greedy_and_several_are_sampled_and_k_are_powers_of_two():
    for num_samples, temperature, ks in ((1, 0.0, ()), (2, 1.0, (2,)), (8, 1.0, (2, 4, 8)), (12, 1.0, (2, 4, 8))):
        config = EvaluateConfig(num_samples=num_samples)
        assert list(check_evaluate(config)) == []
        assert (get_temperature(config), list_ks(config)) == (temperature, ks)


def test_the_run_folder_is_named_after_the_model_or_the_checkpoint():
    tiny = load_configs(expand_sets(["data=letter_count"]))
    assert choose_run_dir([], tiny) == ["hydra.run.dir=runs/${now:%Y-%m-%d_%H-%M-%S}_evaluate_tiny"]
    trained = load_configs(expand_sets(["data=letter_count", "model=checkpoint", "model.path=/models/my model/"]))
    assert choose_run_dir([], trained)[0].endswith("_evaluate_my_model")
    assert choose_run_dir(["hydra.run.dir=here"], tiny) == []


RUN = (
    *("algo=grpo", "data=jsonl", "data.path=mine.jsonl", "data.num_heldout=6", "reward=exact", "seed=3"),
    *("data.prompt_length=4", "train.num_eval_prompts=4"),
)


@pytest.fixture
def heldout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Prompt, ...]:
    """Those of a run of 30 questions, of which 10 are too long; its model is in run/policy."""
    monkeypatch.chdir(tmp_path)
    questions = [
        first + second + end for first in "abcde" for second in "abcdef" for end in ["." * (second in "ef") * 4]
    ]
    write_questions(tmp_path / "mine.jsonl", questions)
    config = load_config(RUN)
    inputs = load_inputs(config)
    save_run(tmp_path / "run", config, RUN)
    shutil.copytree(inputs.checkpoint, tmp_path / "run" / "policy")
    return inputs.data.heldout[: config.train.num_eval_prompts]


def write_questions(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"question": question, "answer": "a"}) + "\n" for question in questions))


def load(*overrides: str) -> list[Prompt]:
    configs = load_configs(expand_sets(["model=checkpoint", "model.path=run/policy", *overrides]))
    return list(load_evaluation_inputs(configs).sets[0].prompts)


def test_the_runs_own_data_are_asked_as_training_asks_its_heldout_prompts(heldout: tuple[Prompt, ...]) -> None:
    assert load() == list(heldout)
    assert len(heldout) == 4
    part = load("evaluate.num_problems=2")
    assert len(part) == 2
    assert all(prompt in heldout for prompt in part)
    assert len(load("train.num_eval_prompts=6")) == 6
    assert len(load("evaluate.heldout=false", "data.prompt_length=8")) == 30
