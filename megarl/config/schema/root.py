"""The root of the configuration and its registration with Hydra."""

import functools
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from megarl.config import run_name
from megarl.config.schema import data as data_config
from megarl.config.schema import reward as reward_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.checkpoint import CheckpointConfig
from megarl.config.schema.cluster import ClusterConfig
from megarl.config.schema.data import DataConfig
from megarl.config.schema.evaluate import EvaluateConfig
from megarl.config.schema.logger import LoggerConfig
from megarl.config.schema.model import ModelConfig
from megarl.config.schema.reward import RewardConfig
from megarl.config.schema.roles import CriticConfig, PolicyConfig, ReferenceConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.train import TrainConfig


@dataclass
class Config:
    """Everything one run is made from; `conf/*.yaml` hold only what differs from these defaults."""

    seed: int = 1
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    data: DataConfig = MISSING
    reward: RewardConfig = MISSING
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@functools.cache
def register() -> None:
    """Put the schema into Hydra's ConfigStore, once in a process."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    run_name.register()
    data_config.register(store)
    reward_config.register(store)
