"""The generated parts of the documentation: docs/configuration.md and the objectives in algorithms.md.

    python tools/docs/generate.py            write them
    python tools/docs/generate.py --check    exit code 1, naming each file that is not current

The configuration is read from the dataclasses of megarl/config/schema and the docstrings below their fields.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING as REQUIRED

from megarl.algo.objective import format_objective
from megarl.config.load import load_config
from megarl.config.overrides import list_options
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "docs" / "configuration.md"
ALGORITHMS = ROOT / "docs" / "algorithms.md"
BEGIN = "<!-- begin objectives: made by tools/docs/generate.py -->\n"
END = "<!-- end objectives -->"
OBJECTIVE_MODEL = "qwen3_8b"
WIDTH = 120
GLUE = "\u00a0"
"""A space at which no line is broken"""
INTRODUCTION = """\
# Configuration

<!-- made by tools/docs/generate.py from megarl/config/schema; change the docstrings there -->

Every key, with its type, its default and its meaning. Keys are set on the command line: `python -m megarl.train
KEY=VALUE`. `algo=vapo` takes a whole group of values, those of `conf/algo/vapo.yaml`; the files of `conf/` hold only
the values that differ from the defaults below. To print the final configuration of a run without starting it:

```bash
python -m megarl.train --cfg job algo=grpo
```

`null` switches a key off or leaves its value to be derived, as its text says.
"""


def render_configuration() -> str:
    """docs/configuration.md."""
    hints = get_type_hints(Config)
    plain = [field for field in fields(Config) if not is_dataclass(hints[field.name])]
    parts = [INTRODUCTION, "## Top level\n", *(_render_key("", field, Config, hints[field.name]) for field in plain)]
    for field in fields(Config):
        if field in plain:
            continue
        schema = hints[field.name]
        parts.append(f"\n## {field.name}\n")
        parts += _render_intro(field.name, schema)
        parts += list(_render_class(field.name, schema))
        for kind, special in SCHEMAS.get(field.name, {}).items():
            own = list(_render_class(field.name, special, left_out=schema))
            parts.append(f"\n### {field.name}={kind}\n")
            parts.append(_wrap(_describe(special)) + "\n")
            parts += own
    return "\n".join(parts).rstrip() + "\n"


def _render_intro(group: str, schema: type) -> Iterator[str]:
    if text := _describe(schema):
        yield _wrap(text) + "\n"
    options = [name for name in list_options(group) if name != "default"]
    if options:
        yield _wrap(f"Choices of `{group}=`: " + ", ".join(f"`{name}`" for name in options) + ".") + "\n"


def _render_class(prefix: str, schema: type, left_out: type | None = None) -> Iterator[str]:
    """Its keys; `left_out`: a base class whose fields are not repeated unless their defaults differ."""
    hints = get_type_hints(schema)
    known = {} if left_out is None else {field.name: field for field in fields(left_out)}
    nested = []
    for field in fields(schema):
        if field.name in known and _get_default(field) == _get_default(known[field.name]):
            continue
        if is_dataclass(hints[field.name]):
            nested.append(field)
        else:
            yield _render_key(prefix, field, schema, hints[field.name])
    for field in nested:
        name = f"{prefix}.{field.name}"
        yield f"\n### {name}\n"
        text = " ".join(filter(None, [_find_text(schema, field.name), _describe(hints[field.name])]))
        if text:
            yield _wrap(text) + "\n"
        yield from _render_class(name, hints[field.name])


def _render_key(prefix: str, field: Field[Any], owner: type, hint: Any) -> str:
    key = f"{prefix}.{field.name}" if prefix else field.name
    default = _get_default(field)
    found = "required" if default == REQUIRED else f"default `{_format_value(default)}`"
    text = _find_text(owner, field.name)
    head = f"- `{key}` ({_format_type(hint)}, {found})"
    return _wrap(f"{head}: {text}" if text else head, "  ") + "".join(_render_choices(hint, described=bool(text)))


def _render_choices(hint: Any, described: bool) -> Iterator[str]:
    """The members of an enum; its own text only where the field has none."""
    for kind in _list_enums(hint):
        texts = _find_texts(kind)
        if not described and (text := _describe(kind)):
            yield "\n" + _wrap(f"  {text}", "  ")
        for member in kind:
            aliases = [name for name, found in kind.__members__.items() if found is member and name != member.name]
            name = f"`{member.name}`" + "".join(f", `{alias}`" for alias in aliases)
            text = texts.get(member.name, "")
            yield "\n" + _wrap(f"  - {name}: {text}" if text else f"  - {name}", "    ")


def _list_enums(hint: Any) -> list[type[Enum]]:
    choices = get_args(hint) or (hint,)
    return [choice for choice in choices if inspect.isclass(choice) and issubclass(choice, Enum)]


def _format_type(hint: Any) -> str:
    if get_origin(hint) in (UnionType, Union):
        return " or ".join("null" if part is NoneType else _format_type(part) for part in get_args(hint))
    if get_origin(hint) is not None:
        inner = ", ".join("any" if part is Any else _format_type(part) for part in get_args(hint))
        return f"{get_origin(hint).__name__} of {inner.replace(', ', ' to ')}"
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return "choice"
    name: str = hint.__name__
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(name, name)


def _get_default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _format_value(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return '""' if value == "" else str(value)


def _describe(schema: type) -> str:
    """The docstring of a class as one line; nothing for the one that dataclasses or enums make up."""
    own = ast.get_docstring(_parse(schema)) if _has_source(schema) else None
    return " ".join((own or "").split())


def _find_text(owner: type, name: str) -> str:
    """The docstring below the field, in the class that defines it."""
    for base in owner.__mro__:
        if is_dataclass(base) and name in inspect.get_annotations(base):
            found = _find_texts(base).get(name)
            if found:
                return found
    return ""


def _find_texts(schema: type) -> dict[str, str]:
    """Field or member -> the docstring below it."""
    if not _has_source(schema):
        return {}
    body = _parse(schema).body
    found = {}
    for node, below in pairwise(body):
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            found[target.id] = " ".join(text.value.split())
    return found


def _has_source(schema: type) -> bool:
    """Enums made by a call have none."""
    try:
        return inspect.getsource(schema).lstrip().startswith(("class", "@"))
    except (OSError, TypeError):
        return False


def _parse(schema: type) -> ast.ClassDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def _wrap(text: str, indent: str = "") -> str:
    # A line that began with one of these signs would be an item of a list.
    for sign in "-+*":
        text = text.replace(f" {sign} ", f"{GLUE}{sign}{GLUE}")
    lines = textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace(GLUE, " ")


def render_objectives() -> str:
    """The printed objective of every preset."""
    blocks = []
    for name in list_options("algo"):
        config = load_config([f"algo={name}", f"model={OBJECTIVE_MODEL}"])
        text = format_objective(config.algo, config.train.responses_per_prompt, config.reward.wrong)
        blocks.append(f"### {name}\n\n```\n{text}\n```\n")
    return "\n" + "\n".join(blocks) + "\n"


def render_algorithms() -> str:
    """docs/algorithms.md with the objectives put in."""
    head, rest = ALGORITHMS.read_text().split(BEGIN)
    return f"{head}{BEGIN}{render_objectives()}{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = []
    pages = (CONFIGURATION, render_configuration), (ALGORITHMS, render_algorithms)
    for file, render in pages:
        text = render()
        if file.is_file() and file.read_text() == text:
            continue
        stale.append(file)
        if not is_check:
            file.write_text(text)
    for file in stale:
        print(f"{file.relative_to(ROOT)}: {'not current' if is_check else 'written'}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
