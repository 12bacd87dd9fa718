"""What a run is made from, loaded and checked before any process is started."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.algo import needs_critic, needs_reference
from megarl.config.errors import ConfigError
from megarl.config.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.config.schema import Config
from megarl.data.build import DataSplits, build_data
from megarl.hf.checkpoint import default_cache_dir, load_tokenizer, resolve_checkpoint
from megarl.mcore.architecture import Architecture, check_layout, read_architecture
from megarl.mcore.spec import Role, WorkerSpec
from megarl.reward.build import build_reward, check_reward
from megarl.rollout.server import build_command
from megarl.sync.probe import build_probe_tokens
from megarl.types import RewardFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_LENGTH = 64


@dataclass(frozen=True)
class Inputs:
    checkpoint: Path
    """Hugging Face checkpoint directory that every role and server starts from"""
    tokenizer: "PreTrainedTokenizerBase"
    data: DataSplits
    reward: RewardFunction
    specs: dict[Role, WorkerSpec]
    """only the roles that the algorithm needs"""
    probe_tokens: tuple[int, ...]
    """the text on which every weight sync is proved"""


def load_inputs(config: Config) -> Inputs:
    """Raises ConfigError for what only the inputs can tell: a missing checkpoint, an unreadable file, a wrong size."""
    checkpoint = resolve_checkpoint(config.model, default_cache_dir())
    architecture = _read_architecture(checkpoint)
    specs = build_specs(config, checkpoint)
    # Raises for unknown options; the real command is made where the server starts.
    build_command(config.rollout, checkpoint, host=config.cluster.listen_host, port=0, seed=config.seed)
    problems = [*_check_model(config, architecture), *_check_megatron_options(specs, architecture)]
    if problems:
        raise ConfigError(problems)
    tokenizer = load_tokenizer(checkpoint)
    data = build_data(config.data, tokenizer, config.seed)
    reward = build_reward(config.reward)
    check_reward(reward, (data.train[0], data.heldout[0]))
    length = min(PROBE_LENGTH, architecture.max_length)
    probe = build_probe_tokens(data.heldout, architecture.vocab_size, length)
    return Inputs(checkpoint, tokenizer, data, reward, specs, probe)


def build_specs(config: Config, checkpoint: Path) -> dict[Role, WorkerSpec]:
    """What each role's workers are told."""

    def build(role: Role, parallel: ParallelConfig, optimizer: OptimizerConfig | None, dtype: Dtype) -> WorkerSpec:
        return WorkerSpec(
            role=role,
            checkpoint=str(checkpoint),
            parallel=parallel,
            optimizer=optimizer,
            dtype=dtype,
            algo=config.algo,
            temperature=config.rollout.temperature,
            response_length=config.rollout.response_length,
            tokens_per_microbatch=config.train.tokens_per_microbatch,
            seed=config.seed,
            megatron=config.model.megatron,
            num_threads=config.cluster.cpu_threads_per_worker,
            deadline_s=config.cluster.call_deadline_s,
        )

    policy, critic, reference = config.policy, config.critic, config.reference
    specs = {Role.policy: build(Role.policy, policy.parallel, policy.optimizer, policy.dtype)}
    if needs_critic(config.algo):
        specs[Role.critic] = build(Role.critic, critic.parallel, critic.optimizer, critic.dtype)
    if needs_reference(config.algo):
        specs[Role.reference] = build(Role.reference, reference.parallel, None, reference.dtype)
    return specs


def _read_architecture(checkpoint: Path) -> Architecture:
    try:
        return read_architecture(checkpoint)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError([f"model.path: {error}"]) from error


def _check_model(config: Config, architecture: Architecture) -> Iterator[str]:
    longest = config.data.prompt_length + config.rollout.response_length
    if longest > architecture.max_length:
        yield (
            f"rollout.response_length: found {config.rollout.response_length}; with data.prompt_length"
            f" {config.data.prompt_length} it is {longest} tokens; the model has {architecture.max_length} positions"
        )


def _check_megatron_options(specs: dict[Role, WorkerSpec], architecture: Architecture) -> Iterator[str]:
    for role, spec in specs.items():
        yield from check_layout(architecture, spec.parallel, f"{role.value}.parallel")
    options = specs[Role.policy].megatron
    if options:
        from megarl.mcore.model import check_options  # imports Megatron, which takes seconds

        for role, spec in specs.items():
            yield from (f"{role.value}: {problem}" for problem in check_options(architecture, spec))
