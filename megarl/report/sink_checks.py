"""Whether the sinks that are configured can be opened: their packages, found without importing them.

Nothing here imports torch: every command asks before it starts.
"""

import importlib.util
from collections.abc import Iterator

from megarl.config.schema.logger import LoggerConfig


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def writes_tensorboard(logger: LoggerConfig) -> bool:
    """logger.tensorboard, with null as its text says."""
    return is_installed("tensorboard") if logger.tensorboard is None else logger.tensorboard


def check_sinks(logger: LoggerConfig) -> Iterator[str]:
    """One message for each sink whose package is missing."""
    for key, value, package, off in (
        ("tensorboard", logger.tensorboard or None, "tensorboard", "false"),
        ("wandb", logger.wandb.name if logger.wandb else None, "wandb", "null"),
        ("mlflow", logger.mlflow, "mlflow", "null"),
    ):
        if value is not None and not is_installed(package):
            extra = f"make install EXTRAS={key}, or in a clone pip install '.[{key}]'"
            shown = "true" if value is True else value
            yield (
                f"logger.{key}: found {shown}, which needs the package {package}, which is not installed: {extra};"
                f" or logger.{key}={off}"
            )
