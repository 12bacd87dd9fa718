"""The runs of a sweep, read from SWEEP_DIR; missing and damaged files are recorded as problems, and nothing raises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.json_text import parse_json
from megarl.report.metrics import FILE_NAME, parse_line
from megarl.report.outcome import load_outcome
from megarl.report.status import FILE_NAME as STATUS_NAME

RUN_FILE = "run.json"
HYDRA_FOLDER = ".hydra"
UNFINISHED = "unfinished"
"""The state of a run that is in progress or was killed: it has no outcome.json"""
HELDOUT = "reward/heldout"
Line = Mapping[str, float]


@dataclass(frozen=True)
class RunRecord:
    """One run of a sweep, read from its folder."""

    name: str
    """The name of its folder"""
    state: str
    """done, failed, stopped or unfinished"""
    why: str
    """The reason why it is not done, or done before its last iteration; else empty"""
    config: Mapping[str, Any]
    """The plain value of each dotted key"""
    overrides: Sequence[str]
    lines: Sequence[Line]
    """The lines of metrics.jsonl"""
    problems: Sequence[str]
    """Messages about files that are missing or damaged"""

    def last(self, metric: str) -> float | None:
        """The metric's newest value; None where there is none."""
        return next((line[metric] for line in reversed(self.lines) if metric in line), None)

    def best(self, metric: str) -> float | None:
        return max((line[metric] for line in self.lines if metric in line), default=None)

    @property
    def num_iterations(self) -> int:
        """Without those of value pretraining."""
        return max(0, int(self.lines[-1]["iteration"])) if self.lines else 0

    @property
    def seconds(self) -> float:
        """The sum of the timed phases of all iterations."""
        return sum(value for line in self.lines for key, value in line.items() if key.startswith("time/"))


@dataclass(frozen=True)
class Sweep:
    directory: Path
    runs: Sequence[RunRecord]
    """Sorted by name"""


def load_sweep(directory: Path) -> Sweep:
    """All folders below `directory` in which a run has begun. A missing folder has no runs."""
    folders = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    records = [
        load_run_record(path)
        for path in folders
        if ((path / HYDRA_FOLDER).is_dir() or (path / RUN_FILE).is_file()) and ".aside-" not in path.name
    ]
    return Sweep(directory, records)


def load_run_record(folder: Path) -> RunRecord:
    problems: list[str] = []
    state, why = load_state(folder, problems)
    lines = _load_lines(folder / FILE_NAME, problems, needed=state == "done")
    return RunRecord(
        name=folder.name,
        state=state,
        why=why,
        config=load_run_config(folder, problems),
        overrides=load_overrides(folder, problems),
        lines=lines,
        problems=problems,
    )


def load_state(folder: Path, problems: list[str]) -> tuple[str, str]:
    """State and reason, as in `RunRecord`."""
    try:
        outcome = load_outcome(folder)
    except ValueError as error:
        problems.append(str(error))
        outcome = None
    if outcome is not None:
        return outcome.state.value, outcome.why
    try:
        status = parse_json((folder / STATUS_NAME).read_text(encoding="utf-8"))
        at = f"at iteration {int(status['iteration'])}, in {status['phase'] or 'no phase'}"
    except FileNotFoundError:
        at = "before its processes were started"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{folder / STATUS_NAME}: is not what a run writes: {error!r}")
        at = "at an unknown point"
    return UNFINISHED, f"in progress or killed, {at}"


def _load_lines(path: Path, problems: list[str], needed: bool = False) -> list[Line]:
    """The readable lines; a problem names the first unreadable one and the number of the others."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        if needed:
            problems.append(f"{path}: is missing")
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return []
    lines: list[Line] = []
    bad: list[str] = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(parse_line(text, f"{path}:{number}"))
        except ValueError as error:
            bad.append(str(error))
    if bad:
        problems.append(bad[0] if len(bad) == 1 else f"{bad[0]} (and {len(bad) - 1} lines more)")
    return lines


def load_run_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The configuration from run.json or, where the run ended before it was written, from Hydra's files."""
    try:
        return dict(parse_json((folder / RUN_FILE).read_text(encoding="utf-8"))["config"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{folder / RUN_FILE}: is not what a run writes: {error!r}")
    path = folder / HYDRA_FOLDER / "config.yaml"
    try:
        tree = _resolve(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return {}
    return _flatten(tree) if isinstance(tree, dict) else {}


def _resolve(composed: Any) -> Any:
    try:
        return OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException:
        # Some values, such as the nodes of a Slurm job, are known only where the run executes.
        return OmegaConf.to_container(composed, resolve=False)


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def load_overrides(folder: Path, problems: list[str]) -> list[str]:
    """The overrides that the run was started with; empty where none are known."""
    path = folder / HYDRA_FOLDER / "overrides.yaml"
    try:
        return [str(text) for text in OmegaConf.to_container(OmegaConf.load(path)) or []]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return []


def format_outcomes(runs: Sequence[RunRecord]) -> str:
    """A table for the terminal: how each run ended, and why where it is not done."""
    rows = [["run", "state", "iterations", "held-out reward", "why"]]
    for run in runs:
        heldout = run.last(HELDOUT)
        shown = "" if heldout is None else f"{heldout:.4f}"
        why = run.why.splitlines()[0] if run.why else ""
        rows.append([run.name, run.state, str(run.num_iterations), shown, why])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
