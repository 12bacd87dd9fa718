"""What the fields of the schema say of themselves: values out of their range, and keys that have no effect."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from megarl.algo import registry
from megarl.algo.declarations import AdvantageEstimator
from megarl.config.placement import find_server_offload
from megarl.config.schema.algo import needs_reference
from megarl.config.schema.key import Effect, Key, get_key, show
from megarl.config.schema.root import Config


@dataclass(frozen=True)
class Place:
    """Where a key stands; what its `Effect` looks at."""

    config: Config
    node: Any
    """The group that has it"""
    path: str
    """of that group"""
    command: str | None = None
    """train or evaluate; None: what only one of them has no use for is not asked"""

    @property
    def has_critic(self) -> bool:
        return registry.needs_critic(self.config.algo)

    @property
    def has_reference(self) -> bool:
        return needs_reference(self.config.algo)

    @property
    def advantage(self) -> AdvantageEstimator:
        return registry.find_advantage(self.config.algo.advantage)

    @property
    def reads_old_logprobs(self) -> bool:
        return registry.reads_old_logprobs(self.config.algo)

    @property
    def can_reuse_logprobs(self) -> bool:
        return self.reads_old_logprobs and not registry.needs_pass(self.config)

    @property
    def offloads_servers(self) -> bool:
        return find_server_offload(self.config) is not None


Effects = Sequence[tuple[Effect, Place]]
"""Those of a key and of the groups above it, each with the place where it is declared"""


def check_keys(config: Config) -> Iterator[str]:
    """One message per value out of its range, and per value without effect that is an error whoever set it."""
    yield from check_node(config, config, "")


def check_node(config: Config, node: object, path: str) -> Iterator[str]:
    """The same of one group, and of a part of reward=weighted as if it were the group at this path."""
    yield from _check_node(Place(config, node, path), ())


def _check_node(place: Place, above: Effects) -> Iterator[str]:
    for each in fields(place.node):
        stated, value = get_key(each), getattr(place.node, each.name)
        name = f"{place.path}.{each.name}".lstrip(".")
        kept = [(effect, declared) for effect, declared in above if effect not in stated.despite]
        effects = [*kept, *((effect, place) for effect in stated.effects)]
        # A set of train.eval_sets has keys of its own, by its name.
        parts = {name: value} if not isinstance(value, Mapping) else {f"{name}.{it}": value[it] for it in value}
        groups = {path: node for path, node in parts.items() if is_dataclass(node)}
        for path, node in groups.items():
            yield from _check_node(Place(place.config, node, path), effects)
        if groups:
            continue
        if (reason := _find_reason(effects)) is None:
            yield from _check_value(name, value, stated)
        elif stated.strict and value != each.default:
            yield f"{name}: {show(value)} found; it has no effect {reason}, else it must be {show(each.default)}"


def _find_reason(effects: Effects) -> str | None:
    """Why a key with these has no effect; None where it has."""
    for effect, place in effects:
        if not effect.counts(place):
            found = show(getattr(place.node, effect.sibling, None))
            return effect.reason.format(config=place.config, node=place.node, path=place.path, found=found)
    return None


def _check_value(name: str, value: object, stated: Key) -> Iterator[str]:
    if isinstance(value, str) and value != "???" and not stated.is_prose:
        if not value.strip():
            yield f"{name}: found {value!r}; it must not be empty (null or leaving it out means the default)"
        elif not value.isprintable():
            yield f"{name}: found {value!r}; it must be one line of text"
        elif stated.names_folder and not re.fullmatch(r"[\w.+-]+", value):
            yield f"{name}: found {value!r}; it is a part of the run's folder: letters, digits and _ . + - only"
    elif isinstance(value, int | float) and not isinstance(value, bool) and not stated.contains(value):
        yield f"{name}: found {value}; it must be {stated.describe_range()}"


def find_unused(config: Config, keys: Iterable[str], command: str | None = "train") -> Iterator[tuple[str, str]]:
    """(key, why it has no effect and what would make it count) for those of `keys` that have none.

    `keys` are the dotted ones that somebody set; what a preset leaves unused is nobody's mistake, and a value that
    switches off what is off anyway is allowed. command: None leaves out what only one of the commands has no use for.
    """
    for key in dict.fromkeys(keys):
        node, path, above, own = config, "", list[tuple[Effect, Place]](), list[tuple[Effect, Place]]()
        stated, default = Key(), None
        for name in key.split("."):
            each = next((it for it in fields(node) if it.name == name), None) if is_dataclass(node) else None
            if each is None:
                break
            stated, default = get_key(each), each.default
            above = [(effect, place) for effect, place in (*above, *own) if effect not in stated.despite]
            own = [(effect, Place(config, node, path, command)) for effect in stated.effects]
            node, path = getattr(node, name), f"{path}.{name}".lstrip(".")
        # A group without effect has nothing that could be switched off.
        if (reason := _find_reason(above if _is_off(node, default, stated) else (*above, *own))) is not None:
            yield key, f"has no effect {reason}"


def _is_off(value: object, default: object, stated: Key) -> bool:
    """Whether the value asks for nothing: null, none, raw, and false or 0 where that or null is the default."""
    if isinstance(value, Enum):
        return value.name in ("none", "raw")
    if value is None or (value == 0 and default in (0, None)):
        return True
    return stated.off is not None and value == stated.off
