"""The user's own reward function, found by name."""

import importlib
from collections.abc import Callable

from megarl.config.errors import ConfigError
from megarl.types import Prompt, Response, Score


def load_reward_function(path: str) -> Callable[[Prompt, Response], Score]:
    """The callable named "package.module:callable", imported as Python finds it (PYTHONPATH, installed
    packages).

    What it returns is checked at each call: TypeError for anything but a Score. Raises ConfigError naming
    reward.path where it cannot be imported or called.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError([f"reward.path: found {path!r}; it must be package.module:callable"])
    try:
        target = importlib.import_module(module_name)
    except Exception as error:  # A user's module can fail in any way while it is imported.
        raise ConfigError(
            [
                f"reward.path: found {path!r}; importing {module_name} failed with {type(error).__name__}:"
                f" {error}"
                " (the module must be installed or its folder be on PYTHONPATH)"
            ]
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError([f"reward.path: found {path!r}; {module_name} has no {name}"])
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError([f"reward.path: found {path!r}, a {type(target).__name__}; a callable was expected"])
    function: Callable[[Prompt, Response], Score] = target

    def score(prompt: Prompt, response: Response) -> Score:
        result: object = function(prompt, response)
        if not isinstance(result, Score):
            raise TypeError(f"reward.path={path} returned a {type(result).__name__}; a megarl.types.Score was expected")
        return result

    return score
