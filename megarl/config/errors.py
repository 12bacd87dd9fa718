"""The one error of a bad configuration, and the search for the key the user meant."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

NEAR, NEAR_LEAF = 0.75, 0.85
"""Least similarity (difflib's ratio) of the whole key, and of its last part alone, to be taken for a misspelt one.
What is less alike is another word: of num_generations and train.num_iterations they are 0.69 and 0.83."""


class ConfigError(ValueError):
    """Each problem names the key, what was found and what would be right."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        """Keeps the problems apart where another process has raised it."""
        return type(self), (self.problems,)


def find_nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key most like `key`; one with the same last part wins over a merely similar one."""

    def measure(name: str) -> tuple[float, float]:
        leaves = SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2])
        return SequenceMatcher(None, key, name).ratio(), leaves.ratio()

    found = {name: (whole, leaf) for name in known for whole, leaf in [measure(name)]}
    near = {name: both for name, both in found.items() if both[0] >= NEAR or both[1] >= NEAR_LEAF}
    return max(near, key=lambda name: (near[name][1] == 1, sum(near[name])), default=None)
