"""A number is hidden; the environment answers each guess with whether the number is higher or lower."""

import re

from megarl.environment import Action, Environment, EpisodeSetting, Step
from megarl.types import FinishReason

NUMBER = re.compile(r"[0-9]+")
MOST_DIGITS = 18


class Guess(Environment):
    """The hidden number is the prompt's answer. The right guess has a reward of 1, everything else 0.

    A guess is the last whole number of the action. The episode ends with the right guess, with the last one, or with an
    action that is no guess: one without a number, or cut at a limit of its length. Details of a turn: "ruled_out" is 1
    where an earlier answer had ruled the guess out, "unreadable" is 1 where the action is no guess.
    """

    def __init__(self, max_turns: int, higher: str = "higher", lower: str = "lower"):
        """max_turns: the number of guesses. higher, lower: what is answered where the number is above or below the
        guess."""
        self._max_turns = max_turns
        self._higher, self._lower = higher, lower
        self._number = 0
        # The number is above the one and below the other, as far as the answers say.
        self._above, self._below = float("-inf"), float("inf")

    def reset(self, setting: EpisodeSetting) -> None:
        """Raises ValueError, naming the prompt, where its answer is not a whole number."""
        prompt = setting.prompt
        if NUMBER.fullmatch(prompt.answer) is None or len(prompt.answer) > MOST_DIGITS:
            raise ValueError(
                f"prompt {prompt.id!r}: answer {prompt.answer!r} found; environment=guess needs a whole number, such as"
                " 4 (data=guess makes such prompts)"
            )
        self._number = int(prompt.answer)

    def step(self, action: Action) -> Step:
        guess = None if action.finish_reason is FinishReason.length else read_guess(action.text)
        if guess is None:
            return Step(done=True, details={"ruled_out": 0.0, "unreadable": 1.0})
        details = {"ruled_out": float(not self._above < guess < self._below), "unreadable": 0.0}
        if guess == self._number:
            return Step(reward=1.0, done=True, details=details)
        if guess < self._number:
            answer, self._above = self._higher, max(self._above, guess)
        else:
            answer, self._below = self._lower, min(self._below, guess)
        return Step(answer, done=action.turn + 1 >= self._max_turns, details=details)


def read_guess(text: str) -> int | None:
    """The last whole number of a text; None where there is none. Of one with more digits than a hidden number may have
    the first 18, which is above any hidden number all the same."""
    found = NUMBER.findall(text)
    return int(found[-1].lstrip("0")[:MOST_DIGITS] or "0") if found else None
