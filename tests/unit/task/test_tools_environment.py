"""environment=tools: what an episode's actions are answered with and how they are counted."""

from collections.abc import Iterator

import pytest

from megarl.config.schema.environment import ToolsEnvironmentConfig
from megarl.environment import Action
from megarl.task.tools import FoundCalls, Toolbox, ToolPrompt, ToolsEnvironment
from megarl.types import FinishReason, Message


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    made = Toolbox(ToolsEnvironmentConfig(num_processes=1))
    yield made
    made.close()


def ask(text: str) -> tuple[str, str]:
    return "calculator", f'{{"expression": "{text}"}}'


def play(toolbox: Toolbox, *actions: FoundCalls, finish: FinishReason = FinishReason.stop, **keys: object):
    """The steps of an episode whose actions have these calls."""
    config = ToolsEnvironmentConfig(**keys)  # type: ignore[arg-type]
    prompt = ToolPrompt(toolbox.schemas, None)
    environment = ToolsEnvironment(config, toolbox, prompt, lambda text: actions[int(text)])
    return [environment.step(Action("", str(turn), (1,), turn, finish)) for turn in range(len(actions))]


def test_an_action_without_a_call_ends_the_episode(toolbox: Toolbox) -> None:
    (step,) = play(toolbox, FoundCalls(()))
    assert step.done
    assert step.details == {"tool_calls": 0.0, "tool_errors": 0.0}


def test_each_call_of_an_action_is_answered_in_order(toolbox: Toolbox) -> None:
    (step,) = play(toolbox, FoundCalls((ask("2*3"), ask("1/0"), ask("2+3"))))
    assert not step.done
    assert step.observation == (
        Message("tool", "6"),
        Message("tool", "error: calculator: ZeroDivisionError: division by zero"),
        Message("tool", "5"),
    )
    assert step.details == {"tool_calls": 3.0, "tool_errors": 1.0}


def test_malformed_calls_and_calls_beyond_the_limit_are_answered_with_an_error(toolbox: Toolbox) -> None:
    (step,) = play(toolbox, FoundCalls((ask("1"), ask("2"), ask("3")), num_malformed=1), max_calls=1)
    assert [message.content.partition(";")[0] for message in step.observation] == [
        "1",
        "error: 2 calls were not run",
        "error: 1 of the calls could not be read",
    ]
    assert step.details == {"tool_calls": 4.0, "tool_errors": 3.0}


def test_an_action_that_a_limit_cut_is_not_answered(toolbox: Toolbox) -> None:
    (step,) = play(toolbox, FoundCalls((ask("1"),)), finish=FinishReason.length)
    assert step.done
    assert step.details == {"tool_calls": 0.0, "tool_errors": 0.0}


def test_the_reward_of_a_call_is_given_once_and_for_calls_without_errors_only(toolbox: Toolbox) -> None:
    good, bad = FoundCalls((ask("1"),)), FoundCalls((ask("1"), ask("x")))
    steps = play(toolbox, bad, good, good, FoundCalls(()), call_reward=0.25)
    assert [step.reward for step in steps] == [0.0, 0.25, 0.0, 0.0]
    assert all(step.reward == 0.0 for step in play(toolbox, good, good))
