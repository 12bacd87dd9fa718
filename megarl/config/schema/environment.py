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
    """Your own class, derived from megarl.environment.Environment, or that of environment=guess (examples/toys)."""

    path: str = MISSING
    """The class, as FILE.py:NAME or package.module:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which an object is made for each episode."""


@dataclass
class VerifiersEnvironmentConfig(MultiTurnEnvironmentConfig):
    """An environment of the package verifiers, with data=verifiers and reward=environment. Tools that it has are
    described to the policy, and their calls read, as with environment=tools."""

    max_turns: int = 1_000
    """Maximum number of turns beside the environment's own limit."""
    id: str = MISSING
    """The environment: the name of an installed one, or FILE.py:NAME or package.module:NAME."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    parser: str | None = None
    """SGLang's parser of tool calls, for an environment with tools; null: the one for the model's chat template."""


@dataclass
class ToolsEnvironmentConfig(MultiTurnEnvironmentConfig):
    """Tools that the policy may call: Python functions, in processes of their own. The first action without a call ends
    the episode; it is the answer that the reward reads."""

    tools: list[str] = field(default_factory=lambda: ["calculator"])
    """The tools: calculator, python (runs code in the sandbox), or functions of your own, as FILE.py:NAME or
    package.module:NAME. A function is described to the policy by its signature and docstring."""
    parser: str | None = None
    """SGLang's parser that reads the calls in what the policy writes, for example hermes, pythonic or llama3; null: the
    one for the model's chat template."""
    description: str | None = None
    """Text that describes the tools in the system message, {tools} replaced by their JSON schemas; null: the chat
    template describes them, or, where it knows no tools, a text that asks for calls in hermes' format."""
    num_processes: int = 2
    """Number of processes that run the tools' functions; each runs one call at a time."""
    call_timeout_s: float = 10.0
    """Time limit in seconds of one call; a call that takes longer is answered with an error."""
    memory_gb: float = 1.0
    """Memory in GiB that a call may take beyond what its process has after loading the tools; a call that needs more is
    answered with an error."""
    max_calls: int = 4
    """Maximum number of calls in one action that are answered; further ones are answered with an error."""
    result_length: int = 2000
    """Maximum number of characters of one result; the rest is cut off."""
    call_reward: float = 0.0
    """Reward of the first action of an episode all of whose calls are answered without an error, for policies that
    rarely call a tool; it is added to what `reward=` gives."""


SCHEMAS: dict[str, type[EnvironmentConfig]] = {
    "single_turn": SingleTurnEnvironmentConfig,
    "class": ClassEnvironmentConfig,
    "verifiers": VerifiersEnvironmentConfig,
    "tools": ToolsEnvironmentConfig,
}


def register(store: ConfigStore) -> None:
    """Put each kind into Hydra's ConfigStore as environment/<kind>_schema; calling it again changes nothing."""
    for kind, schema in SCHEMAS.items():
        store.store(group="environment", name=f"{kind}_schema", node=schema)
