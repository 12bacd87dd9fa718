"""Where the metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

RUN_DIR/sinks.json has the ids under which the last two know the run, {"wandb": "3f9c...", "mlflow": "a81b..."}: a
resumed run continues there. Iterations that it repeats TensorBoard shows once, MLflow with their last values, and
Weights & Biases twice at the same place of its axis.
"""

import importlib.util
import json
import os
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from megarl.config.errors import ConfigError
from megarl.config.schema.run import LoggerConfig
from megarl.files import load_json_object, write_atomically

IDS = "sinks.json"
STEP = "iteration"
"""The axis of wandb's charts: its own step must not go back, as a resumed run's iterations do"""


class Sink:
    """What the report does with every sink, after it has written metrics.jsonl."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def rewind(self, iteration: int) -> None:
        """`iteration` is the next one to be written, also where it was already."""

    def close(self) -> None:
        """End the run there: as failed, where an error is on its way."""
        raise NotImplementedError


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def check_sinks(logger: LoggerConfig) -> Iterator[str]:
    """One message for each sink whose package is missing. Every command asks before it starts."""
    for key, value, off in (
        ("tensorboard", "true" if logger.tensorboard else None, "false"),
        ("wandb", logger.wandb.name if logger.wandb else None, "null"),
        ("mlflow", logger.mlflow, "null"),
    ):
        if value is not None and not is_installed(key):
            yield (
                f"logger.{key}: found {value}, which needs the package {key}, which is not installed: make install"
                f" EXTRAS={key}, or in a clone pip install '.[{key}]'; or logger.{key}={off}"
            )


def open_sinks(logger: LoggerConfig, run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Sink]:
    """The sinks that are configured. settings: the run's configuration by dotted key, for those that show it.

    Raises ConfigError naming the key of one that does not open: nobody is logged in, no server answers.
    """
    if problems := list(check_sinks(logger)):
        raise ConfigError(problems)
    key, value = "tensorboard", ""
    try:
        if is_installed("tensorboard") if logger.tensorboard is None else logger.tensorboard:
            yield TensorBoardSink(run_dir / "tensorboard")
        if logger.wandb is not None:
            key, value = "wandb", logger.wandb.name
            yield WandbSink(run_dir, logger.wandb.name, settings)
        if logger.mlflow is not None:
            key, value = "mlflow", logger.mlflow
            yield MlflowSink(run_dir, logger.mlflow, settings)
    except Exception as error:
        raise ConfigError([f"logger.{key}: found {value}: {type(error).__name__}: {error}"]) from error


def load_ids(run_dir: Path) -> dict[str, str]:
    """By sink; a run that is new to one has none there."""
    return load_json_object(run_dir / IDS) if (run_dir / IDS).exists() else {}


def save_id(run_dir: Path, sink: str, value: str) -> None:
    write_atomically(run_dir / IDS, json.dumps(load_ids(run_dir) | {sink: value}))


class TensorBoardSink(Sink):
    """Writes each metric as a scalar of its own name; flushed after every iteration."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._open()

    def _open(self, purge_step: int | None = None) -> None:
        # Imported only when it is used: it takes a second or more.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self._directory), purge_step=purge_step)
        self._opened = float(int(time.time()))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=iteration)
        self._writer.flush()

    def rewind(self, iteration: int) -> None:
        """Hide what was written for this iteration and later ones."""
        self._writer.close()
        # Files are read in the order of their names, which begin with the second in which they were made.
        time.sleep(max(0.0, self._opened + 1 - time.time()))
        self._open(iteration)

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """Online, or into RUN_DIR/wandb, which `wandb sync` uploads. The run's folder is its name there."""

    def __init__(self, run_dir: Path, mode: str, settings: Mapping[str, Any]):
        """mode: online or offline."""
        import wandb

        run_id = load_ids(run_dir).get("wandb") or uuid.uuid4().hex[:16]
        save_id(run_dir, "wandb", run_id)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megarl"),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode=cast(Any, mode),
            dir=run_dir,
            config=dict(settings),
            # Neither does it read what this process prints, nor the state of the repository in the current folder.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: iteration, **metrics})

    def close(self) -> None:
        self._run.finish(exit_code=0 if sys.exception() is None else 1)


class MlflowSink(Sink):
    """The run's folder is its name there. What a server that is away does not take goes with the next iteration's."""

    def __init__(self, run_dir: Path, uri: str, settings: Mapping[str, Any]):
        # A tracking server that is away holds up the training so long at most, instead of for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._unsent = MlflowClient(uri), list[Any]()
        if (known := load_ids(run_dir).get("mlflow")) is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megarl")
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            known = str(self._client.create_run(number, run_name=run_dir.name).info.run_id)
            save_id(run_dir, "mlflow", known)
            # It takes 100 parameters of 500 characters in a call, and 1,000 metrics.
            params = [Param(key, str(value)[:500]) for key, value in settings.items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(known, params=params[start : start + 100])
        self._run_id = known
        self._client.set_terminated(self._run_id, status="RUNNING")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._unsent += [Metric(name, float(value), now, iteration) for name, value in metrics.items()]
        self._send()

    def close(self) -> None:
        self._send("FINISHED" if sys.exception() is None else "FAILED")

    def _send(self, status: str = "") -> None:
        """What is unsent, and how the run ended."""
        try:
            while self._unsent:
                self._client.log_batch(self._run_id, metrics=self._unsent[:900])
                del self._unsent[:900]
            if status:
                self._client.set_terminated(self._run_id, status=status)
        except Exception as error:
            text = f"logger.mlflow: {type(error).__name__}: {error}; {len(self._unsent)} values wait"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
