"""The report of a run: the trainer reports phases, metrics, messages and samples to it."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from megarl.config.schema.root import LoggerConfig
from megarl.report.record import METRICS_FILE, ONCE, MetricsWriter, Sink, check_metrics, open_sinks, write_status
from megarl.report.signs import Watch
from megarl.report.text import LOG_NAME, TIME, Decode, Progress, format_iteration, format_samples, format_seconds
from megarl.report.timeline import span
from megarl.types import Metrics, Sample

WARNING = "warning: "


def measure_speed(metrics: Metrics, times: Mapping[str, float]) -> Metrics:
    """perf/* of an iteration with responses, by verl's names where they mean the same. times: the seconds of its
    phases. Memory is that of now.
    """
    seconds = sum(value for name, value in times.items() if name.removeprefix(TIME) not in ONCE)
    if "length/sum" not in metrics or seconds <= 0:
        return {}
    return {
        "perf/time_per_step": seconds,
        "perf/tokens_per_second": metrics["length/sum"] / seconds,
        "perf/samples_per_second": metrics["length/sum"] / metrics["length/mean"] / seconds,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }


class Report:
    """Writes to metrics.jsonl, the sinks, train.log and the terminal, as configured. `build_report` builds it."""

    def __init__(
        self,
        metrics: MetricsWriter,
        sinks: Sequence[Sink],
        progress: Progress,
        num_iterations: int,
        num_logged_samples: int,
        decode: Decode | None = None,
        deadline: float = math.inf,
    ):
        self._metrics, self._sinks, self._progress = metrics, tuple(sinks), progress
        self._num_iterations, self._num_logged_samples, self._decode = num_iterations, num_logged_samples, decode
        self._deadline = deadline
        self._iteration = 0
        self._times: Metrics = {}
        self._is_paced = self._closed = False
        self._watch = Watch()
        self.measure: Callable[[], Metrics] = dict
        """Gives further metrics of the run's processes to each `log` of an iteration with responses"""
        self.after_log: Callable[[int], None] = lambda _iteration: None
        """Called at the end of each `log`: the next iteration begins here"""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, as time/NAME in the next `log`, the sum where it comes again, and show it while it runs."""
        start = time.perf_counter()
        write_status(self._metrics.path.parent, self._iteration, name)
        self._progress.enter(name)
        try:
            with span(name):
                yield
        finally:
            self._progress.leave()
            write_status(self._metrics.path.parent, self._iteration, None)
            self._times[TIME + name] = self._times.get(TIME + name, 0.0) + time.perf_counter() - start

    def take_times(self) -> Metrics:
        """The seconds of the phases since the last call, as time/NAME."""
        times, self._times = self._times, {}
        return times

    def log(self, iteration: int, metrics: Metrics, times: Metrics | None = None) -> None:
        """Write one iteration's metrics and the times of its phases, those since the last `log` unless given; warn as
        `Watch` does, and once say how long the other iterations take. Raises as `check_metrics`, and then writes
        nothing.
        """
        own = self._times if times is None else times
        if both := sorted(metrics.keys() & own.keys()):
            raise ValueError(f"metric {both[0]!r} has the name of a phase that is timed already")
        speed = measure_speed(metrics, own)
        complete = {**metrics, **own, **speed, **(self.measure() if speed else {})}
        check_metrics(complete)
        self._times, self._iteration = {} if times is None else self._times, iteration + 1
        self._metrics.write(iteration, complete)
        for sink in self._sinks:
            sink.write(iteration, complete)
        self._progress.line(format_iteration(iteration, self._num_iterations, complete))
        self._progress.show_iteration(iteration, self._num_iterations)
        for text in self._watch.check(metrics):
            self.message(text)
        if speed and not self._is_paced and (num_left := self._num_iterations - iteration) > 0:
            self._is_paced, each = True, speed["perf/time_per_step"]
            rest = f"the other {num_left} take about {format_seconds(num_left * each)}"
            num_timely = math.ceil(min(num_left, max(0.0, self._deadline - time.monotonic()) / each))
            if num_timely < num_left:
                rest += f", but train.max_minutes ends the run after about {num_timely} of them"
            self.message(f"pace: {format_seconds(each)} an iteration; {rest}")
        self.after_log(iteration)

    def rewind(self, iteration: int) -> None:
        """Make `iteration` the next one to be logged, in a run that resumes from a checkpoint."""
        self._times = {}
        self._iteration = iteration
        self._watch = Watch()
        self._progress.forget_iterations()
        for sink in self._sinks:
            sink.rewind(iteration)

    def message(self, text: str) -> None:
        """Print one or more lines for the user; of those that begin with "warning: " the last one stays in view."""
        self._progress.line(text)
        if text.startswith(WARNING):
            self._progress.warning = f"{text.removeprefix(WARNING)} (iteration {self._iteration})"

    def show_processes(self, describe: Callable[[], str]) -> None:
        """Have the live display ask for a line about servers and workers. describe: called from its thread."""
        self._progress.describe_processes = describe

    def samples(self, samples: Sequence[Sample]) -> None:
        """Print logger.num_logged_samples of the samples, where possible a correct and a wrong one."""
        if samples and self._num_logged_samples > 0:
            self._progress.line(format_samples(samples, self._num_logged_samples, self._decode))

    def close(self) -> None:
        """Close the files and end the display; may be called twice."""
        if not self._closed:
            self._closed = True
            for sink in self._sinks:
                sink.close()
            self._progress.close()
            self._metrics.close()


def build_report(
    logger: LoggerConfig,
    run_dir: Path,
    num_iterations: int,
    stream: TextIO | None = None,
    decode: Decode | None = None,
    settings: Mapping[str, Any] | None = None,
    deadline: float = math.inf,
) -> Report:
    """stream: standard output unless given. decode: reads observations in printed samples. settings: the run's
    configuration by dotted key. deadline: when train.max_minutes have passed, on time.monotonic's clock. Raises
    ConfigError where a sink does not open.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks = list(open_sinks(logger, run_dir, settings or {}))
    metrics = MetricsWriter(run_dir / METRICS_FILE)
    progress = Progress((stream or sys.stdout) if logger.terminal else None, log=run_dir / LOG_NAME)
    report = Report(metrics, sinks, progress, num_iterations, logger.num_logged_samples, decode, deadline)
    if metrics.num_dropped_bytes:
        dropped = f"an unfinished last line of {metrics.num_dropped_bytes} bytes, left by a killed run"
        report.message(f"{metrics.path}: {dropped}, was cut off")
    return report
