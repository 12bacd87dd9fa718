"""The one error of a bad configuration, and the search for the key the user meant."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Each problem names the key, what was found and what would be right."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def find_nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key most like `key`; one with the same last part wins over a merely similar one."""
    candidates = list(known)
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [name for name in candidates if name.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda name: _similarity(key, name))
    best = max(candidates, key=lambda name: _similarity(key, name), default=None)
    return best if best is not None and _similarity(key, best) >= 0.6 else None


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
