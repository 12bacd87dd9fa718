"""What follows from finished runs of tools/bench/experiments.py, and docs/results/claims.md with its pictures.

A prediction is tested with Student's t over the seeds of the difference high - low of two arms with the same seed, or
of one arm's number and a constant: 95%, two-sided. It

- does not hold where the whole interval is below the margin,
- holds where the mean difference is the margin or more and the interval is above 0, or above the margin where that is
  negative: the arm is then not worse by as much,
- and cannot be told otherwise.

A difference that is real and smaller than the margin does not hold.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from megarl.report.charts import HEIGHT, WIDTH, Curve, draw_curves

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantile of Student's t for 1 to 9 degrees of freedom"""
BEGIN = "<!-- begin claims: made by tools/bench/experiments.py -->\n"
END = "<!-- end claims -->"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
ROW = 15


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
    low: str | float
    """The arm that it is compared with; or a number"""
    margin: float
    """The least difference, high - low, that counts"""
    expected: str
    """holds, does not hold or cannot tell: what we think will come out"""
    why: str
    decides: bool = True
    """Whether the experiment's verdict depends on it"""


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
    cross_check: str | None = None
    """What a run with the real loop gave beside those in one process"""
    readme: Mapping[str, str] | None = None
    """Arms of the README's picture, with what they are called there"""


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


MEASURES: dict[str, Callable[[Run], float]] = {
    "right at the end": lambda run: take_last(run.right),
    "right at the start": lambda run: take_first(run.right),
    "right over all": lambda run: statistics.fmean(run.right),
    "iterations to half": lambda run: count_to_half(run.right),
    "fall from the best": lambda run: find_best(run.right) - take_last(run.right),
    "surprise at the end": lambda run: take_last(run.surprise),
    "SNR": lambda run: run.snr[0],
    "log10 of SNR": lambda run: math.log10(max(1e-3, run.snr[0])),
    "share in near-solved groups": lambda run: take_first(run.noise_share),
    "held-out at the end": lambda run: run.heldout[-1][1],
    "rise of the held-out reward": lambda run: run.heldout[-1][1] - run.heldout[0][1],
}
"""Numbers of a run by name. `at the end`: mean over the last quarter of the iterations, `at the start`: over the first,
of the held-out reward the last evaluation; SNR: of the first iteration, in which the policy is untrained."""


def compute_difference(differences: Sequence[float]) -> Difference:
    """The mean and its 95% interval by Student's t. Raises ValueError for fewer than 2 or more than 10 seeds."""
    if not 2 <= len(differences) <= len(T_975) + 1:
        raise ValueError(f"found {len(differences)} seeds; an interval needs 2 to {len(T_975) + 1}")
    mean = statistics.fmean(differences)
    reach = T_975[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - reach, mean + reach)


def judge(difference: Difference, margin: float) -> Verdict:
    """The verdict of a difference; see the module."""
    if difference.high < margin:
        return Verdict.does_not_hold
    is_clear = difference.low > min(0.0, margin) and difference.mean >= margin
    return Verdict.holds if is_clear else Verdict.cannot_tell


def list_arms(side: str | float | Sequence[str]) -> list[str]:
    """The arms that a side of a prediction names."""
    if isinstance(side, str):
        return [side]
    return [] if isinstance(side, int | float) else list(side)


def judge_prediction(prediction: Prediction, runs: Runs, seeds: Sequence[int]) -> Outcome:
    """Without all seeds of all arms it is not run: no verdict from a part of them."""
    measure, differences = MEASURES[prediction.number], []
    for seed in seeds:
        found = []
        for side in (prediction.high, prediction.low):
            arms = list_arms(side)
            if any((arm, seed) not in runs for arm in arms):
                return Outcome(Verdict.not_run, None)
            least = min(measure(runs[arm, seed]) for arm in arms) if arms else float(str(side))
            found.append(least)
        differences.append(found[0] - found[1])
    difference = compute_difference(differences)
    return Outcome(judge(difference, prediction.margin), difference)


def judge_all(experiment: Experiment, runs: Runs) -> list[Outcome]:
    return [judge_prediction(prediction, runs, experiment.seeds) for prediction in experiment.predictions]


def judge_experiment(experiment: Experiment, outcomes: Sequence[Outcome]) -> Verdict:
    """Of the predictions that decide: holds where all do, does not hold where one does not."""
    verdicts = [o.verdict for p, o in zip(experiment.predictions, outcomes, strict=True) if p.decides]
    for verdict in (Verdict.not_run, Verdict.does_not_hold, Verdict.cannot_tell):
        if verdict in verdicts:
            return verdict
    return Verdict.holds


def fill_page(page: str, content: str) -> str:
    """The page with this between its marks. Raises ValueError where they are missing."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def format_page(experiments: Mapping[str, Experiment], runs: Mapping[str, Runs]) -> str:
    """Markdown: the verdicts of all experiments, then each of them. runs: by experiment."""
    lines = ["| claim | verdict | source |", "| --- | --- | --- |"]
    for name, experiment in experiments.items():
        verdict = judge_experiment(experiment, judge_all(experiment, runs[name])).value
        lines.append(f"| [{experiment.title}](#{name.replace('_', '-')}) | {verdict} | {experiment.source} |")
    parts = ["\n".join(lines), *(format_experiment(each, runs[name]) for name, each in experiments.items())]
    return "\n\n".join(parts) + "\n"


def format_experiment(experiment: Experiment, runs: Runs) -> str:
    outcomes = judge_all(experiment, runs)
    parts = [
        f"### {experiment.name.replace('_', '-')}",
        wrap(f"**{experiment.title}: {judge_experiment(experiment, outcomes).value}.** Source: {experiment.source}."),
        wrap(experiment.task),
        wrap(describe_loop(experiment, runs)),
    ]
    if runs:
        picture = f"../../tools/bench/experiments/{experiment.name}.svg"
        parts += [f"![share of right answers, or held-out reward, against responses]({picture})"]
    parts += [format_predictions(experiment.predictions, outcomes)]
    if runs:
        parts += [format_arms(experiment, runs)]
    return "\n\n".join(parts)


def wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def describe_loop(experiment: Experiment, runs: Runs) -> str:
    seeds = ", ".join(map(str, experiment.seeds))
    if any(run.loop == "in_process" for run in runs.values()):
        text = "In one process: the product's loop, targets and losses over the tiny model in plain torch"
        return f"{text}. Seeds {seeds}. Cross-check: {experiment.cross_check}."
    return f"Real loop (Megatron-Core, SGLang, Ray). Seeds {seeds}."


def format_predictions(predictions: Sequence[Prediction], outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per prediction; those in brackets do not decide."""
    lines = [
        "| prediction | number | margin | expected, because | difference, 95% interval | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for prediction, outcome in zip(predictions, outcomes, strict=True):
        text = prediction.text if prediction.decides else f"({prediction.text})"
        arms = list_arms(prediction.high)
        high = arms[0] if len(arms) == 1 else f"least of {len(arms)} arms"
        difference = outcome.difference
        found = "" if difference is None else f"{difference.mean:.3f}, {difference.low:.3f} to {difference.high:.3f}"
        why = f"{prediction.expected}: {prediction.why}"
        number = f"{prediction.number}: {high} - {prediction.low}"
        cells = (text, number, f"{prediction.margin:g}", why, found, outcome.verdict.value)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines)


BAR = "\\|"
"""The sign that would end the cell of a table"""


def format_arms(experiment: Experiment, runs: Runs) -> str:
    """Markdown: the numbers that the predictions are about, of each arm and seed."""
    names = list(dict.fromkeys(prediction.number for prediction in experiment.predictions))
    if any(run.right for run in runs.values()):
        names = list(dict.fromkeys(["right at the end", *names]))
    lines = [f"| arm | seeds | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
    for arm in experiment.arms:
        found = [runs[arm, seed] for seed in experiment.seeds if (arm, seed) in runs]
        if found:
            cells = [", ".join(f"{MEASURES[name](run):.2f}" for run in found) for name in names]
            lines.append(f"| {arm} | {', '.join(str(run.seed) for run in found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_points(run: Run) -> list[tuple[float, float]]:
    """What is drawn: the share of right answers against the responses generated, or the iteration where those are not
    known; without such shares the held-out reward.
    """
    xs = run.samples or range(1, len(run.right) + 1)
    return list(zip(xs, run.right, strict=True)) or [(float(x), y) for x, y in run.heldout]


def draw(runs: Runs, names: Mapping[str, str]) -> str:
    """A standalone SVG of these arms, by arm what it is called. The mean of the arm's seeds is a thick line, each seed
    a thin one.
    """
    curves, drawn = [], [arm for arm in names if any(name == arm for name, _ in runs)]
    for group, arm in enumerate(drawn):
        found = [run for (name, _), run in sorted(runs.items()) if name == arm]
        points = [list_points(run) for run in found]
        curves += [Curve(arm, group, own, run=f"{arm} {run.seed}") for run, own in zip(found, points, strict=True)]
        means = [(column[0][0], statistics.fmean(y for _, y in column)) for column in zip(*points, strict=False)]
        curves.append(Curve(arm, group, means, run=f"{arm} mean"))
    legend = [
        f'<text x="{46 + 150 * (i % 2)}" y="{HEIGHT + 8 + ROW * (i // 2)}" fill="{COLOURS[i % 8]}">'
        f"{escape(names[arm])}</text>"
        for i, arm in enumerate(drawn)
    ]
    style = (
        "text{font:11px sans-serif}.tick{fill:#777}.grid,.axis{stroke:#ccc}polyline{fill:none}.hit,.end{display:none}"
    )
    for i in range(len(drawn)):
        style += f".g{i} .line{{stroke:{COLOURS[i % 8]};stroke-width:.6;opacity:.5}}"
        style += f'.g{i}[data-run$="mean"] .line{{stroke-width:2.2;opacity:1}}'
    height = HEIGHT + ROW * ((len(drawn) + 1) // 2) + 4
    svg = draw_curves(curves).replace(
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">',
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{2 * WIDTH}" role="img">'
        f"<style>{style}</style>",
    )
    return svg.removesuffix("</svg>") + "".join(legend) + "</svg>\n"
