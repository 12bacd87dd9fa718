"""The root of the configuration and its registration with Hydra."""

import functools
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from megarl.config.schema import cpu_dtype, run_name, task
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
    run_name.register()
    cpu_dtype.register()
    task.register(store)
