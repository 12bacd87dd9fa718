"""ROLL's names (github.com/alibaba/ROLL) on the command line, rewritten to our keys before Hydra composes.

The table of names is in names.yaml. What ROLL means was read in its PPOConfig, RLVRConfig and functionals.py (releases
0.1.0 to 0.3.0).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megarl.config.errors import ConfigError
from megarl.config.names import ALIASES, CHOICES
from megarl.config.overrides import list_set_keys
from megarl.config.schema.algo import AlgoConfig

MAX_COMBINATIONS = 256
"""Most runs of a sweep over aliases."""
PG_CLIP = 0.2
"""ROLL's default of pg_clip, pg_clip_low and pg_clip_high."""
_OWN = {f"algo.{field.name}" for field in fields(AlgoConfig)}


@dataclass(frozen=True)
class Value:
    """What was given under a name."""

    text: str
    """The value as it is written in an override."""
    parsed: object


@dataclass(frozen=True)
class Rewriting:
    """What became of one alias, or of several that mean something only together."""

    names: tuple[str, ...]
    assignments: dict[str, str]
    """Our key -> text of its value; empty where ROLL's value switches off what is off here anyway."""
    text: str


@dataclass(frozen=True)
class Rewritten:
    overrides: list[str]
    lines: list[str]
    """What was rewritten, one line each, to be printed."""
    origins: dict[str, str]
    """Our key -> the override that it came from."""


Given = Mapping[str, Value]


def resolve_aliases(given: Given) -> list[Rewriting]:
    """Our keys for ROLL's names and their values. Raises ConfigError: one message per problem."""
    problems: list[str] = []
    found: list[Rewriting] = []
    alone = [((name,), _resolve_one) for name in given if not any(name in names for names, _ in _TOGETHER)]
    for names, resolve in (*_TOGETHER, *alone):
        present = tuple(name for name in names if name in given)
        if present:
            try:
                assignments = resolve(given if len(names) > 1 else {names[0]: given[names[0]]})
            except ConfigError as error:
                problems += error.problems
            else:
                # What an alias alone says is its own text; several say theirs one after the other.
                text = "; ".join(dict.fromkeys(ALIASES[name].text for name in present))
                found.append(Rewriting(present, assignments, text))
    setters: dict[str, Rewriting] = {}
    for rewriting in found:
        for key in rewriting.assignments:
            other = setters.setdefault(key, rewriting)
            if other is not rewriting:
                problems.append(f"{rewriting.names[0]}: sets {key}, and so does {other.names[0]}: leave one out")
    if problems:
        raise ConfigError(problems)
    return found


def _refuse(problem: str) -> NoReturn:
    raise ConfigError([problem])


def _read_flag(given: Given, name: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value.parsed, bool):
        _refuse(f"{name}: found {value.text}; must be true or false")
    return None if value is None else bool(value.parsed)


def _resolve_one(given: Given) -> dict[str, str]:
    ((name, value),) = given.items()
    alias, text = ALIASES[name], value.text
    if not alias.targets:
        if any(value.parsed == off and isinstance(value.parsed, bool) is isinstance(off, bool) for off in alias.off):
            return {}
        _refuse(f"{name}: no such thing here: {alias.text}")
    if name == "use_topr_neg_loss_coef" and isinstance(value.parsed, bool):
        text = "1.0" if value.parsed else "0.0"
    elif name == "critic_warmup":
        # ROLL's is a number alone; here 0 switches off what may be off already.
        return {"algo.value_pretrain.steps": text} | ({"algo.value_pretrain.enabled": "true"} if value.parsed else {})
    elif name in CHOICES:
        if str(value.parsed) not in CHOICES[name]:
            _refuse(f"{name}: found {text}; the choices are {', '.join(CHOICES[name])}")
        text = CHOICES[name][str(value.parsed)]
    return dict.fromkeys(alias.targets, text)


def _resolve_clip(given: Given) -> dict[str, str]:
    ranged, dual = _read_flag(given, "use_pg_clip_range"), _read_flag(given, "dual_clip_loss")
    clip, low, high = given.get("pg_clip"), given.get("pg_clip_low"), given.get("pg_clip_high")
    out: dict[str, str] = {}
    if ranged:
        if clip is not None and not dual:
            _refuse(
                f"pg_clip: {clip.text} found; ROLL reads it with use_pg_clip_range=true only for dual_clip_loss=true:"
                " leave it out"
            )
        out = {
            "algo.clip_low": low.text if low else f"{PG_CLIP}",
            "algo.clip_high": high.text if high else f"{PG_CLIP}",
        }
    elif low or high:
        _refuse(
            f"{'pg_clip_low' if low else 'pg_clip_high'}: ROLL reads it only with use_pg_clip_range=true: add that, or"
            " set algo.clip_low and algo.clip_high"
        )
    elif clip is not None:
        out = dict.fromkeys(ALIASES["pg_clip"].targets, clip.text)
    if dual is not None:
        number = PG_CLIP if clip is None else clip.parsed
        if isinstance(number, bool) or not isinstance(number, int | float):
            _refuse(f"pg_clip: {clip.text if clip else number} found; must be a number")
        out["algo.dual_clip"] = f"{1 + 2 * number:.10g}" if dual else "null"
    return out


def _resolve_aggregation(given: Given) -> dict[str, str]:
    mode, token_level = given.get("loss_agg_mode"), _read_flag(given, "token_level_loss")
    if mode is None:
        return {"algo.loss_agg_mode": "token-mean" if token_level else "seq-mean-token-mean"}
    if token_level is not None and (mode.parsed == "token-mean") is not token_level:
        _refuse(
            f"token_level_loss: {str(token_level).lower()} found with loss_agg_mode={mode.text}; both set"
            " algo.loss_agg_mode: leave one out"
        )
    return {"algo.loss_agg_mode": mode.text}


def _resolve_normalisation(given: Given) -> dict[str, str]:
    estimator = _read_estimator(given)
    shift, scale = bool(_read_flag(given, "reward_shift")), bool(_read_flag(given, "reward_scale"))
    if shift and scale:
        _refuse(
            "reward_shift: true found with reward_scale=true; one subtracts the mean only, the other divides by the"
            " standard deviation only: leave one out"
        )
    scopes = _read_scopes(given, estimator, shift, scale)
    spread = _read_flag(given, "div_std_global")
    if estimator == "grpo":
        return _resolve_grpo(given, scopes, shift, scale, bool(spread))
    out = {"algo.advantage": estimator} if estimator else {}
    if spread:
        if estimator in ("gae", "reinforce", "rloo") or scopes.get("mean") == "group":
            _refuse(
                "div_std_global: true found; it divides the group-relative advantage: give adv_estimator=grpo, and no"
                " reward_norm"
            )
        out |= {"algo.advantage_std": "batch", "algo.std_of": "centered"}
    elif spread is not None:
        out["algo.std_of"] = "raw"
    return out | {f"algo.reward_norm.{half}": scope for half, scope in scopes.items()}


def _resolve_grpo(given: Given, scopes: Mapping[str, str], shift: bool, scale: bool, spread: bool) -> dict[str, str]:
    """ROLL's grpo: rewards normalised by their group, whatever else is configured, then summed up per token."""
    exact = "write adv_estimator=reinforce norm_mean_type=group norm_std_type=group for ROLL's order"
    for half, scope in scopes.items():
        if scope not in ("none", "group"):
            _refuse(
                f"reward_norm: {half}={scope} found; ROLL normalises by the group under adv_estimator=grpo, whatever is"
                " given: leave it out"
            )
    if scale:
        _refuse("reward_scale: true found; ROLL ignores it under adv_estimator=grpo: leave it out")
    if _read_flag(given, "add_token_level_kl"):
        _refuse(
            "adv_estimator: grpo found with add_token_level_kl=true; ROLL subtracts that KL after the division by the"
            f" group's standard deviation: {exact}"
        )
    gamma = given.get("gamma")
    if gamma is not None and gamma.parsed != 1:
        _refuse(f"gamma: {gamma.text} found; the group-relative advantage has no discount: {exact}")
    if spread and shift:
        _refuse("div_std_global: true found with reward_shift=true, which divides by nothing: leave one out")
    if spread:
        return {"algo.advantage": "group", "algo.advantage_std": "batch", "algo.std_of": "centered"}
    return {"algo.advantage": "group", "algo.advantage_std": "none" if shift else "group"}


def _read_estimator(given: Given) -> str | None:
    value = given.get("adv_estimator")
    if value is None:
        return None
    if value.parsed not in CHOICES["adv_estimator"]:
        choices = f"the choices are {', '.join(CHOICES['adv_estimator'])}"
        _refuse(
            f"adv_estimator: found {value.text}; {CHOICES['adv_estimators_without'].get(str(value.parsed), choices)}"
        )
    return str(value.parsed)


def _read_scopes(given: Given, estimator: str | None, shift: bool, scale: bool) -> dict[str, str]:
    """mean and std of algo.reward_norm, those that are given."""
    scopes: dict[str, str] = {}
    for name in ("reward_norm", "norm_mean_type", "norm_std_type"):
        if name in given:
            scope = given[name].parsed
            scopes[name] = "none" if scope in (None, "none", "None") else str(scope)
            if scopes[name] not in ("none", "batch", "group", "running"):
                _refuse(f"{name}: found {given[name].text}; must be batch, group, running or null")
    both = scopes.pop("reward_norm", None)
    if both is not None and scopes:
        _refuse("reward_norm: found with norm_mean_type or norm_std_type, which set the same: leave it out")
    if both is not None:
        return {"mean": "none" if scale else both, "std": "none" if shift else both}
    if (shift or scale) and estimator != "grpo":
        name = "reward_shift" if shift else "reward_scale"
        _refuse(f"{name}: true found without reward_norm, whose half it chooses: give reward_norm too")
    return {name.split("_")[1]: scope for name, scope in scopes.items()}


_TOGETHER: tuple[tuple[tuple[str, ...], Callable[[Given], dict[str, str]]], ...] = (
    (
        (
            *("adv_estimator", "reward_norm", "reward_shift", "reward_scale", "norm_mean_type", "norm_std_type"),
            "div_std_global",
        ),
        _resolve_normalisation,
    ),
    (("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss"), _resolve_clip),
    (("loss_agg_mode", "token_level_loss"), _resolve_aggregation),
)
"""Names that mean something only together."""


def rewrite_overrides(overrides: Sequence[str]) -> Rewritten:
    """The same overrides with our keys in place of ROLL's names (`pg_clip=0.2`, `algo.pg_clip=0.2`).

    A sweep over a name that sets several keys becomes a sweep over the first, which the others follow by interpolation.
    Raises ConfigError for a name without a counterpart, for a name and a key that set the same, and for a sweep
    that would have to change several keys in different ways.
    """
    given: dict[str, str] = {}
    for text in overrides:
        name = _name_alias(text)
        if name in given:
            _refuse(f"{name}: given twice, as {given[name]} and {text}: leave one out")
        if name is not None:
            given[name] = text
    rewritings = _resolve_sweep({name: _list_values(name, text) for name, text in given.items()}) if given else []
    own = {key for text in overrides if _name_alias(text) is None for key in list_set_keys(text)}
    problems: list[str] = []
    lines: list[str] = []
    origins: dict[str, str] = {}
    by_first: dict[str, list[str]] = {}
    for rewriting in rewritings:
        source = " ".join(given[name] for name in rewriting.names)
        new = [f"{key}={text}" for key, text in rewriting.assignments.items()]
        problems += [
            f"{given[rewriting.names[0]]}: sets {key}, which is given itself, too: leave one out"
            for key in rewriting.assignments
            if key in own
        ]
        lines.append(f"{source} -> {' '.join(new) or 'nothing to set'} ({rewriting.text})")
        origins |= dict.fromkeys(rewriting.assignments, source)
        by_first[next(name for name in given if name in rewriting.names)] = new
    if problems:
        raise ConfigError(problems)
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
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_override(text.lstrip("+"))
    except HydraException as error:
        raise ConfigError([f"{name}: {str(error).strip().splitlines()[0]}"]) from error
    if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
        _refuse(f"{name}: {text} found; a sweep over it must list its values, as {name}=a,b")
    texts = list(parsed.sweep_string_iterator()) if parsed.is_sweep_override() else [text.partition("=")[2]]
    values = [parser.parse_override(f"{name}={each}").value() for each in texts]
    # A quoted string is an object of the parser's.
    return [
        Value(str(value).lower() if isinstance(value, bool) else each, getattr(value, "text", value))
        for each, value in zip(texts, values, strict=True)
    ]


def _resolve_sweep(values: Mapping[str, list[Value]]) -> list[Rewriting]:
    """One rewriting per group of names that holds for every combination of the swept values."""
    names = list(values)
    if prod(map(len, values.values())) > MAX_COMBINATIONS:
        _refuse(f"{', '.join(names)}: more than {MAX_COMBINATIONS} combinations of swept values")
    resolved = {
        run: resolve_aliases({name: values[name][i] for name, i in zip(names, run, strict=True)})
        for run in itertools.product(*(range(len(each)) for each in values.values()))
    }
    texts = {
        run: {k: text for each in found for k, text in each.assignments.items()} for run, found in resolved.items()
    }
    first = (0,) * len(names)
    leads: dict[int, tuple[str, list[str | None]]] = {}

    def express(key: str) -> str:
        """The value of `key` as one override: fixed, a sweep, or following the key that already sweeps."""
        causes = [
            position
            for position in range(len(names))
            if any(
                found.get(key) != texts[(*run[:position], 0, *run[position + 1 :])].get(key)
                for run, found in texts.items()
            )
        ]
        if not causes:
            return texts[first][key]
        cause = causes[0]
        column = [found.get(key) for run, found in texts.items() if run[:cause] + run[cause + 1 :] == first[1:]]
        lead, same = leads.setdefault(cause, (key, column))
        if len(causes) > 1 or None in column or column != same:
            swept = " and ".join(name for name in names if len(values[name]) > 1)
            _refuse(
                f"{swept}: a sweep would have to change {key} together with other keys, which Hydra cannot: sweep our"
                " keys instead, or start one run per value"
            )
        return ",".join(map(str, column)) if lead == key else f"${{{lead}}}"

    return [
        Rewriting(
            each.names,
            {
                key: express(key)
                for key in dict.fromkeys(key for found in resolved.values() for key in found[number].assignments)
            },
            each.text,
        )
        for number, each in enumerate(resolved[first])
    ]
