"""Problems as a source of prompts gives them: text, before any tokenizer sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.types import Message


@dataclass(frozen=True)
class Problem:
    """A task to solve. The last user message is its question."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The record that it was read from, as it was; empty for generated problems"""

    @property
    def question_key(self) -> str:
        """Equal for problems that ask the same: all messages but for the spacing."""
        return "\n".join(f"{m.role}: {' '.join(m.content.split())}" for m in self.messages)


@dataclass(frozen=True)
class ProblemSplits:
    train: Sequence[Problem]
    heldout: Sequence[Problem] | None
    """Held-out problems; None: the source has no held-out part of its own."""
    shares_questions: bool = False
    """Whether both parts ask the same: what differs is hidden in the environment, where no policy can memorize it"""
    notes: tuple[str, ...] = ()
    """What was chosen in reading them, for the reader of a log"""


def note_parts(train: str, heldout: str) -> tuple[str, ...]:
    """The notes on both parts, one where they are alike."""
    return (train,) if train == heldout else (f"for training {train}", f"held out {heldout}")


class Source(Protocol):
    def load(self, seed: int) -> ProblemSplits:
        """All problems of the source; the same for the same seed. Raises ConfigError."""
        ...


def ask(question: str, answer: str, metadata: Mapping[str, str] | None = None) -> Problem:
    """A problem of one question."""
    return Problem((Message("user", question),), answer, metadata or {})
