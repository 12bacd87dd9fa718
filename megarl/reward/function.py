"""The user's own reward function, found by name."""

import importlib
import threading
from collections.abc import Callable

from megarl.config.errors import ConfigError
from megarl.types import Prompt, Response, Score

RESERVED_NAMES = frozenset(
    {
        *("mean", "std", "min", "max", "correct", "positive_frac", "shaped_mean", "equal_groups_frac", "failed_frac"),
        "heldout",
    }
)
"""What the trainer itself logs under reward/."""


def load_reward_function(path: str) -> Callable[[Prompt, Response], Score]:
    """The callable named "package.module:callable", imported as Python finds it (PYTHONPATH, installed packages).

    What it returns is checked at each call, see `CheckedFunction`. Raises ConfigError naming reward.path where it
    cannot be imported or called.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError([f"reward.path: found {path!r}; it must be package.module:callable"])
    try:
        target = importlib.import_module(module_name)
    except Exception as error:  # A user's module can fail in any way while it is imported.
        raise ConfigError(
            [
                f"reward.path: found {path!r}; importing {module_name} failed with {type(error).__name__}: {error}"
                " (the module must be installed or its folder be on PYTHONPATH)"
            ]
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError([f"reward.path: found {path!r}; {module_name} has no {name}"])
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError([f"reward.path: found {path!r}, a {type(target).__name__}; a callable was expected"])
    return CheckedFunction(path, target)


class CheckedFunction:
    """Calls the user's function, from any thread, and holds it to what the means under reward/ need.

    Every Score must have the same names in `details` as the first one, and none of RESERVED_NAMES.
    """

    def __init__(self, path: str, function: Callable[[Prompt, Response], Score]):
        self._path = path
        self._function = function
        self._lock = threading.Lock()
        self._first: tuple[frozenset[str], str] | None = None
        """The names in `details` of the first Score, and its prompt's id."""

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        """Raises TypeError for anything but a Score, ValueError naming the prompt for other names in `details`."""
        result: object = self._function(prompt, response)
        if not isinstance(result, Score):
            raise TypeError(
                f"reward.path={self._path} returned a {type(result).__name__}; a megarl.types.Score was expected"
            )
        self._check_names(prompt, frozenset(result.details))
        return result

    def _check_names(self, prompt: Prompt, names: frozenset[str]) -> None:
        found = f"reward.path={self._path}: prompt {prompt.id!r}: found details {_list_names(names)}"
        reserved = names & RESERVED_NAMES
        if reserved:
            raise ValueError(f"{found}; megarl's own metrics have the names {_list_names(reserved)} under reward/")
        with self._lock:
            if self._first is None:
                self._first = (names, prompt.id)
            expected, first_id = self._first
        if names != expected:
            raise ValueError(
                f"{found}; the first response, to prompt {first_id!r}, had {_list_names(expected)}, and every"
                " response must have the same (0.0 for a part that does not apply)"
            )


def _list_names(names: frozenset[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "no names"
