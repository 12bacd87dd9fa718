"""The differences between the runs of a sweep, and the effect of each on a metric."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.report.sweep import RunRecord

SEED = "seed"
BOOKKEEPING = ("cluster.", "logger.", "checkpoint.", "evaluate.")
"""Prefixes of keys that have no effect on what a run learns"""
ABSENT = "—"


@dataclass(frozen=True)
class Level:
    """One value of a parameter."""

    value: str
    points: tuple[float, ...]
    """The metric of every run with this value, in the runs' order"""
    mean: float
    """Mean over the settings of the other parameters, each the mean of its seeds"""
    seed_std: float | None
    """Standard deviation over seeds within a setting, pooled over the settings; None where none has two seeds"""


@dataclass(frozen=True)
class Effect:
    key: str
    levels: tuple[Level, ...]

    @property
    def range(self) -> float:
        """The difference between the best and the worst mean."""
        means = [level.mean for level in self.levels]
        return max(means) - min(means)


def find_parameters(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose values differ between the runs, those of the command line first, the seed last.

    A key whose value follows from another one's (such as those that a preset sets with algo.name) is left out, unless
    the command line set it.
    """
    known = [run for run in runs if run.config]
    if not known:
        return []
    keys = [key for key in known[0].config if all(key in run.config for run in known)]
    differing = [
        key
        for key in keys
        if not key.startswith(BOOKKEEPING) and len({show_value(run.config[key]) for run in known}) > 1
    ]
    given = {text.lstrip("+").split("=", 1)[0] for run in known for text in run.overrides}
    asked = [key for key in differing if key in given]
    found = list(asked)
    for key in sorted((key for key in differing if key not in given), key=lambda key: key != "algo.name"):
        if not any(_follows(key, other, known) for other in found):
            found.append(key)
    return sorted(found, key=lambda key: (key == SEED, key not in asked, differing.index(key)))


def _follows(key: str, other: str, runs: Sequence[RunRecord]) -> bool:
    """Whether the value of `other` determines that of `key` in every run."""
    seen: dict[str, str] = {}
    return all(
        seen.setdefault(show_value(run.config[other]), show_value(run.config[key])) == show_value(run.config[key])
        for run in runs
    )


def show_value(value: object) -> str:
    """The value as it would be typed on a command line."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def get_value(run: RunRecord, key: str) -> str:
    return show_value(run.config[key]) if key in run.config else ABSENT


def compute_effects(runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float]) -> list[Effect]:
    """The effect of each parameter other than the seed; largest range first.

    scores: the metric by run name; runs without one are left out. A setting is one combination of the parameters other
    than the seed; every setting has the same weight, however many seeds it has.
    """
    settings: dict[tuple[str, ...], list[float]] = {}
    varied = [key for key in parameters if key != SEED]
    counted = [run for run in runs if run.name in scores]
    for run in counted:
        settings.setdefault(tuple(get_value(run, key) for key in varied), []).append(scores[run.name])
    effects = []
    for position, key in enumerate(varied):
        values = sort_values({setting[position] for setting in settings})
        if len(values) > 1:
            levels = [_build_level(value, position, key, settings, counted, scores) for value in values]
            effects.append(Effect(key, tuple(levels)))
    return sorted(effects, key=lambda effect: -effect.range)


def _build_level(
    value: str,
    position: int,
    key: str,
    settings: Mapping[tuple[str, ...], Sequence[float]],
    runs: Sequence[RunRecord],
    scores: Mapping[str, float],
) -> Level:
    groups = [points for setting, points in settings.items() if setting[position] == value]
    several = [points for points in groups if len(points) > 1]
    freedom = sum(len(points) - 1 for points in several)
    squares = sum((len(points) - 1) * statistics.variance(points) for points in several)
    return Level(
        value=value,
        points=tuple(scores[run.name] for run in runs if get_value(run, key) == value),
        mean=statistics.mean(statistics.mean(points) for points in groups),
        seed_std=(squares / freedom) ** 0.5 if freedom else None,
    )


def sort_values(values: set[str]) -> list[str]:
    """The values sorted: numbers by size, then words."""

    def rank(text: str) -> tuple[bool, float, str]:
        try:
            return False, float(text), ""
        except ValueError:
            return True, 0.0, text

    return sorted(values, key=rank)


def is_complete_grid(runs: Sequence[RunRecord], parameters: Sequence[str]) -> bool:
    """Whether every combination of the values was run; otherwise an effect may be another parameter's."""
    combinations = {tuple(get_value(run, key) for key in parameters) for run in runs}
    expected = 1
    for position in range(len(parameters)):
        expected *= len({combination[position] for combination in combinations})
    return len(combinations) == expected
