"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it (names.yaml, roll_file).

What the file leaves out has ROLL's default. Nothing comes from the tiny task or from a preset that the file does not
say. tools/import_roll.py is the command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megarl.config.checks.keys import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.names import ALIASES, read_names
from megarl.config.roll import Value, resolve_aliases
from megarl.config.schema.root import Config
from megarl.config.schema.task import RewardConfig
from megarl.config.search_path import CONF_DIR

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
"""Most values of a file, those behind aliases and interpolations counted wherever they appear."""
MAX_DEPTH = 8
"""Longest chain of interpolations that is followed."""
MAX_TEXT = 10_000
"""Longest text that interpolations may grow to."""
OTHER_PIPELINES = {
    **{"custom_envs": "agentic", "train_env_manager": "agentic", "sft_train": "SFT"},
    **{"student_train": "distillation", "student": "distillation", "chosen_key": "DPO"},
}
"""Keys that only another pipeline's files have."""
DEFAULT = "ROLL's default"
LEARNED_KINDS = ("data", "reward", "objective", "model")
GROUPS = ("model", "cluster", "algo", "data", "reward")
TRAINED = {"actor_train": "policy", "critic": "critic"}
ROLES = {**TRAINED, "reference": "reference"}
STRATEGY = "strategy_args.strategy_config"
TEMPLATES = ("native", "qwen2_5", "qwen3")
"""ROLL's templates that are the tokenizer's own; qwen3 switches thinking on, which is Qwen3's default."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
DECAYS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_TABLE = read_names()["roll_file"]
DEFAULTS: Mapping[str, Any] = _TABLE["defaults"]
TRAINING_DEFAULTS: Mapping[str, Any] = _TABLE["training_defaults"]
_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
_PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
_WORKERS = (None, "roll.pipeline.rlvr.actor_worker.ActorWorker", _PG_WORKER)
_WEIGHT = "train_infer_correction.is_weight"
_OFF: tuple[Any, ...] = (None, False, 0, "", "disable", "disabled", [], {}, ["_self_"])

Leaves = Mapping[str, Any]


@dataclass(frozen=True)
class RollFile:
    leaves: dict[str, Any]
    """By dotted key; lists are values."""
    unresolved: dict[str, str]
    """By dotted key: an interpolation that leads nowhere in the file."""
    variables: frozenset[str]
    """Keys at the top that other values refer to."""


@dataclass(frozen=True)
class Conversion:
    """What a key becomes."""

    overrides: dict[str, str] = field(default_factory=dict)
    note: str = ""
    lost: str = ""
    """what of what is learned is lost with it: data, reward, objective or model; "" for nothing"""


@dataclass(frozen=True)
class Outcome:
    """What became of a key."""

    key: str
    found: str
    verdict: str
    """kept, renamed, nothing here, no effect, not resolved, not known, or ROLL's default"""
    overrides: dict[str, str] = field(default_factory=dict)
    note: str = ""
    lost: str = ""
    """as Conversion.lost"""

    def __str__(self) -> str:
        to = " ".join(f"{key}={text}" for key, text in self.overrides.items())
        note = f" ({self.note})" if self.note else ""
        lost = f"  LOST: {self.lost}" if self.lost else ""
        return f"{self.key}: {self.found}  {self.verdict}" + (f" -> {to}" if to else "") + note + lost


def _expand(key: str) -> list[tuple[str, str]]:
    """(ROLL's key, our role) for each role that a key of the table stands for."""
    places = {"{trained}": [*TRAINED], "{role}": [*ROLES], "{process}": [*ROLES, "actor_infer"]}
    place = next((name for name in places if key.startswith(name)), "")
    key = key.replace(".strategy.", f".{STRATEGY}.")
    return [(key.replace(place, role), ROLES.get(role, "")) for role in places[place]] if place else [(key, "")]


RENAMED = {
    name: f"{role}.{ours}" if role else ours for key, ours in _TABLE["renamed"].items() for name, role in _expand(key)
}
_REASONS = {name: why for why, keys in _TABLE["nothing"].items() for key in keys for name, _ in _expand(key)}
_LEARNED = {name: kind for kind, keys in _TABLE["learned"].items() for key in keys for name, _ in _expand(key)}


def _find_longest(key: str, table: Mapping[str, str]) -> str | None:
    parts = key.split(".")
    prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


def to_text(value: Any) -> str:
    """A value as an override writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w./:@%+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# Reading.


def read_roll_file(path: Path) -> RollFile:
    """Raises ValueError, OSError or YAMLError for what is no file of the RLVR pipeline."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes found; a configuration has at most {MAX_BYTES}")
    text = path.read_text("utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ValueError("the file is empty; a configuration of ROLL's RLVR pipeline was expected")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("a mapping of ROLL's keys was expected")
        if _count(root, {}) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values found, with its aliases written out")
        # OmegaConf's loader is YAML's safe one, with the numbers that ROLL reads (1e-6).
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    assert isinstance(raw, dict)
    for key, pipeline in OTHER_PIPELINES.items():
        if raw.get(key) is not None:
            raise ValueError(f"{key} found: a file of ROLL's {pipeline} pipeline; those of RLVR are imported")
    if missing := [name for name in ("actor_train", "actor_infer") if not isinstance(raw.get(name), dict)]:
        found = ", ".join(str(key) for key in list(raw)[:8])
        raise ValueError(
            f"no configuration of ROLL's RLVR pipeline: {' and '.join(missing)}, with the keys of a role, not found;"
            f" found {found or 'nothing'}"
        )
    reader = _Reader(raw)
    leaves = dict(reader.walk(raw, "", 0))
    return RollFile(leaves, reader.unresolved, frozenset(name.split(".")[0] for name in _REFERENCE.findall(text)))


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Values below a node with every alias written out, without writing it out."""
    if counted.get(id(node)) == 0:
        raise ValueError("an alias stands for something that contains it")
    if id(node) not in counted:
        counted[id(node)] = 0
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        items = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in pairs for each in pair]
        counted[id(node)] = 1 + sum(_count(item, counted) for item in items)
    return counted[id(node)]


class _Reader:
    def __init__(self, raw: dict[Any, Any]) -> None:
        self._raw = raw
        self._budget = MAX_VALUES
        self.unresolved: dict[str, str] = {}

    def walk(self, tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        for name, child in tree.items():
            key = f"{prefix}{name}"
            try:
                value = child if isinstance(child, dict) else self._resolve(child, depth)
            except LookupError:
                self.unresolved[key] = str(child)
                continue
            if isinstance(value, dict) and value:
                yield from self.walk(value, f"{key}.", depth + (value is not child))
            else:
                yield key, value

    def _resolve(self, value: Any, depth: int) -> Any:
        """The value with its interpolations replaced. Raises LookupError where one leads nowhere."""
        self._budget -= 1
        if self._budget < 0:
            raise ValueError(f"more than {MAX_VALUES} values found, with its interpolations written out")
        if isinstance(value, list):
            return [self._resolve(item, depth) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth == MAX_DEPTH:
            raise LookupError(value)
        if whole := _REFERENCE.fullmatch(value):
            return self._resolve(self._select(whole.group(1)), depth + 1)
        text = _REFERENCE.sub(lambda match: self._to_text(match.group(1), depth + 1), value)
        if "${" in text or len(text) > MAX_TEXT:
            raise LookupError(value)
        return text

    def _to_text(self, name: str, depth: int) -> str:
        value = self._resolve(self._select(name), depth)
        if isinstance(value, dict | list):
            raise LookupError(name)
        return str(value)

    def _select(self, name: str) -> Any:
        value: Any = self._raw
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise LookupError(name)
            value = value[part]
        return value


# What a key becomes that depends on its value or on other keys: each handler takes the value, the whole file and, where
# there is one, ROLL's role.


def read_number(leaves: Leaves, key: str, default: Any) -> float:
    """Raises ValueError that names the key where it holds no number."""
    value = leaves.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}: found {value!r}; must be a number")
    return value


def _read_group(leaves: Leaves) -> int:
    return int(read_number(leaves, "num_return_sequences_in_group", 1))


def _has_critic(leaves: Leaves) -> bool:
    return bool(leaves.get("adv_estimator", DEFAULTS["adv_estimator"]) == "gae")


def _count_devices(mapping: Any) -> int:
    """Of ROLL's device_mapping, `list(range(0,8)) + [8, 9]` or a list; 1 where it is neither."""
    if isinstance(mapping, list):
        return max(1, len(mapping))
    ranges = re.findall(r"range\(\s*(\d+)\s*,\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)", str(mapping))
    number = sum(len(range(int(low), int(high), int(step or 1) or 1)) for low, high, step in ranges)
    return max(1, number + sum(len(re.findall(r"\d+", each)) for each in re.findall(r"\[([\d,\s]*)\]", str(mapping))))


def _count_minibatch(role: str, leaves: Leaves) -> int:
    """Samples of an optimizer step: per device x accumulation x data-parallel ranks."""
    split = read_number(leaves, f"{role}.model_args.ulysses_size", 1)
    for name in ("tensor_model", "pipeline_model", "context"):
        split *= read_number(leaves, f"{role}.{STRATEGY}.{name}_parallel_size", 1)
    ranks = max(1, _count_devices(leaves.get(f"{role}.device_mapping")) // max(1, int(split)))
    per_device, steps = (
        read_number(leaves, f"{role}.training_args.{name}", TRAINING_DEFAULTS[name])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    return int(per_device) * int(steps) * ranks


def _list_domains(leaves: Leaves) -> dict[str, float]:
    """ROLL's domains by their share of the prompts; those of `rewards` where no shares are given."""
    prefix = "actor_train.data_args.domain_interleave_probs."
    shares = {key.removeprefix(prefix): value for key, value in leaves.items() if key.startswith(prefix)}
    domains = {key.split(".")[1]: 1.0 for key in leaves if key.startswith("rewards.") and key.count(".") > 1}
    return {name: float(value) for name, value in shares.items() if isinstance(value, int | float)} or domains


def _list_math_domains(leaves: Leaves) -> list[str]:
    """The domains whose reward is reward=math here."""
    workers = {name: str(leaves.get(f"rewards.{name}.worker_cls")) for name in _list_domains(leaves)}
    return [name for name, worker in workers.items() if worker.endswith(".MathRuleRewardWorker")]


def _find_variant(leaves: Leaves) -> str:
    """Which policy loss ROLL computes: ppo, or the pg_variant of its ActorPGWorker."""
    is_pg = leaves.get("actor_train.worker_cls") == _PG_WORKER
    return str(leaves.get("actor_train.pg_variant")) if is_pg else "ppo"


def _convert_model(value: Any, leaves: Leaves) -> Conversion:
    roles = ("actor_train", "actor_infer", "reference")
    names = [leaves.get(f"{role}.model_args.model_name_or_path") for role in roles]
    policy = names[0] if all(names) else value
    if policy is None:
        return Conversion(note="model.path=DIRECTORY_OR_NAME is needed", lost="model")
    if all(names) and len(set(names)) > 1:
        note = "actor_train, actor_infer and reference have different models; here all start from one"
        return Conversion({"model.path": to_text(policy)}, note, "model")
    return Conversion({"model.path": to_text(policy)})


def _convert_critic(value: Any, leaves: Leaves) -> Conversion:
    if not _has_critic(leaves):
        return Conversion(note="of a rule-based reward ROLL takes its tokenizer alone")
    path = leaves.get("critic.model_args.model_name_or_path") or value
    if path is None or path == leaves.get("pretrain"):
        return Conversion(note="the critic starts from the policy's weights, with a new value head")
    return Conversion({"critic.init": to_text(path)})


def _convert_reward(domain: str, value: Any, leaves: Leaves) -> Conversion:
    """rewards.DOMAIN.worker_cls."""
    shares = _list_domains(leaves)
    if domain not in shares:
        return Conversion(note="no prompts are drawn for it (domain_interleave_probs)")
    if domain in _list_math_domains(leaves):
        return Conversion({"reward": "math"}, "by math-verify, 1 or 0, as in ROLL")
    share = f" for {shares[domain] / sum(shares.values()):.0%} of the prompts" if sum(shares.values()) > 0 else ""
    note = f"there is no {str(value).rsplit('.', 1)[-1]} here{share}; write it as a function: reward=function"
    return Conversion(note=f"{note} reward.path=package.module:callable", lost="reward")


def _is_all_or_nothing(leaves: Leaves, low: float, high: float) -> bool:
    """Whether means outside of (low, high) are exactly those of groups of K that are all right or all wrong."""
    group = _read_group(leaves)
    return 0 <= low < 1 / group and 1 - 1 / group < high <= 1


def _convert_filter(domain: str, value: Any, leaves: Leaves) -> Conversion:
    """rewards.DOMAIN.query_filter_config.type: groups that are replaced by those of further prompts."""
    if value in (None, "no_filter") or domain not in _list_domains(leaves):
        return Conversion(note="nothing is filtered")
    prefix = f"rewards.{domain}.query_filter_config.filter_args."
    if value == "mean_filter":
        low, high = read_number(leaves, f"{prefix}threshold_down", -1), read_number(leaves, f"{prefix}threshold_up", 2)
        same = _is_all_or_nothing(leaves, low, high)
    else:
        # The standard deviation of ROLL, over n - 1, of one right response among K is 1 / sqrt(K).
        same = 0 <= read_number(leaves, f"{prefix}std_threshold", -1) < 1 / sqrt(_read_group(leaves))
    if same and domain in _list_math_domains(leaves):
        note = "of rewards 0 and 1, exactly the groups that are all right or all wrong"
        return Conversion({"algo.dynamic_sampling.enabled": "true"}, note)
    return Conversion(note="algo.dynamic_sampling replaces groups that are all right or all wrong alone", lost="data")


def _convert_difficulty_mask(value: Any, leaves: Leaves) -> Conversion:
    if not value or _read_group(leaves) < 2:
        return Conversion(note="nothing is masked")
    low, high = (
        read_number(leaves, f"difficulty_{name}_threshold", default) for name, default in (("low", 0.0), ("high", 1.0))
    )
    if _is_all_or_nothing(leaves, low, high) and _list_math_domains(leaves):
        note = "of rewards 0 and 1 it masks exactly the groups that are all right or all wrong, which are replaced here"
        return Conversion({"algo.dynamic_sampling.enabled": "true"}, note)
    note = "rewards it masks more than algo.dynamic_sampling replaces: groups all right or all wrong"
    return Conversion(note=f"of {_read_group(leaves)} {note}", lost="objective")


def _convert_files(value: Any, leaves: Leaves) -> Conversion:
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    readable = [name for name in names if name.endswith((".jsonl", ".parquet"))]
    math = _list_math_domains(leaves)
    others = [name for name in _list_domains(leaves) if name not in math]
    if not readable:
        found = ", ".join(names) or "nothing"
        return Conversion({"data": "jsonl"}, f"{found}: give data=jsonl or parquet data.path=FILE", "data")
    words = {name.split("_")[0].lower() for name in math}
    named = [name for name in readable if set(re.findall(r"[a-z]+", name.rsplit("/", 1)[-1].lower())) & words]
    kept = readable[0] if len(names) == 1 else (named or readable)[0]
    overrides = {"data": kept.rsplit(".", 1)[1], "data.path": to_text(kept)}
    if len(names) == 1:
        note = f"its rows of {', '.join(others)} have to be taken out"
        return Conversion(overrides, note, "data") if others else Conversion(overrides)
    note = f"one file is read; left out: {', '.join(name for name in names if name != kept)}"
    return Conversion(overrides, note if others else f"{note} (join them: cat FILES > train.jsonl)", "data")


def _convert_prompts(value: Any, leaves: Leaves, *, chat: bool) -> Conversion:
    if value is None:
        return Conversion(note="not given")
    if "data.path" not in _convert_files(leaves.get("actor_train.data_args.file_name"), leaves).overrides:
        return Conversion(note="data.prompt_field, of one file")
    fields = {"data.prompt_field": to_text(value)}
    if _list_math_domains(leaves):
        fields["data.answer_field"] = "ground_truth"  # what ROLL's MathRuleRewardWorker reads
    return Conversion(fields if chat else fields | {"data.chat_template": "false"}, "" if chat else "as it is")


def _convert_template(value: Any, leaves: Leaves) -> Conversion:
    if (leaves.get("global_template") or value) in TEMPLATES:
        return Conversion(note="the tokenizer's own, which data.chat_template uses")
    return Conversion(note="data.chat_template uses the tokenizer's own", lost="data")


def _convert_heldout_files(value: Any, leaves: Leaves) -> Conversion:
    names = value if isinstance(value, list) else [value]
    kind = _convert_files(leaves.get("actor_train.data_args.file_name"), leaves).overrides.get("data")
    if len(names) == 1 and kind and str(names[0]).endswith(f".{kind}"):
        return Conversion({"data.heldout_path": to_text(names[0])})
    return Conversion(note="data.heldout_path, of one file of the kind of data.path")


def _convert_worker(value: Any, leaves: Leaves) -> Conversion:
    if value not in _WORKERS:
        return Conversion(note="its loss is not known", lost="objective")
    if value == _PG_WORKER and leaves.get("actor_train.pg_variant") is None:
        return Conversion(note="it needs a pg_variant, in ROLL too", lost="objective")
    return Conversion(note="actor_train.pg_variant says which loss" if value == _PG_WORKER else "algo.surrogate=clip")


def _convert_variant(value: Any, leaves: Leaves) -> Conversion:
    if leaves.get("actor_train.worker_cls") != _PG_WORKER:
        return Conversion(note="ROLL reads it only with worker_cls=...ActorPGWorker")
    if value == "topr":
        return _convert_topr(leaves)
    known = {"ppo": ("clip", ""), "vanilla": ("logprob", "-A log pi")}
    if value in known:
        return Conversion({"algo.surrogate": known[value][0]}, known[value][1])
    note = f"there is no loss {value} here; algo.surrogate names one of your own"
    if value == "cispo":
        note = "algo.surrogate=cispo, algo.clip_low and algo.clip_high are to be set by hand: not converted"
    return Conversion(note=note, lost="objective")


def _convert_topr(leaves: Leaves) -> Conversion:
    """ROLL: positive is a score above 0 instead of A >= 0, and the ratio is that of each token."""
    overrides = {"algo.rl_loss_coef": "0.0"}
    for name in ("positive", "negative"):
        weight = read_number(leaves, f"actor_train.topr_{name}_weight", 1.0) * read_number(leaves, "rl_loss_coef", 1.0)
        overrides[f"algo.topr.{name}_loss_coef"] = f"{weight:g}"
        if name == "negative" and weight:
            overrides["algo.topr.ratio_level"] = "token"
    # With rewards 0 and 1, one for all tokens of a response, the reward 1 has A >= 0 and the reward 0 has A <= 0
    # wherever one mean is subtracted; one mean a group, and then another over the batch, may turn the sign.
    scopes = (leaves.get("norm_mean_type"), leaves.get("reward_norm"))
    grouped = leaves.get("adv_estimator") == "grpo" or "group" in scopes
    if _has_critic(leaves) or leaves.get("add_token_level_kl"):
        return Conversion(overrides, "ROLL splits by score > 0, the sign of A is another thing here", "objective")
    if grouped and leaves.get("whiten_advantages"):
        note = "ROLL splits by score > 0; whitened advantages of a group of equal rewards may have the other sign"
        return Conversion(overrides, note, "objective")
    if not _list_math_domains(leaves):
        note = "ROLL splits by score > 0, which A >= 0 follows for rewards 0 and 1 alone"
        return Conversion(overrides, note, "objective")
    return Conversion(overrides, "ROLL's score > 0 is A >= 0 with rewards 0 and 1")


def _convert_loss_coef(value: Any, leaves: Leaves) -> Conversion:
    if _find_variant(leaves) == "topr":
        return Conversion(note="in the weights of algo.topr")
    return Conversion({"algo.rl_loss_coef": to_text(value)})


def _convert_async_ratio(value: Any, leaves: Leaves) -> Conversion:
    """async_generation_ratio: responses are sampled ahead of the update, by older weights."""
    if not value:
        return Conversion(note="rollout and update alternate")
    overrides = {"rollout.max_staleness": str(ceil(read_number(leaves, "async_generation_ratio", 0)))}
    if leaves.get(f"{_WEIGHT}.enabled") or _find_variant(leaves) == "topr":
        return Conversion(overrides, "responses are generated ahead")
    note = "ROLL does not correct for the policy that sampled; here older samples are weighted by the ratio to it"
    return Conversion(overrides | {"algo.mismatch.correction": "tis"}, note, "objective")


def _convert_importance_weight(value: Any, leaves: Leaves) -> Conversion:
    """train_infer_correction.is_weight.enabled."""
    if not value:
        return Conversion(note="off, as here")
    level, high = leaves.get(f"{_WEIGHT}.weight_type", "token"), leaves.get(f"{_WEIGHT}.upper_bound", 1.2)
    if level not in ("token", "geometric", "sequence") or high is None or _find_variant(leaves) == "topr":
        return Conversion(note="algo.mismatch has no such weight", lost="objective")
    overrides = {"algo.mismatch.correction": "tis", "algo.mismatch.level": level, "algo.mismatch.high": to_text(high)}
    return Conversion(overrides, "the ratio, bounded from above")


def _convert_importance_filters(value: Any, _: Leaves) -> Conversion:
    if not any(isinstance(each, dict) and each.get("enabled") for each in value or ()):
        return Conversion(note="none is enabled")
    return Conversion(note="algo.mismatch.correction rejects by one ratio and weights by it", lost="objective")


def _convert_update_frequency(value: Any, _: Leaves) -> Conversion:
    lost = "" if value in (None, 1) else "objective"
    return Conversion(note="the servers have the new weights after every update", lost=lost)


def _convert_moe_aux_loss(value: Any, _: Leaves) -> Conversion:
    if not value:
        return Conversion(note="off, as here")
    return Conversion({"model.megatron.moe_aux_loss_coeff": to_text(value)})


def _convert_response_length(value: Any, leaves: Leaves) -> Conversion:
    whole = leaves.get("sequence_length")
    if whole is None:
        return Conversion({"rollout.response_length": to_text(value)})
    left = int(whole) - int(read_number(leaves, "prompt_length", DEFAULTS["prompt_length"]))
    return Conversion({"rollout.response_length": str(left)}, "sequence_length minus prompt_length")


def _convert_servers(value: Any, leaves: Leaves) -> Conversion:
    each = int(read_number(leaves, f"actor_infer.{STRATEGY}.tensor_parallel_size", 1))
    overrides = {"rollout.num_servers": str(max(1, _count_devices(value) // max(1, each)))}
    if each > 1:
        return Conversion(overrides | {"rollout.tp": str(each)}, f"{each} devices per server")
    return Conversion(overrides, "one server per device")


def _convert_minibatch(value: Any, leaves: Leaves, role: str) -> Conversion:
    if role == "critic" and not _has_critic(leaves):
        return Conversion(note="there is no critic")
    policy = _count_minibatch("actor_train", leaves)
    if role == "actor_train":
        note = "times accumulation steps and data-parallel ranks"
        return Conversion({"train.samples_per_minibatch": str(policy)}, note)
    critic = _count_minibatch("critic", leaves)
    if policy == critic:
        return Conversion(note="the critic has the policy's minibatches")
    note = f"the critic's minibatch has {critic} samples and the policy's {policy}"
    return Conversion(note=f"{note}; both have train.samples_per_minibatch", lost="objective")


def _convert_devices(value: Any, _: Leaves, role: str) -> Conversion:
    return Conversion({f"{ROLES[role]}.parallel.num_processes": str(_count_devices(value))}, "one process per device")


def _convert_sequence_parallel(value: Any, leaves: Leaves, role: str) -> Conversion:
    if value and (leaves.get(f"{role}.{STRATEGY}.tensor_model_parallel_size") or 1) == 1:
        return Conversion(note="without effect at tensor_model_parallel_size=1")
    return Conversion({f"{ROLES[role]}.parallel.sp": to_text(value)})


def _convert_recompute(value: Any, leaves: Leaves, role: str) -> Conversion:
    modules = str(leaves.get(f"{role}.{STRATEGY}.recompute_modules") or "core_attn").split(",")
    if value == "selective" and modules != ["core_attn"]:
        return Conversion({f"{ROLES[role]}.recompute": "full"}, f"in place of {', '.join(modules)} alone")
    return Conversion({f"{ROLES[role]}.recompute": to_text(value or "none")})


def _convert_moe_recompute(value: Any, leaves: Leaves, role: str) -> Conversion:
    if not value or leaves.get(f"{role}.{STRATEGY}.recompute_granularity"):
        return Conversion(note="recompute_granularity decides")
    return Conversion({f"{ROLES[role]}.recompute": "full"}, "in place of the experts' layers alone")


def _convert_strategy(value: Any, leaves: Leaves, role: str) -> Conversion:
    note = "Megatron trains and scores"
    if value == "fsdp2_train" and not leaves.get(f"{role}.model_args.disable_gradient_checkpointing"):
        return Conversion({f"{ROLES[role]}.recompute": "full"}, f"{note}; disable_gradient_checkpointing is false")
    return Conversion(note=note)


def _convert_dtype(value: Any, _: Leaves, role: str) -> Conversion:
    target = f"{ROLES.get(role, 'rollout')}.dtype"
    return (
        Conversion({target: DTYPES[value]}) if value in DTYPES else Conversion(note=f"{target} is bfloat16 or float32")
    )


def _convert_schedule(value: Any, leaves: Leaves, role: str) -> Conversion:
    if value not in DECAYS:
        return Conversion(note=f"the choices are {', '.join(DECAYS)}", lost="objective")
    decay, key = DECAYS[value], f"{ROLES[role]}.optimizer"
    iterations = "null" if decay == "constant" else str(leaves.get("max_steps", DEFAULTS["max_steps"]))
    found = {f"{key}.decay": decay, f"{key}.decay_iterations": iterations, f"{key}.min_lr": "0.0"}
    return Conversion(found, "to 0 over the iterations of the run" if decay != "constant" else "")


def _convert_warmup_ratio(value: Any, leaves: Leaves, role: str) -> Conversion:
    if not value or leaves.get(f"{role}.training_args.warmup_steps"):
        return Conversion(note="ROLL reads warmup_steps where it is above 0")
    samples = 1.0
    for name in ("max_steps", "rollout_batch_size", "num_return_sequences_in_group", "ppo_epochs"):
        samples *= read_number(leaves, name, DEFAULTS[name])
    steps = ceil(samples // _count_minibatch(role, leaves) * float(value))
    return Conversion({f"{ROLES[role]}.optimizer.warmup_steps": str(steps)}, "of all optimizer steps")


Handler = Callable[[Any, Leaves], Conversion]
"""From a value and the whole file."""
_OF_A_ROLE: tuple[tuple[str, Sequence[str], Callable[..., Conversion]], ...] = (
    ("training_args.per_device_train_batch_size", [*TRAINED], _convert_minibatch),
    ("training_args.lr_scheduler_type", [*TRAINED], _convert_schedule),
    ("training_args.warmup_ratio", [*TRAINED], _convert_warmup_ratio),
    ("strategy_args.strategy_name", [*TRAINED], _convert_strategy),
    (f"{STRATEGY}.recompute_granularity", [*TRAINED], _convert_recompute),
    (f"{STRATEGY}.moe_layer_recompute", [*TRAINED], _convert_moe_recompute),
    (f"{STRATEGY}.sequence_parallel", [*ROLES], _convert_sequence_parallel),
    ("device_mapping", [*ROLES], _convert_devices),
    ("model_args.dtype", [*ROLES, "actor_infer"], _convert_dtype),
)
_NOTES = {
    **dict.fromkeys(("difficulty_low_threshold", "difficulty_high_threshold"), "of difficulty_mask"),
    "error_max_len_threshold": "of error_max_len_clip",
    **{f"{role}.training_args.gradient_accumulation_steps": "in train.samples_per_minibatch" for role in TRAINED},
}
HANDLERS: Mapping[str, Handler] = {
    "pretrain": _convert_model,
    "reward_pretrain": _convert_critic,
    "response_length": _convert_response_length,
    "sequence_length": _convert_response_length,
    "rl_loss_coef": _convert_loss_coef,
    "difficulty_mask": _convert_difficulty_mask,
    "async_generation_ratio": _convert_async_ratio,
    "train_infer_correction.is_weight.enabled": _convert_importance_weight,
    "train_infer_correction.filters": _convert_importance_filters,
    "actor_infer.device_mapping": _convert_servers,
    "actor_train.worker_cls": _convert_worker,
    "actor_train.model_update_frequency": _convert_update_frequency,
    "actor_train.pg_variant": _convert_variant,
    "actor_train.data_args.file_name": _convert_files,
    "actor_train.data_args.messages": partial(_convert_prompts, chat=True),
    "actor_train.data_args.prompt": partial(_convert_prompts, chat=False),
    "actor_train.data_args.template": _convert_template,
    "global_template": _convert_template,
    "validation.data_args.file_name": _convert_heldout_files,
    f"actor_train.{STRATEGY}.moe_aux_loss_coeff": _convert_moe_aux_loss,
    **{key: partial(lambda note, *_: Conversion(note=note), note) for key, note in _NOTES.items()},
    **{f"{role}.{name}": partial(convert, role=role) for name, roles, convert in _OF_A_ROLE for role in roles},
}


# The whole file.


def import_roll(file: RollFile) -> tuple[list[Outcome], list[str]]:
    """What became of every key, and what keeps the overrides from loading."""
    leaves = file.leaves
    estimator = str(leaves.get("adv_estimator", DEFAULTS["adv_estimator"]))
    variant = _find_variant(leaves)
    preset = variant if variant == "topr" else _TABLE["presets"].get(estimator, "ppo")
    base = {"model": "checkpoint", "cluster": "gpu", "algo": preset}
    outcomes = [Outcome("adv_estimator", estimator, "the presets below it", base)]
    outcomes += _import_aliases(leaves)
    outcomes += [
        _import_key(key, value, file) for key, value in leaves.items() if key not in ALIASES or key in HANDLERS
    ]
    outcomes += [
        Outcome(key, text, "not resolved", {}, "an interpolation", "objective" if key in ALIASES else _find_kind(key))
        for key, text in file.unresolved.items()
    ]
    outcomes += _find_missing(file)
    outcomes += _import_defaults(file, list_overrides(outcomes))
    outcomes += _undo_preset(preset, list_overrides(outcomes))
    try:
        config = compose_config(_list_texts(outcomes))
        outcomes = list(_drop_unused(outcomes, dict(find_unused(config, list_overrides(outcomes)))))
        load_config(_list_texts(outcomes))
    except ConfigError as error:
        return outcomes, list(error.problems)
    return outcomes, []


def list_overrides(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Our key -> text of its value."""
    return {key: text for outcome in outcomes for key, text in outcome.overrides.items()}


def list_losses(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """data, reward, objective, model -> ROLL's keys that are lost."""
    lost = {kind: [each.key for each in outcomes if each.lost == kind] for kind in LEARNED_KINDS}
    return {kind: keys for kind, keys in lost.items() if keys}


def _list_texts(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{key}={text}" for key, text in list_overrides(outcomes).items()]


def _find_kind(key: str) -> str:
    """What of what is learned a key decides: data, reward, objective or model; "" for none."""
    return _find_longest(key, _LEARNED) or ""


def _import_aliases(leaves: Leaves) -> list[Outcome]:
    """The names that are accepted on the command line, too; one that ROLL does not read beside another is left out."""
    left_out = dict(_find_ignored(leaves))
    outcomes = [Outcome(key, to_text(leaves[key]), "nothing here", note=why) for key, why in left_out.items()]
    given = {key: leaves[key] for key in leaves if key in ALIASES and key not in HANDLERS and key not in left_out}
    while True:
        try:
            rewritings = resolve_aliases({key: Value(to_text(value), value) for key, value in given.items()})
            break
        except ConfigError as error:
            for problem in error.problems:
                key, _, why = problem.partition(": ")
                if key in given:
                    lost = "objective" if ALIASES[key].is_read else ""
                    outcomes.append(Outcome(key, to_text(given.pop(key)), "nothing here", {}, why, lost))
    for each in rewritings:
        found = ", ".join(to_text(given[key]) for key in each.names)
        same = all(key.endswith(f".{each.names[0]}") for key in each.assignments)
        verdict = "kept" if same else "renamed"
        outcomes.append(Outcome(", ".join(each.names), found, verdict, dict(each.assignments), each.text))
    return outcomes


def _find_ignored(leaves: Leaves) -> Iterator[tuple[str, str]]:
    """Keys that ROLL itself does not read beside another one."""
    if "loss_agg_mode" in leaves and "token_level_loss" in leaves:
        yield "token_level_loss", "ROLL reads loss_agg_mode instead"
    if not leaves.get("use_pg_clip_range"):
        for key in {"pg_clip_low", "pg_clip_high"} & set(leaves):
            yield key, "ROLL reads it only with use_pg_clip_range=true"
    elif "pg_clip" in leaves and not leaves.get("dual_clip_loss"):
        yield "pg_clip", "ROLL reads pg_clip_low and pg_clip_high instead"
    if leaves.get("adv_estimator") == "grpo":
        for key in ("reward_norm", "norm_mean_type", "norm_std_type"):
            if key in leaves and leaves[key] != "group":
                yield key, "ROLL normalises by the group under adv_estimator=grpo, whatever is given"
    if "importance_sampling" in leaves and _find_variant(leaves) != "ppo":
        yield "importance_sampling", "ROLL reads it only without a pg_variant"


def _import_key(key: str, value: Any, file: RollFile) -> Outcome:
    found = to_text(value)
    try:
        conversion = _convert(key, value, file)
    except (ValueError, TypeError, ArithmeticError) as error:
        conversion = Conversion(note=str(error), lost="objective")
    if conversion is not None:
        verdict = "kept" if list(conversion.overrides) == [key] else "renamed"
        verdict = verdict if conversion.overrides else "nothing here"
        return Outcome(key, found, verdict, conversion.overrides, conversion.note, conversion.lost)
    if (why := _find_longest(key, _REASONS)) is not None:
        asked = any(key == name or key.startswith(f"{name}.") for name in _TABLE["asked"]) and value not in _OFF
        return Outcome(key, found, "nothing here", {}, why, _find_kind(key) if asked else "")
    if key.split(".")[0] in file.variables:
        return Outcome(key, found, "nothing here", note="other values refer to it")
    return Outcome(key, found, "not known", note="no key of ROLL's at the commit read", lost="objective")


def _convert(key: str, value: Any, file: RollFile) -> Conversion | None:
    """What a key becomes; None where it has no counterpart."""
    role, _, rest = key.partition(".")
    for ending, convert in ((".worker_cls", _convert_reward), (".query_filter_config.type", _convert_filter)):
        if role == "rewards" and rest.endswith(ending):
            return convert(rest.split(".")[0], value, file.leaves)
    if key in HANDLERS:
        return HANDLERS[key](value, file.leaves)
    if key not in RENAMED:
        return None
    if role in ROLES and value is None:
        return Conversion(note="off, as here")
    return Conversion({RENAMED[key]: to_text(value)})


def _find_missing(file: RollFile) -> Iterator[Outcome]:
    """What a run needs and the file does not say."""
    known = {**file.leaves, **file.unresolved}
    if "pretrain" not in known:
        yield Outcome("pretrain", "-", "not given", {}, "model.path=DIRECTORY_OR_NAME is needed", "model")
    if (key := "actor_train.data_args.file_name") not in known:
        yield Outcome(key, "-", "not given", {"data": "jsonl"}, "data.path=FILE is needed", "data")
    if not {"response_length", "sequence_length"} & set(known):
        yield Outcome("response_length", "-", "not given", {}, "needed in ROLL, too", "objective")
    if not _list_math_domains(file.leaves):
        # Never another reward in its place: without a path these overrides do not load.
        note = "reward.path=package.module:callable"
        yield Outcome("rewards", "-", "none here", {"reward": "function"}, note, "reward")


def _import_defaults(file: RollFile, given: Mapping[str, str]) -> Iterator[Outcome]:
    """What ROLL takes where the file is silent."""
    top = {key: value for key, value in DEFAULTS.items() if key not in file.leaves}
    aliases = {key: Value(to_text(value), value) for key, value in top.items() if key in ALIASES}
    found = [
        *(Outcome(each.names[0], "-", DEFAULT, each.assignments) for each in resolve_aliases(aliases)),
        *(Outcome(key, "-", DEFAULT, {RENAMED[key]: to_text(top[key])}) for key in top if key not in ALIASES),
    ]
    for key, value in ((f"{role}.training_args.{k}", v) for role in TRAINED for k, v in TRAINING_DEFAULTS.items()):
        if key not in file.leaves:
            found.append(replace(_import_key(key, value, file), found="-", verdict=DEFAULT))
    for outcome in found:
        yield replace(outcome, overrides={k: text for k, text in outcome.overrides.items() if k not in given})


def _undo_preset(name: str, given: Mapping[str, str]) -> Iterator[Outcome]:
    """The schema's default of every key that the preset of the algorithm sets and ROLL's file and defaults do not."""
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "algo" / f"{name}.yaml"))
    assert isinstance(tree, dict)
    for key in _list_keys(tree, ""):
        if key not in given and key not in ("algo.name", "defaults"):
            value: Any = Config(reward=RewardConfig())
            for part in key.split("."):
                value = getattr(value, part)
            text = to_text(value.name if isinstance(value, Enum) else value)
            yield Outcome(key, "-", DEFAULT, {key: text}, f"not the one of algo={name}")


def _list_keys(tree: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from _list_keys(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _drop_unused(outcomes: Sequence[Outcome], unused: Mapping[str, str]) -> Iterator[Outcome]:
    for outcome in outcomes:
        dead = [key for key in outcome.overrides if key in unused]
        kept = {key: text for key, text in outcome.overrides.items() if key not in unused}
        if dead and not kept and outcome.verdict != DEFAULT:
            yield replace(outcome, verdict="no effect", overrides={}, note=f"{dead[0]} {unused[dead[0]]}")
        elif kept or outcome.lost or outcome.verdict != DEFAULT:
            yield replace(outcome, overrides=kept)


def write_experiment(path: Path, overrides: Mapping[str, str], source: str) -> None:
    """The overrides as an option of the group experiment; never over an existing file."""
    tree: dict[str, Any] = {}
    groups = [{f"override /{key}": text} for key, text in overrides.items() if key in GROUPS]
    for key, text in overrides.items():
        *parents, leaf = key.split(".")
        if not parents and leaf != "seed":
            continue
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        value = OverridesParser.create().parse_override(f"{leaf}={text}").value()
        node[leaf] = getattr(value, "text", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(f"# @package _global_\n# From ROLL's {source}, by tools/import_roll.py.\n")
        file.write(yaml.safe_dump({"defaults": groups, **tree}, sort_keys=False))


def summarize(outcomes: Sequence[Outcome], problems: Sequence[str], allow_loss: bool) -> str:
    """The last line: whether the overrides load, and what of what is learned is lost."""
    loads = f"{len(list_overrides(outcomes))} overrides, which {'do not load' if problems else 'load'}"
    lost = list_losses(outcomes)
    if not lost:
        return f"{loads}; nothing that is learned is lost"
    named = "; ".join(f"{kind} ({', '.join(keys)})" for kind, keys in lost.items())
    accepted = "accepted by --allow-loss" if allow_loss else "--allow-loss accepts it"
    return f"{loads}; LOST of what is learned: {named}; {accepted}"


def get_exit_code(outcomes: Sequence[Outcome], problems: Sequence[str], allow_loss: bool = False) -> int:
    return int(bool(problems) or (any(each.lost for each in outcomes) and not allow_loss))
