"""Metrics to Weights & Biases, online or into RUN_DIR/wandb, which `wandb sync` uploads."""

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megarl.report.metric_names import METRICS
from megarl.report.run_ids import load_id, save_id
from megarl.types import Metrics

NAME = "wandb"
STEP = "iteration"
"""The axis of the charts: wandb's own step must not go back, as a resumed run's iterations do"""


class WandbSink:
    """The run's folder is its name there; a resumed run continues under the same id.

    Iterations that a resumed run repeats are there twice, at the same place of the axis `iteration`.
    """

    def __init__(self, run_dir: Path, mode: str, project: str, settings: Mapping[str, Any]):
        """mode: online or offline. settings: the run's configuration by dotted key."""
        import wandb

        known = load_id(run_dir, NAME)
        run_id = known or uuid.uuid4().hex[:16]
        if known is None:
            save_id(run_dir, NAME, run_id)
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode=cast(Any, mode),
            dir=run_dir,
            config=dict(settings),
            # Neither does it read what this process prints, nor the state of the repository in the current folder.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        for group in {metric.name.split("/")[0] for metric in METRICS}:
            self._run.define_metric(f"{group}/*", step_metric=STEP)

    def write(self, iteration: int, metrics: Metrics) -> None:
        self._run.log({STEP: iteration, **metrics})

    def rewind(self, iteration: int) -> None:
        """Nothing: the axis is a number of ours."""

    def close(self) -> None:
        """End the run there: as failed, where an error is on its way."""
        self._run.finish(exit_code=0 if sys.exception() is None else 1)
