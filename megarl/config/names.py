"""What is said of a name that is no key of megarl's: its own of before, from names.yaml."""

import re
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

FILE = Path(__file__).with_name("names.yaml")


@cache
def read_names() -> dict[str, dict[str, str]]:
    """The sections of names.yaml: name -> ours, or a sentence."""
    tree = OmegaConf.to_container(OmegaConf.load(FILE))
    assert isinstance(tree, dict)
    return {str(section): {str(name): str(ours) for name, ours in names.items()} for section, names in tree.items()}


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
