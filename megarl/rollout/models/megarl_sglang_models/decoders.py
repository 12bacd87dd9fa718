"""The decoder models of all families, as SGLang defines them."""

from collections.abc import Iterator
from importlib import import_module

from megarl.models.families import FAMILIES


def _list_classes() -> Iterator[type]:
    """Each module's EntryClass is a class or a list of them; modules are shared by families."""
    for name in sorted({family.sglang_module for family in FAMILIES.values()}):
        found = import_module(f"sglang.srt.models.{name}").EntryClass
        yield from found if isinstance(found, list) else [found]


EntryClass = list(_list_classes())
