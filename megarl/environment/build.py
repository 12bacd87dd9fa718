"""From the `environment` group to what makes an environment for each episode."""

from collections.abc import Callable
from functools import partial

from megarl.config.errors import ConfigError
from megarl.config.schema.environment import (
    ClassEnvironmentConfig,
    EnvironmentConfig,
    GuessEnvironmentConfig,
    MultiTurnEnvironmentConfig,
    SingleTurnEnvironmentConfig,
    VerifiersEnvironmentConfig,
)
from megarl.config.user_code import describe_error, load_named
from megarl.environment.guess import Guess
from megarl.environment.interface import Environment
from megarl.environment.verifiers import VerifiersEnvironment

EnvironmentFactory = Callable[[], Environment]


def build_environment(config: EnvironmentConfig) -> tuple[MultiTurnEnvironmentConfig, EnvironmentFactory] | None:
    """The limits of an episode and what makes its environment; None where the first turn is the whole episode.

    Makes one environment, to see that it can be made. Raises ConfigError naming the key that is wrong.
    """
    if isinstance(config, SingleTurnEnvironmentConfig):
        return None
    assert isinstance(config, MultiTurnEnvironmentConfig)
    make = _find_factory(config)
    try:
        made = make()
    except ConfigError:
        raise
    except Exception as error:  # The user's own code.
        raise ConfigError([f"environment: making one raised {describe_error(error)}"]) from error
    if not isinstance(made, Environment):
        raise ConfigError(
            [f"environment: found a {type(made).__name__}; expected one derived from megarl.environment.Environment"]
        )
    return config, make


def _find_factory(config: MultiTurnEnvironmentConfig) -> EnvironmentFactory:
    match config:
        case ClassEnvironmentConfig():
            target = load_named("environment.path", config.path)
            if not callable(target):
                raise ConfigError([f"environment.path: found {config.path!r}; a class was expected"])
            return partial(target, **config.options)
        case GuessEnvironmentConfig():
            return partial(Guess, config.max_turns, config.higher, config.lower)
        case VerifiersEnvironmentConfig():
            return partial(VerifiersEnvironment, config.id, config.args)
    raise ConfigError([f"environment: found a {type(config).__name__}; megarl/environment/build.py has none for it"])
