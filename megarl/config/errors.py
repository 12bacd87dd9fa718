"""The one error of a bad configuration, and the search for the key the user meant."""

import difflib
from collections.abc import Iterable, Sequence

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
    candidates = list(known)
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [name for name in candidates if name.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda name: _similarity(key, name))
    near = [name for name in candidates if _similarity(key, name) >= NEAR or _leaf_similarity(leaf, name) >= NEAR_LEAF]
    return max(near, key=lambda name: _similarity(key, name) + _leaf_similarity(leaf, name), default=None)


def _leaf_similarity(leaf: str, name: str) -> float:
    return _similarity(leaf, name.rsplit(".", 1)[-1])


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
