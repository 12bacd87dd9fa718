"""Contradictions between values: found before anything starts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from megarl.algo.registry import needs_critic
from megarl.config.checks.algo import check_algo, check_modules, check_older_samples
from megarl.config.checks.ranges import MAX_STALENESS, check_ranges, check_texts
from megarl.config.checks.roles import check_compute, check_critic, check_overlap, check_parallel, find_nearest_divisor
from megarl.config.placement import find_server_offload
from megarl.config.reward_parts import check_parts
from megarl.config.schema.algo import LARGEST_KL_ERROR, KLConfig, OverlongConfig, needs_full_kl, needs_reference
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import Config
from megarl.config.schema.run import NO_QUANTIZED_WEIGHTS, TrainConfig, check_hardware, check_truncation
from megarl.config.schema.task import EnvironmentRewardConfig, SingleTurnEnvironmentConfig, ToolsEnvironmentConfig

_SIZES = (
    *("num_iterations", "samples_per_iteration", "prompts_per_iteration", "responses_per_prompt"),
    *("samples_per_minibatch", "num_minibatches", "tokens_per_microbatch", "epochs_per_iteration"),
    *("eval_every", "num_eval_prompts", "max_samples", "profile"),
)
"""Keys of `train` that are 1 or more, or null."""
TOYS = ("tiny", "tiny_moe")
"""The presets in conf/model/ whose settings are for random weights (model.source=random)"""
_QUANTIZES = ("quantization", "quantize_and_serve", "modelopt_quant", "rl_quant_profile")
"""SGLang's options that make a server hold other weights than the policy's."""
_FULL = "log-probs are of the full distribution at the temperature, and of nothing that a server adds or cuts off"
_ONE_MODEL = "servers hold the policy's weights as the checkpoint and the trainer have them, and compute its model"
_OLD_CACHE = "a store outside of the server would keep keys and values of older weights"
REFUSED_OPTIONS = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "preferred_sampling_params", "enable_custom_logit_processor"), _FULL),
    **dict.fromkeys(("enable_watermark", "watermark_config", "dllm_algorithm", "dllm_algorithm_config"), _FULL),
    **dict.fromkeys(("enable_strict_thinking", "allow_auto_truncate"), _FULL),
    **dict.fromkeys(("json_model_override_args", "model_config_parser", "trust_remote_code", "revision"), _ONE_MODEL),
    **dict.fromkeys(("decrypted_config_file", "decrypted_draft_config_file", "forward_hooks"), _ONE_MODEL),
    **dict.fromkeys(("enable_lora", "lora_paths", "uno_lora_path", "kt_weight_path", "kt_method"), _ONE_MODEL),
    **dict.fromkeys(("is_embedding", "enable_hisparse", "hisparse_config", "weight_cache_mode"), _ONE_MODEL),
    **dict.fromkeys(("enable_w4a4_mxfp4_megamoe", "modelopt_checkpoint_restore_path"), _ONE_MODEL),
    "delete_ckpt_after_loading": "it deletes the model",
    **dict.fromkeys(("hicache_storage_backend", "enable_lmcache", "enable_flexkv"), _OLD_CACHE),
    "enable_unified_cache_external_linker": _OLD_CACHE,
}
"""Server arguments by which responses are sampled otherwise, or from another model, than training assumes; and why"""
_DRAFTS = "drafts come from a model that no weight sync reaches, and thresholds may accept what the policy would not"
"""Of every argument that begins with speculative_"""
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors", "fastsafetensors", "instanttensor", "layered"),
    "model_impl": ("auto", "sglang"),
}
"""Server arguments of which other values load other weights, or other modules than the weight sync knows"""
MAX_SAMPLES = 2**20
"""Responses that are held at a time, a hundred times those of the largest published runs (8192 an iteration)"""
MAX_TOKENS = 2**32
"""Tokens that are held at a time"""


def check_config(config: Config) -> list[str]:
    """One message per problem: the key, what was found, what would be right. Empty where all is well."""
    unknown = check_modules(config.algo)
    if unknown:
        return unknown
    sizes = list(_check_each_size(config))
    if sizes:
        return sizes  # what follows divides by them
    return [
        *_check_division(config.train),
        *_check_eval_sets(config.train),
        *_check_profile(config.train),
        *check_ranges(config),
        *check_texts(config),
        *check_parts(config.reward),
        *_check_model(config),
        *_check_roles(config),
        *check_compute(config),
        *check_critic(config),
        *_check_rollout(config),
        *_check_saved(config),
        *_check_environment(config),
        *_check_kl_horizon(config.algo.kl, config.train.num_samples),
        *check_hardware(config.cluster.hardware),
        *check_algo(config.algo, config.train.responses_per_prompt, config.train.num_optimizer_steps),
    ]


def _check_eval_sets(train: TrainConfig) -> Iterator[str]:
    for name, each in train.eval_sets.items():
        key = f"train.eval_sets.{name}"
        if not re.fullmatch(r"[\w-]+", str(name)):
            yield f"{key}: found {name!r}; the name of a set has letters, digits, _ and -"
        for size in ("num_prompts", "num_samples"):
            if (value := getattr(each, size)) is not None and value < 1:
                yield f"{key}.{size}: found {value}; it must be 1 or more"
        if not (isfinite(each.temperature) and each.temperature >= 0):
            yield f"{key}.temperature: found {each.temperature}; it must be 0 (greedy) or above"
        elif each.temperature == 0 and each.num_samples > 1:
            yield f"{key}.num_samples: found {each.num_samples}; greedy responses are all the same, set temperature too"
        yield from check_truncation(key, each.temperature, each.top_p, each.top_k)


def describe_sizes(config: Config) -> str:
    """The sizes of an iteration as one sentence."""
    train = config.train
    return (
        f"each iteration: {train.num_prompts} prompts x {train.responses_per_prompt} responses"
        f" = {train.num_samples} samples; {train.minibatch_size} samples per minibatch"
        f" x {train.epochs_per_iteration} epoch{'s' if train.epochs_per_iteration > 1 else ''}"
        f" = {train.num_optimizer_steps} optimizer steps;"
        f" micro-batches of up to {train.tokens_per_microbatch} tokens"
    )


def _check_each_size(config: Config) -> Iterator[str]:
    """Sizes below 1, and more responses or tokens in an iteration than can be held."""
    train, staleness = config.train, min(max(0, config.rollout.max_staleness), MAX_STALENESS)
    positive = {
        **{f"train.{field.name}": getattr(train, field.name) for field in fields(train) if field.name in _SIZES},
        "data.prompt_length": config.data.prompt_length,
        "rollout.response_length": config.rollout.response_length,
    }
    if train.num_iterations == 0 and needs_critic(config.algo) and config.algo.value_pretrain.num_steps > 0:
        del positive["train.num_iterations"]
    bad = [f"{key}: found {v}; it must be 1 or more" for key, v in positive.items() if v is not None and v < 1]
    if positive.get("train.num_iterations") == 0:
        bad.append("train.num_iterations: 0 is value pretraining alone, and there is none: algo.value_pretrain.enabled")
    if not bad and train.responses_per_prompt > MAX_SAMPLES:
        bad = [f"train.responses_per_prompt: found {train.responses_per_prompt}; it must be {MAX_SAMPLES} at most"]
    yield from bad
    if bad:
        return
    found = describe_iteration_size(train)
    ahead = f", and of {staleness} iterations ahead (rollout.max_staleness)" if staleness else ""
    samples = train.num_samples * (1 + staleness)
    tokens = samples * (config.data.prompt_length + config.rollout.response_length)
    if samples > MAX_SAMPLES:
        yield (
            f"{found}, which with {train.responses_per_prompt} responses to each prompt is {train.num_samples} samples"
            f" of an iteration{ahead}; all are requests and objects of one process, which holds {MAX_SAMPLES} at most"
        )
    elif tokens > MAX_TOKENS:
        yield (
            f"{found}, which makes up to {tokens} tokens of an iteration{ahead} at data.prompt_length +"
            f" rollout.response_length; one process holds {MAX_TOKENS} at most, {MAX_TOKENS * 8 // 2**30} GiB of"
            " token ids alone"
        )


def describe_iteration_size(train: TrainConfig) -> str:
    """The key that gives the size of an iteration, and its value: the start of a message."""
    key = "samples" if train.prompts_per_iteration is None and train.samples_per_iteration else "prompts"
    return f"train.{key}_per_iteration: found {getattr(train, f'{key}_per_iteration')}"


def _check_division(train: TrainConfig) -> Iterator[str]:
    wanted, group = train.samples_per_iteration, train.responses_per_prompt
    if train.prompts_per_iteration is None and wanted is not None and wanted % group:
        nearest = max(1, round(wanted / group)) * group
        yield (
            f"train.samples_per_iteration: found {wanted}, which train.responses_per_prompt ({group}) does not divide;"
            f" the nearest that it does is {nearest}, of {nearest // group} prompts"
        )
        return
    samples = train.num_samples
    made = f"the {train.num_prompts} prompts x {group} responses = {samples} samples of an iteration"
    key = "samples_per_minibatch" if train.num_minibatches is None else "num_minibatches"
    found = getattr(train, key)
    if samples % found:
        nearest = find_nearest_divisor(samples, found)
        yield f"train.{key}: found {found}, which does not divide {made}; the nearest that does is {nearest}"


def _check_profile(train: TrainConfig) -> Iterator[str]:
    if train.profile is not None and train.profile > train.num_iterations:
        yield (
            f"train.profile: found {train.profile}, the number of an iteration; the run has"
            f" train.num_iterations={train.num_iterations}: it must be at most that, or null"
        )


def _check_roles(config: Config) -> Iterator[str]:
    roles = {"policy": config.policy.parallel}
    if needs_critic(config.algo):
        roles["critic"] = config.critic.parallel
    if needs_reference(config.algo):
        roles["reference"] = config.reference.parallel
    if needs_full_kl(config.algo) and config.policy.parallel.pp > 1:
        yield (
            f"policy.parallel.pp: found {config.policy.parallel.pp} with a KL of estimator full, which compares whole"
            " distributions on the policy's last stage; it must be 1, or the estimator k1, k2 or k3"
        )
    for role, parallel in roles.items():
        yield from check_parallel(f"{role}.parallel", parallel, config.train.minibatch_size)
    yield from check_overlap("policy.optimizer", config.policy.optimizer)
    if "critic" in roles:
        yield from check_overlap("critic.optimizer", config.critic.optimizer)


def _check_model(config: Config) -> Iterator[str]:
    source, path = config.model.source, config.model.path
    if source is ModelSource.path and not path:
        yield (
            f"model.path: found {'null' if path is None else repr(path)}; it must be a Hugging Face checkpoint"
            " directory, or the name of a model on the hub, OWNER/NAME"
        )
    if path is not None and config.model.name in TOYS:
        yield (
            f"model.path: found {path!r} with model={config.model.name}, whose learning rate, lengths, float32 and data"
            f" are those of a toy with random weights; type model=checkpoint model.path={path}"
        )
    elif source is not ModelSource.path and path is not None:
        yield (
            f"model.path: found {path!r}; it has no effect under model.source={source.name}: type model=checkpoint"
            f" model.path={path}, or to keep the preset's settings model={config.model.name} model.source=path"
            f" model.path={path}"
        )


def _check_rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    longest = config.data.prompt_length + rollout.response_length
    yield from _check_overlong(config.algo.overlong, rollout.response_length)
    if rollout.max_staleness > 0:
        yield from check_older_samples(config.algo, f"rollout.max_staleness: {rollout.max_staleness} found")
        if (offload := find_server_offload(config)) is not None:
            yield (
                f"rollout.offload: found {offload.name} with rollout.max_staleness={rollout.max_staleness}, where"
                " servers generate while the roles compute; null, or rollout.max_staleness=0"
            )
    yield from _check_options(rollout.sglang, longest)
    chunk = rollout.sglang.get("chunked_prefill_size")
    if rollout.router_replay and isinstance(chunk, int) and chunk <= 0:
        yield (
            f"rollout.sglang.chunked_prefill_size: found {chunk} with rollout.router_replay; SGLang holds the experts"
            " of one chunk and ends where a prompt is longer: it must be above 0, or left out"
        )
    found = {key: rollout.sglang[key] for key in _QUANTIZES if rollout.sglang.get(key)}
    yield from (f"rollout.sglang.{key}: found {value!r}; {NO_QUANTIZED_WEIGHTS}" for key, value in found.items())
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < longest:
        yield (
            f"rollout.kv_cache_tokens: found {rollout.kv_cache_tokens}; one sequence may have"
            f" data.prompt_length + rollout.response_length = {longest} tokens"
        )


def _check_options(options: Mapping[str, Any], longest: int) -> Iterator[str]:
    """One message for each server argument by which responses would not be samples of the policy."""
    for key, value in options.items():
        why = _DRAFTS if key.startswith("speculative_") else REFUSED_OPTIONS.get(key)
        if why is not None and value is not None and value is not False:
            yield f"rollout.sglang.{key}: found {value!r}; {why}: leave it out"
        elif value == "flash_rl":
            yield f"rollout.sglang.{key}: found {value!r}; {NO_QUANTIZED_WEIGHTS}"
        elif key in ALLOWED_VALUES and value is not None and value not in ALLOWED_VALUES[key]:
            yield f"rollout.sglang.{key}: found {value!r}; {_ONE_MODEL}: it must be {' or '.join(ALLOWED_VALUES[key])}"
    length = options.get("context_length")
    if isinstance(length, int) and length < longest:
        yield (
            f"rollout.sglang.context_length: found {length}; data.prompt_length + rollout.response_length = {longest}"
            " tokens must fit"
        )


def _check_environment(config: Config) -> Iterator[str]:
    if isinstance(config.reward, EnvironmentRewardConfig) and isinstance(
        config.environment, SingleTurnEnvironmentConfig
    ):
        yield (
            "reward: found environment with environment=single_turn, which gives no rewards; choose an environment that"
            " does, such as environment=guess, or another reward"
        )
    if isinstance(config.environment, ToolsEnvironmentConfig):
        yield from _check_tools(config, config.environment)


def _check_tools(config: Config, tools: ToolsEnvironmentConfig) -> Iterator[str]:
    longest = tools.max_calls * tools.call_timeout_s
    if longest >= tools.step_deadline_s:
        yield (
            f"environment.step_deadline_s: found {tools.step_deadline_s:g}; the calls of one action may take"
            f" environment.max_calls x environment.call_timeout_s = {longest:g} s, and it must be above that"
        )
    if config.data.response_prefix is not None:
        yield (
            "data.response_prefix: found a text with environment=tools; tool calls are read in what the policy"
            " generates, which does not have it: leave it null"
        )


def _check_overlong(overlong: OverlongConfig, response_length: int) -> Iterator[str]:
    if overlong.buffer is not None and overlong.buffer > response_length:
        yield (
            f"algo.overlong.buffer: found {overlong.buffer}; it is a part of rollout.response_length"
            f" ({response_length}) and must not be longer"
        )
    frac = overlong.buffer_frac
    if overlong.penalty > 0 and overlong.buffer is None and isfinite(frac) and frac * response_length <= 0.5:
        yield (
            f"algo.overlong.buffer_frac: found {frac:g}, which is less than one token of"
            f" rollout.response_length ({response_length}); algo.overlong.penalty > 0 needs at least one"
        )


def _check_kl_horizon(kl: KLConfig, num_samples: int) -> Iterator[str]:
    least = LARGEST_KL_ERROR * num_samples
    if kl.in_reward and kl.target is not None and 0 < kl.horizon <= least:
        yield (
            f"algo.kl.horizon: found {kl.horizon:g} with the {num_samples} samples of an iteration; one step would"
            f" change the weight of the KL by all of it or more and could make it 0 or negative: it must be above"
            f" {least:g} ({LARGEST_KL_ERROR:g} * samples), and several times the samples for small steps"
        )


def _check_saved(config: Config) -> Iterator[str]:
    """One message per key that asks for what only servers can give, or of a loss that cannot learn from the file."""
    rollout, algo = config.rollout, config.algo
    if rollout.file is None:
        return
    yield from check_older_samples(algo, f"rollout.file: {rollout.file} found", off="null")
    where = f"with rollout.file={rollout.file}"
    if algo.replay.num_iterations > 0:
        yield (
            f"algo.replay.num_iterations: {algo.replay.num_iterations} found {where}; each pass over the file takes"
            " every group again: must be 0"
        )
    if algo.dynamic_sampling.enabled:
        yield (
            f"algo.dynamic_sampling.enabled: true found {where}; there is no server to sample other groups in place of"
            " those whose rewards are equal: must be false"
        )
    if rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness: found {rollout.max_staleness} {where}; nothing is generated ahead, and all"
            " responses of the file are learned from, however old: it must be 0"
        )
    if rollout.router_replay:
        yield (
            f"rollout.router_replay: found true {where}; a rollouts.jsonl does not have the experts that the servers"
            " chose: it must be false"
        )
    pretraining = algo.value_pretrain
    if needs_critic(algo) and pretraining.num_steps > 0 and pretraining.rollouts is None:
        yield (
            f"algo.value_pretrain.rollouts: null found {where}; there is no server to sample the responses of value"
            f" pretraining: must be a file, such as {rollout.file}, or algo.value_pretrain.enabled=false"
        )
