"""The turns of a response as texts: what the policy wrote, and what the environment answered."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.types import Response

Decode = Callable[[list[int]], str | list[str]]
"""A tokenizer's `decode`; with special tokens, which show where an observation's messages begin"""


@dataclass(frozen=True)
class ShownTurn:
    """One turn, for people."""

    action: str
    observation: str
    """Empty where there is none"""
    reward: float


def has_observations(response: Response) -> bool:
    """Whether there is more to show than one action."""
    return len(response.turns) > 1 or not bool(response.generated.all())


def list_turns(response: Response, decode: Decode | None) -> list[ShownTurn]:
    """The turns in order; without an action, one first where the response begins with an observation.

    decode: reads an observation's tokens; None: their number stands in its place.
    """

    def read(start: int, end: int) -> str:
        if start == end:
            return ""
        return str(decode(response.token_ids[start:end].tolist())) if decode else f"[{end - start} tokens]"

    turns = response.turns
    ends = [turn.start for turn in turns[1:]] + [len(response)]
    shown = [ShownTurn(turn.text, read(turn.end, end), turn.reward) for turn, end in zip(turns, ends, strict=True)]
    return [*([ShownTurn("", first, 0.0)] if (first := read(0, turns[0].start)) else []), *shown]
