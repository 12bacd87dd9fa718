import pytest
from reward_cases import build_prompt, build_reward

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.reward import EnvironmentRewardConfig
from megarl.types import FinishReason, Response, Score, Turn


def build_response(rewards: tuple[float, ...]) -> Response:
    """One token a turn."""
    turns, count = [Turn(i, i + 1, "4", reward) for i, reward in enumerate(rewards)], len(rewards)
    return Response([1] * count, "4", [0.0] * count, [True] * count, [0] * count, FinishReason.stop, turns=turns)


@pytest.mark.parametrize(
    ("rewards", "correct"), [((0.0, 1.0), True), ((0.5, 0.5), True), ((0.0,), False), ((2.0, -1.5), False), ((), False)]
)
def test_it_adds_nothing_and_is_correct_where_the_turns_rewards_sum_to_enough(rewards, correct):
    reward = build_reward(EnvironmentRewardConfig())
    assert reward(build_prompt("4"), build_response(rewards)) == Score(0.0, correct)


def test_correct_at_is_the_least_sum_that_counts():
    reward = build_reward(EnvironmentRewardConfig(correct_at=0.5))
    assert [reward(build_prompt("4"), build_response((r,))).correct for r in (0.4, 0.5, 0.6)] == [False, True, True]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_threshold_that_no_sum_reaches_is_refused(value):
    with pytest.raises(ConfigError, match=rf"reward\.correct_at: found {value}; it must be a finite number"):
        load_config(["experiment=guess", f"reward.correct_at={value}"])


def test_without_an_environment_that_rewards_it_is_refused():
    with pytest.raises(ConfigError, match=r"reward: found environment with environment=single_turn, which gives no"):
        load_config(["reward=environment"])
