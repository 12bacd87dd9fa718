"""Checks of a composed configuration: ranges, keys without effect, parts of a reward, values that contradict others."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from math import isfinite, isqrt
from typing import Any

from megarl.algo import objective
from megarl.config.errors import ConfigError
from megarl.config.placement import find_server_offload, list_layouts
from megarl.config.schema import task
from megarl.config.schema.algo import (
    LARGEST_KL_ERROR,
    NO_ADVANTAGE,
    AlgoConfig,
    LossAggMode,
    MismatchCorrection,
    NormScope,
    ValueLoss,
    compares_pairs,
    needs_full_kl,
    uses_topr,
)
from megarl.config.schema.key import Effect, Key, get_key, show
from megarl.config.schema.mix import list_sources, name_in_source, split_config
from megarl.config.schema.roles import Dtype, ModelSource, ParallelConfig, TrainedRoleConfig
from megarl.config.schema.root import NO_QUANTIZED_WEIGHTS, Config, TrainConfig, check_truncation


@dataclass(frozen=True)
class Place:
    """Where a key stands; what its `Effect` looks at."""

    config: Config
    node: Any
    """The group that has it"""
    path: str
    """of that group"""
    command: str | None = None
    """train or evaluate; None: what only one of them has no use for is not asked"""
    objective: Any = objective
    """The module, which the schema, below it, cannot import"""

    @property
    def offloads_servers(self) -> bool:
        return find_server_offload(self.config) is not None


Effects = Sequence[tuple[Effect, Place]]
"""Each with the place where it is declared"""


def _walk(place: Place, above: Effects = ()) -> Iterator[tuple[str, Any, Field[Any], Effects, Effects]]:
    """Every key and group below the node, with its value and field, the effects of the groups above, and its own."""
    for each in fields(place.node):
        stated, value, name = get_key(each), getattr(place.node, each.name), f"{place.path}.{each.name}".lstrip(".")
        kept = [it for it in above if it[0] not in stated.despite] if stated.despite else above
        own = [(effect, place) for effect in stated.effects]
        yield name, value, each, kept, own
        # A set of train.eval_sets has keys of its own, by its name.
        parts = {f"{name}.{it}": value[it] for it in value} if isinstance(value, dict) else {name: value}
        for path, node in parts.items():
            if is_dataclass(node):
                yield from _walk(replace(place, node=node, path=path), (*kept, *own))


def check_keys(place: Place) -> Iterator[str]:
    """One message per value of the node out of its range, and per value without effect that is an error whoever set it;
    of a part of reward=weighted as if it were the group at its path.
    """
    for name, value, each, above, own in _walk(place):
        stated = get_key(each)
        if is_dataclass(value):
            continue
        wrong, must_count = list(_check_value(name, value, stated)), stated.strict and value != each.default
        # The search of a plan checks thousands of configurations, and asking whether a key has an effect takes longest.
        reason = _find_reason((*above, *own)) if wrong or must_count else None
        if reason is None:
            yield from wrong
        elif must_count:
            yield f"{name}: {show(value)} found; it has no effect {reason}, else it must be {show(each.default)}"


def _find_reason(effects: Effects) -> str | None:
    """Why a key with these has no effect; None where it has."""
    for effect, place in effects:
        if not effect.counts(place):
            found = show(getattr(place.node, effect.sibling, None))
            return effect.reason.format(config=place.config, node=place.node, path=place.path, found=found)
    return None


def _check_value(name: str, value: object, stated: Key) -> Iterator[str]:
    if isinstance(value, str) and value != "???" and not stated.is_prose:
        if not value.strip():
            yield f"{name}: found {value!r}; it must not be empty (null or leaving it out means the default)"
        elif not value.isprintable():
            yield f"{name}: found {value!r}; it must be one line of text"
        elif stated.names_folder and not re.fullmatch(r"[\w.+-]+", value):
            yield f"{name}: found {value!r}; it is a part of the run's folder: letters, digits and _ . + - only"
    elif isinstance(value, int | float) and not isinstance(value, bool) and not stated.contains(value):
        yield f"{name}: found {value}; it must be {stated.describe_range()}"


def find_unused(config: Config, keys: Iterable[str], command: str | None = "train") -> Iterator[tuple[str, str]]:
    """(key, why it has no effect and what would make it count) for those of `keys` that have none.

    `keys` are the dotted ones that somebody set; what a preset leaves unused is nobody's mistake, and a value that
    switches off what is off anyway is allowed. command: None leaves out what only one of the commands has no use for.
    """
    known = {name: found for name, *found in _walk(Place(config, config, "", command))}
    for key in dict.fromkeys(keys):
        # What stands below a dictionary counts as that does.
        name = next((name for size in range(key.count(".") + 1) if (name := key.rsplit(".", size)[0]) in known), None)
        if name is not None:
            value, each, above, own = known[name]
            # A group without effect has nothing that could be switched off.
            is_off = _is_off(value, each.default, get_key(each))
            if (reason := _find_reason(above if is_off else (*above, *own))) is not None:
                yield key, f"has no effect {reason}"


def _is_off(value: object, default: object, stated: Key) -> bool:
    """Whether the value asks for nothing: null, none, raw, and false or 0 where that or null is the default."""
    if isinstance(value, Enum):
        return value.name in ("none", "raw")
    if value is None or (value == 0 and default in (0, None)):
        return True
    return stated.off is not None and value == stated.off


def _check_sources(config: Config) -> Iterator[str]:
    """One message per problem of a source of data=mix; none for other data."""
    try:
        sources = list_sources(config)
    except ConfigError as error:
        yield from error.problems
        return
    for name, source in sources.items():
        for group in ("data", "reward", "environment"):
            place = Place(source.config, getattr(source.config, group), group)
            yield from (name_in_source(name, problem) for problem in check_keys(place))
        yield from (name_in_source(name, problem) for problem in _check_parts(source.config))
    for name, each in config.train.eval_sets.items():
        key = f"train.eval_sets.{name}"
        if sources and each.source not in sources:
            yield f"{key}.source: found {show(each.source)}; it must be one of data.sources: {', '.join(sources)}"
        elif not sources and each.source is not None:
            yield f"{key}.source: found {each.source}; it has no effect without data=mix: leave it out"
        if name in sources:
            yield f"{key}: a source has this name, under which its held-out prompts are logged: choose another"
    if config.reference.by_source:
        full = needs_full_kl(config.algo)
        why = "a KL of estimator full compares with the policy's own start" if full else "it needs data=mix"
        if full or not sources:
            yield f"reference.by_source: found {show(config.reference.by_source)}; {why}: leave it out"
        for name in set(config.reference.by_source) - set(sources) if sources else ():
            yield f"reference.by_source.{name}: found no such source; data.sources has {', '.join(sources)}"


def _check_parts(config: Config) -> Iterator[str]:
    """One message per problem of the parts of a weighted sum; none for another reward."""
    if isinstance(config.reward, task.WeightedRewardConfig):
        try:
            parts = task.read_parts(config.reward)
        except ConfigError as error:
            yield from error.problems
        else:
            for part in parts:
                yield from check_keys(Place(config, part.config, f"reward.parts.{part.name}"))


TOY_MODELS = ("tiny", "tiny_moe")
"""The presets in conf/model/ whose settings are for random weights (model.source=random)"""
_FULL = "log-probs are of the full distribution at the temperature, and of nothing that a server adds or cuts off"
_ONE_MODEL = "servers hold the policy's weights as the checkpoint and the trainer have them, and compute its model"
_OLD_CACHE = "a store outside of the server would keep keys and values of older weights"
_REASONS = {
    _FULL: "top_p top_k min_p preferred_sampling_params enable_custom_logit_processor enable_watermark watermark_config"
    " dllm_algorithm dllm_algorithm_config enable_strict_thinking allow_auto_truncate",
    _ONE_MODEL: "json_model_override_args model_config_parser trust_remote_code revision decrypted_config_file"
    " decrypted_draft_config_file forward_hooks enable_lora lora_paths uno_lora_path kt_weight_path kt_method"
    " is_embedding enable_hisparse hisparse_config weight_cache_mode enable_w4a4_mxfp4_megamoe"
    " modelopt_checkpoint_restore_path delete_ckpt_after_loading",
    _OLD_CACHE: "hicache_storage_backend enable_lmcache enable_flexkv enable_unified_cache_external_linker",
    NO_QUANTIZED_WEIGHTS: "quantization quantize_and_serve modelopt_quant rl_quant_profile",
}
REFUSED_OPTIONS = {option: why for why, options in _REASONS.items() for option in options.split()}
"""Server arguments by which responses are sampled otherwise, or from another model, than training assumes; and why"""
_DRAFTS = "drafts come from a model that no weight sync reaches, and thresholds may accept what the policy would not"
"""Of every argument that begins with speculative_"""
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors", "fastsafetensors", "instanttensor", "layered"),
    "model_impl": ("auto", "sglang"),
}
"""Server arguments of which other values load other weights, or other modules than the weight sync knows"""


def check_config(config: Config) -> list[str]:
    """One message per problem: the key, what was found, what would be right. Empty where all is well."""
    unknown: list[str] = []
    for find, name in (
        (objective.find_advantage, config.algo.advantage),
        (objective.find_policy_loss, config.algo.surrogate),
    ):
        try:
            find(name)
        except ConfigError as error:
            unknown += error.problems
    if unknown := unknown or list(objective.check_options(config.algo)):
        return unknown
    # What follows takes numbers to be in their ranges, and divides by them.
    return [*check_keys(Place(config, config, "")), *_check_parts(config), *_check_sources(config)] or [
        *_check_train(config),
        *_check_model(config),
        *_check_roles(config),
        *check_critic(config),
        *_check_rollout(config),
        *_check_saved(config),
        *_check_pairs(config),
        *_check_demonstrations(config),
        *(name_in_source(*it) for it in _check_each(config)),
        *_check_sampling(config),
        *check_algo(config.algo, config.train.responses_per_prompt, config.train.num_optimizer_steps),
    ]


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


def describe_iteration_size(train: TrainConfig) -> str:
    """The key that gives the size of an iteration, and its value: the start of a message."""
    key = "samples" if train.prompts_per_iteration is None and train.samples_per_iteration else "prompts"
    return f"train.{key}_per_iteration: found {getattr(train, f'{key}_per_iteration')}"


def _check_train(config: Config) -> Iterator[str]:
    train, pretrains = config.train, objective.needs_critic(config.algo) and config.algo.value_pretrain.num_steps > 0
    wanted, group, samples = train.samples_per_iteration, train.responses_per_prompt, train.num_samples
    key = "samples_per_minibatch" if train.num_minibatches is None else "num_minibatches"
    if train.num_iterations == 0 and not pretrains:
        yield "train.num_iterations: found 0, value pretraining alone, and there is none: algo.value_pretrain.enabled"
    if train.prompts_per_iteration is None and wanted is not None and wanted % group:
        nearest = max(1, round(wanted / group)) * group
        right = f"the nearest that it does is {nearest}, of {nearest // group} prompts"
        found = f"found {wanted}, which train.responses_per_prompt ({group}) does not divide"
        yield f"train.samples_per_iteration: {found}; {right}"
    elif samples % (found := getattr(train, key)):
        right = f"the nearest that does is {find_nearest_divisor(samples, found)}"
        size = f"{train.num_prompts} prompts x {group} responses = {samples} samples of an iteration"
        yield f"train.{key}: found {found}, which does not divide the {size}; {right}"
    for name, each in train.eval_sets.items():
        key = f"train.eval_sets.{name}"
        yield from check_truncation(key, each, each.temperature)


def _check_model(config: Config) -> Iterator[str]:
    source, path, name = config.model.source, config.model.path, config.model.name
    found, right = f"model.path: found {'null' if path is None else repr(path)}", "type model=checkpoint model.path="
    if source is ModelSource.path and not path:
        yield f"{found}; it must be a Hugging Face checkpoint directory, or the name of a model on the hub, OWNER/NAME"
    elif path is not None and name in TOY_MODELS:
        toy = "whose learning rate, lengths, float32 and data are those of a toy with random weights"
        yield f"{found} with model={name}, {toy}; {right}{path}"
    elif source is not ModelSource.path and path is not None:
        yield f"{found}; it has no effect under model.source={source.name}: {right}{path}"


# The roles: layouts that Megatron's arithmetic allows, and how each computes.


def _check_roles(config: Config) -> Iterator[str]:
    steps, num_iterations = config.train.num_optimizer_steps, config.train.num_iterations
    if not config.has_critic_alone:
        yield from _check_role("policy", config.policy, steps, num_iterations)
    if objective.needs_critic(config.algo):
        steps *= config.critic.updates_per_policy_update
        yield from _check_role("critic", config.critic, steps, num_iterations)
    for role, parallel in list_layouts(config).items():
        yield from check_parallel(f"{role}.parallel", parallel, config.train.minibatch_size)
    if needs_full_kl(config.algo) and (pp := config.policy.parallel.pp) > 1:
        why = "a KL of estimator full, which compares whole distributions on the policy's last stage"
        yield f"policy.parallel.pp: found {pp} with {why}; it must be 1, or the estimator k1, k2 or k3"


def _check_role(role: str, node: TrainedRoleConfig, steps_per_iteration: int, num_iterations: int) -> Iterator[str]:
    optimizer, key = node.optimizer, f"{role}.optimizer"
    if node.fp8 and node.dtype is not Dtype.bfloat16:
        needed = f"{role}.dtype=bfloat16"
        yield f"{role}.fp8: found {node.fp8.value} with {role}.dtype={node.dtype.value}; FP8 products need {needed}"
    if optimizer.min_lr > optimizer.lr:
        yield f"{key}.min_lr: found {optimizer.min_lr}; it must be between 0 and lr ({optimizer.lr})"
    resolved = optimizer.resolve_schedule(steps_per_iteration, num_iterations)
    warmup, steps = resolved.warmup_steps, resolved.decay_steps
    if steps is not None and steps <= warmup:
        found = f"decay_steps: found {optimizer.decay_steps}"
        if optimizer.decay_steps is None:
            found = f"decay_iterations: found {optimizer.decay_iterations}, which is {steps} optimizer steps"
        given = "warmup_steps" if optimizer.warmup_ratio is None else f"warmup_ratio={optimizer.warmup_ratio:g}"
        yield f"{key}.{found}; it must be above {key}.{given} ({warmup}), which it includes"


def check_parallel(key: str, parallel: ParallelConfig, samples_per_minibatch: int) -> Iterator[str]:
    """One message per problem of the layout under `key`; what depends on the model is checked with the model."""
    total, tp, pp, cp, ep, etp = (getattr(parallel, name) for name in ("num_processes", "tp", "pp", "cp", "ep", "etp"))
    size = tp * pp * cp
    if total % size:
        nearest = max(1, (2 * total + size) // (2 * size)) * size
        layout = f"tp {tp} x pp {pp} x cp {cp} = {size}"
        yield f"{key}.num_processes: found {total}, which {layout} does not divide; {nearest} would fit"
        return
    if samples_per_minibatch < parallel.dp:
        samples = f"{samples_per_minibatch} samples (train.samples_per_minibatch)"
        yield f"{key}: {parallel.dp} data-parallel ranks share {samples}; each needs at least one"
    # The experts' layout: etp x ep x expert data parallelism in each pipeline stage.
    stage = total // pp
    if stage % (etp * ep):
        near_etp = find_nearest_divisor(stage, etp)
        near = f"the nearest that do are ep={find_nearest_divisor(stage // near_etp, ep)} etp={near_etp}"
        must = f"etp x ep must divide the {stage} processes of a pipeline stage"
        yield f"{key}.ep: found {ep} with etp {etp}; {must}; {near}"
    if parallel.sp and tp == 1:
        yield f"{key}.sp: found true at tp 1; it splits over tensor-parallel ranks: set {key}.tp, or sp=false"
    if parallel.vpp > 1 and pp == 1:
        yield f"{key}.vpp: found {parallel.vpp} at pp 1; it cuts the stages of a pipeline: set {key}.pp, or vpp=1"


def find_nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return min([*small, *(number // n for n in small)], key=lambda n: (abs(n - wanted), n))


def check_critic(config: Config) -> Iterator[str]:
    """One message per problem of the critic's keys and policy.frozen_iterations."""
    frozen, iterations, algo = config.policy.frozen_iterations, config.train.num_iterations, config.algo
    if frozen >= iterations > 0:
        right = f"it must be below {iterations}. To train a critic alone: train.num_iterations=0"
        yield f"policy.frozen_iterations: found {frozen}; the policy would never learn: {right}"
    if not objective.needs_critic(algo):
        return
    yield from _check_critic_replay(config)
    value_range = config.critic.value_range
    yield from _check_value_loss(config)
    if value_range is None:
        return
    found = f"critic.value_range: found {_show(*value_range)}"
    if len(value_range) != 2 or not all(map(isfinite, value_range)) or value_range[0] >= value_range[1]:
        yield f"{found}; it must be [low, high], two finite numbers with low below high, or null"
        return
    if algo.kl.in_reward:
        yield f"{found} with algo.kl.in_reward=true; a return then has the KL of all tokens, which nothing bounds"
    if {algo.reward_norm.mean, algo.reward_norm.std} != {NormScope.none} or algo.reward_norm.parts:
        yield f"{found} with algo.reward_norm; normalized rewards have no fixed range: it must be null, or all off"
    elif (returns := find_return_range(config)) is not None:
        low, high = returns
        if not value_range[0] <= low <= high <= value_range[1]:
            right = _show(min(low, value_range[0]), max(high, value_range[1]))
            by = f"(reward.wrong={config.reward.wrong:g}, algo.overlong.penalty={algo.overlong.penalty:g})"
            returns_are = f"the returns that the critic learns are from {low:g} to {high:g} {by}"
            yield f"{found}; {returns_are}, and others can never be learned: it must contain them, as {right} does"


def _check_value_loss(config: Config) -> Iterator[str]:
    algo = config.algo
    if config.critic.value_range is None and algo.value_loss is ValueLoss.cross_entropy:
        right = "it needs the range of the returns, as critic.value_range=[0,1], or squared"
        yield f"algo.value_loss: {algo.value_loss.name} found with critic.value_range=null; {right}"


def _check_critic_replay(config: Config) -> Iterator[str]:
    num, algo = config.critic.replay_iterations, config.algo
    where = f"found with critic.replay_iterations={num}"
    if num and algo.lambda_critic != 1:
        why = "returns of past iterations would have their values in them"
        yield f"algo.lambda_critic: {algo.lambda_critic:g} {where}; {why}: it must be 1"
    if num and algo.value_clip is not None:
        why = "values of past iterations are no bound for the present ones"
        yield f"algo.value_clip: {algo.value_clip:g} {where}; {why}: it must be null"


def find_return_range(config: Config) -> tuple[float, float] | None:
    """The least and the largest return of a response without a KL or a normalization of rewards; None where the
    configuration does not say, because the scores, or an environment's rewards of turns, may be any number.
    """
    sources = list_sources(config).values()
    found = [_find_own_range(each.config, each.reward_scale) for each in sources] or [_find_own_range(config)]
    ranges = [each for each in found if each is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if len(ranges) == len(found) else None


def _find_own_range(config: Config, scale: float = 1.0) -> tuple[float, float] | None:
    """scale: reward_scale of the source."""
    scores = task.find_score_range(config.reward)
    if scores is None or not isinstance(config.environment, task.SingleTurnEnvironmentConfig):
        return None
    wrong, clip = config.reward.wrong, config.algo.reward_clip
    low, high = sorted(scale * (wrong + (1 - wrong) * score) for score in scores)
    low -= config.algo.overlong.penalty
    if clip is not None:
        low, high = (min(max(end, -clip), clip) for end in (low, high))
    return (min(low, 0.0), max(high, 0.0)) if config.algo.gamma < 1 else (low, high)


def _show(*numbers: float) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


# Generation, and what is learned without it.


def _check_each(config: Config) -> Iterator[tuple[str, str]]:
    """The name of each source, or "", with a problem of its limits and of what answers the policy."""
    overlong = config.algo.overlong
    for name, each in split_config(config).items():
        length = each.rollout.response_length
        if overlong.penalty > 0 and overlong.count_buffer(length) < 1:
            less = f"which is less than one token of rollout.response_length ({length})"
            why = f"found {overlong.buffer_frac:g}, {less}; algo.overlong.penalty needs one"
            yield name, f"algo.overlong.buffer_frac: {why}"
        yield from ((name, problem) for problem in (*_check_environment(each), *_check_reward_parts(each)))


def _check_rollout(config: Config) -> Iterator[str]:
    rollout, kl = config.rollout, config.algo.kl
    longest = config.data.prompt_length + rollout.response_length
    least = LARGEST_KL_ERROR * config.train.num_samples
    if kl.in_reward and kl.target is not None and kl.horizon <= least:
        right = f"it must be above {least:g} ({LARGEST_KL_ERROR:g} * samples of an iteration)"
        yield f"algo.kl.horizon: found {kl.horizon:g}; a step could make the weight of the KL negative: {right}"
    if rollout.max_staleness > 0:
        yield from check_older_samples(config.algo, f"rollout.max_staleness: {rollout.max_staleness} found")
        if (offload := find_server_offload(config)) is not None:
            why = f"rollout.max_staleness={rollout.max_staleness}, where servers generate while the roles compute"
            yield f"rollout.offload: found {offload.name} with {why}; null, or rollout.max_staleness=0"
    yield from _check_options(rollout.sglang, longest)
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < longest:
        needed = f"one sequence may have data.prompt_length + rollout.response_length = {longest} tokens"
        yield f"rollout.kv_cache_tokens: found {rollout.kv_cache_tokens}; {needed}"


def _check_options(options: Mapping[str, Any], longest: int) -> Iterator[str]:
    """One message for each server argument by which responses would not be samples of the policy."""
    for key, value in options.items():
        why = _DRAFTS if key.startswith("speculative_") else REFUSED_OPTIONS.get(key)
        why = NO_QUANTIZED_WEIGHTS if value == "flash_rl" else why
        if why is not None and value is not None and value is not False:
            yield f"rollout.sglang.{key}: found {value!r}; {why}: leave it out"
        elif key in ALLOWED_VALUES and value is not None and value not in ALLOWED_VALUES[key]:
            yield f"rollout.sglang.{key}: found {value!r}; {_ONE_MODEL}: it must be {' or '.join(ALLOWED_VALUES[key])}"
    length = options.get("context_length")
    if isinstance(length, int) and length < longest:
        needed = f"data.prompt_length + rollout.response_length = {longest} tokens must fit"
        yield f"rollout.sglang.context_length: found {length}; {needed}"


def _check_environment(config: Config) -> Iterator[str]:
    tools = config.environment
    if isinstance(config.reward, task.EnvironmentRewardConfig) and isinstance(tools, task.SingleTurnEnvironmentConfig):
        right = "choose one that does, such as environment=guess, or another reward"
        yield f"reward: found environment with environment=single_turn, which gives no rewards; {right}"
    if isinstance(tools, task.AgentEnvironmentConfig):
        yield from _check_agent(config, tools)
    if not isinstance(tools, task.ToolsEnvironmentConfig):
        return
    if (longest := tools.max_calls * tools.call_timeout_s) >= tools.step_deadline_s:
        right = f"it must be above environment.max_calls x environment.call_timeout_s = {longest:g} s"
        yield f"environment.step_deadline_s: found {tools.step_deadline_s:g}; {right}"
    if config.data.response_prefix is not None:
        why = "tool calls are read in what the policy generates, which does not have it"
        yield f"data.response_prefix: found a text with environment=tools; {why}: leave it null"


def _check_agent(config: Config, agent: task.AgentEnvironmentConfig) -> Iterator[str]:
    given = [name for name in ("command", "path", "url") if getattr(agent, name)]
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "found none of command, path and url"
        yield f"environment: {found} with environment=agent; one of them says what the agent is"
    if config.rollout.router_replay:
        why = "the experts of an episode with several segments are not kept"
        yield f"rollout.router_replay: found true with environment=agent; {why}: set it to false"


def _check_pairs(config: Config) -> Iterator[str]:
    """One message per key that asks a reward model for what pairs do not have."""
    algo, train, critic = config.algo, config.train, config.critic
    if not compares_pairs(algo):
        return
    why = "with algo.value_loss=bradley_terry, which learns from pairs of responses alone"
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("train.responses_per_prompt", train.responses_per_prompt, 2),
        ("critic.value_range", critic.value_range, None),
        ("critic.replay_iterations", critic.replay_iterations, 0),
        ("algo.value_clip", algo.value_clip, None),
        ("algo.value_pretrain.enabled", algo.value_pretrain.num_steps > 0, False),
        ("algo.kl.in_reward", algo.kl.in_reward, False),
        ("algo.kl.in_advantage", algo.kl.in_advantage, False),
        ("algo.kl.in_loss", algo.kl.in_loss, False),
        ("data.critic_prompt", config.data.critic_prompt, None),
        ("data.response_prefix", config.data.response_prefix, None),
        ("rollout.file", config.rollout.file, None),
    )
    yield from _list_others(asked, why)
    if train.minibatch_size % 2:
        key = "samples_per_minibatch" if train.num_minibatches is None else "num_minibatches"
        yield f"train.{key}: found minibatches of {train.minibatch_size} samples {why}: it must be an even number"
    yield from _check_file(config, why, "the columns prompt, chosen and rejected")


def _check_demonstrations(config: Config) -> Iterator[str]:
    """As `_check_pairs`, of a policy that imitates."""
    algo, train, rollout = config.algo, config.train, config.rollout
    if not rollout.from_data:
        return
    why = "with rollout.from_data=true, which learns the data's answers alone (experiment=sft)"
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("algo.advantage", algo.advantage, NO_ADVANTAGE),
        ("algo.rl_loss_coef", algo.rl_loss_coef, 0),
        ("algo.topr.positive_loss_coef", algo.topr.positive_loss_coef, 0),
        ("algo.topr.negative_loss_coef", algo.topr.negative_loss_coef, 0),
        ("algo.kl.in_reward", algo.kl.in_reward, False),
        ("algo.kl.in_advantage", algo.kl.in_advantage, False),
        ("algo.kl.in_loss", algo.kl.in_loss, False),
        ("algo.dynamic_sampling.enabled", algo.dynamic_sampling.enabled, False),
        ("algo.replay.num_iterations", algo.replay.num_iterations, 0),
        ("data.response_prefix", config.data.response_prefix, None),
        ("rollout.file", rollout.file, None),
        ("rollout.max_staleness", rollout.max_staleness, 0),
        ("rollout.router_replay", rollout.router_replay, False),
        ("rollout.temperature", rollout.temperature, 1),
        ("train.eval_sets", bool(train.eval_sets), False),
        ("train.responses_per_prompt", train.responses_per_prompt, 1),
    )
    yield from _list_others(asked, why)
    if not isinstance(config.environment, task.SingleTurnEnvironmentConfig):
        yield f"environment: found one with turns {why}: it must be single_turn"
    yield from _check_file(config, why, "answers")


def _list_others(asked: Iterable[tuple[str, Any, Any]], why: str) -> Iterator[str]:
    """asked: keys, what was found, and the only value that would be right."""
    for key, found, right in asked:
        if found != right:
            yield f"{key}: found {show(found)} {why}: it must be {show(right)}"


def _check_file(config: Config, why: str, what: str) -> Iterator[str]:
    if not isinstance(config.data, task.FileDataConfig):
        kind = next((name for name, schema in task.SCHEMAS["data"].items() if type(config.data) is schema), "none")
        yield f"data: found {kind} {why}: it must be jsonl, parquet or huggingface, with {what}"


def _check_saved(config: Config) -> Iterator[str]:
    """One message per key that asks for what only servers can give, or of a loss that cannot learn from the file."""
    rollout, algo, pretraining = config.rollout, config.algo, config.algo.value_pretrain
    if rollout.file is None:
        return
    yield from check_older_samples(algo, f"rollout.file: {rollout.file} found", off="null")
    asked = (
        ("algo.replay.num_iterations", algo.replay.num_iterations, "0", "each pass takes every group again"),
        ("algo.dynamic_sampling.enabled", algo.dynamic_sampling.enabled, "false", "no server samples other groups"),
        ("rollout.max_staleness", rollout.max_staleness, "0", "all of the file is learned from, however old"),
        ("rollout.router_replay", rollout.router_replay, "false", "it does not have the experts that servers chose"),
    )
    for key, value, right, why in asked:
        if value:
            yield f"{key}: found {str(value).lower()} with rollout.file={rollout.file}; {why}: it must be {right}"
    if objective.needs_critic(algo) and pretraining.num_steps > 0 and pretraining.rollouts is None:
        right = f"must be a file, such as {rollout.file}, or algo.value_pretrain.enabled=false"
        yield f"algo.value_pretrain.rollouts: null found with rollout.file={rollout.file}; {right}"


# The algorithm: what one estimator, policy loss or term of the loss refuses is in its own module.


def check_algo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps_per_iteration: int) -> Iterator[str]:
    """One message per contradiction of values that are each in their range (`check_keys`): the key, what was found and
    what would be right.
    """
    yield from _check_groups(algo, responses_per_prompt)
    yield from _check_replay(algo)
    checks = [objective.find_advantage(algo.advantage).check]
    if algo.rl_loss_coef != 0:
        checks.append(objective.find_policy_loss(algo.surrogate).check)
    for check in [*checks, *(term.check for term in objective.LOSS_TERMS if term.is_used(algo))]:
        yield from check(algo, responses_per_prompt, optimizer_steps_per_iteration)
    if algo.kl.in_reward and algo.kl.in_advantage:
        yield "algo.kl.in_advantage: true found with algo.kl.in_reward=true; the KL would count twice: must be false"
    correction = algo.mismatch.correction
    if algo.rl_loss_coef == 0 and not (uses_topr(algo) or algo.positive_lm_coef):
        others = "both topr weights 0 and algo.positive_lm_coef=0"
        yield f"algo.rl_loss_coef: 0 found with {others}, so that nothing is learned: one must be above 0"
    if correction is not MismatchCorrection.none and objective.has_ratio_to_rollout(algo):
        found = f"{correction.name} found with algo.surrogate={algo.surrogate}, whose ratio is to the rollout engine's"
        yield f"algo.mismatch.correction: {found}; it would count the mismatch twice: must be none"
    if algo.value_loss_agg_mode is LossAggMode["seq-mean-token-sum-norm"]:
        right = "token-mean, seq-mean-token-sum or seq-mean-token-mean"
        yield f"algo.value_loss_agg_mode: seq-mean-token-sum-norm found; must be {right}"


def _check_groups(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    norm, compares = algo.reward_norm, objective.find_advantage(algo.advantage).compares_group
    asked = {
        f"algo.advantage={algo.advantage}": compares,
        "algo.reward_norm.mean=group": norm.mean is NormScope.group,
        "algo.reward_norm.std=group": norm.std is NormScope.group,
        "algo.reward_norm.parts": bool(norm.parts),
        "algo.dynamic_sampling.enabled=true": algo.dynamic_sampling.enabled,
    }
    for what in [what for what, is_asked in asked.items() if is_asked and responses_per_prompt < 2]:
        found = f"train.responses_per_prompt: {responses_per_prompt} found"
        yield f"{found}; {what} compares the responses of a group, so it must be at least 2"
    if compares and norm.mean is NormScope.group:
        why = f"algo.advantage={algo.advantage} compares the rewards of a group already"
        yield f"algo.reward_norm.mean: group found; {why}, so it must be none (or batch, running)"
    if algo.value_pretrain.rollouts is not None and algo.kl.in_reward:
        found = f"algo.value_pretrain.rollouts: {algo.value_pretrain.rollouts} found with algo.kl.in_reward=true"
        yield f"{found}; saved responses have no KL: must be null (fresh responses), or algo.kl.in_reward=false"


def _check_sampling(config: Config) -> Iterator[str]:
    sampling = config.algo.dynamic_sampling
    for of in ("", "value_"):
        low, high = getattr(sampling, f"{of}low"), getattr(sampling, f"{of}high")
        if low is not None and high is not None and low >= high:
            right = f"algo.dynamic_sampling.{of}high ({high:g})"
            yield f"algo.dynamic_sampling.{of}low: found {low:g}; it must be below {right}"
    asked = {name: getattr(sampling, name) for name in ("skip_epochs", "value_low", "value_high")}
    for name, value in asked.items():
        found = f"algo.dynamic_sampling.{name}: found {show(value)}"
        if value not in (0, None) and config.rollout.max_staleness:
            why = f"rollout.max_staleness={config.rollout.max_staleness} draws prompts before that is measured"
            yield f"{found}; {why}: it must be {'0' if name == 'skip_epochs' else 'null'}"
        elif value is not None and name != "skip_epochs" and find_server_offload(config) is not None:
            why = "servers that have given their memory to the critic generate nothing before the next sync"
            yield f"{found}; {why}: it needs rollout.offload=null, or cluster.placement=split"


def _check_reward_parts(config: Config) -> Iterator[str]:
    parts, reward = config.algo.reward_norm.parts, config.reward
    if not parts:
        return
    found = f"algo.reward_norm.parts: found {', '.join(f'{name}={weight:g}' for name, weight in parts.items())}"
    if not all(map(isfinite, parts.values())):
        yield f"{found}; weights must be finite numbers"
    if reward.wrong != 0:
        yield f"{found} with reward.wrong={reward.wrong:g}, whose scale the normalization removes: it must be 0"
    known = reward.parts if isinstance(reward, task.WeightedRewardConfig) else {name.split("/")[0] for name in parts}
    if unknown := [name for name in parts if name.split("/")[0] not in known]:
        yield f"{found}; {unknown[0]} is not one of reward.parts, which are {', '.join(map(str, known))}"


def _check_replay(algo: AlgoConfig) -> Iterator[str]:
    if algo.replay.num_iterations == 0:
        return
    where = f"algo.replay.num_iterations: {algo.replay.num_iterations} found"
    if objective.needs_critic(algo):
        right = objective.name_advantages(needs_critic=False)
        yield f"{where}; the critic's returns would be of older policies: algo.advantage must be {right}"
    yield from check_older_samples(algo, where)
    if NormScope.running in (algo.reward_norm.mean, algo.reward_norm.std):
        yield f"{where}; algo.reward_norm=running would count a replayed reward again: must be 0, or batch or group"


def check_older_samples(algo: AlgoConfig, where: str, off: str = "0") -> Iterator[str]:
    """Why the loss may not learn from samples of older policies: replayed, sampled ahead or saved.

    where: the key that asks for them and what was found. off: the key's value that does not.
    """
    if algo.rl_loss_coef == 0 or objective.has_ratio_to_rollout(algo):
        return
    if algo.mismatch.correction is MismatchCorrection.none:
        losses = objective.name_policy_losses(ratio_to_rollout=True)
        yield (
            f"{where} with algo.mismatch.correction=none; the surrogate takes its samples as the present policy's: must"
            f" be {off}, or algo.mismatch.correction=tis (or mis), which weights them by the ratio to that policy,"
            f" algo.surrogate={losses}, whose ratio is to that policy, or algo.rl_loss_coef=0 with the topr terms"
        )
