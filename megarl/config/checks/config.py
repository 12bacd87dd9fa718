"""Contradictions between values: found before anything starts."""

from collections.abc import Iterator
from math import isfinite

from megarl.algo.registry import needs_critic
from megarl.config.checks.algo import check_algo, check_modules
from megarl.config.checks.compute import check_compute
from megarl.config.checks.parallel import check_overlap, check_parallel
from megarl.config.checks.ranges import check_ranges
from megarl.config.schema.algo import needs_full_kl, needs_reference
from megarl.config.schema.hardware import check_hardware
from megarl.config.schema.model import ModelSource
from megarl.config.schema.root import Config


def check_config(config: Config) -> list[str]:
    """One message per problem: the key, what was found, what would be right. Empty where all is well."""
    unknown = check_modules(config.algo)
    if unknown:
        return unknown
    return [
        *_check_sizes(config),
        *check_ranges(config),
        *_check_model(config),
        *_check_roles(config),
        *check_compute(config),
        *_check_rollout(config),
        *check_hardware(config.cluster.hardware),
        *check_algo(config.algo, config.train.responses_per_prompt, num_optimizer_steps(config)),
    ]


def num_samples(config: Config) -> int:
    """Samples of one iteration: prompts x responses."""
    return config.train.prompts_per_iteration * config.train.responses_per_prompt


def num_optimizer_steps(config: Config) -> int:
    """Policy optimizer steps of one iteration."""
    return num_samples(config) // max(1, config.train.samples_per_minibatch) * config.train.epochs_per_iteration


def describe_sizes(config: Config) -> str:
    """The sizes of an iteration as one sentence."""
    train = config.train
    return (
        f"each iteration: {train.prompts_per_iteration} prompts x {train.responses_per_prompt} responses"
        f" = {num_samples(config)} samples; {train.samples_per_minibatch} samples per minibatch"
        f" x {train.epochs_per_iteration} epoch{'s' if train.epochs_per_iteration > 1 else ''}"
        f" = {num_optimizer_steps(config)} optimizer steps;"
        f" micro-batches of up to {train.tokens_per_microbatch} tokens"
    )


def _check_sizes(config: Config) -> Iterator[str]:
    train = config.train
    positive = {
        "train.num_iterations": train.num_iterations,
        "train.prompts_per_iteration": train.prompts_per_iteration,
        "train.responses_per_prompt": train.responses_per_prompt,
        "train.samples_per_minibatch": train.samples_per_minibatch,
        "train.tokens_per_microbatch": train.tokens_per_microbatch,
        "train.epochs_per_iteration": train.epochs_per_iteration,
        "train.eval_every": train.eval_every,
        "train.num_eval_prompts": train.num_eval_prompts,
        "train.max_samples": 1 if train.max_samples is None else train.max_samples,
        "data.prompt_length": config.data.prompt_length,
        "rollout.response_length": config.rollout.response_length,
    }
    bad = [f"{key}: found {value}; it must be 1 or more" for key, value in positive.items() if value < 1]
    yield from bad
    if bad:
        return
    samples = num_samples(config)
    if train.samples_per_minibatch > samples or samples % train.samples_per_minibatch:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - train.samples_per_minibatch))
        yield (
            f"train.samples_per_minibatch: found {train.samples_per_minibatch}, which does not divide the"
            f" {train.prompts_per_iteration} prompts x {train.responses_per_prompt} responses = {samples} samples"
            f" of an iteration; the nearest that does is {nearest}"
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
        yield from check_parallel(f"{role}.parallel", parallel, config.train.samples_per_minibatch)
    yield from check_overlap("policy.optimizer", config.policy.optimizer)
    if "critic" in roles:
        yield from check_overlap("critic.optimizer", config.critic.optimizer)


def _check_model(config: Config) -> Iterator[str]:
    source, path = config.model.source, config.model.path
    if source is ModelSource.path and not path:
        yield (
            f"model.path: found {'null' if path is None else repr(path)}; model.source=path needs a Hugging Face"
            " checkpoint directory, or a name in the local cache"
        )
    if source is not ModelSource.path and path is not None:
        yield (
            f"model.path: found {path!r}; it has no effect under model.source={source.name}:"
            " set model.source=path, or leave it out"
        )


def _check_rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    longest = config.data.prompt_length + rollout.response_length
    if not (isfinite(rollout.temperature) and rollout.temperature > 0):
        yield (
            f"rollout.temperature: found {rollout.temperature}; training needs a sampled distribution, above 0"
            " (evaluation is greedy by itself)"
        )
    if config.algo.overlong.buffer > rollout.response_length:
        yield (
            f"algo.overlong.buffer: found {config.algo.overlong.buffer}; it is a part of rollout.response_length"
            f" ({rollout.response_length}) and must not be longer"
        )
    for key in ("top_p", "top_k", "min_p"):
        if key in rollout.sglang:
            yield f"rollout.sglang.{key}: refused; log-probs are of the full distribution, not of a truncated one"
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < longest:
        yield (
            f"rollout.kv_cache_tokens: found {rollout.kv_cache_tokens}; one sequence may have"
            f" data.prompt_length + rollout.response_length = {longest} tokens"
        )
