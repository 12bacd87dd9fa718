"""ROLL's keys beside those of megarl/config/roll/aliases.py: what they are called here, or why they are not.

Read in roll/configs/ and roll/pipeline/rlvr/ of github.com/alibaba/ROLL at commit 8eb27cc2 (after release 0.3.0).
"""

import re
from collections.abc import Mapping
from typing import Any

ROLL_DEFAULTS: dict[str, Any] = {
    **{"rollout_batch_size": 128, "prompt_length": 1024, "num_return_sequences_in_group": 1, "ppo_epochs": 1},
    **{"adv_estimator": "gae", "gamma": 1.0, "lambd": 0.95, "pg_clip": 0.2, "dual_clip_loss": False},
    **{"value_clip": None, "whiten_advantages": False, "advantage_clip": None, "reward_clip": None},
    **{"add_token_level_kl": False, "kl_penalty": "kl", "init_kl_coef": 0.2, "target_kl": None, "kl_horizon": 10000},
    **{"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_loss_coef": 0.0, "rl_loss_coef": 1.0},
    **{"loss_agg_mode": "seq-mean-token-mean", "max_len_mask": False, "critic_warmup": 0, "max_grad_norm": 1.0},
    **{"max_steps": 500, "eval_steps": 10, "seed": 42, "actor_infer.generating_args.temperature": 0.95},
}
TRAINING_DEFAULTS: dict[str, Any] = {
    **{"learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}
PRESETS = {"gae": "ppo", "reinforce": "reinforce_pp", "grpo": "grpo"}
"""What the imported values are laid over, by adv_estimator."""
ROLES = {"actor_train": "policy", "critic": "critic", "reference": "reference"}
TRAINED = ("actor_train", "critic")
_PROCESSES = (*ROLES, "actor_infer")
RENAMED = {
    **{"seed": "seed", "max_steps": "train.num_iterations", "eval_steps": "train.eval_every"},
    **{"max_running_requests": "rollout.max_running_requests"},
    "actor_infer.generating_args.temperature": "rollout.temperature",
    "actor_train.max_tokens_per_microbatch_in_train": "train.tokens_per_microbatch",
}
_STRATEGY = "strategy_args.strategy_config."
OF_A_ROLE = {
    "training_args.learning_rate": "optimizer.lr",
    "training_args.weight_decay": "optimizer.weight_decay",
    "training_args.warmup_steps": "optimizer.warmup_steps",
    "training_args.adam_beta1": "optimizer.beta1",
    "training_args.adam_beta2": "optimizer.beta2",
    f"{_STRATEGY}tensor_model_parallel_size": "parallel.tp",
    f"{_STRATEGY}pipeline_model_parallel_size": "parallel.pp",
    f"{_STRATEGY}virtual_pipeline_model_parallel_size": "parallel.vpp",
    f"{_STRATEGY}context_parallel_size": "parallel.cp",
    f"{_STRATEGY}expert_model_parallel_size": "parallel.ep",
    f"{_STRATEGY}expert_tensor_parallel_size": "parallel.etp",
    "model_args.ulysses_size": "parallel.cp",
    f"{_STRATEGY}recompute_method": "recompute_method",
    f"{_STRATEGY}recompute_num_layers": "recompute_num_layers",
}
_SAMPLING = "training samples from the full distribution: log-probs are not of a truncated one"
_RUN_DIR = "a run's files are in runs/TIME_ALGO_MODEL (hydra.run.dir=DIR)"
_MANAGED = "follows from other keys in ROLL, too"
_PACKED = "sequences are always packed without padding, up to train.tokens_per_microbatch"
_PACKING = (
    *(
        "use_dynamic_batching_in_train",
        "use_dynamic_batching_in_infer",
        "use_sequence_packing",
        "sequence_packing_args",
    ),
    *("sequence_length_round_in_train", "sequence_length_round_in_infer", "max_tokens_per_microbatch_in_infer"),
    *("max_tokens_per_microbatch_in_train", "use_remove_padding"),
)
_PLACING = (
    *("world_size", "num_gpus_per_worker", "system_envs", "offload_nccl", "name", "backend_timeout", "max_concurrency"),
    *("device_mapping",),
)
_PLACEMENT = "cluster=NAME and cluster.placement decide where processes run"
_MEDIA = tuple(
    f"actor_train.data_args.{kind}_{name}" for kind in ("image", "video", "audio") for name in ("folder", "max_pixels")
)
_FROM_CHECKPOINT = "the architecture is the checkpoint's"
NOTHING_HERE: dict[str, str] = {
    "hydra": "Hydra's own, which conf/config.yaml has",
    "defaults": "the files that it names are not read",
    **dict.fromkeys(("exp_name", "logging_dir", "output_dir", "base_dir", "profiler_output_dir"), _RUN_DIR),
    **dict.fromkeys(("rollout_dump_dir", "otlp_output_dir", "length_profiler_dir", "save_logging_board_dir"), _RUN_DIR),
    **dict.fromkeys(("profiler_timeline", "profiler_memory", "report_length_and_rewards"), "metrics.jsonl has times"),
    **dict.fromkeys(("track_with", "tracker_kwargs"), "metrics.jsonl is always written; logger.tensorboard=true|false"),
    **dict.fromkeys(
        ("save_steps", "checkpoint_config", "max_ckpt_to_keep"),
        "the policy is saved at the end; checkpoint.save_every=N",
    ),
    "resume_from_checkpoint": "a run is resumed by resume=RUN_DIR",
    "logging_steps": "every iteration is logged",
    **dict.fromkeys(("system_envs", "num_gpus_per_node", "num_nodes", "offload_nccl", "rpc_timeout"), _PLACEMENT),
    **dict.fromkeys(("local_rank", "transfer_backend", "model_update_buffer_size_mb"), _PLACEMENT),
    **dict.fromkeys(
        ("is_offload_states", "is_offload_optimizer_states_in_train_step"), "policy.offload=optimizer|all, and critic's"
    ),
    "model_download_type": "checkpoints come from the Hugging Face cache",
    **dict.fromkeys(("global_template", "tag_to_template"), "data.chat_template uses the tokenizer's own"),
    "reward_pretrain": "of a rule-based reward ROLL takes its tokenizer alone",
    "reward_model": "no reward model scores responses here: reward=function reward.path=package.module:callable",
    "validation": "evaluation is greedy on the held-out prompts of data.*; python -m megarl.evaluate does more",
    **dict.fromkeys(
        ("val_batch_size", "val_prompt_length", "val_sequence_length", "val_greedy", "val_n_sample"),
        "evaluation is greedy on the held-out prompts of data.*; python -m megarl.evaluate does more",
    ),
    "train_infer_correction": "algo.mismatch.correction, .level, .low and .high are ours",
    **dict.fromkeys(
        ("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute"),
        "old_logprobs are the trainer's, computed before the update",
    ),
    **dict.fromkeys(("generate_opt_level", "router_args", "user_defined_rollout_loop_cls"), "SGLang schedules them"),
    **dict.fromkeys(
        ("is_use_additional_prompts", "max_additional_running_prompts", "is_num_return_sequences_expand"),
        "how ROLL schedules prompts; the responses of an iteration are the same",
    ),
    "balance_length": "ROLL reads it nowhere",
    "minibatch_data_iter_num": "ROLL reads it nowhere",
    "dataset_filter": "ROLL reads it nowhere",
    "reward": "ROLL's RLVR pipeline reads rewards",
    "rollout_mock": "python -m megarl.train logger.save_rollouts=true writes the responses",
    "pure_opd_pipeline_type": "of distillation alone",
    **dict.fromkeys(("teacher", "student_train", "student_infer"), "there is no distillation from a teacher"),
    "actor_infer.generating_args.max_new_tokens": "rollout.response_length; ROLL overwrites it with response_length",
    "actor_infer.generating_args.num_return_sequences": _MANAGED + " (num_return_sequences_in_group)",
    **dict.fromkeys((f"actor_infer.generating_args.{name}" for name in ("top_p", "top_k")), _SAMPLING),
    "actor_infer.generating_args": "responses are sampled, one sequence at a time",
    "actor_infer.strategy_args": "SGLang generates; its options are rollout.sglang.*",
    "actor_infer.data_args": "data.* is for training and generation alike",
    "actor_train.data_args": "data=NAME data.path=FILE chooses the prompts",
    **dict.fromkeys((f"{role}.data_args" for role in ROLES), "data.* is that of the policy"),
    **dict.fromkeys((f"{role}.model_args" for role in _PROCESSES), "all roles have the architecture of model.*"),
    **dict.fromkeys((f"{role}.infer_batch_size" for role in _PROCESSES), "train.tokens_per_microbatch is the size"),
    **dict.fromkeys((f"{role}.strategy_args" for role in ROLES), "Megatron, with the options of model.megatron"),
    **dict.fromkeys((f"{role}.training_args" for role in ROLES), "AdamW has the keys of policy.optimizer"),
    **dict.fromkeys((f"{role}.generating_args" for role in ROLES), "ROLL reads actor_infer's"),
    **{f"{role}.{name}": _PLACEMENT for role in _PROCESSES for name in _PLACING},
    **{f"{role}.{name}": _PACKED for role in _PROCESSES for name in _PACKING},
    **{f"{role}.worker_cls": "a class of ROLL's" for role in _PROCESSES},
    **{f"{role}.{name}": "ROLL reads actor_train's" for role in _PROCESSES for name in ("pg_variant",)},
    **{
        f"{role}.{name}": "losses are of float32 log-probs and divided by the global minibatch's counts"
        for role in _PROCESSES
        for name in ("logits_in_fp32", "apply_loss_scale")
    },
    **{f"{role}.{name}": "of distillation alone" for role in _PROCESSES for name in ("opd_kl_coef", "tag_included")},
    **{f"{role}.topr_{name}_weight": "in algo.topr" for role in _PROCESSES for name in ("positive", "negative")},
    **{f"{role}.model_update_frequency": "ROLL reads actor_train's" for role in _PROCESSES},
    "actor_infer.training_args": "the servers train nothing",
    **{f"{role}.router_replay": "the routing of experts is not replayed in training" for role in _PROCESSES},
    **{f"{role}.mtp_training_mode": "multi-token prediction is not trained" for role in _PROCESSES},
    **dict.fromkeys(
        (f"actor_train.model_args.lora_{name}" for name in ("rank", "alpha", "dropout")),
        "of lora_target alone; all weights are trained",
    ),
    "actor_train.model_args.lora_target": "all weights are trained, not adapters",
    "actor_train.model_args.adapter_name_or_path": "all weights are trained, not adapters",
    "actor_train.model_args.freeze_module_prefix": "all weights are trained, none are frozen",
    "actor_train.model_args.model_config_kwargs": _FROM_CHECKPOINT,
    **dict.fromkeys(
        (f"{role}.{_STRATEGY}account_for_{part}_in_pipeline_split" for role in ROLES for part in ("embedding", "loss")),
        "model.megatron.num_layers_in_first_pipeline_stage=N, and last, split the layers unevenly",
    ),
    **dict.fromkeys(
        (f"{role}.{_STRATEGY}pipeline_model_parallel_layout" for role in ROLES),
        "model.megatron.num_layers_in_first_pipeline_stage=N, and last, split the layers unevenly",
    ),
    f"actor_train.{_STRATEGY}additional_configs": "model.megatron.KEY=VALUE sets Megatron's own",
    **dict.fromkeys(
        _MEDIA,
        "prompts are text alone",
    ),
    "actor_train.data_args.custom_data_kwargs_func": "prompts are text alone",
    **dict.fromkeys(("actor_train.data_args.tag", "actor_train.data_args.id"), "of several domains; here is one"),
    "rewards": "reward=NAME is one verifier for all prompts",
}  # fmt: skip
"""By ROLL's key, with everything below it; the longest that fits is the reason."""
LEARNED: dict[str, str] = {
    **dict.fromkeys(("pretrain", "actor_train.model_args.model_name_or_path", "reward_pretrain"), "model"),
    **dict.fromkeys(
        (f"actor_train.model_args.{name}" for name in ("lora_target", "adapter_name_or_path", "freeze_module_prefix")),
        "model",
    ),
    "actor_train.model_args.model_config_kwargs": "model",
    **dict.fromkeys(("actor_train.mtp_training_mode", "actor_train.router_replay"), "objective"),
    **dict.fromkeys(("actor_train.pg_variant", "actor_train.worker_cls", "train_infer_correction"), "objective"),
    **dict.fromkeys(("defaults", "teacher", "sequence_length", *RENAMED), "objective"),
    **{f"{role}.training_args": "objective" for role in TRAINED},
    **dict.fromkeys(("actor_train.data_args", "tag_to_template", "global_template"), "data"),
    **dict.fromkeys(("rewards", "reward_model"), "reward"),
}  # fmt: skip
"""By ROLL's key, with everything below it: what is lost of what is learned where its interpolation leads nowhere, or,
for those of `HAS_NO_COUNTERPART`, where it asks for something at all."""
HAS_NO_COUNTERPART = (
    *(f"actor_train.model_args.{name}" for name in ("lora_target", "adapter_name_or_path", "freeze_module_prefix")),
    *("actor_train.model_args.model_config_kwargs", "actor_train.mtp_training_mode", "actor_train.router_replay"),
    *("defaults", "teacher", "tag_to_template", "reward_model.device_mapping"),
    *("actor_train.data_args.custom_data_kwargs_func", *_MEDIA),
)  # fmt: skip
_OFF: tuple[Any, ...] = (None, False, 0, "", "disable", "disabled", [], {}, ["_self_"])


def find_reason(key: str) -> str | None:
    """Why a key has nothing to be converted to; None where it is not known."""
    return _find_longest(key, NOTHING_HERE)


def find_loss(key: str, value: Any) -> str:
    """What is lost of what is learned with a key that has no counterpart and asks for something: "" for nothing."""
    lost = any(key == name or key.startswith(f"{name}.") for name in HAS_NO_COUNTERPART)
    return (_find_longest(key, LEARNED) or "") if lost and value not in _OFF else ""


def find_kind(key: str) -> str:
    """What of what is learned a key decides: data, reward, objective or model; "" for none."""
    return _find_longest(key, LEARNED) or ""


def _find_longest(key: str, table: Mapping[str, str]) -> str | None:
    parts = key.split(".")
    prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


def to_text(value: Any) -> str:
    """A value as an override writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w./:@%+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
