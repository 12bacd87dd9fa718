"""Everything that the page of a run shows, read from RUN_DIR while it trains or after; nothing here raises."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.load import find_choices, list_preset_values
from megarl.config.search_path import CONF_DIR, is_search_path
from megarl.json_text import load_json_object
from megarl.report.history import History, add_mfu, load_history
from megarl.report.metrics import FILE_NAME
from megarl.report.responses import (
    LoggedWarning,
    SampledResponse,
    add_entropy_estimate,
    read_warnings,
    sample_responses,
)
from megarl.report.starts import Start, load_starts
from megarl.report.status import FILE_NAME as STATUS_NAME
from megarl.report.sweep import RUN_FILE, UNFINISHED, load_overrides, load_run_config, load_state

LOG_NAME = "train.log"
SILENT_S = 1800.0
"""Without a sign of life for so long, a run is said to be silent"""


@dataclass(frozen=True)
class RunFacts:
    directory: Path
    state: str
    """As in `sweep.RunRecord`, also `why`"""
    why: str
    silent_s: float | None
    """Seconds since the run's last sign of life, where it is unfinished and they are more than SILENT_S"""
    config: Mapping[str, Any]
    overrides: Sequence[str]
    choices: Sequence[str]
    """The options of groups that the run is compared with, as overrides"""
    changes: Mapping[str, tuple[Any, Any]] | None
    """(preset's, this run's) value of each key that differs from what `choices` alone give; None: not known"""
    starts: Sequence[Start]
    history: History
    responses: Sequence[SampledResponse]
    logged: Sequence[LoggedWarning]
    problems: Sequence[str]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def num_iterations(self) -> int | None:
        """How many the run is to have; None: not known"""
        found = self.config.get("train.num_iterations")
        return found if isinstance(found, int) else None


def is_run(directory: Path) -> bool:
    """Whether it is the folder of a run, and not of a sweep or anything else."""
    return any((directory / name).is_file() for name in (RUN_FILE, FILE_NAME))


def load_run_facts(directory: Path) -> RunFacts:
    problems: list[str] = []
    state, why = load_state(directory, problems)
    config, overrides = load_run_config(directory, problems), _load_kept_overrides(directory, problems)
    history = load_history(directory / FILE_NAME, problems, needed=state == "done")
    responses = sample_responses(directory, problems)
    add_entropy_estimate(history, responses)
    starts = load_starts(directory, problems)
    # A run that goes on elsewhere is measured by its newest machine.
    if starts and (peak := starts[-1].hardware.get("peak_tflops")):
        add_mfu(history, float(peak))
    choices = list_choices(overrides)
    return RunFacts(
        directory,
        state,
        why,
        _find_silence(directory) if state == UNFINISHED else None,
        config,
        overrides,
        choices,
        find_changes(config, [*choices, *filter(is_search_path, overrides)], problems),
        starts,
        history,
        responses,
        list(read_warnings(directory / LOG_NAME)),
        problems,
    )


def _load_kept_overrides(directory: Path, problems: list[str]) -> list[str]:
    """Those of run.json, which has what a resumed run repeats; where there is none, Hydra's."""
    try:
        return [str(text) for text in load_json_object(directory / RUN_FILE)["overrides"]]
    except (OSError, ValueError, KeyError, TypeError):
        return load_overrides(directory, problems)


def _is_choice(override: str) -> bool:
    name = override.lstrip("+~").split("=", 1)[0].split("@")[0]
    return (CONF_DIR / name).is_dir()


def list_choices(overrides: Sequence[str]) -> list[str]:
    """Those of the overrides that choose an option of a group.

    An experiment that is a file of the user's own has what is to be seen: in its place are the options that it chooses.
    """
    chosen = [text for text in overrides if _is_choice(text)]
    names = [text.split("=", 1)[1] for text in chosen if text.lstrip("+").startswith("experiment=")]
    if not names or (CONF_DIR / "experiment" / f"{names[-1]}.yaml").is_file():
        return chosen
    try:
        found = find_choices([*chosen, *filter(is_search_path, overrides)])
        defaults = find_choices([])
    except ConfigError:
        return chosen  # find_changes says so
    return [f"{group}={name}" for group, name in found.items() if group != "experiment" and name != defaults.get(group)]


def find_changes(
    config: Mapping[str, Any], choices: Sequence[str], problems: list[str]
) -> dict[str, tuple[Any, Any]] | None:
    """(preset's value, the run's) of each key of `config` that differs. choices: the run's options of groups; None
    where they do not compose, which `problems` then says.
    """
    if not config:
        return None
    try:
        preset = list_preset_values(choices)
    except ConfigError as error:
        shown = " ".join(choices) or "the defaults"
        problems.append(f"the preset ({shown}) cannot be composed here: {'; '.join(error.problems)}")
        return None
    return {key: (preset.get(key), value) for key, value in config.items() if preset.get(key) != value}


def _find_silence(directory: Path) -> float | None:
    """Seconds since the newest of the files that a run that is alive writes."""
    written = [path.stat().st_mtime for name in (STATUS_NAME, FILE_NAME) if (path := directory / name).is_file()]
    silent = time.time() - max(written) if written else 0.0
    return silent if silent > SILENT_S else None
