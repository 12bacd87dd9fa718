"""What an environment is: an object for each episode that answers the policy's actions.

class Guess(Environment):
    def step(self, action):
        ...
        return Step("higher", done=False)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.types import FinishReason, Message, Prompt

Observation = str | Sequence[Message] | Sequence[int]
"""What the policy reads next: a text (with a chat template a user's message, else the text itself), messages for the
chat template (without one their contents, one after the other), or token ids as they are"""


@dataclass(frozen=True)
class EpisodeSetting:
    """What is fixed before an episode begins."""

    prompt: Prompt
    seed: int
    """For the environment's own random numbers: follows from the run's seed, the iteration, the prompt and the number
    of the response, so that a resumed run meets the same environment"""


@dataclass(frozen=True)
class Action:
    """What the policy wrote in one turn."""

    text: str
    """Decoded, without special tokens"""
    raw_text: str
    """Decoded, with special tokens: what parsers of tool calls read"""
    token_ids: tuple[int, ...]
    turn: int
    """Number of the turn, from 0"""
    finish_reason: FinishReason
    """stop, or length where a limit cut the action; the episode then ends whatever the environment answers"""


@dataclass(frozen=True)
class Step:
    """The environment's answer to an action."""

    observation: Observation = ""
    """Not read where `done`"""
    reward: float = 0.0
    """Of this turn; it stands at the action's last token and is added to what `reward=` gives for the whole response"""
    done: bool = False
    details: Mapping[str, float] = field(default_factory=dict)
    """Named numbers of this turn, for example {"tool_calls": 1.0}; their sums over the turns are logged as means
    over the episodes, as environment/<name>"""


class Environment:
    """One episode. An object is made for each, with the options of the configuration as keyword arguments.

    The methods may be plain functions, which run in a thread and may take up to environment.step_deadline_s, or
    coroutines (async def), which must not block. What they raise costs the sample, not the run.
    """

    def reset(self, setting: EpisodeSetting) -> Observation | None:
        """Begin. Returns what the policy reads in place of the prompt; None: the prompt as the data have it."""
        return None

    def step(self, action: Action) -> Step:
        """Answer an action."""
        raise NotImplementedError

    def cut(self) -> Step | None:
        """A limit ends the episode (environment.max_turns, rollout.response_length), though the last Step was not done.

        Returns what counts in its place, for an environment that rewards whole episodes; None: that Step counts.
        """
        return None

    def close(self) -> None:
        """Release what the episode holds; called once, also where the episode was broken off."""
