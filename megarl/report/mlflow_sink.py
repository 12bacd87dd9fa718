"""Metrics to MLflow: a tracking server, or a database file of this machine."""

import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.report.run_ids import load_id, save_id
from megarl.types import Metrics

NAME = "mlflow"
MAX_BATCH = 900
"""MLflow takes 1,000 metrics in a call, 100 parameters"""
LONGEST_PARAM = 500
NUM_PARAMS = 100
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""A tracking server that is away holds up the training so long at most, instead of for minutes"""


class MlflowSink:
    """The run's folder is its name there; a resumed run continues under the same id.

    What a server that is away does not take is sent with the next iteration's. Of a repeated iteration MLflow shows
    the last value.
    """

    def __init__(self, run_dir: Path, uri: str, experiment: str, settings: Mapping[str, Any]):
        """uri: of the tracking server, http://..., or of a file, sqlite:///mlflow.db. settings: the run's configuration
        by dotted key. Raises MlflowException where nothing answers there.
        """
        for name, value in REQUEST_LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(uri)
        self._unsent: list[Any] = []
        known = load_id(run_dir, NAME)
        self._run_id = known or self._create_run(experiment, run_dir)
        if known is None:
            save_id(run_dir, NAME, self._run_id)
            self._send_settings(settings)
        self._client.set_terminated(self._run_id, status="RUNNING")

    def write(self, iteration: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._unsent += [Metric(name, float(value), now, iteration) for name, value in metrics.items()]
        try:
            self._send()
        except Exception as error:
            warnings.warn(
                f"logger.mlflow: {type(error).__name__}: {error}; {len(self._unsent)} values wait",
                RuntimeWarning,
                stacklevel=2,
            )

    def rewind(self, iteration: int) -> None:
        """Nothing: each value has its iteration."""

    def close(self) -> None:
        """End the run there: as failed, where an error is on its way."""
        status = "FINISHED" if sys.exception() is None else "FAILED"
        try:
            self._send()
            self._client.set_terminated(self._run_id, status=status)
        except Exception as error:
            warnings.warn(f"logger.mlflow: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)

    def _create_run(self, name: str, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        return str(self._client.create_run(experiment, run_name=run_dir.name).info.run_id)

    def _send_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in settings.items()]
        for start in range(0, len(params), NUM_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + NUM_PARAMS])

    def _send(self) -> None:
        while self._unsent:
            self._client.log_batch(self._run_id, metrics=self._unsent[:MAX_BATCH])
            del self._unsent[:MAX_BATCH]
