"""ROLL's names and values to our keys and values: those that mean something only together are resolved together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.config.roll.aliases import ALIASES

ROLL_PG_CLIP = 0.2
"""ROLL's default of pg_clip, pg_clip_low and pg_clip_high."""


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


_SCOPES = "batch, group, running or null"
_ESTIMATORS_WITHOUT = {
    "step_reinforce": "it gives each step of an agent its own return; here a response has one reward",
    "gigpo": "it compares the steps of agents; here a response has one reward",
    "agentic_reinforce": "it is of ROLL's agentic pipeline; adv_estimator=reinforce is the one for responses",
}
_NORM = ("adv_estimator", "reward_norm", "reward_shift", "reward_scale", "norm_mean_type", "norm_std_type",
         "div_std_global")  # fmt: skip
_CLIP = ("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss")
_AGGREGATION = ("loss_agg_mode", "token_level_loss")


def resolve_aliases(given: Mapping[str, Value]) -> list[Rewriting]:
    """Our keys for ROLL's names and their values. Raises ConfigError: one message per problem."""
    problems: list[str] = []
    found: list[Rewriting] = []
    together = (
        (_NORM, _resolve_normalisation),
        (_CLIP, _resolve_clip),
        (_AGGREGATION, _resolve_aggregation),
    )
    for names, resolve in together:
        _collect(tuple(name for name in names if name in given), given, resolve, found, problems)
    grouped = {*_NORM, *_CLIP, *_AGGREGATION}
    for name in given:
        if name not in grouped:
            _collect((name,), {name: given[name]}, _resolve_one, found, problems)
    setters: dict[str, Rewriting] = {}
    for rewriting in found:
        for key in rewriting.assignments:
            other = setters.setdefault(key, rewriting)
            if other is not rewriting:
                problems.append(f"{rewriting.names[0]}: sets {key}, and so does {other.names[0]}: leave one out")
    if problems:
        raise ConfigError(problems)
    return found


def _collect(
    names: tuple[str, ...],
    given: Mapping[str, Value],
    resolve: Callable[[Mapping[str, Value]], dict[str, str]],
    found: list[Rewriting],
    problems: list[str],
) -> None:
    if not names:
        return
    try:
        assignments = resolve(given)
    except ConfigError as error:
        problems.extend(error.problems)
        return
    # What an alias alone says is its own text; several say theirs one after the other.
    found.append(Rewriting(names, assignments, "; ".join(dict.fromkeys(ALIASES[name].text for name in names))))


def _resolve_one(given: Mapping[str, Value]) -> dict[str, str]:
    ((name, value),) = given.items()
    alias = ALIASES[name]
    if not alias.targets:
        if any(type(value.parsed) is type(off) and value.parsed == off for off in alias.off):
            return {}
        raise ConfigError([f"{name}: no such thing here: {alias.text}"])
    text = value.text
    if name == "use_topr_neg_loss_coef" and isinstance(value.parsed, bool):
        text = "1.0" if value.parsed else "0.0"
    if name == "critic_warmup":
        # ROLL's is a number alone; here 0 switches off what may be off already.
        return {"algo.value_pretrain.steps": text} | ({"algo.value_pretrain.enabled": "true"} if value.parsed else {})
    if alias.choices:
        text = _choose(name, value, alias.choices)
    return dict.fromkeys(alias.targets, text)


def _resolve_clip(given: Mapping[str, Value]) -> dict[str, str]:
    ranged, dual = _flag(given, "use_pg_clip_range"), _flag(given, "dual_clip_loss")
    clip, low, high = given.get("pg_clip"), given.get("pg_clip_low"), given.get("pg_clip_high")
    out: dict[str, str] = {}
    if ranged:
        if clip is not None and not dual:
            raise ConfigError([f"pg_clip: {clip.text} found; ROLL reads it with use_pg_clip_range=true only for"
                               " dual_clip_loss=true: leave it out"])  # fmt: skip
        out["algo.clip_low"] = low.text if low else f"{ROLL_PG_CLIP}"
        out["algo.clip_high"] = high.text if high else f"{ROLL_PG_CLIP}"
    elif low or high:
        name = "pg_clip_low" if low else "pg_clip_high"
        raise ConfigError([f"{name}: ROLL reads it only with use_pg_clip_range=true: add that, or set algo.clip_low and"
                           " algo.clip_high"])  # fmt: skip
    elif clip is not None:
        out |= dict.fromkeys(ALIASES["pg_clip"].targets, clip.text)
    if dual is not None:
        number = ROLL_PG_CLIP if clip is None else clip.parsed
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError([f"pg_clip: {clip.text if clip else number} found; must be a number"])
        out["algo.dual_clip"] = f"{1 + 2 * number:.10g}" if dual else "null"
    return out


def _resolve_aggregation(given: Mapping[str, Value]) -> dict[str, str]:
    mode, token_level = given.get("loss_agg_mode"), _flag(given, "token_level_loss")
    if token_level is None:
        return {"algo.loss_agg_mode": given["loss_agg_mode"].text}
    implied = "token-mean" if token_level else "seq-mean-token-mean"
    if mode is not None and (mode.parsed == "token-mean") is not token_level:
        raise ConfigError([f"token_level_loss: {str(token_level).lower()} found with loss_agg_mode={mode.text}; both"
                           " set algo.loss_agg_mode: leave one out"])  # fmt: skip
    return {"algo.loss_agg_mode": mode.text if mode is not None else implied}


def _resolve_normalisation(given: Mapping[str, Value]) -> dict[str, str]:
    estimator = _estimator(given)
    shift, scale = _flag(given, "reward_shift"), _flag(given, "reward_scale")
    if shift and scale:
        raise ConfigError(["reward_shift: true found with reward_scale=true; one subtracts the mean only, the other"
                           " divides by the standard deviation only: leave one out"])  # fmt: skip
    mean, std = _scopes(given, estimator, bool(shift), bool(scale))
    if estimator == "grpo":
        return _resolve_grpo(given, mean, std, bool(shift), bool(scale))
    out = {"algo.advantage": estimator} if estimator else {}
    spread = _flag(given, "div_std_global")
    if spread:
        if estimator in ("gae", "reinforce", "rloo") or mean == "group":
            raise ConfigError(["div_std_global: true found; it divides the group-relative advantage: give"
                               " adv_estimator=grpo, and no reward_norm"])  # fmt: skip
        out |= {"algo.advantage_std": "batch", "algo.std_of": "centered"}
    elif spread is not None:
        out["algo.std_of"] = "raw"
    if mean is not None:
        out["algo.reward_norm.mean"] = mean
    if std is not None:
        out["algo.reward_norm.std"] = std
    return out


def _resolve_grpo(
    given: Mapping[str, Value], mean: str | None, std: str | None, shift: bool, scale: bool
) -> dict[str, str]:
    """ROLL's grpo: rewards normalised by their group, whatever else is configured, then summed up per token."""
    exact = "write adv_estimator=reinforce norm_mean_type=group norm_std_type=group for ROLL's order"
    for name, scope in (("mean", mean), ("std", std)):
        if scope not in (None, "none", "group"):
            raise ConfigError([f"reward_norm: {name}={scope} found; ROLL normalises by the group under"
                               " adv_estimator=grpo, whatever is given: leave it out"])  # fmt: skip
    if scale:
        raise ConfigError(["reward_scale: true found; ROLL ignores it under adv_estimator=grpo: leave it out"])
    if _flag(given, "add_token_level_kl"):
        raise ConfigError([f"adv_estimator: grpo found with add_token_level_kl=true; ROLL subtracts that KL after the"
                           f" division by the group's standard deviation: {exact}"])  # fmt: skip
    gamma = given.get("gamma")
    if gamma is not None and gamma.parsed != 1:
        raise ConfigError([f"gamma: {gamma.text} found; the group-relative advantage has no discount: {exact}"])
    if _flag(given, "div_std_global"):
        if shift:
            raise ConfigError(["div_std_global: true found with reward_shift=true, which divides by nothing:"
                               " leave one out"])  # fmt: skip
        return {"algo.advantage": "group", "algo.advantage_std": "batch", "algo.std_of": "centered"}
    return {"algo.advantage": "group", "algo.advantage_std": "none" if shift else "group"}


def _estimator(given: Mapping[str, Value]) -> str | None:
    value = given.get("adv_estimator")
    if value is None:
        return None
    choices = ("gae", "reinforce", "grpo", "rloo", "group")
    if value.parsed in choices:
        return str(value.parsed)
    reason = _ESTIMATORS_WITHOUT.get(str(value.parsed), f"the choices are {', '.join(choices)}")
    raise ConfigError([f"adv_estimator: found {value.text}; {reason}"])


def _scopes(
    given: Mapping[str, Value], estimator: str | None, shift: bool, scale: bool
) -> tuple[str | None, str | None]:
    """(mean, std) of algo.reward_norm, each None where it is not given."""
    scopes = {name: _scope(name, given[name]) for name in ("reward_norm", "norm_mean_type", "norm_std_type")
              if name in given}  # fmt: skip
    both = scopes.get("reward_norm")
    if both is not None and len(scopes) > 1:
        raise ConfigError(["reward_norm: found with norm_mean_type or norm_std_type, which set the same: leave it out"])
    if both is None:
        if (shift or scale) and estimator != "grpo":
            name = "reward_shift" if shift else "reward_scale"
            raise ConfigError([f"{name}: true found without reward_norm, whose half it chooses: give reward_norm too"])
        return scopes.get("norm_mean_type"), scopes.get("norm_std_type")
    return ("none" if scale else both), ("none" if shift else both)


def _scope(name: str, value: Value) -> str:
    if value.parsed is None or value.parsed in ("none", "None"):
        return "none"
    if value.parsed in ("batch", "group", "running"):
        return str(value.parsed)
    raise ConfigError([f"{name}: found {value.text}; must be {_SCOPES}"])


def _flag(given: Mapping[str, Value], name: str) -> bool | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value.parsed, bool):
        raise ConfigError([f"{name}: found {value.text}; must be true or false"])
    return value.parsed


def _choose(name: str, value: Value, choices: Mapping[str, str]) -> str:
    if str(value.parsed) not in choices:
        raise ConfigError([f"{name}: found {value.text}; the choices are {', '.join(choices)}"])
    return choices[str(value.parsed)]
