"""The names of names.yaml, which are no keys of ours: ROLL's, which are accepted (megarl/config/roll.py), and those of
TRL, verl, OpenRLHF and of megarl before, which an unknown key is answered with.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("names.yaml")
NONE = "none; "
"""How an answer begins that says why there is no counterpart"""


@dataclass(frozen=True)
class Alias:
    """What a name of ROLL's is here."""

    targets: tuple[str, ...]
    """Our keys; () where there is no such thing here, and then `text` says why."""
    text: str
    off: tuple[object, ...] = ()
    """Where there are no targets: the values that ask for nothing."""
    is_read: bool = True
    """Whether ROLL's RLVR pipeline reads it."""


@cache
def read_names() -> Mapping[str, Any]:
    """The sections of names.yaml."""
    # YAML's safe loader, in C where PyYAML was built with it: every command reads this file at its start.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(loader(FILE.read_text("utf-8")).get_single_data())


ALIASES: Mapping[str, Alias] = {
    **{name: Alias(tuple(ours.split()), text) for name, (ours, text) in read_names()["roll"].items()},
    **{
        name: Alias((), text, tuple(off), name not in read_names()["roll_unread"])
        for name, (off, text) in read_names()["roll_nothing"].items()
    },
}
CHOICES: Mapping[str, Any] = read_names()["roll_choices"]
"""ROLL's values by name, and ours where they differ"""
PEER_NAMES: Mapping[str, tuple[str, str]] = {
    name: (trainer, ours)
    for trainer in ("OpenRLHF", "verl", "TRL")
    for ours, names in read_names()["peers"].items()
    for name in names.get(trainer, ())
}
"""Name -> whose it is, and the key of ours or why there is none. Most mean something a little different than ours."""


def find_old_name(name: str) -> str | None:
    """What to say of a key, `group=option` or `key=value` that megarl had before; None where it had none.

    A key below a node that was renamed or removed is answered as the node is.
    """
    old = read_names()["megarl"]
    node = name
    while node not in old:
        if "=" in node or "." not in node:
            return None
        node = node.rpartition(".")[0]
    ours = old[node]
    if re.fullmatch(r"[\w.]+(=[\w./-]+)?", ours) and not ours.endswith("."):
        return f"; it is {ours}{name.removeprefix(node)} now"
    return f"; it was removed: {ours.removesuffix('.')}"


def find_peer_name(key: str) -> str | None:
    """What to say of an unknown key that is, whole or in its last part, a name of theirs; None where it is none.

    A part in the critic's name is answered with the critic's key.
    """
    name = key if key in PEER_NAMES else key.rsplit(".", 1)[-1]
    if name not in PEER_NAMES:
        return None
    trainer, ours = PEER_NAMES[name]
    if name != key and key.startswith("critic."):
        ours = ours.replace("policy.", "critic.")
    if ours.startswith(NONE):
        return f"; {trainer}'s {name} has no counterpart: {ours.removeprefix(NONE)}"
    return f"; {trainer}'s {name} is {ours} here"
