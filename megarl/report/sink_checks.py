"""Whether the sinks that are configured can be opened: their packages and the port, found without importing them.

Nothing here imports torch: every command asks before it starts.
"""

import importlib.util
import socket
from collections.abc import Iterator

from megarl.config.schema.logger import LoggerConfig

LOOPBACK = "127.0.0.1"


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def writes_tensorboard(logger: LoggerConfig) -> bool:
    """logger.tensorboard, with null as its text says."""
    return is_installed("tensorboard") if logger.tensorboard is None else logger.tensorboard


def check_sinks(logger: LoggerConfig) -> Iterator[str]:
    """One message for each sink whose package is missing, or whose port is taken."""
    for key, value, package, off in (
        ("tensorboard", logger.tensorboard or None, "tensorboard", "false"),
        ("wandb", logger.wandb.name if logger.wandb else None, "wandb", "null"),
        ("mlflow", logger.mlflow, "mlflow", "null"),
        ("prometheus_port", logger.prometheus_port, "prometheus_client", "null"),
    ):
        if value is not None and not is_installed(package):
            extra = f"make install EXTRAS={key}, or in a clone pip install '.[{key}]'"
            how = f"pip install {package}" if key == "prometheus_port" else extra
            shown = "true" if value is True else value
            yield (
                f"logger.{key}: found {shown}, which needs the package {package}, which is not installed: {how};"
                f" or logger.{key}={off}"
            )
    if logger.prometheus_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, logger.prometheus_port))
            except OSError as error:
                yield (
                    f"logger.prometheus_port: found {logger.prometheus_port}, on which this machine cannot listen"
                    f" ({error.strerror}); 0 takes a free port, which is printed"
                )
