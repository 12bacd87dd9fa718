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


def compute_best_without_answers(max_number: int, max_turns: int) -> float:
    """The most that a policy which ignores the answers can score: max_turns / max_number, at most 1.

    The number is uniform over 1 to max_number. Such a policy knows only that no guess so far was right, as the episode
    goes on; what it does is therefore fixed by the random numbers that it draws, whatever the hidden number is: a
    sequence of max_turns guesses. The sequence is right for the different numbers in it, max_turns at most, each of
    which is hidden with probability 1 / max_number. A policy that draws its sequence at random scores an average over
    sequences, and none is above that bound, which max_turns different guesses reach.
    """
    return min(1.0, max_turns / max_number)


def compute_best_with_answers(max_number: int, max_turns: int) -> float:
    """The most that any policy can score: (2^max_turns - 1) / max_number, at most 1.

    For fixed random numbers a guess follows from the answers before it, each of which is higher or lower: there are
    2^t guesses for turn t (from 0), so 2^max_turns - 1 different numbers at most are ever guessed right. Binary search
    reaches it: guessing the middle of 2^n - 1 numbers leaves 2^(n-1) - 1 of them on either side.
    """
    return min(1.0, ((1 << max_turns) - 1) / max_number)
