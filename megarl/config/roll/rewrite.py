"""ROLL's names on the command line, rewritten to our keys before Hydra composes: sweeps over them included."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megarl.config.errors import ConfigError
from megarl.config.roll.aliases import ALIASES
from megarl.config.roll.resolve import Rewriting, Value, resolve_aliases
from megarl.config.schema.algo import AlgoConfig

MAX_COMBINATIONS = 256
"""Most runs of a sweep over aliases."""

_OWN = {f"algo.{field.name}" for field in fields(AlgoConfig)}


@dataclass(frozen=True)
class Rewritten:
    overrides: list[str]
    lines: list[str]
    """What was rewritten, one line each, to be printed."""
    origins: dict[str, str]
    """Our key -> the override that it came from."""


def rewrite_overrides(overrides: Sequence[str]) -> Rewritten:
    """The same overrides with our keys in place of ROLL's names (`pg_clip=0.2`, `algo.pg_clip=0.2`).

    A sweep over a name that sets several keys becomes a sweep over the first, which the others follow by interpolation.
    Raises ConfigError for a name without a counterpart, for a name and a key that set the same, and for a sweep
    that would have to change several keys in different ways.
    """
    given: dict[str, str] = {}
    for text in overrides:
        name = _name_alias(text)
        if name is not None:
            if name in given:
                raise ConfigError([f"{name}: given twice, as {given[name]} and {text}: leave one out"])
            given[name] = text
    if not given:
        return Rewritten(list(overrides), [], {})
    values = {name: _list_values(name, text) for name, text in given.items()}
    rewritings = _resolve_sweep(values)
    _check_own_keys(overrides, given, rewritings)
    lines: list[str] = []
    origins: dict[str, str] = {}
    by_first: dict[str, list[str]] = {}
    for rewriting in rewritings:
        source = " ".join(given[name] for name in rewriting.names)
        new = [f"{key}={text}" for key, text in rewriting.assignments.items()]
        lines.append(f"{source} -> {' '.join(new) or 'nothing to set'} ({rewriting.text})")
        origins |= dict.fromkeys(rewriting.assignments, source)
        by_first[next(name for name in given if name in rewriting.names)] = new
    out: list[str] = []
    for text in overrides:
        name = _name_alias(text)
        out += [text] if name is None else by_first.get(name, [])
    return Rewritten(out, lines, origins)


def _name_alias(text: str) -> str | None:
    """The alias that an override sets; None where it sets a key of ours."""
    key, equals, value = text.lstrip("+").partition("=")
    if not equals:
        return None
    if key in _OWN:
        # algo.reward_norm is a node of ours, and with one word for both of its keys ROLL's name.
        return "reward_norm" if key == "algo.reward_norm" and not value.lstrip().startswith("{") else None
    name = key.removeprefix("algo.")
    return name if name in ALIASES else None


def _list_values(name: str, text: str) -> list[Value]:
    """The value, or each of a sweep's."""
    try:
        parsed = OverridesParser.create().parse_override(text.lstrip("+"))
    except HydraException as error:
        raise ConfigError([f"{name}: {str(error).strip().splitlines()[0]}"]) from error
    if not parsed.is_sweep_override():
        return [_read(name, text.partition("=")[2])]
    if not parsed.is_discrete_sweep():
        raise ConfigError([f"{name}: {text} found; a sweep over it must list its values, as {name}=a,b"])
    return [_read(name, value) for value in parsed.sweep_string_iterator()]


def _read(name: str, text: str) -> Value:
    value = OverridesParser.create().parse_override(f"{name}={text}").value()
    if isinstance(value, bool):
        return Value(str(value).lower(), value)
    # A quoted string is an object of the parser's.
    return Value(text, getattr(value, "text", value))


def _resolve_sweep(values: Mapping[str, list[Value]]) -> list[Rewriting]:
    """One rewriting per group of names that holds for every combination of the swept values."""
    names = list(values)
    runs = list(
        itertools.islice(itertools.product(*(range(len(values[name])) for name in names)), MAX_COMBINATIONS + 1)
    )
    if len(runs) > MAX_COMBINATIONS:
        raise ConfigError([f"{', '.join(names)}: more than {MAX_COMBINATIONS} combinations of swept values"])
    resolved = {
        run: resolve_aliases({name: values[name][i] for name, i in zip(names, run, strict=True)}) for run in runs
    }
    first = resolved[runs[0]]
    swept = [position for position, name in enumerate(names) if len(values[name]) > 1]
    if not swept:
        return first
    leads: dict[int, tuple[str, list[str]]] = {}
    return [
        Rewriting(
            rewriting.names,
            {
                key: _express(key, {run: _flatten(resolved[run]).get(key) for run in runs}, swept, names, leads)
                for key in dict.fromkeys(key for run in runs for key in resolved[run][number].assignments)
            },
            rewriting.text,
        )
        for number, rewriting in enumerate(first)
    ]


def _flatten(rewritings: Sequence[Rewriting]) -> dict[str, str]:
    return {key: text for rewriting in rewritings for key, text in rewriting.assignments.items()}


def _express(
    key: str,
    texts: Mapping[tuple[int, ...], str | None],
    swept: Sequence[int],
    names: Sequence[str],
    leads: dict[int, tuple[str, list[str]]],
) -> str:
    """The value of `key` as one override: fixed, a sweep, or following the key that already sweeps."""
    first = (0,) * len(names)
    causes = [
        position
        for position in swept
        if any(text != texts[(*run[:position], 0, *run[position + 1 :])] for run, text in texts.items())
    ]
    fixed = texts[first]
    if not causes and fixed is not None:
        return fixed
    cause = causes[0]
    steps = [text for run, text in texts.items() if run == (*first[:cause], run[cause], *first[cause + 1 :])]
    column = [text for text in steps if text is not None]
    lead, same = leads.setdefault(cause, (key, column))
    if len(causes) == 1 and len(column) == len(steps) and column == same:
        return ",".join(column) if lead == key else f"${{{lead}}}"
    swept_names = " and ".join(names[position] for position in swept)
    raise ConfigError(
        [
            f"{swept_names}: a sweep would have to change {key} together with other keys, which Hydra cannot: sweep our"
            " keys instead, or start one run per value"
        ]
    )


def _check_own_keys(overrides: Sequence[str], given: Mapping[str, str], rewritings: Sequence[Rewriting]) -> None:
    own = {key for text in overrides if _name_alias(text) is None for key in list_set_keys(text)}
    problems = [
        f"{given[rewriting.names[0]]}: sets {target}, which is given itself, too: leave one out"
        for rewriting in rewritings
        for target in rewriting.assignments
        if target in own
    ]
    if problems:
        raise ConfigError(problems)


def list_set_keys(override: str) -> list[str]:
    """The dotted keys that an override sets, those of a dictionary one by one; none for an option of a group."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or key.startswith(("~", "-", "hydra.")):
        return []
    if value.lstrip().startswith("{"):
        parsed = OverridesParser.create().parse_override(override).value()
        return [f"{key}.{name}" for name in _walk(parsed)] if isinstance(parsed, dict) else []
    return [key] if "." in key or key == "seed" else []


def _walk(tree: dict[Any, Any]) -> Iterator[str]:
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from (f"{getattr(name, 'text', name)}.{rest}" for rest in _walk(child))
        else:
            yield str(getattr(name, "text", name))
