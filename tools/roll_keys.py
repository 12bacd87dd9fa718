"""ROLL's keys beside those of megarl/config/roll/aliases.py: what they are called here, or why they are not.

Read in roll/configs/ and roll/pipeline/rlvr/rlvr_config.py of github.com/alibaba/ROLL, up to release 0.3.0.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

ROLL_DEFAULTS: dict[str, Any] = {
    **{"rollout_batch_size": 128, "prompt_length": 1024, "num_return_sequences_in_group": 1, "ppo_epochs": 1},
    **{"adv_estimator": "gae", "gamma": 1.0, "lambd": 0.95, "pg_clip": 0.2, "dual_clip_loss": False},
    **{"value_clip": None, "whiten_advantages": False, "advantage_clip": None, "reward_clip": None},
    **{"add_token_level_kl": False, "kl_penalty": "kl", "init_kl_coef": 0.2, "target_kl": None, "kl_horizon": 10000},
    **{"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_loss_coef": 0.0, "rl_loss_coef": 1.0},
    **{"loss_agg_mode": "seq-mean-token-mean", "max_len_mask": False, "critic_warmup": 0, "max_grad_norm": 1.0},
    **{"max_steps": 500, "eval_steps": 10, "seed": 42},
}
TRAINING_DEFAULTS: dict[str, Any] = {
    **{"learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}
PRESETS = {"gae": "ppo", "reinforce": "reinforce_pp", "grpo": "grpo"}
"""What the imported values are laid over, by adv_estimator."""
ROLES = {"actor_train": "policy", "critic": "critic", "reference": "reference"}
_PROCESSES = (*ROLES, "actor_infer")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
DECAYS = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
RENAMED = {
    **{"seed": "seed", "max_steps": "train.num_iterations", "eval_steps": "train.eval_every"},
    **{"max_running_requests": "rollout.max_running_requests"},
    "actor_infer.generating_args.temperature": "rollout.temperature",
    "actor_train.max_tokens_per_microbatch_in_train": "train.tokens_per_microbatch",
}
OF_A_ROLE = {
    "training_args.learning_rate": "optimizer.lr",
    "training_args.weight_decay": "optimizer.weight_decay",
    "training_args.warmup_steps": "optimizer.warmup_steps",
    "training_args.adam_beta1": "optimizer.beta1",
    "training_args.adam_beta2": "optimizer.beta2",
    "strategy_args.strategy_config.tensor_model_parallel_size": "parallel.tp",
    "strategy_args.strategy_config.pipeline_model_parallel_size": "parallel.pp",
}
_SAMPLING = "training samples from the full distribution: log-probs are not of a truncated one"
_RUN_DIR = "a run's files are in runs/TIME_ALGO_MODEL (hydra.run.dir=DIR)"
_MANAGED = "follows from other keys in ROLL, too"
_LOSS = "the imported loss is the clipped one; algo=topr, or algo.surrogate and the keys of algo.topr, choose others"
_PACKED = "sequences are always packed without padding, up to train.tokens_per_microbatch"
_PACKING = (
    *(
        "use_dynamic_batching_in_train",
        "use_dynamic_batching_in_infer",
        "use_sequence_packing",
        "sequence_packing_args",
    ),
    *("sequence_length_round_in_train", "sequence_length_round_in_infer", "max_tokens_per_microbatch_in_infer"),
)
_PLACING = ("world_size", "num_gpus_per_worker", "system_envs", "offload_nccl", "name")
_PLACEMENT = "the laptop cluster places processes itself"
NOTHING_HERE: dict[str, str] = {
    **dict.fromkeys(("hydra", "defaults"), "Hydra's own, which conf/config.yaml has"),
    **dict.fromkeys(("exp_name", "logging_dir", "output_dir", "profiler_output_dir"), _RUN_DIR),
    **dict.fromkeys(("track_with", "tracker_kwargs"), "metrics.jsonl is always written; logger.tensorboard=true|false"),
    **dict.fromkeys(("save_steps", "checkpoint_config"), "the policy is saved at the end, in RUN_DIR/policy"),
    "resume_from_checkpoint": "a run is not resumed; model.path=RUN_DIR/policy starts from its policy",
    "logging_steps": "every iteration is logged",
    **dict.fromkeys(("system_envs", "num_gpus_per_node", "num_nodes", "offload_nccl", "rpc_timeout"), _PLACEMENT),
    "model_download_type": "checkpoints come from the Hugging Face cache",
    "global_template": "data.chat_template uses the tokenizer's own",
    "reward_pretrain": "the critic starts from the policy; critic.init=PATH takes another checkpoint",
    "reward_model": "there is no reward model that scores responses; reward=NAME is a verifier",
    "validation": "evaluation is greedy on the held-out prompts of data.*; python -m megarl.evaluate does more",
    "sequence_length": "give rollout.response_length instead",
    "train_infer_correction": "algo.mismatch.correction, .level, .low and .high are ours",
    "generate_opt_level": "requests are scheduled by SGLang",
    **dict.fromkeys(
        ("is_use_additional_prompts", "max_additional_running_prompts", "reward_filter_mean_threshold",
         "is_num_return_sequences_expand", "generate_redundancy_num"),
        "algo.dynamic_sampling.enabled=true replaces groups of equal rewards",
    ),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_target"), "all weights are trained"),
    "pg_variant": _LOSS,
    "actor_infer.generating_args.max_new_tokens": "rollout.response_length; ROLL overwrites it with response_length",
    "actor_infer.generating_args.num_return_sequences": _MANAGED + " (num_return_sequences_in_group)",
    **dict.fromkeys((f"actor_infer.generating_args.{name}" for name in ("top_p", "top_k")), _SAMPLING),
    "actor_infer.generating_args": "responses are sampled, one sequence at a time",
    "actor_infer.strategy_args": "SGLang generates; its options are rollout.sglang.*",
    "actor_infer.data_args": "data.* is for training and generation alike",
    **dict.fromkeys((f"{role}.data_args" for role in ROLES), "data=NAME data.path=FILE chooses the prompts"),
    **dict.fromkeys((f"{role}.model_args" for role in _PROCESSES), "all roles have the architecture of model.*"),
    **dict.fromkeys((f"{role}.infer_batch_size" for role in _PROCESSES), "train.tokens_per_microbatch is the size"),
    **dict.fromkeys((f"{role}.strategy_args" for role in ROLES), "Megatron, with the options of model.megatron"),
    **dict.fromkeys((f"{role}.training_args" for role in ROLES), "AdamW has the keys of policy.optimizer"),
    **{f"{role}.{name}": _PLACEMENT for role in _PROCESSES for name in _PLACING},
    **{f"{role}.{name}": _PACKED for role in ROLES for name in _PACKING},
    "actor_train.worker_cls": _LOSS,
    "actor_train.pg_variant": _LOSS,
    "rewards": "reward=NAME is one verifier for all prompts",
}  # fmt: skip
"""By ROLL's key, with everything below it; the longest that fits is the reason."""


def to_text(value: Any) -> str:
    """A value as an override writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if not isinstance(value, str) or re.fullmatch(r"[\w./:@%+-]+", text) else f"'{text}'"


Handler = Callable[[Any, Mapping[str, Any]], tuple[dict[str, str], str]]
"""From a value and the whole file to our overrides and a note."""


def _count_devices(mapping: Any) -> int:
    """Of ROLL's device_mapping, `list(range(0,8)) + list(range(12,16))` or a list; 1 where it is neither."""
    if isinstance(mapping, list):
        return max(1, len(mapping))
    ranges = re.findall(r"range\(\s*(\d+)\s*,\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)", str(mapping))
    return max(1, sum(len(range(int(low), int(high), int(step or 1))) for low, high, step in ranges))


def _count_samples_per_minibatch(leaves: Mapping[str, Any]) -> int:
    """Samples of an optimizer step: per device x accumulation x data-parallel ranks."""
    training, strategy = "actor_train.training_args.", "actor_train.strategy_args.strategy_config."
    sizes = [
        leaves.get(f"{strategy}{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model", "context")
    ]
    devices = _count_devices(leaves.get("actor_train.device_mapping"))
    ranks = max(1, devices // (sizes[0] * sizes[1] * sizes[2]))
    per_device, steps = (
        leaves.get(f"{training}{name}", TRAINING_DEFAULTS[name])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    return int(per_device) * int(steps) * ranks


def _schedule(role: str) -> Handler:
    def handle(value: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        if value not in DECAYS:
            return {}, f"the choices are {', '.join(DECAYS)}"
        decay, key = DECAYS[value], f"{role}.optimizer"
        iterations = "null" if decay == "constant" else str(leaves.get("max_steps", ROLL_DEFAULTS["max_steps"]))
        found = {f"{key}.decay": decay, f"{key}.decay_iterations": iterations, f"{key}.min_lr": "0.0"}
        return found, "to 0 over the iterations of the run" if decay != "constant" else ""

    return handle


def _dtype(target: str) -> Handler:
    return lambda value, _: (
        ({target: DTYPES[value]}, "") if value in DTYPES else ({}, f"{target} is bfloat16 or float32")
    )


def _devices(role: str) -> Handler:
    return lambda value, _: ({f"{role}.parallel.num_processes": str(_count_devices(value))}, "one process per device")


def _sequence_parallel(role: str) -> Handler:
    def handle(value: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        split = leaves.get(f"{role}.strategy_args.strategy_config.tensor_model_parallel_size") or 1
        if value and split == 1:
            return {}, "without effect at tensor_model_parallel_size=1"
        return {f"{ROLES[role]}.parallel.sp": to_text(value)}, ""

    return handle


def _servers(value: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    each = int(leaves.get("actor_infer.strategy_args.strategy_config.tensor_parallel_size") or 1)
    num_servers = str(max(1, _count_devices(value) // each))
    if each > 1:
        return {"rollout.num_servers": num_servers, "rollout.tp": str(each)}, f"{each} devices per server"
    return {"rollout.num_servers": num_servers}, "one server per device"


def _data_file(value: Any, _: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1 or not str(names[0]).endswith((".jsonl", ".parquet")):
        return {}, "one .jsonl or .parquet file is read: give data=jsonl data.path=FILE"
    return {"data": str(names[0]).rsplit(".", 1)[1], "data.path": to_text(names[0])}, ""


def _data_field(target: str) -> Handler:
    def handle(value: Any, leaves: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        has_file = bool(_data_file(leaves.get("actor_train.data_args.file_name"), leaves)[0])
        return ({target: to_text(value)} if has_file else {}), f"{target}, of one file"

    return handle


def _model_path(value: Any, _: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    # The numbers of the tiny model, which is the default, are replaced where its size decided them.
    return {"model.source": "path", "model.path": to_text(value), "rollout.kv_cache_tokens": "null"}, ""


SPECIAL: dict[str, Handler] = {
    "pretrain": _model_path,
    "actor_infer.device_mapping": _servers,
    "actor_infer.model_args.dtype": _dtype("rollout.dtype"),
    "actor_train.data_args.file_name": _data_file,
    "actor_train.data_args.prompt": _data_field("data.prompt_field"),
    "actor_train.data_args.response": _data_field("data.answer_field"),
    "actor_train.training_args.per_device_train_batch_size": lambda _, leaves: (
        {"train.samples_per_minibatch": str(_count_samples_per_minibatch(leaves))},
        "times accumulation steps and data-parallel ranks",
    ),
    "actor_train.training_args.gradient_accumulation_steps": lambda *_: ({}, "in train.samples_per_minibatch"),
    **{f"{role}.device_mapping": _devices(ours) for role, ours in ROLES.items()},
    **{f"{role}.strategy_args.strategy_config.sequence_parallel": _sequence_parallel(role) for role in ROLES},
    **{f"{role}.model_args.dtype": _dtype(f"{ours}.dtype") for role, ours in ROLES.items()},
    **{f"{role}.training_args.lr_scheduler_type": _schedule(ROLES[role]) for role in ("actor_train", "critic")},
}
