"""When a key has an effect."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.schema.root import Config


@dataclass(frozen=True)
class Rule:
    """When keys have an effect. A key that none of the rules names always has."""

    keys: tuple[str, ...]
    """Dotted keys, each with everything below it."""
    counts: Callable[[Config], bool]
    reason: str
    """Why they have none and what would give them one; {c} is the configuration."""
    switch: bool = False
    """Whether a value that means off (null, false, 0, none) is allowed all the same: there is nothing to switch off."""
    but: tuple[str, ...] = ()
    """Keys below `keys` that have an effect all the same."""
