"""When a key has an effect."""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.schema.root import Config


@dataclass(frozen=True)
class Rule:
    """When keys have an effect. A key that none of the rules names always has."""

    keys: tuple[str, ...]
    """each with everything below it"""
    counts: Callable[[Config], bool]
    reason: str
    """why not and what would make it count; {c} is the configuration"""
    switch: bool = False
    """off (null, false, 0, none) is allowed all the same: there is nothing to switch off"""
