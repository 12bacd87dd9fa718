"""ROLL's keys whose conversion depends on their value or on other keys of the file: sizes, layouts, schedules."""

import re
from math import ceil
from typing import Any

from megarl.tools.roll_keys import ROLES, ROLL_DEFAULTS, TRAINED, TRAINING_DEFAULTS, to_text
from megarl.tools.roll_learned import (
    Conversion,
    Handler,
    Leaves,
    convert_async_ratio,
    convert_critic,
    convert_difficulty_mask,
    convert_files,
    convert_heldout_files,
    convert_importance_filters,
    convert_importance_weight,
    convert_loss_coef,
    convert_model,
    convert_moe_aux_loss,
    convert_prompts,
    convert_template,
    convert_update_frequency,
    convert_variant,
    convert_worker,
    get_estimator,
    read_number,
)

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
DECAYS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_STRATEGY = "strategy_args.strategy_config"


def _count_devices(mapping: Any) -> int:
    """Of ROLL's device_mapping, `list(range(0,8)) + [8, 9]` or a list; 1 where it is neither."""
    if isinstance(mapping, list):
        return max(1, len(mapping))
    text, number = str(mapping), 0
    for low, high, step in re.findall(r"range\(\s*(\d+)\s*,\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)", text):
        number += len(range(int(low), int(high), int(step or 1) or 1))
    for numbers in re.findall(r"\[([\d,\s]*)\]", text):
        number += len(re.findall(r"\d+", numbers))
    return max(1, number)


def _count_samples_per_minibatch(role: str, leaves: Leaves) -> int:
    """Samples of an optimizer step: per device x accumulation x data-parallel ranks."""
    sizes = [
        read_number(leaves, f"{role}.{_STRATEGY}.{name}_parallel_size", 1)
        for name in ("tensor_model", "pipeline_model", "context")
    ]
    ulysses = read_number(leaves, f"{role}.model_args.ulysses_size", 1)
    devices = _count_devices(leaves.get(f"{role}.device_mapping"))
    ranks = max(1, devices // max(1, int(sizes[0] * sizes[1] * sizes[2] * ulysses)))
    per_device, steps = (
        read_number(leaves, f"{role}.training_args.{name}", TRAINING_DEFAULTS[name])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    return int(per_device) * int(steps) * ranks


def _policy_minibatch(_: Any, leaves: Leaves) -> Conversion:
    size = _count_samples_per_minibatch("actor_train", leaves)
    return Conversion({"train.samples_per_minibatch": str(size)}, "times accumulation steps and data-parallel ranks")


def _critic_minibatch(_: Any, leaves: Leaves) -> Conversion:
    if get_estimator(leaves) != "gae":
        return Conversion(note="there is no critic")
    policy, critic = (_count_samples_per_minibatch(role, leaves) for role in ("actor_train", "critic"))
    if policy == critic:
        return Conversion(note="the critic has the policy's minibatches")
    note = (
        f"the critic's minibatch has {critic} samples and the policy's {policy}; both have train.samples_per_minibatch"
    )
    return Conversion(note=note, lost="objective")


def _devices(role: str) -> Handler:
    return lambda value, _: Conversion(
        {f"{role}.parallel.num_processes": str(_count_devices(value))}, "one process per device"
    )


def _sequence_parallel(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        split = leaves.get(f"{role}.{_STRATEGY}.tensor_model_parallel_size") or 1
        if value and split == 1:
            return Conversion(note="without effect at tensor_model_parallel_size=1")
        return Conversion({f"{ROLES[role]}.parallel.sp": to_text(value)})

    return handle


def _recompute(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        modules = str(leaves.get(f"{role}.{_STRATEGY}.recompute_modules") or "core_attn").split(",")
        if value == "selective" and modules != ["core_attn"]:
            return Conversion({f"{ROLES[role]}.recompute": "full"}, f"in place of {', '.join(modules)} alone")
        return Conversion({f"{ROLES[role]}.recompute": to_text(value or "none")})

    return handle


def _moe_recompute(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        if not value or leaves.get(f"{role}.{_STRATEGY}.recompute_granularity"):
            return Conversion(note="recompute_granularity decides")
        return Conversion({f"{ROLES[role]}.recompute": "full"}, "in place of the experts' layers alone")

    return handle


def _strategy(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        note = "Megatron trains and scores"
        if value == "fsdp2_train" and not leaves.get(f"{role}.model_args.disable_gradient_checkpointing"):
            return Conversion({f"{ROLES[role]}.recompute": "full"}, f"{note}; disable_gradient_checkpointing is false")
        return Conversion(note=note)

    return handle


def _servers(value: Any, leaves: Leaves) -> Conversion:
    each = int(read_number(leaves, f"actor_infer.{_STRATEGY}.tensor_parallel_size", 1))
    num_servers = str(max(1, _count_devices(value) // max(1, each)))
    if each > 1:
        overrides = {"rollout.num_servers": num_servers, "rollout.tp": str(each)}
        return Conversion(overrides, f"{each} devices per server")
    return Conversion({"rollout.num_servers": num_servers}, "one server per device")


def _dtype(target: str) -> Handler:
    return lambda value, _: (
        Conversion({target: DTYPES[value]}) if value in DTYPES else Conversion(note=f"{target} is bfloat16 or float32")
    )


def _schedule(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        if value not in DECAYS:
            return Conversion(note=f"the choices are {', '.join(DECAYS)}", lost="objective")
        decay, key = DECAYS[value], f"{role}.optimizer"
        iterations = "null" if decay == "constant" else str(leaves.get("max_steps", ROLL_DEFAULTS["max_steps"]))
        found = {f"{key}.decay": decay, f"{key}.decay_iterations": iterations, f"{key}.min_lr": "0.0"}
        return Conversion(found, "to 0 over the iterations of the run" if decay != "constant" else "")

    return handle


def _warmup_ratio(role: str) -> Handler:
    def handle(value: Any, leaves: Leaves) -> Conversion:
        if not value or leaves.get(f"{role}.training_args.warmup_steps"):
            return Conversion(note="ROLL reads warmup_steps where it is above 0")
        samples = 1.0
        for name in ("max_steps", "rollout_batch_size", "num_return_sequences_in_group", "ppo_epochs"):
            samples *= read_number(leaves, name, ROLL_DEFAULTS[name])
        steps = ceil(samples // _count_samples_per_minibatch(role, leaves) * float(value))
        return Conversion({f"{ROLES[role]}.optimizer.warmup_steps": str(steps)}, "of all optimizer steps")

    return handle


def _response_length(value: Any, leaves: Leaves) -> Conversion:
    whole = leaves.get("sequence_length")
    if whole is None:
        return Conversion({"rollout.response_length": to_text(value)})
    left = int(whole) - int(read_number(leaves, "prompt_length", ROLL_DEFAULTS["prompt_length"]))
    return Conversion({"rollout.response_length": str(left)}, "sequence_length minus prompt_length")


def _note(text: str) -> Handler:
    return lambda *_: Conversion(note=text)


HANDLERS: dict[str, Handler] = {
    "pretrain": convert_model,
    "reward_pretrain": convert_critic,
    "response_length": _response_length,
    "sequence_length": _response_length,
    "rl_loss_coef": convert_loss_coef,
    "difficulty_mask": convert_difficulty_mask,
    "difficulty_low_threshold": _note("of difficulty_mask"),
    "difficulty_high_threshold": _note("of difficulty_mask"),
    "error_max_len_threshold": _note("of error_max_len_clip"),
    "async_generation_ratio": convert_async_ratio,
    "train_infer_correction.is_weight.enabled": convert_importance_weight,
    "train_infer_correction.filters": convert_importance_filters,
    "actor_infer.device_mapping": _servers,
    "actor_infer.model_args.dtype": _dtype("rollout.dtype"),
    "actor_train.worker_cls": convert_worker,
    "actor_train.model_update_frequency": convert_update_frequency,
    "actor_train.pg_variant": convert_variant,
    "actor_train.data_args.file_name": convert_files,
    "actor_train.data_args.messages": convert_prompts(chat=True),
    "actor_train.data_args.prompt": convert_prompts(chat=False),
    "actor_train.data_args.template": convert_template,
    "global_template": convert_template,
    "validation.data_args.file_name": convert_heldout_files,
    f"actor_train.{_STRATEGY}.moe_aux_loss_coeff": convert_moe_aux_loss,
    "actor_train.training_args.per_device_train_batch_size": _policy_minibatch,
    "critic.training_args.per_device_train_batch_size": _critic_minibatch,
    **dict.fromkeys(
        (f"{role}.training_args.gradient_accumulation_steps" for role in TRAINED),
        _note("in train.samples_per_minibatch"),
    ),
    **{f"{role}.device_mapping": _devices(ours) for role, ours in ROLES.items()},
    **{f"{role}.{_STRATEGY}.sequence_parallel": _sequence_parallel(role) for role in ROLES},
    **{f"{role}.model_args.dtype": _dtype(f"{ours}.dtype") for role, ours in ROLES.items()},
    **{f"{role}.training_args.lr_scheduler_type": _schedule(ROLES[role]) for role in TRAINED},
    **{f"{role}.training_args.warmup_ratio": _warmup_ratio(role) for role in TRAINED},
    **{f"{role}.{_STRATEGY}.recompute_granularity": _recompute(role) for role in TRAINED},
    **{f"{role}.{_STRATEGY}.moe_layer_recompute": _moe_recompute(role) for role in TRAINED},
    **{f"{role}.strategy_args.strategy_name": _strategy(role) for role in TRAINED},
}
