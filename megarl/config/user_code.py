"""Objects of the user's own modules, found by name."""

import importlib

from megarl.config.errors import ConfigError


def load_named(key: str, path: str) -> object:
    """The object named "package.module:name", imported as Python finds it (PYTHONPATH, installed packages).

    Raises ConfigError naming `key` where it cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError([f"{key}: found {path!r}; it must be package.module:name"])
    try:
        target: object = importlib.import_module(module_name)
    except Exception as error:  # A user's module can fail in any way while it is imported.
        raise ConfigError(
            [
                f"{key}: found {path!r}; importing {module_name} failed with {type(error).__name__}: {error}"
                " (the module must be installed or its folder be on PYTHONPATH)"
            ]
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError([f"{key}: found {path!r}; {module_name} has no {name}"])
        target = getattr(target, part)
    return target
