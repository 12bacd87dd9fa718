"""Where the metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, a CSV file, Prometheus."""

import contextlib
import importlib.util
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config.errors import ConfigError
from megarl.config.schema.logger import LoggerConfig
from megarl.report.csv_file import CsvSink
from megarl.report.mlflow_sink import MlflowSink
from megarl.report.prometheus import LOOPBACK, PrometheusSink
from megarl.report.tensorboard import DIRECTORY, TensorBoardWriter
from megarl.report.wandb_sink import WandbSink
from megarl.types import Metrics


class Sink(Protocol):
    """What the report does with every sink, after it has written metrics.jsonl."""

    def write(self, iteration: int, metrics: Metrics) -> None: ...

    def write_pretraining(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step of value pretraining."""
        ...

    def rewind(self, iteration: int) -> None:
        """`iteration`, or the step of value pretraining, is the next one to be written, also where it was already."""
        ...

    def close(self) -> None: ...


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
            extra = f"make install EXTRAS={key}, or pip install 'megarl[{key}]'"
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


def open_sinks(logger: LoggerConfig, run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Sink]:
    """The sinks that are configured. settings: the run's configuration by dotted key, for those that show it.

    Raises ConfigError naming the key of one that does not open: nobody is logged in, no server answers.
    """
    problems = list(check_sinks(logger))
    if problems:
        raise ConfigError(problems)
    if writes_tensorboard(logger):
        yield TensorBoardWriter(run_dir / DIRECTORY)
    if logger.csv:
        yield CsvSink(run_dir)
    if logger.wandb is not None:
        with _naming("wandb", logger.wandb.name):
            yield WandbSink(run_dir, logger.wandb.name, logger.wandb_project, settings)
    if logger.mlflow is not None:
        with _naming("mlflow", logger.mlflow):
            yield MlflowSink(run_dir, logger.mlflow, logger.mlflow_experiment, settings)
    if logger.prometheus_port is not None:
        with _naming("prometheus_port", logger.prometheus_port):
            yield PrometheusSink(run_dir, logger.prometheus_port)


@contextlib.contextmanager
def _naming(key: str, value: object) -> Iterator[None]:
    """Other people's errors within the block become a ConfigError that names the key."""
    try:
        yield
    except Exception as error:
        raise ConfigError([f"logger.{key}: found {value}: {type(error).__name__}: {error}"]) from error
