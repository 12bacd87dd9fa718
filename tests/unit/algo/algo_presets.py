"""Reads conf/algo/*.yaml over the typed schema, as Hydra does."""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import CriticConfig, PolicyConfig
from megarl.config.schema.run import TrainConfig
from megarl.config.schema.task import RewardConfig

CONF = Path(__file__).parents[3] / "conf" / "algo"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))


@dataclass
class _Root:
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)


def load_preset(name: str, *overrides: str) -> tuple[AlgoConfig, TrainConfig]:
    return load_preset_text((CONF / f"{name}.yaml").read_text(), *overrides)


def load_preset_text(text: str, *overrides: str) -> tuple[AlgoConfig, TrainConfig]:
    """As `load_preset`, of a preset that is no file of conf/."""
    root = OmegaConf.merge(OmegaConf.structured(_Root), OmegaConf.create(text), OmegaConf.from_dotlist(list(overrides)))
    config = OmegaConf.to_object(root)
    return config.algo, config.train
