"""The generated parts of the documentation: docs/configuration.md from megarl/config/schema and the docstrings below
its fields, the signs in docs/troubleshooting.md and the names of other trainers in docs/migrating.md.

    python tools/docs/generate.py            write them
    python tools/docs/generate.py --check    exit code 1, naming each file that is not current
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING as REQUIRED

from megarl.config.names import TABLE, is_name
from megarl.config.overrides import list_options, list_values
from megarl.config.schema.roles import CriticConfig, ParallelConfig, PolicyConfig
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS
from megarl.report.signs import BETTER_CRITIC, SIGNS, Sign

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH = 120
TRAINERS = ("TRL", "verl", "OpenRLHF")
"""Columns of the table of names; ROLL's names work as they are"""
TYPED = """algo.advantage_std
algo.clip_low and algo.clip_high
algo.clip_high
algo.entropy_coef
algo.kl.coef
algo.kl.loss_coef
algo.lambda_policy and algo.lambda_critic
algo.loss_agg_mode
algo.mismatch.correction
algo.mismatch.high
checkpoint.save_every
critic.optimizer.lr
data.prompt_length
hydra.run.dir
model.path with model=checkpoint
policy.lora.rank
policy.offload
policy.optimizer.lr
policy.optimizer.warmup_ratio
policy.parallel.tp
policy.recompute
rollout.response_length
rollout.sglang.mem_fraction_static
rollout.temperature
rollout.tp
train.epochs_per_iteration
train.eval_every
train.num_iterations
train.prompts_per_iteration
train.responses_per_prompt
train.samples_per_minibatch
train.tokens_per_microbatch""".splitlines()
"""Our keys whose other names people type most; the program answers all names"""
NAMED = re.compile(r"\b[a-z_]+(?:[./][a-z_]\w*)+(?:=\w+)?|\balgo=\w+")
"""Keys, metrics and files in an advice"""
MAIN = yaml.safe_load((DOCS.parent / "conf" / "config.yaml").read_text())
DEFAULTS = {group: name for each in MAIN["defaults"] if isinstance(each, dict) for group, name in each.items()}
"""Group -> the choice that a run has without one"""
GLUE = "\u00a0"
"""A space at which no line is broken"""
INTRODUCTION = """\
# Configuration

For everybody who looks up a key. At the end of an entry you know its default, type and meaning.

<!-- made by tools/docs/generate.py from megarl/config/schema; change the docstrings there -->

Set a key on the command line: `megarl train KEY=VALUE`. `algo=vapo` takes a group of values from `conf/algo/vapo.yaml`.
Such a file holds only values that differ from the defaults below. `hydra.run.dir=RUN_DIR` names the folder of a run;
without it, runs go to `runs/DATE_TIME_ALGO_MODEL`. To print the final configuration of a run without starting it:

```bash
megarl train --cfg job algo=grpo
```

An entry reads `KEY=DEFAULT` (type): meaning. A type is given if the default does not show it. `null` switches a key off
unless its text says otherwise. Keys that end in `_s` are in seconds.
"""
ROLES = """\
`policy` is the model that is trained to answer, `critic` the model that estimates values (only with algo.advantage=gae,
tether or control_variate), and `reference` the frozen model that KL terms compare with. The critic has the same keys
and defaults under `critic`, but no {without}, and {other}. The reference has `reference.init` (null: the
policy's checkpoint; else a teacher's), `reference.dtype`, `reference.offload` (null or all) and `reference.parallel`.
"""


def render_configuration() -> str:
    hints = get_type_hints(Config)
    plain = [field for field in fields(Config) if not is_dataclass(hints[field.name])]
    parts = [INTRODUCTION, "## Top level\n", *(_render_key("", field, Config, hints[field.name]) for field in plain)]
    for name in (field.name for field in fields(Config) if field not in plain):
        if name == "policy":
            parts += _render_roles()
        elif name not in ("critic", "reference"):
            parts += [*_head(f"## {name}", _describe(hints[name])), *_render_group(name, hints[name])]
    return "\n".join(parts).rstrip() + "\n"


def _head(title: str, text: str) -> Iterator[str]:
    yield f"\n{title}\n"
    if text:
        yield _wrap(text) + "\n"


def _render_roles() -> Iterator[str]:
    """Policy, critic and reference in one section: what they have in common once."""
    own = [f"policy.{name}" for name in sorted(_list_names(PolicyConfig) - _list_names(CriticConfig))]
    policy, critic = dict(list_values(PolicyConfig())), dict(list_values(CriticConfig()))
    changed = [f"critic.{key}={critic[key]}" for key in policy if critic.get(key, policy[key]) != policy[key]]
    without, other = (" or ".join(f"`{each}`" for each in own), ", ".join(f"`{each}`" for each in changed))
    yield from _head("## policy, critic, reference", ROLES.format(without=without, other=other))
    yield from _render_class("policy", PolicyConfig, apart=("parallel",))
    yield from _head("### critic", "Keys that only the critic has.")
    yield from _render_class("critic", CriticConfig, apart=_list_names(PolicyConfig))
    yield from _head("### policy.parallel, critic.parallel, reference.parallel", _describe(ParallelConfig))
    yield from _render_class("policy.parallel", ParallelConfig)


def _render_group(group: str, schema: type) -> Iterator[str]:
    """Its keys and its kinds (of data, environments or rewards); keys that kinds inherit stand once, before these."""
    if options := [name for name in list_options(group) if name != "default"]:
        chosen = f" (default `{DEFAULTS[group]}`)" if group in DEFAULTS else ""
        yield _wrap(f"Choices of `{group}=`{chosen}: " + ", ".join(f"`{name}`" for name in options) + ".") + "\n"
    yield from _render_class(group, schema)
    kinds = dict(sorted(SCHEMAS.get(group, {}).items()))
    heirs: dict[type, list[str]] = {}
    for kind, special in kinds.items():
        for base in (each for each in special.__mro__[1:] if each not in (schema, object, *kinds.values())):
            heirs.setdefault(base, []).append(kind)
    shown = {f"Keys of {group}={', '.join(names)}": base for base, names in heirs.items()}
    for title, special in (shown | {f"{group}={kind}": special for kind, special in kinds.items()}).items():
        yield from _head(f"### {title}", _describe(special))
        inherited = {name for base in special.__mro__[1:-1] for name in _list_names(base)}
        yield from _render_class(group, special, left_out=inherited)


def _list_names(schema: type) -> set[str]:
    return {field.name for field in fields(schema)}


def _render_class(
    prefix: str, schema: type, left_out: Collection[str] = (), apart: Collection[str] = ()
) -> Iterator[str]:
    """Its keys; `left_out`: not these unless this class gives them anew; `apart`: not these at all."""
    hints = get_type_hints(schema)
    nested = []
    for field in fields(schema):
        if field.name in apart or (field.name in left_out and field.name not in inspect.get_annotations(schema)):
            continue
        if is_dataclass(hints[field.name]):
            nested.append(field.name)
        else:
            yield _render_key(prefix, field, schema, hints[field.name])
    for name in nested:
        yield from _head(f"### {prefix}.{name}", _describe(hints[name]) or _find_text(schema, name))
        yield from _render_class(f"{prefix}.{name}", hints[name])


def _render_key(prefix: str, field: Field[Any], owner: type, hint: Any) -> str:
    key = f"{prefix}.{field.name}" if prefix else field.name
    default = field.default if field.default_factory is MISSING else field.default_factory()
    given = f"`{key}={_format_value(default)}`".replace(" ", GLUE)
    if default == REQUIRED:
        given = f"`{key}` ({_format_type(hint)}, required)"
    elif hint not in (bool, int, float, str) and get_origin(hint) is not dict:  # whose defaults show them
        kind = _format_type(hint)
        given += f" ({kind if default is not None else kind.removesuffix(', null')})"
    text = _find_text(owner, field.name)
    return _wrap(f"- {given}: {text}" if text else f"- {given}", "  ")


def _format_type(hint: Any) -> str:
    if get_origin(hint) in (UnionType, Union):
        return ", ".join("null" if part is NoneType else _format_type(part) for part in get_args(hint))
    if get_origin(hint) is not None:
        return f"list of {' '.join(map(_format_type, get_args(hint)))}"
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return ", ".join(f"`{name}`" for name in hint.__members__)
    name: str = hint.__name__
    return {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}.get(name, name)


def _format_value(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return '""' if value == "" else str(value)


def _describe(schema: type) -> str:
    """The docstring of a class as one line; nothing for the one that dataclasses make up."""
    return " ".join((ast.get_docstring(_parse(schema)) or "").split())


def _find_text(owner: type, name: str) -> str:
    """The docstring below the field, in the nearest class that has one."""
    found = [_find_texts(base).get(name) for base in owner.__mro__ if is_dataclass(base)]
    return next(filter(None, found), "")


def _find_texts(schema: type) -> dict[str, str]:
    """Field -> the docstring below it."""
    return {
        node.target.id: " ".join(below.value.value.split())
        for node, below in pairwise(_parse(schema).body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


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


def render_signs() -> str:
    """One row for signs of the same title, in bold what the terminal says."""
    metrics: dict[str, list[str]] = {}
    for sign in SIGNS:
        metrics.setdefault(sign.title, []).append(f"`{sign.metric}`")
    signs = {sign.title: sign for sign in SIGNS}
    shorter = f"too: {BETTER_CRITIC}", 'too: see "The critic is worse than a constant"'
    rows = [
        f"| {f'**{title}**' if sign.patience else title} | {' or '.join(metrics[title])} {_format_bound(sign)} |"
        f" {_mark_names(sign.do.replace(*shorter))} |"
        for title, sign in signs.items()
    ]
    return "\n".join(["| sign | metric | what to do |", "| --- | --- | --- |", *rows])


def _mark_names(advice: str) -> str:
    return NAMED.sub(r"`\g<0>`", advice if NAMED.match(advice) else advice[0].upper() + advice[1:])


def _format_bound(sign: Sign) -> str:
    bounds = {"above": sign.above, "below": sign.below, "is": sign.equal}
    found = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None and isfinite(bound)]
    # What no bound says, `also` does, of the rewards.
    return found[0] if found else "is `reward/min` and `reward/max`"


def render_names() -> str:
    """What other trainers call the keys of TYPED, and what megarl renamed."""
    rows = [["here", *TRAINERS]]
    for key in TYPED:
        names = [
            peers for ours, peers in TABLE["peers"].items() if re.match(rf"{re.escape(key)}(,| \(| with algo|$)", ours)
        ]
        given = [" ".join(each[trainer] for each in names if trainer in each) for trainer in TRAINERS]
        rows.append([key, *(each.split()[0] if each else "-" for each in given)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "```text\n" + "\n".join(lines) + "\n```\n\n" + _wrap(f"Keys of megarl with a new name: {_list_renames()}.")


def _list_renames() -> str:
    """Keys that only moved to another node stand together."""
    moved: dict[tuple[str, str], list[str]] = {}
    for old, ours in TABLE["megarl"].items():
        if is_name(ours):
            (node, _, name), (to, _, new) = old.rpartition("."), ours.rpartition(".")
            moved.setdefault((node, to) if name == new else (old, ours), []).append(name)
    return "; ".join(
        f"`{a}` is now `{b}`" if "." in a else f"{', '.join(names)} of `{a}` are now below `{b}`"
        for (a, b), names in moved.items()
    )


def fill_block(page: Path, name: str, body: str) -> str:
    """The page with the body between its two markers."""
    head, begin, rest = page.read_text().partition(f"<!-- begin {name}: made by tools/docs/generate.py -->\n")
    _, end, tail = rest.partition(f"<!-- end {name} -->")
    assert end, f"{page}: without the markers of {name}"
    return f"{head}{begin}\n{body}\n\n{end}{tail}"


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "configuration.md": render_configuration,
    DOCS / "troubleshooting.md": lambda: fill_block(DOCS / "troubleshooting.md", "signs", render_signs()),
    DOCS / "migrating.md": lambda: fill_block(DOCS / "migrating.md", "names", render_names()),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = {file: text for file, render in PAGES.items() if (text := render()) != file.read_text()}
    for file, text in stale.items():
        if not is_check:
            file.write_text(text)
        print(f"docs/{file.name}: {'not current' if is_check else 'written'}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
