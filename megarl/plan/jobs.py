"""From a checked configuration to the inputs of a plan: the models, and what each role's memory depends on."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.schema.algo import needs_full_kl, needs_reference
from megarl.config.schema.model import ModelSource, RandomModelConfig
from megarl.config.schema.roles import (
    CriticConfig,
    ParallelConfig,
    PolicyConfig,
    ReferenceConfig,
    Trainable,
    TrainedRoleConfig,
)
from megarl.config.schema.root import Config
from megarl.families.registry import build_random_fields
from megarl.hf.checkpoint import default_cache_dir, resolve_checkpoint
from megarl.hf.random_model import SPECIAL_TOKENS
from megarl.mcore.model.architecture import Architecture, check_layout, parse_architecture, read_architecture
from megarl.mcore.role_fields import check_router_replay
from megarl.plan.activations import MicroBatch, Saving
from megarl.plan.published import PUBLISHED
from megarl.plan.roles import RoleJob
from megarl.sync.serving_pieces import check_serving_layout

DEFAULT_MODULES = ("core_attn",)
"""Modules that Megatron recomputes under recompute=selective (transformer_config.py, recompute_modules)"""


@dataclass(frozen=True)
class PlannedModels:
    policy: Architecture
    """Also the reference's"""
    critic: Architecture


def find_models(config: Config) -> PlannedModels:
    """The sizes of the models, from their files where they exist locally, else as published; nothing is downloaded.

    Raises ConfigError naming model.path or critic.init.
    """
    if config.model.source is ModelSource.random:
        policy = describe_random(config.model.random)
    elif config.model.source is ModelSource.path:
        policy = find_architecture(str(config.model.path), "model.path")
    else:
        policy = _read(resolve_checkpoint(config.model, default_cache_dir()), "model.source")
    has_own = needs_critic(config.algo) and config.critic.init is not None
    return PlannedModels(policy, find_architecture(str(config.critic.init), "critic.init") if has_own else policy)


def find_architecture(name: str, key: str) -> Architecture:
    """The sizes of a checkpoint directory, a model in the Hugging Face cache, or one of PUBLISHED."""
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _read(directory, key)
    cached = find_in_cache(name)
    if cached is not None:
        return _read(cached, key)
    if name in PUBLISHED:
        return parse_architecture(PUBLISHED[name], Path(name))
    raise ConfigError(
        [
            f"{key}: {name!r} found; no config.json is in {directory.absolute()} or, under that name, in the local"
            f" Hugging Face cache, and its sizes are not among those known here: {', '.join(PUBLISHED)}"
        ]
    )


def find_in_cache(name: str) -> Path | None:
    """The directory of a model whose config.json is in the local Hugging Face cache; None where none is."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read(directory: Path, key: str) -> Architecture:
    try:
        return read_architecture(directory)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def describe_random(random: RandomModelConfig) -> Architecture:
    """The sizes of model.source=random, whose files need not exist yet."""
    fields = build_random_fields(random, len(random.alphabet) + len(SPECIAL_TOKENS))
    return parse_architecture({"model_type": random.family, **fields}, Path("model.random"))


def build_jobs(config: Config, models: PlannedModels, on_gpu: bool) -> dict[str, RoleJob]:
    """The roles that the algorithm needs, in the order policy, critic, reference.

    Raises ConfigError for a layout that does not divide its model, and for replay of routes that it does not have.
    """
    jobs = {"policy": _build_job(config, "policy", config.policy, models.policy, on_gpu)}
    if needs_critic(config.algo):
        jobs["critic"] = _build_job(config, "critic", config.critic, models.critic, on_gpu)
    if needs_reference(config.algo):
        jobs["reference"] = _build_job(config, "reference", config.reference, models.policy, on_gpu)
    problems = [] if config.rollout.file is not None else list(check_serving_layout(models.policy, config.rollout.tp))
    for name, job in jobs.items():
        problems += check_layout(job.arch, job.parallel, f"{name}.parallel", config.model.megatron)
    if config.rollout.router_replay:
        problems += check_router_replay(models.policy, config.model.megatron)
    if problems:
        raise ConfigError(problems)
    return jobs


def _build_job(
    config: Config, name: str, node: TrainedRoleConfig | ReferenceConfig, arch: Architecture, on_gpu: bool
) -> RoleJob:
    batch, num_microbatches = find_microbatch(config, node.parallel, find_longest(config, is_critic=name == "critic"))
    saving, fp8 = Saving(), False
    if isinstance(node, TrainedRoleConfig):
        fp8 = node.fp8 is not None
        modules = tuple(config.model.megatron.get("recompute_modules") or DEFAULT_MODULES)
        saving = Saving(node.recompute, node.recompute_method, node.recompute_num_layers, modules)
    return RoleJob(
        name=name,
        arch=arch,
        parallel=node.parallel,
        dtype=node.dtype,
        is_trained=isinstance(node, TrainedRoleConfig),
        has_value_head=name == "critic",
        holds_reference=name == "policy" and needs_full_kl(config.algo),
        offload=node.offload,
        saving=saving,
        batch=batch,
        num_microbatches=num_microbatches,
        on_gpu=on_gpu,
        fp8=fp8,
        lora=node.lora if isinstance(node, PolicyConfig) and node.lora.rank else None,
        trainable=node.trainable if isinstance(node, CriticConfig) else Trainable.all,
        caches_fp8=fp8 and not config.model.megatron.get("disable_parameter_transpose_cache"),
    )


def find_longest(config: Config, is_critic: bool = False) -> int:
    """The maximum number of tokens of a sequence; is_critic: of the critic's, with data.critic_prompt."""
    own = config.data.num_critic_tokens if is_critic else 0
    return own + config.data.prompt_length + config.rollout.response_length


def find_microbatch(config: Config, parallel: ParallelConfig, longest: int) -> tuple[MicroBatch, int]:
    """The largest micro-batch that packing makes (megarl/data/packing.py), nearly all of it response tokens, and the
    number of micro-batches per minibatch on a data-parallel rank if every sequence has its maximum length, `longest`.
    """
    train = config.train
    budget = train.tokens_per_microbatch * parallel.cp
    tokens = min(max(budget, longest), ceil(train.num_samples / parallel.dp) * longest)
    share = ceil(train.minibatch_size / parallel.dp)
    number = ceil(share / max(1, budget // longest))
    own = ceil(tokens / parallel.cp)
    return MicroBatch(own, own, longest), number


def check_batches(config: Config, jobs: Mapping[str, RoleJob]) -> list[str]:
    """Problems with dividing an iteration's samples over the ranks of a role, one message each."""
    samples, problems = config.train.minibatch_size, []
    for name, job in jobs.items():
        if job.is_trained and samples < job.parallel.dp:
            problems.append(
                f"{name}.parallel: {job.parallel.dp} data-parallel ranks share {samples} samples"
                " (train.samples_per_minibatch); each needs at least one"
            )
    return problems
