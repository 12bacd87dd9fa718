"""What follows from finished runs of tools/bench/experiments.py: tables of docs/results.md, their data and a picture.

A prediction is tested with Student's t over the seeds of the difference high - low of two arms with the same seed, or
of one arm's number and a constant: 95%, two-sided. It

- does not hold where the whole interval is below the margin,
- holds where the mean difference is the margin or more and the interval is above 0, or above the margin where that is
  negative: the arm is then not worse by as much,
- and otherwise cannot be told from fewer than 20 seeds; from 20 on it does not hold.

A difference that is real and smaller than the margin does not hold.
"""

import csv
import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import Any

from scipy.stats import t

ENOUGH_SEEDS = 20
BEGIN = "<!-- begin {}: made by tools/bench/experiments.py -->\n"
END = "<!-- end {} -->"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
FURTHER_COLOURS = ("#bcbd22", "#e377c2", "#000000", "#5254a3")


@dataclass(frozen=True)
class Arm:
    """One variant, trained once for each seed."""

    keys: tuple[str, ...]
    """Configuration of the run, after that of the experiment"""
    task: str | None
    """Of experiment_tasks.TASKS; None: the keys choose model, data and reward"""
    frozen: bool = False
    """Every iteration learns from the responses of the first one"""
    keeps_old_logprobs: bool = False
    """With `frozen`: ratios are to the policy that sampled, not to the one at the iteration's start"""


@dataclass(frozen=True)
class Prediction:
    """A number of one arm against that of another, seed by seed."""

    text: str
    number: str
    """Name of one of `MEASURES`"""
    high: str | Sequence[str]
    """The arm that is predicted to have the higher number; of several the one with the lowest"""
    low: str | float | Sequence[str]
    """The arm that it is compared with, or a number; of several the one with the highest mean over the seeds"""
    margin: float
    """The least difference, high - low, that counts"""
    expected: str
    """holds, does not hold or cannot tell: what we think will come out"""
    why: str
    decides: bool = True
    """Whether the experiment's verdict depends on it"""
    seeds: tuple[int, ...] = ()
    """Others than the experiment's, for two arms that those could not tell apart"""

    @property
    def arms(self) -> list[str]:
        return [*list_arms(self.high), *list_arms(self.low)]


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str
    task: str
    """What is to be done, in words"""
    seeds: tuple[int, ...]
    arms: Mapping[str, Arm]
    predictions: tuple[Prediction, ...]
    short: str = ""
    """The task and the two arms of the difference on the page; "" for what is no claim of a paper as a whole"""
    advice: str = ""
    """What it means for a user"""


@dataclass(frozen=True)
class Run:
    """What is kept of a finished run: numbers of each iteration."""

    experiment: str
    arm: str
    seed: int
    loop: str
    """real, or in_process: with the tiny model in plain torch for Megatron-Core and SGLang, as at commit 0020eba"""
    seconds: float
    samples: tuple[int, ...] = ()
    """Responses generated up to each iteration, those of value pretraining included; empty: not known"""
    right: tuple[float, ...] = ()
    """Share of right answers among the sampled ones"""
    reward: tuple[float, ...] = ()
    surprise: tuple[float, ...] = ()
    """Mean of -log pi of the sampled tokens: an estimate of the entropy"""
    snr: tuple[float, ...] = ()
    """Of the tokens' advantages, where the task says which tokens are right"""
    noise_share: tuple[float, ...] = ()
    """Share of |advantage| in groups of which at least 7 in 8 responses are paid, and not all"""
    length: tuple[float, ...] = ()
    """Mean tokens of a response"""
    tilt: tuple[float, ...] = ()
    """Mean advantage of the first quarter of a response's tokens minus that of the last"""
    advantages: tuple[float, ...] = ()
    """By eighth of the response: mean advantage in the first iteration"""
    values: tuple[float, ...] = ()
    """The critic's mean value, likewise"""
    values_before: tuple[float, ...] = ()
    """The same before value pretraining"""
    heldout: tuple[tuple[int, float], ...] = ()
    """(responses generated, reward of greedy held-out responses) of each evaluation"""


Runs = Mapping[tuple[str, int], Run]
"""Of an experiment, by arm and seed"""


class Verdict(Enum):
    holds = "holds"
    does_not_hold = "does not hold"
    cannot_tell = "cannot tell"
    not_run = "not run"


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float
    high: float
    num_seeds: int


@dataclass(frozen=True)
class Outcome:
    """Of one prediction."""

    verdict: Verdict
    difference: Difference | None
    """None: it is not run"""


def take_first(values: Sequence[float]) -> float:
    """The mean over the first quarter of the iterations."""
    return statistics.fmean(values[: max(1, len(values) // 4)])


def take_last(values: Sequence[float]) -> float:
    """The mean over the last quarter of the iterations."""
    return statistics.fmean(values[-max(1, round(0.25 * len(values))) :])


def count_to_half(values: Sequence[float]) -> float:
    """The number of the first iteration in which half of the answers are right, and one past the end if none."""
    return next((number + 1 for number, value in enumerate(values) if value >= 0.5), len(values) + 1)


def find_best(values: Sequence[float]) -> float:
    """The highest mean over a tenth of the iterations."""
    width = max(1, len(values) // 10)
    return max(statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1))


def take_half(heldout: Sequence[tuple[int, float]]) -> float:
    """The evaluation nearest to half of all responses."""
    return min(heldout, key=lambda point: abs(point[0] - heldout[-1][0] / 2))[1]


def find_area(run: Run) -> float:
    """The mean over the responses generated: of the held-out reward between evaluations where there are three or more,
    else of the share of correct responses, an iteration's for all since the iteration before.
    """
    if len(points := run.heldout) > 2:
        parts = [(b - a) * (x + y) / 2 for (a, x), (b, y) in itertools.pairwise(points)]
        return sum(parts) / (points[-1][0] - points[0][0])
    since = zip((0, *run.samples), run.samples, run.right, strict=False)
    return sum((end - start) * right for start, end, right in since) / run.samples[-1]


MEASURES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "area": ("", find_area),
    "correct at the end": ("right", take_last),
    "correct over all": ("right", statistics.fmean),
    "paid over all": ("reward", statistics.fmean),
    "iterations to half": ("right", count_to_half),
    "fall from the best": ("right", lambda right: find_best(right) - take_last(right)),
    "SNR": ("snr", lambda snr: snr[0]),
    "log10 of SNR": ("snr", lambda snr: math.log10(max(1e-3, snr[0]))),
    "share in near-solved groups": ("noise_share", take_first),
    "length at the end": ("length", take_last),
    "shortest length": ("length", min),
    "first quarter's advantage": ("tilt", lambda tilt: tilt[0]),
    "held-out at half": ("heldout", take_half),
    "held-out at the end": ("heldout", lambda heldout: heldout[-1][1]),
    "rise of the held-out reward": ("heldout", lambda heldout: heldout[-1][1] - heldout[0][1]),
}
"""Numbers by name: the field of a `Run` that they are computed from, "" for the run, and how. `correct`: share of
correct responses; `at the end`: mean over the last quarter of the iterations, of the held-out reward the last
evaluation; shortest length: the least mean of an iteration; SNR: of the first iteration, in which the policy is
untrained; first quarter's advantage: minus the last quarter's, likewise."""


def measure(run: Run, name: str) -> float:
    series, compute = MEASURES[name]
    return compute(getattr(run, series) if series else run)


def compute_difference(differences: Sequence[float]) -> Difference:
    """The mean and its 95% interval by Student's t. Raises ValueError for fewer than 2 seeds."""
    if (num := len(differences)) < 2:
        raise ValueError(f"found {num} seeds; an interval needs 2 or more")
    mean = statistics.fmean(differences)
    reach = float(t.ppf(0.975, num - 1)) * statistics.stdev(differences) / math.sqrt(num)
    return Difference(mean, mean - reach, mean + reach, num)


def judge(difference: Difference, margin: float) -> Verdict:
    """The verdict of a difference; see the module."""
    if difference.high < margin:
        return Verdict.does_not_hold
    is_clear = difference.low > min(0.0, margin) and difference.mean >= margin
    if is_clear:
        return Verdict.holds
    return Verdict.does_not_hold if difference.num_seeds >= ENOUGH_SEEDS else Verdict.cannot_tell


def list_arms(side: str | float | Sequence[str]) -> list[str]:
    """The arms that a side of a prediction names."""
    if isinstance(side, str):
        return [side]
    return [] if isinstance(side, int | float) else list(side)


def judge_prediction(prediction: Prediction, runs: Runs, seeds: Sequence[int]) -> Outcome:
    """Without all seeds of all arms it is not run: no verdict from a part of them."""
    high, low = list_arms(prediction.high), list_arms(prediction.low)
    if any((arm, seed) not in runs for arm in prediction.arms for seed in seeds):
        return Outcome(Verdict.not_run, None)
    numbers = {arm: [measure(runs[arm, seed], prediction.number) for seed in seeds] for arm in prediction.arms}
    least = [min(each) for each in zip(*(numbers[arm] for arm in high), strict=True)]
    rival = (
        max((numbers[arm] for arm in low), key=statistics.fmean) if low else [float(str(prediction.low))] * len(seeds)
    )
    difference = compute_difference([a - b for a, b in zip(least, rival, strict=True)])
    return Outcome(judge(difference, prediction.margin), difference)


def judge_all(experiment: Experiment, runs: Runs) -> list[Outcome]:
    return [judge_prediction(each, runs, each.seeds or experiment.seeds) for each in experiment.predictions]


def choose_seeds(experiment: Experiment, arm: str) -> list[int]:
    """Those of the experiment, and those of the predictions about the arm."""
    own = [each.seeds for each in experiment.predictions if arm in each.arms]
    return sorted({*experiment.seeds, *itertools.chain(*own)})


def judge_experiment(experiment: Experiment, outcomes: Sequence[Outcome]) -> Verdict:
    """Of the predictions that decide: holds where all do, does not hold where one does not."""
    verdicts = [o.verdict for p, o in zip(experiment.predictions, outcomes, strict=True) if p.decides]
    for verdict in (Verdict.not_run, Verdict.does_not_hold, Verdict.cannot_tell):
        if verdict in verdicts:
            return verdict
    return Verdict.holds


def fill_page(page: str, name: str, content: str) -> str:
    """The page with this between the marks of that name. Raises ValueError if they are missing."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = page.split(begin)
    return f"{head}{begin}\n{content}\n\n{end}{rest.split(end)[1]}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def list_verdicts(experiments: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> list[list[str]]:
    """A row per claim that was run, with the first prediction that decided its verdict."""
    rows = [["claim", "task and arms", "difference (95% interval), margin", "seeds", "verdict", "for you"]]
    for name, experiment in experiments.items():
        if not experiment.short:
            continue
        outcomes = judge_all(experiment, runs[name])
        verdict = judge_experiment(experiment, outcomes)
        if verdict is Verdict.not_run:
            continue
        pairs = zip(experiment.predictions, outcomes, strict=True)
        prediction, found = next((p, o.difference) for p, o in pairs if p.decides and o.verdict is verdict)
        assert found is not None, "its runs are finished"
        numbers = [f"{prediction.number}: {_format(found)}, margin {prediction.margin:g}", str(found.num_seeds)]
        rows.append([experiment.title, experiment.short, *numbers, verdict.value, experiment.advice])
    return rows


def _format(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.mean:.2f} ({difference.low:.2f} to {difference.high:.2f})"


def list_parts(experiment: Experiment, runs: Runs) -> list[list[str]]:
    """A row per prediction."""
    rows = [["claim", f"{experiment.predictions[0].number}: with the part minus without", "seeds", "verdict"]]
    for prediction, outcome in zip(experiment.predictions, judge_all(experiment, runs), strict=True):
        num_seeds = len(prediction.seeds or experiment.seeds)
        rows.append([prediction.text, _format(outcome.difference), str(num_seeds), outcome.verdict.value])
    return rows


def describe_number(prediction: Prediction) -> str:
    arms = list_arms(prediction.high)
    low = prediction.low if isinstance(prediction.low, str | float | int) else "best of " + " ".join(prediction.low)
    return f"{prediction.number}, {arms[0] if len(arms) == 1 else 'lowest arm'} - {low}"


def list_predictions(experiments: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> list[list[object]]:
    """A row per prediction: docs/results/claims.csv."""
    texts = ("experiment", "prediction", "difference", "margin", "decides", "expected", "because")
    rows: list[list[object]] = [[*texts, "mean", "interval_low", "interval_high", "verdict"]]
    for name, experiment in experiments.items():
        for each, outcome in zip(experiment.predictions, judge_all(experiment, runs[name]), strict=True):
            found = outcome.difference
            numbers = [""] * 3 if found is None else [f"{x:.3f}" for x in (found.mean, found.low, found.high)]
            row = (name, each.text, describe_number(each), each.margin, each.decides, each.expected, each.why)
            rows.append([*row, *numbers, outcome.verdict.value])
    return rows


def list_seeds(experiments: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> list[list[object]]:
    """A row per finished run with every number that it has: docs/results/claims-seeds.csv."""
    rows: list[list[object]] = [["experiment", "arm", "seed", "loop", *MEASURES]]
    for name, experiment in experiments.items():
        for key in [(arm, seed) for arm in experiment.arms for seed in choose_seeds(experiment, arm)]:
            if (run := runs[name].get(key)) is not None:
                cells = [f"{measure(run, each):.3f}" if _has(run, each) else "" for each in MEASURES]
                rows.append([name, *key, run.loop, *cells])
    return rows


def _has(run: Run, name: str) -> bool:
    return any(getattr(run, MEASURES[name][0] or "samples"))


def _take_areas(experiment: Experiment, runs: Runs) -> list[tuple[str, list[float]]]:
    """(arm, its areas) of the arms that all seeds have run."""
    done = [arm for arm in experiment.arms if all((arm, seed) in runs for seed in experiment.seeds)]
    return [(arm, [measure(runs[arm, seed], "area") for seed in experiment.seeds]) for arm in done]


def draw_suite(suite: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> str:
    """A standalone SVG: a row per task that was run, a mark at each arm's mean area, and a line from its lowest seed to
    the highest. Arms with a critic are filled, those that compare a group are rings.
    """
    left, width, row, top = 310, 400, 44, 30
    done = {each.title: found for name, each in suite.items() if (found := _take_areas(each, runs[name]))}
    arms = list(dict.fromkeys(arm for found in done.values() for arm, _ in found))
    parts, height = [], top + row * len(done) + 20 * ((len(arms) + 3) // 4) + 16
    for tick in range(0, 11, 2):
        x = left + width * tick / 10
        parts.append(f'<path d="M{x:g} {top - 8}V{top + row * len(done) - 8}" class="grid"/>')
        parts.append(f'<text x="{x:g}" y="14" text-anchor="middle" class="tick">{tick / 10:g}</text>')
    for number, (title, of_arms) in enumerate(done.items()):
        y = top + row * number + 8
        parts.append(f'<text x="0" y="{y + 4}">{escape(title)}</text>')
        for arm, areas in of_arms:
            at = arms.index(arm)
            low, high, mean = (left + width * z for z in (min(areas), max(areas), statistics.fmean(areas)))
            line = y - 14 + 2.8 * at
            parts.append(f'<path d="M{low:.1f} {line:.1f}H{high:.1f}" stroke="{_colour(at)}"/>')
            parts.append(_mark(mean, line, arm, at))
    for at, arm in enumerate(arms):
        x, y = 8 + 180 * (at % 4), top + row * len(done) + 10 + 20 * (at // 4)
        parts.append(f'{_mark(x, y, arm, at)}<text x="{x + 10}" y="{y + 4}">{escape(arm)}</text>')
    style = "text{font:12px sans-serif;fill:#555}.grid{stroke:#ccc}path{fill:none}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" role="img">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


GROUP_ARMS = {"rloo", "grpo", "dr_grpo", "dapo"}


def _colour(at: int) -> str:
    return (COLOURS + FURTHER_COLOURS)[at]


def _mark(x: float, y: float, arm: str, at: int) -> str:
    fill = "white" if arm in GROUP_ARMS else _colour(at)
    size = 5 if at == 0 else 3.5
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" fill="{fill}" stroke="{_colour(at)}"/>'


def list_suite(suite: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> list[list[str]]:
    """A row per task that the recipe has run: mean areas of it, the best group method and the best other critic, and
    whether it meets both bars.
    """
    rows = [["task", "`cv_ppo`", "best group method", "best other critic"]]
    rows[0] += ["difference (95% interval), seeds", "bar: not worse by 0.03", "bar: better by"]
    for name, experiment in suite.items():
        means = {arm: statistics.fmean(areas) for arm, areas in _take_areas(experiment, runs[name])}
        if "cv_ppo" not in means:
            continue
        critics = [arm for arm in means if arm not in GROUP_ARMS and not arm.startswith("cv_ppo")]
        not_worse, better = judge_all(experiment, runs[name])[:2]
        best = [max(arms, key=means.__getitem__, default="") for arms in (GROUP_ARMS & means.keys(), critics)]
        cells = [f"`{arm}` {means[arm]:.2f}" if arm else "" for arm in best]
        row, found = [experiment.title, f"{means['cv_ppo']:.2f}", *cells], not_worse.difference
        if found is None:
            rows.append([*row, "not run", "", ""])
            continue
        met = ["met" if outcome.verdict is Verdict.holds else "missed" for outcome in (not_worse, better)]
        second = f"{experiment.predictions[1].margin:g}: {met[1]}"
        rows.append([*row, f"{_format(found)}, {found.num_seeds}", met[0], second])
    return rows


def list_presets(experiment: Experiment, runs: Runs) -> str:
    """The arms of the first prediction, from the highest mean at the end to the lowest."""
    found = {
        arm: statistics.fmean(measure(runs[arm, seed], "held-out at the end") for seed in experiment.seeds)
        for arm in list_arms(experiment.predictions[0].high)
    }
    arms = sorted(found, key=found.__getitem__, reverse=True)
    return textwrap.fill(", ".join(f"`{arm}` {found[arm]:.2f}" for arm in arms) + ".", 120, break_on_hyphens=False)
