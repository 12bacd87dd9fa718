"""environment=tools: the policy's tool calls are answered, until an action has none."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.schema.environment import ToolsEnvironmentConfig
from megarl.environment.interface import Action, Environment, Step
from megarl.toolbox.prompt import ToolPrompt
from megarl.toolbox.toolbox import Toolbox
from megarl.types import FinishReason


@dataclass(frozen=True)
class FoundCalls:
    """The tool calls of one action."""

    calls: tuple[tuple[str, str], ...]
    """The name and the arguments, a JSON object as text, of each, in order"""
    num_malformed: int = 0
    """Calls that were begun and could not be read"""


FindCalls = Callable[[str], FoundCalls]
"""Reads the calls in an action's text, special tokens included"""


class ToolsEnvironment(Environment):
    """Answers each call with the tool's result or with what is wrong with it. An action without a call is final.

    details of each turn: tool_calls (calls begun, malformed ones included) and tool_errors (answered with an error).
    """

    def __init__(self, config: ToolsEnvironmentConfig, toolbox: Toolbox, prompt: ToolPrompt, find_calls: FindCalls):
        self._config = config
        self._toolbox = toolbox
        self._prompt = prompt
        self._find_calls = find_calls
        self._rewarded = False

    def step(self, action: Action) -> Step:
        """Runs the calls one after the other."""
        if action.finish_reason is FinishReason.length:  # The episode ends here: nobody would read the results.
            return Step(done=True, details=_count(0, 0))
        found = self._find_calls(action.raw_text)
        num_calls = len(found.calls) + found.num_malformed
        if not num_calls:
            return Step(done=True, details=_count(0, 0))
        limit = self._config.max_calls
        results, num_errors = [], 0
        for name, arguments in found.calls[:limit]:
            result = self._toolbox.call(name, arguments)
            results.append(result.text)
            num_errors += result.failed
        if len(found.calls) > limit:
            results.append(f"error: {len(found.calls) - limit} calls were not run; {limit} at most are run at a time")
        if found.num_malformed:
            results.append(
                f"error: {found.num_malformed} of the calls could not be read; a call is the tool's name and its"
                " arguments, in the format that was described"
            )
        num_errors += max(0, len(found.calls) - limit) + found.num_malformed
        return Step(self._prompt.answer(results), self._reward(num_errors), details=_count(num_calls, num_errors))

    def _reward(self, num_errors: int) -> float:
        if num_errors or self._rewarded:
            return 0.0
        self._rewarded = True
        return self._config.call_reward


def _count(calls: int, errors: int) -> dict[str, float]:
    return {"tool_calls": float(calls), "tool_errors": float(errors)}
