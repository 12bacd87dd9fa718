"""The verifiers exact, addition and function, and their configuration."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from reward_cases import build_prompt, build_response, build_reward

from megarl import algo
from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR, load_config
from megarl.config.schema.reward import (
    SCHEMAS,
    AdditionRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
    register,
)
from megarl.task.function import RESERVED_NAMES, FunctionReward
from megarl.task.process import load_callable
from megarl.task.scorer import EMPTY, build_scorer, reads_answers

PROMPT = build_prompt("")
READS_NO_ANSWER = {"environment", "letter_count", "reasoning_gym", "format", "length", "code", "http", "function"}

REQUIRED = {
    "function": {"path": "reward_cases:build_prompt"},
    "http": {"url": "http://127.0.0.1:1/score"},
    "judge": {"url": "http://127.0.0.1:9"},
    "reward_model": {"url": "http://127.0.0.1:9"},
    "weighted": {"parts": {"right": {"kind": "exact"}}},
}
"""Keys without a default, by kind"""
OF_SERVERS = ("judge", "reward_model")
"""Kinds that ask their server when they are built: test_judge.py"""


def list_required(kind: str) -> list[str]:
    """The same as overrides."""
    return [f"++reward.{key}={value}".replace("'", "") for key, value in REQUIRED.get(kind, {}).items()]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_each_kind_composes_to_its_own_dataclass(kind):
    register(ConfigStore.instance())
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose(overrides=[f"+reward={kind}", *list_required(kind)])
    assert isinstance(OmegaConf.to_object(composed.reward), SCHEMAS[kind])


def test_every_kind_has_a_yaml_file_and_a_verifier():
    assert {file.stem for file in (CONF_DIR / "reward").glob("*.yaml")} == set(SCHEMAS)
    for kind, schema in SCHEMAS.items():
        config = schema(**REQUIRED.get(kind, {}))
        if kind in OF_SERVERS:
            with pytest.raises(ConfigError, match=r"reward\.url: found http://127\.0\.0\.1:9"):
                build_scorer(config)
        else:
            build_scorer(config).close()


def test_a_kind_without_a_verifier_is_named():
    with pytest.raises(ConfigError, match="RewardConfig"):
        build_scorer(RewardConfig())


@pytest.mark.parametrize(
    ("config", "answer", "text", "read"),
    [
        (ExactRewardConfig(), "Paris", " PARIS. ", "paris"),
        (ExactRewardConfig(), "Paris", " ", None),
        (AdditionRewardConfig(), "85", "085.", "85"),
        (AdditionRewardConfig(), "85", "-0", "0"),
        (AdditionRewardConfig(), "85", "It is 85", None),
        (LetterCountRewardConfig(), "b3", "bbb", None),
    ],
)
def test_a_score_says_which_answer_was_read(config, answer, text, read):
    assert build_reward(config)(build_prompt(answer), build_response(text)).answer == read


@pytest.mark.parametrize("kind", sorted(set(SCHEMAS) - {"function", "weighted"}))
def test_a_kind_that_reads_answers_reads_the_right_one_in_itself(kind):
    """85 as the expected answer and the response; the other kinds have no answer to read in it."""
    config = SCHEMAS[kind](**REQUIRED.get(kind, {}))
    if reads_answers(config):
        score = build_reward(config)(build_prompt("85"), build_response("85"))
        assert (score.correct, score.answer) == (True, "85")
    else:
        assert kind in {*READS_NO_ANSWER, *OF_SERVERS}


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    def write(source: str) -> None:
        (tmp_path / "my_reward_of_test.py").write_text(source)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("my_reward_of_test", None)


def test_a_users_own_function_scores(user_module):
    user_module(
        "from megarl.types import Score\n"
        "def score(prompt, response):\n"
        "    return Score(len(response.text) / 10, prompt.answer in response.text)\n"
    )
    reward = build_reward(FunctionRewardConfig("my_reward_of_test:score"))
    result = reward(build_prompt("yes"), build_response("oh yes"))
    assert (result.reward, result.correct) == (0.6, True)


def test_responses_with_different_details_are_refused_with_both_sets():
    verifier = FunctionReward(FunctionRewardConfig("package:function"))
    first = {"reward": 0.0, "correct": False, "details": {"a": 1.0, "b": 0.0}}
    assert verifier.read(first, PROMPT).details == {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match=r"found details a; the first response had a, b"):
        verifier.read({**first, "details": {"a": 0.0}}, PROMPT)
    assert verifier.read(first, PROMPT).details == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_details_with_a_name_of_the_trainers_own_metrics_are_refused(name):
    verifier = FunctionReward(FunctionRewardConfig("package:function"))
    with pytest.raises(ValueError, match=rf"own metrics have the names {name} under reward/"):
        verifier.read({"reward": 0.0, "correct": False, "details": {"mine": 1.0, name: 1.0}}, PROMPT)


def test_the_names_that_the_algorithms_log_under_reward_are_reserved():
    sources = [file.read_text() for file in Path(algo.__file__).parent.glob("*.py")]
    logged = {name for source in sources for name in re.findall(r'"reward/(\w+)"', source)}
    assert logged
    assert logged <= RESERVED_NAMES


@pytest.mark.parametrize(
    ("config", "answer", "data"),
    [
        (LetterCountRewardConfig(), "85", "data=letter_count"),
        (AdditionRewardConfig(), "b37", "data=addition"),
        (ReasoningGymRewardConfig(), "85", "data=reasoning_gym"),
    ],
)
def test_a_reward_that_cannot_read_the_datas_answers_is_found_before_the_run(config, answer, data):
    with pytest.raises(ConfigError, match=rf"^reward=\.\.\. with data=\.\.\..*prompt 'p1'.*{data}"):
        build_scorer(config).check([build_prompt(answer)])


def test_every_prompt_given_is_checked():
    with pytest.raises(ConfigError, match="'b37'"):
        build_scorer(AdditionRewardConfig()).check([build_prompt("85"), build_prompt("b37")])


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        (LetterCountRewardConfig(), build_prompt("b37")),
        (AdditionRewardConfig(), build_prompt("85")),
        (ExactRewardConfig(), build_prompt("Paris")),
        (MathRewardConfig(), build_prompt("\\frac{1}{2}")),
        (
            ReasoningGymRewardConfig(),
            build_prompt(
                "3",
                reasoning_gym={
                    "task": "chain_sum",
                    "entry": {"question": "1 + 2 =", "answer": "3", "metadata": {}},
                    "config": {"max_terms": 3},
                },
            ),
        ),
        (FunctionRewardConfig("megarl.task.rule_rewards:score_exact"), build_prompt("Paris")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_reward_that_fits_its_data_passes_the_check(config, prompt):
    scorer = build_scorer(config)
    scorer.check([prompt])
    score = asyncio.run(scorer.score(prompt, EMPTY))
    assert (score.correct, score.failure) == (False, None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "package.module:NAME"),
        ("no_such_module_here:score", "ModuleNotFoundError"),
        ("my_reward_of_test:missing", "has no missing"),
        ("my_reward_of_test:NUMBER", "a callable was expected"),
    ],
)
def test_a_path_that_cannot_be_called_is_named(user_module, path, message):
    user_module("NUMBER = 3\n")
    with pytest.raises(ValueError, match=rf"^found '{path}'.*{message}"):
        load_callable(path)


def test_a_module_that_fails_while_imported_is_named(user_module):
    user_module("1 / 0\n")
    with pytest.raises(ConfigError, match=r"^reward\.path: found .*ZeroDivisionError"):
        build_scorer(FunctionRewardConfig("my_reward_of_test:score")).check([build_prompt("")])


def test_a_function_with_a_scale_of_its_own_is_refused_beside_reward_wrong_before_the_run(user_module):
    user_module("from megarl.types import Score\ndef score(prompt, response):\n    return Score(-1.0, False)\n")
    scorer = build_scorer(FunctionRewardConfig("my_reward_of_test:score"))
    scorer.check([build_prompt("")])
    with pytest.raises(ConfigError, match=r"reward\.wrong: found -1 with a score of -1.*reward\.wrong=0 takes"):
        scorer.check([build_prompt("")], wrong=-1.0)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_has_the_reward_of_a_wrong_answer(kind):
    overrides = [f"reward={kind}", "model=tiny", "reward.wrong=-1", "environment=guess", *list_required(kind)]
    assert load_config(overrides).reward.wrong == -1.0


@pytest.mark.parametrize("value", ["1", "1.5", "inf", "-inf", "nan"])
def test_a_wrong_answer_is_worth_less_than_a_right_one(value):
    with pytest.raises(ConfigError, match=r"reward\.wrong: found .*; it must be a finite number below 1"):
        load_config([f"reward.wrong={value}"])
