"""What a run leaves in its folder: its metrics, what it says of itself, and the whole of it read again.

run.json is one object, which is replaced whole at each start, phase and end:

overrides, config, directory: what the run was started with, for resuming (`megarl.run.command.save_run`).

starts: what each start was made with, the fields of `Start`.

status: the current phase, for monitoring from outside: {"iteration": 3, "phase": "rollout", "since": 1790000000.0,
"pid": 4711}. `iteration` is the current one; `phase` is null between phases; `since` is in seconds of Unix time.

outcome: how it ended: {"state": "done", "why": "", "results": {"iterations": 80, "reward/heldout": 0.98}}. `state` is
done, failed or stopped (by a signal, after its checkpoint was written); `why` is the reason where it is not done, and
what ended it where it is done before its last iteration. Null for a run in progress or one whose process was killed.

metrics.jsonl: one strict JSON object per line, {"iteration": 3, "reward/mean": 0.5, ...}. `History` has a file of any
length as at most `MOST_POINTS` points, each of `width` iterations: whenever there are too many, each two neighbours
become one.

sinks.json: the ids under which Weights & Biases and MLflow know the run, {"wandb": "3f9c...", "mlflow": "a81b..."}: a
resumed run continues there. Iterations that it repeats TensorBoard shows once, MLflow with their last values, and
Weights & Biases twice at the same place of its axis.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import psutil
from pydantic import TypeAdapter

from megarl.config.errors import ConfigError
from megarl.config.schema.root import LoggerConfig
from megarl.files import RUN_FILE, load_json_object, naming_file, parse_strict_json, write_atomically
from megarl.report.text import TIME

METRICS_FILE = "metrics.jsonl"
IDS = "sinks.json"
ITERATION = "iteration"
"""Also the axis of wandb's charts: its own step must not go back, as a resumed run's iterations do"""
MOST_POINTS = 600
QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Of a response, as metrics name them; `megarl.algo.diagnostics.QUARTERS`, which this room may not import"""
ONCE = ("start", "load")
"""Phases of a start, not of an iteration"""
SECONDS = "perf/time_per_step"
MODEL_TFLOP = ("policy/model_tflop_sum", "critic/model_tflop_sum")
UPDATE_TFLOPS, MFU = "derived/update_tflops", "derived/mfu"
HYDRA_FOLDER = ".hydra"
HELDOUT, HELDOUT_PAIRS, HELDOUT_LOGPROB = "reward/heldout", "heldout/pair_accuracy", "heldout/logprob"
LONGEST_WHY = 2000
PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "numpy")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
UNFINISHED = "unfinished"
"""The state of a run that is in progress or was killed: it has no outcome"""
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a file raises that is not what a run writes"""


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Refuse what strict JSON cannot represent as a number: ValueError, or TypeError where it is none at all."""
    for name, value in metrics.items():
        if name == ITERATION or not isinstance(name, str):
            raise ValueError(f"a metric may not be named {name!r}: it must be a text other than {ITERATION!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"metric {name!r} is {type(value).__name__}, not an int or a float: {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value}: only finite numbers can be logged")


class LineFile:
    """Appends lines to a file; they are complete on disk when `append` returns."""

    def __init__(self, path: Path):
        """Open or create `path`, and cut off a half-written last line."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        end = content.rfind(b"\n") + 1
        self.num_dropped_bytes = len(content) - end
        """Length of a half-written last line, left by a killed run, that was cut off; usually 0"""
        if self.num_dropped_bytes:
            os.truncate(path, end)
        self._file = path.open("a", encoding="utf-8")

    def append(self, lines: Sequence[str]) -> None:
        """Write the lines, each with its newline. Raises OSError that names the file."""
        with naming_file(self.path):
            self._file.writelines(lines)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsWriter(LineFile):
    """Appends to a run's metrics.jsonl."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one line. Raises as `check_metrics`, and then writes nothing."""
        check_metrics(metrics)
        self.append([json.dumps({ITERATION: iteration, **metrics}, allow_nan=False) + "\n"])


def load_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, in order. Raises ValueError that says FILE:LINE, as `parse_line`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def parse_line(line: str, where: str) -> dict[str, float]:
    """Raises ValueError, starting with `where`, unless it is a JSON object of finite numbers with a whole iteration."""
    if not line.endswith("\n"):
        raise ValueError(f"{where}: the line is incomplete: the run that wrote it was killed, or is still writing")
    try:
        record = parse_strict_json(line)
        if not isinstance(record, dict) or type(record.get(ITERATION)) is not int:
            raise ValueError(f'not a JSON object with a whole "{ITERATION}": {line.strip()[:80]}')
        check_metrics({name: value for name, value in record.items() if name != ITERATION})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return record


@dataclass
class Range:
    """One metric over the iterations of a point."""

    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass
class Point:
    first: int
    last: int
    """The iterations of its first and last line"""
    num_lines: int
    metrics: dict[str, Range]

    def add(self, other: "Point") -> None:
        self.last, self.num_lines = other.last, self.num_lines + other.num_lines
        for name, new in other.metrics.items():
            old = self.metrics.get(name, Range(0, 0.0, math.inf, -math.inf))
            low, high = min(old.low, new.low), max(old.high, new.high)
            self.metrics[name] = Range(old.count + new.count, old.total + new.total, low, high)


@dataclass
class History:
    """The points of one file, and of each metric, over all its lines: sum, newest value, and the largest with the first
    iteration that has it.
    """

    points: list[Point] = field(default_factory=list)
    width: int = 1
    """Lines of every point but the last"""
    num_lines: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, line: dict[str, float]) -> None:
        """Take the next line of the file."""
        iteration = int(line[ITERATION])
        point = Point(iteration, iteration, 1, {})
        self.num_lines += 1
        for name, value in line.items():
            if name == ITERATION:
                continue
            point.metrics[name] = Range(1, value, value, value)
            self.last[name] = value
            self.sums[name] = self.sums.get(name, 0.0) + value
            if name not in self.best or value > self.best[name][0]:
                self.best[name] = value, iteration
        if self.points and self.points[-1].num_lines < self.width:
            self.points[-1].add(point)
            return
        if len(self.points) == MOST_POINTS:
            for first, second in zip(self.points[::2], self.points[1::2], strict=True):
                first.add(second)
            self.points, self.width = self.points[::2], 2 * self.width
        self.points.append(point)

    @property
    def seconds(self) -> float:
        """The sum of all phases."""
        return sum(total for name, total in self.sums.items() if name.startswith(TIME))

    @property
    def num_iterations(self) -> int:
        """Without those of value pretraining."""
        return max(0, self.points[-1].last) if self.points else 0

    @property
    def names(self) -> list[str]:
        """All metrics, in the order in which they appear."""
        return list(self.last)

    @property
    def lines(self) -> list[dict[str, float]]:
        """The means of each point, as lines of a shorter metrics.jsonl."""
        means = ({name: found.mean for name, found in point.metrics.items()} for point in self.points)
        return [{ITERATION: point.last, **each} for point, each in zip(self.points, means, strict=True)]

    def list_ranges(self, metric: str, start: float = -math.inf) -> list[Range]:
        """Of the points that have the metric and that begin at iteration `start` or later."""
        return [point.metrics[metric] for point in self.points if metric in point.metrics and point.first >= start]

    def list_recent(self, metric: str, number: int = MOST_POINTS, start: float = -math.inf) -> list[float]:
        """The means of the metric in the last `number` of those points."""
        return [each.mean for each in self.list_ranges(metric, start)[-number:]]


def load_history(path: Path, problems: list[str]) -> History:
    """Read the file, with what `derive_metrics` adds; lines that cannot be read are left out, and `problems` names the
    first of them.
    """
    history, bad = History(), list[str]()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                try:
                    line = parse_line(text, f"{path}:{number}")
                    history.add(line | derive_metrics(line))
                except ValueError as error:
                    bad.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error}")
    if bad:
        problems.append(bad[0] if len(bad) == 1 else f"{bad[0]} (and {len(bad) - 1} lines more)")
    return history


def derive_metrics(line: Mapping[str, float]) -> dict[str, float]:
    """derived/* of an iteration, which its line implies.

    rollout_frac: share of its seconds in which the roles wait for responses. servers_idle_frac: share without a rollout
    or an evaluation; with rollout.max_staleness the servers generate then, too. update_tflops: 1e12 model operations a
    second of policy and critic during the update.
    """
    seconds, rollout, update = line.get(SECONDS, 0.0), line.get("time/rollout"), line.get("time/update", 0.0)
    if rollout is None or seconds <= 0:
        return {}
    generating = rollout + line.get("time/evaluate", 0.0)
    derived = {"derived/rollout_frac": rollout / seconds, "derived/servers_idle_frac": 1 - generating / seconds}
    tflop = [line[name] for name in MODEL_TFLOP if name in line]
    return derived | ({UPDATE_TFLOPS: sum(tflop) / update} if tflop and update > 0 else {})


def add_mfu(history: History, peak_tflops: float) -> None:
    """Put MFU, the update's model operations a second over this peak, into all points that have them."""
    for metrics in (point.metrics for point in history.points):
        if (rate := metrics.get(UPDATE_TFLOPS)) is not None:
            metrics[MFU] = Range(rate.count, *(x / peak_tflops for x in (rate.total, rate.low, rate.high)))
    if UPDATE_TFLOPS in history.last:
        history.last[MFU] = history.last[UPDATE_TFLOPS] / peak_tflops


def load_record(run_dir: Path) -> dict[str, Any]:
    """What run.json has; empty where there is none. Raises ValueError that names it where it is no object."""
    path = run_dir / RUN_FILE
    return load_json_object(path) if path.exists() else {}


def update_record(run_dir: Path, **fields: Any) -> None:
    """Replace these fields of run.json, atomically. It is not synced to disk; a full disk is left to other writers, and
    a damaged file stays as it is.
    """
    path = run_dir / RUN_FILE
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(OSError, ValueError):
        run_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(load_record(run_dir) | fields, indent=1), encoding="utf-8")
        partial.replace(path)


def write_status(run_dir: Path, iteration: int, phase: str | None) -> None:
    update_record(run_dir, status={"iteration": iteration, "phase": phase, "since": time.time(), "pid": os.getpid()})


class State(Enum):
    done = "done"
    failed = "failed"
    stopped = "stopped"


@dataclass(frozen=True)
class Outcome:
    state: State
    why: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the line `done: ...`, without those that are not finite"""


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    results = {name: value for name, value in outcome.results.items() if math.isfinite(value)}
    why = outcome.why[:LONGEST_WHY]
    update_record(run_dir, outcome={"state": outcome.state.value, "why": why, "results": results})


def clear_outcome(run_dir: Path) -> None:
    """The run has not ended. A run.json that says only how a run failed before it began is removed."""
    with contextlib.suppress(ValueError):
        if "config" in load_record(run_dir):
            update_record(run_dir, outcome=None)
        else:
            (run_dir / RUN_FILE).unlink(missing_ok=True)


def load_outcome(run_dir: Path) -> Outcome | None:
    """None where the run has not ended. Raises ValueError naming the file where it is not valid."""
    try:
        return TypeAdapter(Outcome | None).validate_python(load_record(run_dir).get("outcome"))
    except ValueError as error:
        raise ValueError(f"{run_dir / RUN_FILE}: is not what a run writes: {error!r}") from None


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    time: float
    """Seconds of Unix time"""
    objective: str
    """The printed formulas, a line each"""
    sizes: str
    data: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    """host, cpu, cores, memory_gib, gpus (of the driver's machine, as nvidia-smi names them), and peak_tflops: what the
    processors of policy and critic can do together, in 1e12 operations a second, or null"""


def record_start(run_dir: Path, *, objective: str, sizes: str, data: str, peak_tflops: float | None) -> None:
    hardware = {**find_hardware(), "peak_tflops": peak_tflops}
    start = Start(time.time(), objective, sizes, data, find_versions(), hardware)
    update_record(run_dir, starts=[*load_record(run_dir).get("starts", []), asdict(start)])


def find_versions() -> dict[str, str]:
    """The version of Python and of each of PACKAGES that is installed, and megarl's commit in a checkout."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    here = Path(__file__).resolve().parents[2]
    if (here / ".git").exists() and (commit := _ask("git", "-C", str(here), "describe", "--always", "--dirty")):
        found["megarl's commit"] = commit
    return found


def find_hardware() -> dict[str, Any]:
    """Of this machine: its name, processor, cores that this process may use, memory in GiB, GPUs."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "host": socket.gethostname(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _ask(*NVIDIA_SMI).splitlines(),
    }


def _ask(*command: str) -> str:
    """What the command prints; empty where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder has it, while it trains or after; files that are missing or damaged are `problems`."""

    directory: Path
    name: str
    """What tells it from the other runs on a page: the name of its folder, if need be with folders above"""
    state: str
    """done, failed, stopped or unfinished"""
    why: str
    """The reason why it is not done, or done before its last iteration; else empty"""
    config: Mapping[str, Any]
    """The plain value of each dotted key, as far as it is known"""
    overrides: Sequence[str]
    starts: Sequence[Start]
    history: History
    problems: list[str]

    @property
    def num_iterations(self) -> int | None:
        """How many the run is to have; None: not known"""
        found = self.config.get("train.num_iterations")
        return found if isinstance(found, int) else None


def is_run(directory: Path) -> bool:
    """Whether it is the folder of a run, and not of a sweep or anything else."""
    return any((directory / name).is_file() for name in (RUN_FILE, METRICS_FILE))


def load_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, with names that differ."""
    above = Path(os.path.commonpath(directories))
    return [replace(load_run(path), name=str(path.relative_to(above))) for path in directories]


def load_sweep(directory: Path) -> list[RunRecord]:
    """All folders below `directory` in which a run has begun, sorted by name. A missing folder has no runs."""
    begun = {path.parent for name in (HYDRA_FOLDER, RUN_FILE) for path in directory.glob(f"*/{name}")}
    return [load_run(path) for path in sorted(begun) if ".aside-" not in path.name]


def load_run(directory: Path) -> RunRecord:
    """Everything but the responses; nothing here raises."""
    problems: list[str] = []
    state, why, starts = UNFINISHED, "in progress or killed, at an unknown point", list[Start]()
    config, overrides = dict[str, Any](), list[str]()
    try:
        record = load_record(directory)
        if "config" in record:
            config, overrides = dict(record["config"]), [str(text) for text in record["overrides"]]
        starts = TypeAdapter(list[Start]).validate_python(record.get("starts", []))
        if (outcome := load_outcome(directory)) is not None:
            state, why = outcome.state.value, outcome.why
        elif (status := record.get("status")) is None:
            why = "in progress or killed, before its processes were started"
        else:
            phase = status["phase"] or "no phase"
            why = f"in progress or killed, at iteration {int(status['iteration'])}, in {phase}"
    except DAMAGED as error:
        problems.append(f"{directory / RUN_FILE}: is not what a run writes: {error!r}")
    history = load_history(directory / METRICS_FILE, problems)
    # A run that goes on elsewhere is measured by its newest machine.
    if starts and (peak := starts[-1].hardware.get("peak_tflops")):
        add_mfu(history, float(peak))
    return RunRecord(directory, directory.name, state, why, config, overrides, starts, history, problems)


def format_outcomes(runs: Sequence[RunRecord]) -> str:
    """A table for the terminal: how each run ended, and why where it is not done."""
    rows = [["run", "state", "iterations", "held-out reward", "why"]]
    for run in runs:
        shown = f"{run.history.last[HELDOUT]:.4f}" if HELDOUT in run.history.last else ""
        rows.append([run.name, run.state, str(run.history.num_iterations), shown, *run.why.splitlines()[:1]])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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
        self._run.define_metric("*", step_metric=ITERATION)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({ITERATION: iteration, **metrics})

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
