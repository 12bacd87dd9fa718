"""Where the metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config.errors import ConfigError
from megarl.config.schema.logger import LoggerConfig
from megarl.report.mlflow_sink import MlflowSink
from megarl.report.sink_checks import check_sinks, writes_tensorboard
from megarl.report.tensorboard import DIRECTORY, TensorBoardWriter
from megarl.report.wandb_sink import WandbSink
from megarl.types import Metrics


class Sink(Protocol):
    """What the report does with every sink, after it has written metrics.jsonl."""

    def write(self, iteration: int, metrics: Metrics) -> None: ...

    def rewind(self, iteration: int) -> None:
        """`iteration` is the next one to be written, also where it was already."""
        ...

    def close(self) -> None: ...


def open_sinks(logger: LoggerConfig, run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Sink]:
    """The sinks that are configured. settings: the run's configuration by dotted key, for those that show it.

    Raises ConfigError naming the key of one that does not open: nobody is logged in, no server answers.
    """
    problems = list(check_sinks(logger))
    if problems:
        raise ConfigError(problems)
    if writes_tensorboard(logger):
        yield TensorBoardWriter(run_dir / DIRECTORY)
    if logger.wandb is not None:
        with _naming("wandb", logger.wandb.name):
            yield WandbSink(run_dir, logger.wandb.name, logger.wandb_project, settings)
    if logger.mlflow is not None:
        with _naming("mlflow", logger.mlflow):
            yield MlflowSink(run_dir, logger.mlflow, logger.mlflow_experiment, settings)


@contextlib.contextmanager
def _naming(key: str, value: object) -> Iterator[None]:
    """Other people's errors within the block become a ConfigError that names the key."""
    try:
        yield
    except Exception as error:
        raise ConfigError([f"logger.{key}: found {value}: {type(error).__name__}: {error}"]) from error
