"""The report of a run: the trainer reports phases, metrics, messages and samples to it."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megarl.config.schema.logger import LoggerConfig
from megarl.report.metrics import FILE_NAME, PRETRAINING_FILE_NAME, MetricsWriter, check_metrics
from megarl.report.progress import Progress
from megarl.report.status import FILE_NAME as STATUS_NAME
from megarl.report.status import StatusFile
from megarl.report.tensorboard import DIRECTORY, TensorBoardWriter
from megarl.report.text import TIME, format_iteration, format_number, format_samples
from megarl.report.turns import Decode
from megarl.types import Metrics, Sample


@dataclass
class Phase:
    """A timed part of an iteration; `seconds` is its duration, valid once it has ended."""

    name: str
    seconds: float = 0.0


class Report:
    """Writes metrics to metrics.jsonl, TensorBoard and the terminal, as configured. `build_report` builds it."""

    def __init__(
        self,
        metrics: MetricsWriter,
        tensorboard: TensorBoardWriter | None,
        progress: Progress | None,
        num_iterations: int,
        num_logged_samples: int,
        status: StatusFile,
        decode: Decode | None = None,
    ):
        self._metrics = metrics
        self._status = status
        self._iteration = 0
        self._pretraining: MetricsWriter | None = None
        self._tensorboard = tensorboard
        self._progress = progress
        self._num_iterations = num_iterations
        self._num_logged_samples = num_logged_samples
        self._decode = decode
        self._times: Metrics = {}
        self._closed = False

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time the block, as time/NAME in the next `log`, and show the phase while it runs.

        A name used more than once before a `log` gives the sum, in seconds.
        """
        phase = Phase(name)
        start = time.perf_counter()
        self._status.write(self._iteration, name)
        if self._progress:
            self._progress.enter(name)
        try:
            yield phase
        finally:
            if self._progress:
                self._progress.leave()
            self._status.write(self._iteration, None)
            phase.seconds = time.perf_counter() - start
            self._times[TIME + name] = self._times.get(TIME + name, 0.0) + phase.seconds

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Write one iteration's metrics and the times of the phases since the last `log`.

        Raises:
            ValueError: a metric is NaN or infinite, or has the name of a phase's time; nothing is written.
            TypeError: a metric is not an int or a float.
        """
        both = sorted(metrics.keys() & self._times.keys())
        if both:
            raise ValueError(f"metric {both[0]!r} has the name of a phase that is timed already")
        complete = {**metrics, **self._times}
        check_metrics(complete)
        self._times = {}
        self._iteration = iteration + 1
        self._metrics.write(iteration, complete)
        if self._tensorboard:
            self._tensorboard.write(iteration, complete)
        if self._progress:
            self._progress.line(format_iteration(iteration, self._num_iterations, complete))
            more = iteration < self._num_iterations
            self._progress.show_iteration(f"iteration {iteration + 1}/{self._num_iterations}" if more else "")

    def log_pretraining(self, step: int, num_steps: int, metrics: Metrics) -> None:
        """Write the metrics of one step of value pretraining to value_pretrain.jsonl; otherwise as `log`."""
        check_metrics(metrics)
        times, self._times = self._times, {}
        if self._pretraining is None:
            self._pretraining = MetricsWriter(self._metrics.path.with_name(PRETRAINING_FILE_NAME))
        self._pretraining.write(step, {**metrics, **times})
        if self._tensorboard:
            self._tensorboard.write(step, metrics)
        if self._progress:
            shown = ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
            seconds = format_number(sum(times.values()))
            self._progress.line(f"value pretraining {step}/{num_steps}  {shown} | {seconds} s")

    def rewind(self, iteration: int) -> None:
        """Make `iteration` the next one to be logged, in a run that resumes from a checkpoint."""
        self._times = {}
        self._iteration = iteration
        if self._tensorboard:
            self._tensorboard.rewind(iteration)

    def rewind_pretraining(self, step: int) -> None:
        """Make the step of value pretraining after `step` the next one to be logged."""
        self._times = {}
        self._iteration = 0
        if self._tensorboard:
            self._tensorboard.rewind(step + 1)

    def message(self, text: str) -> None:
        """Print one or more lines for the user."""
        if self._progress:
            self._progress.line(text)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Print logger.num_logged_samples of the samples, where possible a correct and a wrong one."""
        if self._progress and samples and self._num_logged_samples > 0:
            self._progress.line(format_samples(samples, self._num_logged_samples, self._decode))

    def close(self) -> None:
        """Close the files and end the display; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._progress.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._pretraining:
            self._pretraining.close()
        self._metrics.close()


def build_report(
    logger: LoggerConfig,
    run_dir: Path,
    num_iterations: int,
    stream: TextIO | None = None,
    decode: Decode | None = None,
) -> Report:
    """A report that appends to RUN_DIR/metrics.jsonl and, as configured, writes to TensorBoard and `stream`.

    `stream` is standard output unless given. decode: reads observations in printed samples. Raises RuntimeError where
    logger.tensorboard is set and its package is missing.
    """
    tensorboard = TensorBoardWriter(run_dir / DIRECTORY) if logger.tensorboard else None
    metrics = MetricsWriter(run_dir / FILE_NAME)
    progress = Progress(stream or sys.stdout) if logger.terminal else None
    status = StatusFile(run_dir / STATUS_NAME)
    report = Report(metrics, tensorboard, progress, num_iterations, logger.num_logged_samples, status, decode)
    if metrics.num_dropped_bytes:
        dropped = f"an unfinished last line of {metrics.num_dropped_bytes} bytes, left by a killed run"
        report.message(f"{metrics.path}: {dropped}, was cut off")
    return report
