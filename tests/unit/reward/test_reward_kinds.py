"""The verifiers exact, addition and function, and their configuration."""

import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR
from megarl.config.reward import (
    SCHEMAS,
    AdditionRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    RewardConfig,
    register,
)
from megarl.reward.build import build_reward


@pytest.mark.parametrize("kind", SCHEMAS)
def test_each_kind_composes_to_its_own_dataclass(kind):
    register(ConfigStore.instance())
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose(
            overrides=[f"+reward={kind}", "+reward.path=a:b"] if kind == "function" else [f"+reward={kind}"]
        )
    assert isinstance(OmegaConf.to_object(composed.reward), SCHEMAS[kind])


def test_every_kind_has_a_yaml_file_and_a_verifier():
    assert {file.stem for file in (CONF_DIR / "reward").glob("*.yaml")} == set(SCHEMAS)
    for kind, schema in SCHEMAS.items():
        config = schema(path="reward_cases:build_prompt") if kind == "function" else schema()
        assert callable(build_reward(config))


def test_a_kind_without_a_verifier_is_named():
    with pytest.raises(ConfigError, match="RewardConfig"):
        build_reward(RewardConfig())


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("Paris", "  paris. ", True),
        ("New  York", "new york", True),
        ("Paris", "Paris, France", False),
        ("3.5", "35", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_exact_compares_normalised_texts(answer, text, expected):
    result = build_reward(ExactRewardConfig())(build_prompt(answer), build_response(text))
    assert (result.reward, result.correct) == (float(expected), expected)


@pytest.mark.parametrize(
    ("text", "well_formed", "right"),
    [
        ("85", 1, 1),
        (" 85.\n", 1, 1),
        ("085", 1, 1),
        ("86", 1, 0),
        ("-85", 1, 0),
        ("The answer is 85.", 0, 1),
        ("47 + 38 = 85", 0, 1),
        ("85 is 47 + 38", 0, 0),
        ("", 0, 0),
        ("eighty-five", 0, 0),
        ("8 5", 0, 0),
        ("8.5", 0, 0),
        ("٨٥", 0, 0),
        ("9" * 100_000, 1, 0),
    ],
)
def test_addition_counts_wrong_format_and_wrong_number_apart(text, well_formed, right):
    result = build_reward(AdditionRewardConfig())(build_prompt("85"), build_response(text))
    assert result.details == {"format": well_formed, "number": right}
    assert result.correct == (well_formed and right)
    assert result.reward == float(result.correct)


def test_addition_names_a_prompt_whose_answer_is_no_integer():
    with pytest.raises(ValueError, match=r"prompt 'p1'.*'b37'"):
        build_reward(AdditionRewardConfig())(build_prompt("b37"), build_response("37"))


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


def test_a_users_function_that_returns_no_score_is_named(user_module):
    user_module("def score(prompt, response):\n    return 1.0\n")
    reward = build_reward(FunctionRewardConfig("my_reward_of_test:score"))
    with pytest.raises(TypeError, match="my_reward_of_test:score returned a float"):
        reward(build_prompt(""), build_response(""))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "package.module:callable"),
        ("no_such_module_here:score", "ModuleNotFoundError"),
        ("my_reward_of_test:missing", "has no missing"),
        ("my_reward_of_test:NUMBER", "a callable was expected"),
    ],
)
def test_a_path_that_cannot_be_called_is_named(user_module, path, message):
    user_module("NUMBER = 3\n")
    with pytest.raises(ConfigError, match=rf"reward\.path: found '{path}'.*{message}"):
        build_reward(FunctionRewardConfig(path))


def test_a_module_that_fails_while_imported_is_named(user_module):
    user_module("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        build_reward(FunctionRewardConfig("my_reward_of_test:score"))
