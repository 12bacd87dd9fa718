"""The `environment` group: what answers the policy within an episode, one schema per kind."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class EnvironmentConfig:
    """What answers the policy. Each kind of environment has different keys."""


@dataclass
class SingleTurnEnvironmentConfig(EnvironmentConfig):
    """Nothing answers: the first response is the whole episode."""


@dataclass
class MultiTurnEnvironmentConfig(EnvironmentConfig):
    """The keys that every environment of several turns has."""

    max_turns: int = 8
    """Maximum number of turns; an episode that would go on is cut there (finish_reason max_turns)."""
    turn_length: int | None = None
    """Maximum tokens of one action; null: only rollout.response_length, the limit of actions and observations together,
    counts."""
    step_deadline_s: float = 60.0
    """Deadline in seconds of one answer of the environment; an episode whose environment takes longer has failed and is
    not learned from."""


@dataclass
class ClassEnvironmentConfig(MultiTurnEnvironmentConfig):
    """Your own class, derived from megarl.environment.Environment."""

    path: str = MISSING
    """The class, as package.module:Class."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which an object is made for each episode."""


@dataclass
class GuessEnvironmentConfig(MultiTurnEnvironmentConfig):
    """A number is hidden, each guess is answered with whether the number is higher or lower. For data=guess, or data
    whose answers are whole numbers."""

    max_turns: int = 3
    """Number of guesses; the episode ends with the last one."""
    higher: str = "higher"
    """The answer where the number is above the guess."""
    lower: str = "lower"
    """The answer where the number is below the guess."""


SCHEMAS: dict[str, type[EnvironmentConfig]] = {
    "single_turn": SingleTurnEnvironmentConfig,
    "guess": GuessEnvironmentConfig,
    "class": ClassEnvironmentConfig,
}


def register(store: ConfigStore) -> None:
    """Put each kind into Hydra's ConfigStore as environment/<kind>_schema; calling it again changes nothing."""
    for kind, schema in SCHEMAS.items():
        store.store(group="environment", name=f"{kind}_schema", node=schema)
