"""Names that are no keys of ours, by the table names.yaml: ROLL's (github.com/alibaba/ROLL), which are accepted on the
command line and in whole files of its RLVR pipeline, and those of TRL, verl, OpenRLHF and of megarl before, which an
unknown key is answered with.

What ROLL means was read in its PPOConfig, RLVRConfig and functionals.py (releases 0.1.0 to 0.3.0).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.overrides import list_leaves, list_set_keys, parse_override, write_value
from megarl.config.schema.algo import AlgoConfig

FILE = Path(__file__).with_name("names.yaml")
# YAML's safe loader, in C where PyYAML was built with it: every command reads this file at its start.
TABLE: Mapping[str, Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(FILE.read_text("utf-8")).get_single_data()
NONE = "none; "
"""How an answer begins that says why there is no counterpart"""
PG_CLIP = 0.2
"""ROLL's default of pg_clip, pg_clip_low and pg_clip_high"""
_OWN = {f"algo.{each.name}" for each in fields(AlgoConfig)}

Values = Mapping[str, Any]
"""ROLL's names, those of a file dotted, and what was given under them"""


class Alias(NamedTuple):
    """What a name of ROLL's is here."""

    ours: tuple[str, ...]
    """Our keys; () where there is no such thing here, and then `text` says why."""
    text: str
    conversion: str | Mapping[str, Any] | None = None
    """Our value for each of ROLL's, or a function of this file for all names that have it; None: the value itself."""
    off: Sequence[Any] = ()
    """Where there is no such thing: the values that ask for nothing."""


ALIASES: Mapping[str, Alias] = {
    **{name: Alias(tuple(ours.split()), *rest) for name, (ours, *rest) in TABLE["roll"].items()},
    **{name: Alias((), text, None, off) for name, (off, text) in TABLE["roll_nothing"].items()},
}
PEER_NAMES: Mapping[str, tuple[str, str]] = {
    name: (trainer, ours)
    for ours, trainers in TABLE["peers"].items()
    for trainer, names in trainers.items()
    for name in names.split()
}
"""The last parts of a name -> whose it is, and the key of ours or why there is none. Most mean a little else."""


def is_name(ours: str) -> bool:
    """Of what the table says of an old name: whether it is the new one, not a sentence."""
    return re.fullmatch(r"[\w.]+(=[\w./-]+)?", ours) is not None and not ours.endswith(".")


def find_old_name(name: str) -> str | None:
    """What to say of a key (one below a node as of the node), `group=option` or `key=value` that megarl had before."""
    node = name
    while node not in TABLE["megarl"]:
        if "=" in node or "." not in node:
            return None
        node = node.rpartition(".")[0]
    ours = TABLE["megarl"][node]
    if is_name(ours):
        return f"; it is {ours}{name.removeprefix(node)} now"
    return f"; it was removed: {ours.removesuffix('.')}"


def find_peer_name(key: str) -> str | None:
    """What to say of an unknown key whose last parts are a name of theirs; of the critic's with the critic's key."""
    parts = key.split(".")
    name = next((name for size in range(len(parts)) if (name := ".".join(parts[size:])) in PEER_NAMES), None)
    if name is None:
        return None
    trainer, ours = PEER_NAMES[name]
    if name != key and key.startswith("critic."):
        ours = ours.replace("policy.", "critic.")
    if ours.startswith(NONE):
        return f"; {trainer}'s {name} has no counterpart: {ours.removeprefix(NONE)}"
    return f"; {trainer}'s {name} is {ours} here"


# The conversions of names that mean something only together: from all that is given to our keys and values.


def _refuse(problem: str) -> NoReturn:
    raise ConfigError([problem])


def _read_flag(given: Values, name: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        _refuse(f"{name}: found {value}; must be true or false")
    return value


def clip(given: Values) -> dict[str, Any]:
    """ROLL's dual clip bounds the ratio by 1 + 2 * pg_clip."""
    ranged, number = _read_flag(given, "use_pg_clip_range"), given.get("pg_clip", PG_CLIP)
    if unread := [name for name in ("pg_clip_low", "pg_clip_high") if name in given and not ranged]:
        _refuse(f"{unread[0]}: ROLL reads it only with use_pg_clip_range=true: add that, or set algo.clip_low")
    found: dict[str, Any] = {}
    for side in ("low", "high") if ranged or "pg_clip" in given else ():
        found[f"algo.clip_{side}"] = given.get(f"pg_clip_{side}", PG_CLIP) if ranged else number
    if "dual_clip_loss" in given:
        if not isinstance(number, int | float):
            _refuse(f"pg_clip: found {number}; must be a number")
        found["algo.dual_clip"] = round(1 + 2 * number, 9) if _read_flag(given, "dual_clip_loss") else None
    return found


def difficulty(given: Values) -> dict[str, Any]:
    """ROLL masks the loss of groups by their mean score, and samples no others for them."""
    names = {"difficulty_low_threshold": 0.0, "difficulty_high_threshold": 1.0}
    key = "algo.dynamic_sampling"
    if not _read_flag(given, "difficulty_mask"):
        if unread := [name for name in names if name in given]:
            _refuse(f"{unread[0]}: ROLL reads it only with difficulty_mask=true: add that, or set {key}.low or high")
        return {f"{key}.enabled": False}
    low, high = (given.get(name, default) for name, default in names.items())
    masks = {f"{key}.enabled": True, f"{key}.by": "reward", f"{key}.max_rounds": 1, f"{key}.rest": "mask"}
    return masks | {f"{key}.low": low, f"{key}.high": high}


def loss_aggregation(given: Values) -> dict[str, Any]:
    """ROLL reads loss_agg_mode alone where it is given."""
    by_token = "token-mean" if _read_flag(given, "token_level_loss") else "seq-mean-token-mean"
    return {"algo.loss_agg_mode": given.get("loss_agg_mode") or by_token}


def normalisation(given: Values) -> dict[str, Any]:
    """ROLL's grpo normalises rewards by their group, whatever else is configured, and then sums up per token."""
    estimator, reasons = given.get("adv_estimator"), TABLE["roll_estimators"]
    if estimator is not None and (reason := reasons.get(str(estimator), "")) is not None:
        choices = ", ".join(name for name, why in reasons.items() if why is None)
        _refuse(f"adv_estimator: found {estimator}; {reason or f'the choices are {choices}'}")
    shift, scale, spread = (_read_flag(given, name) for name in ("reward_shift", "reward_scale", "div_std_global"))
    std = {"algo.advantage_std": "batch", "algo.std_of": "centered"} if spread else {}
    if estimator == "grpo":
        if given.get("add_token_level_kl") or given.get("gamma", 1) != 1:
            exact = "adv_estimator=reinforce norm_mean_type=group norm_std_type=group has ROLL's order"
            _refuse(
                f"adv_estimator: grpo found with add_token_level_kl or gamma, which come after the division: {exact}"
            )
        if spread and shift:
            _refuse("div_std_global: true found with reward_shift=true, which divides by nothing: leave one out")
        return {"algo.advantage": "group", **(std or {"algo.advantage_std": "none" if shift else "group"})}
    names = {"norm_mean_type": "mean", "norm_std_type": "std", "reward_norm": "both"}
    scopes = {half: str(given[name] or "none").lower() for name, half in names.items() if name in given}
    for name in names.keys() & given.keys():
        if scopes[names[name]] not in ("none", "batch", "group", "running"):
            _refuse(f"{name}: found {given[name]}; must be batch, group, running or null")
    if spread and (estimator in ("gae", "reinforce", "rloo") or "group" in scopes.values()):
        _refuse("div_std_global: true found; it divides the group's advantage: adv_estimator=grpo without reward_norm")
    both = scopes.pop("both", None)
    if (both and scopes) or shift + scale > bool(both):
        name = "reward_norm" if both and scopes else "reward_shift" if shift else "reward_scale"
        right = "give norm_mean_type and norm_std_type alone, or reward_norm with one of reward_shift and reward_scale"
        _refuse(f"{name}: found with others that set the same halves, or without reward_norm: {right}")
    halves = {"mean": "none" if scale else both, "std": "none" if shift else both} if both else scopes
    found = {"algo.advantage": estimator} if estimator else {}
    found |= std or ({"algo.std_of": "raw"} if "div_std_global" in given else {})
    return found | {f"algo.reward_norm.{half}": scope for half, scope in halves.items()}


def warmup(given: Values) -> dict[str, Any]:
    """ROLL's is a number alone; here 0 switches off what may be off already."""
    steps = given["critic_warmup"]
    return {"algo.value_pretrain.steps": steps} | ({"algo.value_pretrain.enabled": True} if steps else {})


def staleness(given: Values) -> dict[str, Any]:
    """A loss of older samples needs a correction here."""
    ratio = given["async_generation_ratio"]
    return {"rollout.max_staleness": ceil(ratio), "algo.mismatch.correction": "tis"} if ratio else {}


def _group(names: Iterable[str]) -> list[list[str]]:
    """The names, those of one conversion together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        conversion = ALIASES[name].conversion
        groups.setdefault(conversion if isinstance(conversion, str) else name, []).append(name)
    return list(groups.values())


def _convert(names: Sequence[str], given: Values) -> dict[str, Any]:
    """Our keys and values for the names of a group. Raises ConfigError with one problem, which begins with a name."""
    alias, value = ALIASES[names[0]], given[names[0]]
    if isinstance(alias.conversion, str):
        found: dict[str, Any] = globals()[alias.conversion](given)
        return found
    if not alias.ours and value not in alias.off:
        _refuse(f"{names[0]}: no such thing here: {alias.text}")
    if alias.conversion is not None and str(value) not in alias.conversion:
        _refuse(f"{names[0]}: found {value}; the choices are {', '.join(alias.conversion)}")
    return dict.fromkeys(alias.ours, value if alias.conversion is None else alias.conversion[str(value)])


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
        if (name := _find_alias(text)) in given:
            _refuse(f"{name}: given twice, as {given[name]} and {text}: leave one out")
        if name is not None:
            given[name] = text
    values = {name: _list_values(name, text) for name, text in given.items()}
    setters = {key: text for text in overrides if not _find_alias(text) for key in list_set_keys(text)}
    by_name: dict[str, list[str]] = {}
    lines: list[str] = []
    origins: dict[str, str] = {}
    for names in _group(given):
        assignments, source = _assign(names, values), " ".join(given[name] for name in names)
        if twice := [key for key in assignments if key in setters]:
            _refuse(f"{given[names[0]]}: sets {twice[0]}, and so does {setters[twice[0]]}: leave one out")
        origins |= dict.fromkeys(assignments, source)
        setters |= origins
        by_name[names[0]] = [f"{key}={text}" for key, text in assignments.items()]
        meaning = "; ".join(dict.fromkeys(ALIASES[name].text for name in names))
        lines.append(f"{source} -> {' '.join(by_name[names[0]]) or 'nothing to set'} ({meaning})")
    rewritten = [by_name.get(alias, []) if (alias := _find_alias(text)) else [text] for text in overrides]
    return Rewritten([text for texts in rewritten for text in texts], lines, origins)


def _find_alias(text: str) -> str | None:
    """The name of ROLL's that an override sets; None where it sets a key of ours."""
    key, equals, value = text.lstrip("+").partition("=")
    if key == "algo.reward_norm":  # a node of ours, and with one word for both of its keys ROLL's name
        return "reward_norm" if equals and not value.lstrip().startswith("{") else None
    name = key.removeprefix("algo.")
    return name if equals and name in ALIASES and key not in _OWN else None


def _list_values(name: str, text: str) -> list[Any]:
    """The value, or each of a sweep's."""
    parsed, texts = parse_override(text.lstrip("+")), [text.partition("=")[2]]
    if parsed.is_sweep_override():
        if not parsed.is_discrete_sweep():
            _refuse(f"{name}: {text} found; a sweep over it must list its values, as {name}=a,b")
        texts = list(parsed.sweep_string_iterator())
    values = [parse_override(f"{name}={each}").value() for each in texts]
    return [getattr(value, "text", value) for value in values]  # a quoted string is an object of the parser's


def _assign(names: Sequence[str], values: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Our keys for a group of names, and the text of each value: fixed, a sweep, or following the key that sweeps."""
    *others, swept = sorted(names, key=lambda name: len(values[name]))
    first = {name: each[0] for name, each in values.items()}
    runs = [_convert(names, {**first, swept: value}) for value in values[swept]]
    columns = {key: tuple(write_value(run.get(key)) for run in runs) for run in runs for key in run}
    changing = [key for key, column in columns.items() if len(set(column)) > 1]
    several = any(len(values[name]) > 1 for name in others) or len({columns[key] for key in changing}) > 1
    if several or any(run.keys() != runs[0].keys() for run in runs):
        cannot = f"a sweep would have to change {', '.join(columns)} in different ways, which Hydra cannot"
        _refuse(f"{swept}: {cannot}: sweep our keys instead, or start one run per value")
    texts = {key: f"${{{changing[0]}}}" if number else ",".join(columns[key]) for number, key in enumerate(changing)}
    return {key: texts.get(key, column[0]) for key, column in columns.items()}


# Whole files of ROLL's RLVR pipeline, which tools/import_roll.py converts.

ANSWER = "ground_truth"
"""ROLL's field with the answer"""
ROLES = {"actor_train": "policy", "critic": "critic", "reference": "reference"}
_OFF: tuple[Any, ...] = (None, False, 0, "", "disable", "disabled", [], {})


class Outcome(NamedTuple):
    """What became of a key of ROLL's."""

    key: str
    found: Any
    overrides: dict[str, Any]
    note: str
    by_hand: bool = False
    """Whether it asks for something that is not converted"""

    def __str__(self) -> str:
        became = " ".join(f"{key}={write_value(value)}" for key, value in self.overrides.items()) or "nothing here"
        note = f" ({'TO DECIDE BY HAND: ' if self.by_hand else ''}{self.note})" if self.note else ""
        return f"{self.key}: {write_value(self.found)} -> {became}{note}"


def read_roll_file(path: Path) -> dict[str, Any]:
    """The values by dotted key. Raises ValueError, OSError, or YAML's or OmegaConf's error for another kind of file."""
    root = OmegaConf.load(path)
    if re.search(r"\$\{[^}]*:", path.read_text("utf-8")):
        raise ValueError("an interpolation like ${oc.env:NAME} reads something else than the file: write its value")
    if "actor_train" not in root or "actor_infer" not in root or "custom_envs" in root:
        raise ValueError("a file of ROLL's RLVR pipeline has actor_train and actor_infer, and no custom_envs")
    return dict(list_leaves(OmegaConf.to_container(root, resolve=True)))


def import_roll(given: Values) -> list[Outcome]:
    """What became of every key of a file, and of ROLL's defaults where it is silent. Data and reward that are not
    converted are left to options that do not load without a path."""
    table = TABLE["roll_file"]
    trained = {
        f"{role}.training_args.{k}": v for role in ("actor_train", "critic") for k, v in table["trained"].items()
    }
    values = {**table["defaults"], **trained, **given}
    base = {**table["base"], "algo": table["presets"].get(values["adv_estimator"], "ppo")}
    outcomes = [Outcome("defaults", "", base, "below what follows")]
    for names in _group(name for name in values if name in ALIASES):
        while names:
            try:
                converted = _convert(names, values)
            except ConfigError as error:
                name, _, why = error.problems[0].partition(": ")
                names.remove(name)
                outcomes.append(Outcome(name, values.pop(name), {}, why, name not in TABLE["roll_unread"]))
            else:
                outcomes += [Outcome(name, values[name], converted, ALIASES[name].text) for name in names]
                break
    domains = _import_domains(values)
    left = values.keys() - ALIASES.keys() - {outcome.key for outcome in domains}
    others = [_import_key(key, value, values) for key, value in values.items() if key in left]
    if any("data.sources" in outcome.overrides for outcome in domains):  # What all sources have stands in data.common.
        given = {key: value for each in others for key, value in each.overrides.items()}
        short = {"data": "kind", "data.path": "path", "data.prompt_field": "prompt_field"}
        common = {name: given[key] for key, name in short.items() if key in given} | {"answer_field": ANSWER}
        outcomes[0].overrides.update({"data": "mix", "data.common": common, "reward": "math"})
        for outcome in others:
            for key in short.keys() & outcome.overrides.keys():
                del outcome.overrides[key]
    return outcomes + others + domains


def _import_domains(values: Values) -> list[Outcome]:
    """The data and rewards of ROLL's domains: one is the run's own, several are data=mix."""
    outcomes: list[Outcome] = []
    sources: dict[str, dict[str, Any]] = {}
    probs = "actor_train.data_args.domain_interleave_probs."
    is_shared = any(key.startswith(probs) for key in values)
    for key in [key for key in values if re.fullmatch(r"rewards\.[^.]+\.worker_cls", key)]:
        name = key.split(".")[1]
        share, field = values.get(f"{probs}{name}"), _find_answer(str(values[key]))
        if is_shared and not share:
            outcomes.append(Outcome(key, values[key], {}, "domain_interleave_probs leaves the domain out"))
            continue
        try:
            reward = _read_worker(name, values)
        except ValueError as error:
            outcomes.append(Outcome(key, values[key], {}, str(error), by_hand=True))
            continue
        sources[name] = {"share": share} if is_shared else {}
        sources[name]["select"] = {"tag": values.get(f"rewards.{name}.tag_included") or [name]}
        sources[name] |= {"answer_field": field} if field != ANSWER else {}
        sources[name]["reward"] = reward
        note = f"serve {reward['model']} at reward.url" if reward["kind"] == "judge" else ""
        own = {"reward": reward["kind"], **{f"reward.{k}": v for k, v in reward.items() if k != "kind"}}
        outcomes.append(Outcome(key, values[key], {**own, "data.answer_field": field}, note))
    if len(sources) > 1:
        outcomes = [outcome._replace(overrides={}) for outcome in outcomes]
        outcomes[-1].overrides["data.sources"] = sources
    return outcomes


def _find_answer(worker: str) -> str:
    return str(TABLE["roll_file"]["answers"].get(worker.rpartition(".")[2], ANSWER))


def _read_worker(name: str, values: Values) -> dict[str, Any]:
    """The reward of a domain, with its kind. Raises ValueError for one that is none of ours."""
    own = f"rewards.{name}."
    worker = str(values[f"{own}worker_cls"]).rpartition(".")[2]
    if worker not in (table := TABLE["roll_file"]["workers"]):
        raise ValueError("of its domain, a function of yours: reward=function reward.path=package.module:callable")
    reward = dict(table[worker])
    if worker == "CrossThinkQARuleRewardWorker":
        if values.get(f"{own}response_length_penalty_coef"):
            raise ValueError("response_length_penalty_coef is not here; algo.overlong.penalty prices long responses")
        reward["path"] = reward["path"].replace("soft", values.get(f"{own}reward_type") or "soft")
    if reward["kind"] == "judge":
        path = "model_args.model_name_or_path"
        models = [f"{own}judge_model_name", f"{own}{path}", f"reward_model.{path}"]
        models = models[::-1] if values.get(f"{own}judge_model_type") == "cluster" else models
        reward["model"] = next((values[key] for key in models if values.get(key)), None)
        reward["url"] = values.get(f"{own}judge_api_url") or reward["url"]
    return reward


def _import_key(key: str, value: Any, values: Values) -> Outcome:
    """By the table: the key itself, or the longest part of it; `*` is any role of Megatron, or any domain."""
    first, _, rest = key.partition(".")
    starred = f"*.{rest}" if first in ROLES else re.sub(r"^rewards\.[^.]+", "rewards.*", key)
    entry = TABLE["roll_file"]["keys"].get(key) or TABLE["roll_file"]["keys"].get(starred)
    if entry is not None and value is not None:
        ours, conversion = entry if isinstance(entry, list) else (entry, None)
        try:
            if isinstance(conversion, str):
                return Outcome(key, value, globals()[conversion](value, values, first), ours)
            converted = value if conversion is None else conversion[value]
            return Outcome(key, value, {ours.replace("*", ROLES.get(first, "")): converted} if ours else {}, "")
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return Outcome(key, value, {}, f"{ours}: {error}", by_hand=True)
    parts = [name.rsplit(".", size)[0] for size in range(key.count(".") + 1) for name in (key, starred)]
    for part in parts:
        for section in ("by_hand", "nothing"):
            for why, keys in TABLE["roll_file"][section].items():
                if part in keys:
                    return Outcome(key, value, {}, why, section == "by_hand" and value not in _OFF)
    return Outcome(key, value, {}, "no key of ROLL's at the commit read", value not in _OFF)


# From a value of the file, all of them and ROLL's role: our keys and values. What is raised is told.


def _count_devices(mapping: Any) -> int:
    """Of ROLL's device_mapping, `list(range(0,8)) + [8, 9]` or a list; 1 where it is neither."""
    ranges = re.findall(r"range\(\s*(\d+)\s*,\s*(\d+)\s*\)", str(mapping))
    listed = [number for each in re.findall(r"\[([\d,\s]*)\]", str(mapping)) for number in re.findall(r"\d+", each)]
    return max(1, sum(int(high) - int(low) for low, high in ranges) + len(listed))


def devices(mapping: Any, _: Values, role: str) -> dict[str, Any]:
    return {f"{ROLES[role]}.parallel.num_processes": _count_devices(mapping)}


def servers(mapping: Any, values: Values, _: str) -> dict[str, Any]:
    tp = values.get("actor_infer.strategy_args.strategy_config.tensor_parallel_size") or 1
    return {"rollout.num_servers": max(1, _count_devices(mapping) // tp), "rollout.tp": tp}


def minibatch(_: Any, values: Values, role: str) -> dict[str, Any]:
    """Samples of an optimizer step: per device x accumulation x data-parallel ranks."""
    samples = {}
    config = "strategy_args.strategy_config"
    sizes = [f"{config}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")]
    for name in ("actor_train", "critic"):
        split = prod(values.get(f"{name}.{size}") or 1 for size in (*sizes, "model_args.ulysses_size"))
        trained = f"{name}.training_args"
        batch = values[f"{trained}.per_device_train_batch_size"] * values[f"{trained}.gradient_accumulation_steps"]
        samples[name] = batch * max(1, _count_devices(values.get(f"{name}.device_mapping")) // split)
    if role == "critic" and values.get("adv_estimator") == "gae" and samples["critic"] != samples["actor_train"]:
        raise ValueError(f"found {samples['critic']} of the critic and {samples['actor_train']} of the policy")
    return {"train.samples_per_minibatch": samples["actor_train"]}


def data_file(value: Any, _: Values, __: str) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    kinds = {str(name).rpartition(".")[2] for name in names}
    if len(kinds) != 1 or not kinds <= {"jsonl", "parquet"}:
        raise ValueError("files of JSON lines (data=jsonl) or Parquet (data=parquet)")
    return {"data": kinds.pop(), "data.path": names[0] if len(names) == 1 else names}


def pg_variant(value: Any, values: Values, _: str) -> dict[str, Any]:
    if value == "topr":
        weights = {end: values.get(f"actor_train.topr_{end}_weight", 1.0) for end in ("positive", "negative")}
        return {"algo.rl_loss_coef": 0.0} | {f"algo.topr.{end}_loss_coef": it for end, it in weights.items()}
    surrogates = {"ppo": "clip", "vanilla": "logprob", "cispo": "cispo"}
    return {"algo.surrogate": surrogates[value]}


def lora_layers(value: Any, _: Values, __: str) -> dict[str, Any]:
    layers = {"attention": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
    names = set().union(*layers.values()) if value == "all-linear" else set(str(value).replace(" ", "").split(","))
    chosen = [layer for layer, own in layers.items() if own <= names]
    if names != set().union(*(layers[layer] for layer in chosen)):
        raise ValueError(f"adapters are on all matrices of a layer: {value} found")
    return {"policy.lora.layers": chosen}
