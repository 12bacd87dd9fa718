"""What is learned: ROLL's models, data, rewards and objective as overrides of ours."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any

from megarl.tools.roll_keys import ROLL_DEFAULTS, to_text

Leaves = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """What a key becomes."""

    overrides: dict[str, str] = field(default_factory=dict)
    note: str = ""
    lost: str = ""
    """what of what is learned is lost with it: data, reward, objective or model; "" for nothing"""


Handler = Callable[[Any, Leaves], Conversion]
"""From a value and the whole file."""

TEMPLATES = ("native", "qwen2_5", "qwen3")
"""ROLL's templates that are the tokenizer's own; qwen3 switches thinking on, which is Qwen3's default."""
_PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
_WORKERS = (None, "roll.pipeline.rlvr.actor_worker.ActorWorker", _PG_WORKER)
_WEIGHT = "train_infer_correction.is_weight"
_FUNCTION = "write it as a function: reward=function reward.path=package.module:callable"


def read_number(leaves: Leaves, key: str, default: Any) -> float:
    """Raises ValueError that names the key where it holds no number."""
    value = leaves.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}: found {value!r}; must be a number")
    return value


def get_estimator(leaves: Leaves) -> Any:
    return leaves.get("adv_estimator", ROLL_DEFAULTS["adv_estimator"])


# Model.


def convert_model(value: Any, leaves: Leaves) -> Conversion:
    names = [
        leaves.get(f"{role}.model_args.model_name_or_path") for role in ("actor_train", "actor_infer", "reference")
    ]
    policy = names[0] if all(names) else value
    if policy is None:
        return Conversion(note="model.path=DIRECTORY_OR_NAME is needed", lost="model")
    if all(names) and len(set(names)) > 1:
        note = "actor_train, actor_infer and reference have different models; here all start from one"
        return Conversion({"model.path": to_text(policy)}, note, "model")
    return Conversion({"model.path": to_text(policy)})


def convert_critic(value: Any, leaves: Leaves) -> Conversion:
    if get_estimator(leaves) != "gae":
        return Conversion(note="of a rule-based reward ROLL takes its tokenizer alone")
    path = leaves.get("critic.model_args.model_name_or_path") or value
    if path is None or path == leaves.get("pretrain"):
        return Conversion(note="the critic starts from the policy's weights, with a new value head")
    return Conversion({"critic.init": to_text(path)})


# Data and reward.


def list_domains(leaves: Leaves) -> dict[str, float]:
    """ROLL's domains by their share of the prompts; those of `rewards` where no shares are given."""
    prefix = "actor_train.data_args.domain_interleave_probs."
    shares = {key.removeprefix(prefix): value for key, value in leaves.items() if key.startswith(prefix)}
    domains = {key.split(".")[1]: 1.0 for key in leaves if key.startswith("rewards.") and key.count(".") > 1}
    return {name: float(value) for name, value in shares.items() if isinstance(value, int | float)} or domains


def list_math_domains(leaves: Leaves) -> list[str]:
    """The domains whose reward is reward=math here."""
    return [
        name
        for name in list_domains(leaves)
        if str(leaves.get(f"rewards.{name}.worker_cls")).endswith(".MathRuleRewardWorker")
    ]


def convert_reward(domain: str, value: Any, leaves: Leaves) -> Conversion:
    """rewards.DOMAIN.worker_cls."""
    shares = list_domains(leaves)
    if domain not in shares:
        return Conversion(note="no prompts are drawn for it (domain_interleave_probs)")
    if domain in list_math_domains(leaves):
        return Conversion({"reward": "math"}, "by math-verify, 1 or 0, as in ROLL")
    share = f" for {shares[domain] / sum(shares.values()):.0%} of the prompts" if sum(shares.values()) > 0 else ""
    name = str(value).rsplit(".", 1)[-1]
    return Conversion(note=f"there is no {name} here{share}; {_FUNCTION}", lost="reward")


def convert_filter(domain: str, value: Any, leaves: Leaves) -> Conversion:
    """rewards.DOMAIN.query_filter_config.type: groups that are replaced by those of further prompts."""
    if value in (None, "no_filter") or domain not in list_domains(leaves):
        return Conversion(note="nothing is filtered")
    group = int(read_number(leaves, "num_return_sequences_in_group", 1))
    prefix = f"rewards.{domain}.query_filter_config.filter_args."
    if value == "mean_filter":
        low, high = read_number(leaves, f"{prefix}threshold_down", -1), read_number(leaves, f"{prefix}threshold_up", 2)
        same = 0 <= low < 1 / group and 1 - 1 / group < high <= 1
    else:
        # The standard deviation of ROLL, over n - 1, of one right response among K is 1 / sqrt(K).
        same = 0 <= read_number(leaves, f"{prefix}std_threshold", -1) < 1 / sqrt(group)
    if same and domain in list_math_domains(leaves):
        return Conversion(
            {"algo.dynamic_sampling.enabled": "true"},
            "of rewards 0 and 1, exactly the groups that are all right or all wrong",
        )
    return Conversion(note="algo.dynamic_sampling replaces groups that are all right or all wrong alone", lost="data")


def convert_files(value: Any, leaves: Leaves) -> Conversion:
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    readable = [name for name in names if name.endswith((".jsonl", ".parquet"))]
    domains, math = list_domains(leaves), list_math_domains(leaves)
    others = [name for name in domains if name not in math]
    if not readable:
        found = ", ".join(names) or "nothing"
        return Conversion({"data": "jsonl"}, f"{found}: give data=jsonl or parquet data.path=FILE", "data")
    if len(names) == 1 and not others:
        return Conversion(_choose_file(readable[0]))
    if len(names) == 1:
        note = f"its rows of {', '.join(others)} have to be taken out"
        return Conversion(_choose_file(readable[0]), note, "data")
    words = {name.split("_")[0].lower() for name in math}
    named = [name for name in readable if set(re.findall(r"[a-z]+", name.rsplit("/", 1)[-1].lower())) & words]
    kept = (named or readable)[0]
    left = ", ".join(name for name in names if name != kept)
    note = f"one file is read; left out: {left}"
    if not others:
        note += " (join them: cat FILES > train.jsonl)"
    return Conversion(_choose_file(kept), note, "data")


def _choose_file(name: str) -> dict[str, str]:
    return {"data": name.rsplit(".", 1)[1], "data.path": to_text(name)}


def convert_prompts(chat: bool) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        if value is None:
            return Conversion(note="not given")
        if not convert_files(leaves.get("actor_train.data_args.file_name"), leaves).overrides.get("data.path"):
            return Conversion(note="data.prompt_field, of one file")
        fields = {"data.prompt_field": to_text(value)}
        if list_math_domains(leaves):
            fields["data.answer_field"] = "ground_truth"  # what ROLL's MathRuleRewardWorker reads
        return Conversion(fields if chat else fields | {"data.chat_template": "false"}, "" if chat else "as it is")

    return handle


def convert_template(value: Any, leaves: Leaves) -> Conversion:
    used = leaves.get("global_template") or value
    if used in TEMPLATES:
        return Conversion(note="the tokenizer's own, which data.chat_template uses")
    return Conversion(note="data.chat_template uses the tokenizer's own", lost="data")


def convert_heldout_files(value: Any, leaves: Leaves) -> Conversion:
    names = value if isinstance(value, list) else [value]
    kind = convert_files(leaves.get("actor_train.data_args.file_name"), leaves).overrides.get("data")
    if len(names) == 1 and kind and str(names[0]).endswith(f".{kind}"):
        return Conversion({"data.heldout_path": to_text(names[0])})
    return Conversion(note="data.heldout_path, of one file of the kind of data.path")


# Objective.


def find_variant(leaves: Leaves) -> str:
    """Which policy loss ROLL computes: ppo, or the pg_variant of its ActorPGWorker."""
    if leaves.get("actor_train.worker_cls") != _PG_WORKER:
        return "ppo"
    return str(leaves.get("actor_train.pg_variant"))


def convert_worker(value: Any, leaves: Leaves) -> Conversion:
    if value not in _WORKERS:
        return Conversion(note="its loss is not known", lost="objective")
    if value == _PG_WORKER and leaves.get("actor_train.pg_variant") is None:
        return Conversion(note="it needs a pg_variant, in ROLL too", lost="objective")
    return Conversion(note="actor_train.pg_variant says which loss" if value == _PG_WORKER else "algo.surrogate=clip")


def convert_variant(value: Any, leaves: Leaves) -> Conversion:
    if leaves.get("actor_train.worker_cls") != _PG_WORKER:
        return Conversion(note="ROLL reads it only with worker_cls=...ActorPGWorker")
    if value == "ppo":
        return Conversion({"algo.surrogate": "clip"})
    if value == "vanilla":
        return Conversion({"algo.surrogate": "logprob"}, "-A log pi")
    if value == "topr":
        return _topr(leaves)
    if value == "cispo":
        note = "algo.surrogate=cispo, algo.clip_low and algo.clip_high are to be set by hand: not converted"
        return Conversion(note=note, lost="objective")
    return Conversion(note=f"there is no loss {value} here; algo.surrogate names one of your own", lost="objective")


def _topr(leaves: Leaves) -> Conversion:
    """ROLL: positive is a score above 0 instead of A >= 0, and the ratio is that of each token."""
    scale = read_number(leaves, "rl_loss_coef", 1.0)
    positive, negative = (
        read_number(leaves, f"actor_train.topr_{name}_weight", 1.0) * scale for name in ("positive", "negative")
    )
    overrides = {
        "algo.rl_loss_coef": "0.0",
        "algo.topr.positive_loss_coef": f"{positive:g}",
        "algo.topr.negative_loss_coef": f"{negative:g}",
    }
    if negative:
        overrides["algo.topr.ratio_level"] = "token"
    # With rewards 0 and 1, one for all tokens of a response, the reward 1 has A >= 0 and the reward 0 has A <= 0
    # wherever one mean is subtracted; one mean a group, and then another over the batch, may turn the sign.
    grouped = get_estimator(leaves) == "grpo" or "group" in (leaves.get("norm_mean_type"), leaves.get("reward_norm"))
    if get_estimator(leaves) == "gae" or leaves.get("add_token_level_kl"):
        return Conversion(overrides, "ROLL splits by score > 0, the sign of A is another thing here", "objective")
    if grouped and leaves.get("whiten_advantages"):
        note = "ROLL splits by score > 0; whitened advantages of a group of equal rewards may have the other sign"
        return Conversion(overrides, note, "objective")
    if not list_math_domains(leaves):
        return Conversion(
            overrides, "ROLL splits by score > 0, which A >= 0 follows for rewards 0 and 1 alone", "objective"
        )
    return Conversion(overrides, "ROLL's score > 0 is A >= 0 with rewards 0 and 1")


def convert_loss_coef(value: Any, leaves: Leaves) -> Conversion:
    if find_variant(leaves) == "topr":
        return Conversion(note="in the weights of algo.topr")
    return Conversion({"algo.rl_loss_coef": to_text(value)})


def convert_difficulty_mask(value: Any, leaves: Leaves) -> Conversion:
    group = int(read_number(leaves, "num_return_sequences_in_group", 1))
    if not value or group < 2:
        return Conversion(note="nothing is masked")
    low = read_number(leaves, "difficulty_low_threshold", 0.0)
    high = read_number(leaves, "difficulty_high_threshold", 1.0)
    if 0 <= low < 1 / group and 1 - 1 / group < high <= 1 and list_math_domains(leaves):
        note = "of rewards 0 and 1 it masks exactly the groups that are all right or all wrong, which are replaced here"
        return Conversion({"algo.dynamic_sampling.enabled": "true"}, note)
    note = f"of {group} rewards it masks more than algo.dynamic_sampling replaces: groups all right or all wrong"
    return Conversion(note=note, lost="objective")


def convert_async_ratio(value: Any, leaves: Leaves) -> Conversion:
    """async_generation_ratio: responses are sampled ahead of the update, by older weights."""
    if not value:
        return Conversion(note="rollout and update alternate")
    overrides = {"rollout.max_staleness": str(ceil(read_number(leaves, "async_generation_ratio", 0)))}
    if leaves.get(f"{_WEIGHT}.enabled") or find_variant(leaves) == "topr":
        return Conversion(overrides, "responses are generated ahead")
    note = "ROLL does not correct for the policy that sampled; here older samples are weighted by the ratio to it"
    return Conversion(overrides | {"algo.mismatch.correction": "tis"}, note, "objective")


def convert_importance_weight(value: Any, leaves: Leaves) -> Conversion:
    """train_infer_correction.is_weight.enabled."""
    if not value:
        return Conversion(note="off, as here")
    level, high = leaves.get(f"{_WEIGHT}.weight_type", "token"), leaves.get(f"{_WEIGHT}.upper_bound", 1.2)
    if level not in ("token", "geometric", "sequence") or high is None or find_variant(leaves) == "topr":
        return Conversion(note="algo.mismatch has no such weight", lost="objective")
    overrides = {"algo.mismatch.correction": "tis", "algo.mismatch.level": level, "algo.mismatch.high": to_text(high)}
    return Conversion(overrides, "the ratio, bounded from above")


def convert_importance_filters(value: Any, _: Leaves) -> Conversion:
    enabled = [each for each in value or () if isinstance(each, dict) and each.get("enabled")]
    if not enabled:
        return Conversion(note="none is enabled")
    return Conversion(note="algo.mismatch.correction rejects by one ratio and weights by it", lost="objective")


def convert_moe_aux_loss(value: Any, _: Leaves) -> Conversion:
    if not value:
        return Conversion(note="off, as here")
    return Conversion({"model.megatron.moe_aux_loss_coeff": to_text(value)})


def convert_update_frequency(value: Any, _: Leaves) -> Conversion:
    """actor_train.model_update_frequency."""
    if value in (None, 1):
        return Conversion(note="the servers have the new weights after every update")
    return Conversion(note="the servers have the new weights after every update", lost="objective")
