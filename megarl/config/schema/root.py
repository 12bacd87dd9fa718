"""The root of the configuration, its registration with Hydra, and the resolvers of conf/.

`${megarl_run_name:...}`, `algo.clip_high=0.24,seed=2_1f9c0b`, is the folder of one run of a sweep: its swept values, to
be read, and a digest of what it computes, which follows from the configuration alone: a sweep that is started again,
with more values or in another order, finds the folders of the runs that it already has.

`${cpu_dtype:${cluster.gpus_per_node}}` is the faster dtype of this machine, for presets of small models.
"""

import functools
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from megarl.config.schema import task
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.key import EVALUATED, GENERATED, NOT_ALONE, TRAINED, WITH_CRITIC, Effect, key
from megarl.config.schema.roles import CriticConfig, ModelConfig, PolicyConfig, ReferenceConfig
from megarl.config.schema.run import (
    CheckpointConfig,
    ClusterConfig,
    EvaluateConfig,
    LoggerConfig,
    RolloutConfig,
    TrainConfig,
)
from megarl.config.schema.task import DataConfig, EnvironmentConfig, RewardConfig

WITH_REFERENCE = Effect(
    lambda it: it.has_reference,
    "without a reference model; it counts with algo.kl.in_reward or algo.kl.in_loss and an estimator other than full",
)


@dataclass
class Config:
    """Everything one run is made from; `conf/*.yaml` hold only what differs from these defaults."""

    seed: int = key(1, low=0, high=2**32 - 1, why="SGLang gives it to numpy, which takes 32 bits")
    """Seed of everything random: order and split of the prompts, sampling, minibatches, new value heads."""
    algo: AlgoConfig = key(factory=AlgoConfig, when=TRAINED)
    """The algorithm: advantages, rewards, losses."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The checkpoint that the run starts from."""
    policy: PolicyConfig = key(factory=PolicyConfig, when=(TRAINED, NOT_ALONE))
    """The model that is trained to answer."""
    critic: CriticConfig = key(factory=CriticConfig, when=(TRAINED, WITH_CRITIC))
    """The model that estimates values; only with algo.advantage=gae."""
    reference: ReferenceConfig = key(factory=ReferenceConfig, when=(TRAINED, NOT_ALONE, WITH_REFERENCE))
    """The frozen model that KL terms compare with; only where there is one."""
    data: DataConfig = key(MISSING, when=GENERATED)
    """Where the prompts come from; its keys are those of the chosen source."""
    environment: EnvironmentConfig = key(MISSING, when=GENERATED)
    """What answers the policy within an episode; its keys are those of the chosen kind."""
    reward: RewardConfig = key(MISSING, when=(GENERATED, NOT_ALONE))
    """How a response is scored; its keys are those of the chosen kind."""
    rollout: RolloutConfig = key(factory=RolloutConfig, when=GENERATED)
    """Generation of responses, and the weight sync to the servers."""
    train: TrainConfig = key(factory=TrainConfig, when=TRAINED)
    """Sizes of an iteration, how long to train, evaluation in training."""
    evaluate: EvaluateConfig = key(factory=EvaluateConfig, when=EVALUATED)
    """How megarl evaluate asks and counts; training does not read it."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where the processes run."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig, when=TRAINED)
    """What of a run survives its processes."""
    logger: LoggerConfig = key(factory=LoggerConfig, when=TRAINED)
    """Where metrics go besides metrics.jsonl."""

    @property
    def has_critic_alone(self) -> bool:
        """Whether the critic learns from saved rollouts and nothing else runs: no policy, reward and server."""
        pretraining = self.algo.value_pretrain
        return self.train.num_iterations == 0 and pretraining.num_steps > 0 and pretraining.rollouts is not None

    @property
    def has_servers(self) -> bool:
        """Whether training generates responses."""
        return self.rollout.file is None and not self.has_critic_alone


@functools.cache
def register() -> None:
    """Put the schema into Hydra's ConfigStore, once in a process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    task.register(store)


NOT_COMPUTED = ("hydra", "cluster", "checkpoint", "evaluate", "logger")
"""Nodes that do not decide what a run learns"""
LONGEST_READABLE = 100
DIGITS = 6


def name_run(readable: str, composed: DictConfig) -> str:
    """readable: Hydra's `key=value,key=value`; composed: the whole configuration of the run, resolved here. What
    computes the same under the same names has the same name."""
    nodes = {str(key): composed[key] for key in composed if key not in NOT_COMPUTED}
    plain = {
        key: OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else node
        for key, node in nodes.items()
    }
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:DIGITS]
    text = re.sub(r"[^A-Za-z0-9_.=,+-]", "-", readable)[:LONGEST_READABLE].lstrip(".-")
    return f"{text}_{digest}" if text else digest


CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16 = re.compile(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)


def choose_dtype(gpus_per_node: int) -> str:
    """`bfloat16` on GPUs and on CPUs that compute with it, else `float32`."""
    return "bfloat16" if gpus_per_node > 0 or computes_bfloat16() else "float32"


def computes_bfloat16() -> bool:
    """Whether this CPU has instructions for it: without them a product of matrices takes several times as long."""
    try:
        return BFLOAT16.search(CPU_INFO.read_text()) is not None
    except OSError:  # not Linux
        return False


def _resolve_run_name(readable: Any, *, _root_: DictConfig) -> str:
    return name_run(str(readable), _root_)


# With the import: a launcher may have sent a run to another process, in which nobody calls anything before.
OmegaConf.register_new_resolver("megarl_run_name", _resolve_run_name, replace=True)
OmegaConf.register_new_resolver("cpu_dtype", choose_dtype, replace=True)
