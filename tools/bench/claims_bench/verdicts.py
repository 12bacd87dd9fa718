"""The numbers of finished runs, and what follows from them: holds, does not hold, cannot tell, or not run.

The test is Student's t over the seeds of the difference high - low of two arms with the same seed, or of one arm's
number and a constant: 95%, two-sided. A prediction

- does not hold where the whole interval is below the margin,
- holds where the mean difference is the margin or more and the interval is above 0, or above the margin where that is
  negative: the arm is then not worse by as much,
- and cannot be told otherwise.

A difference that is real and smaller than the margin does not hold.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from claims_bench.runs import Run
from claims_bench.specs import Claim, Prediction

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantile of Student's t for 1 to 9 degrees of freedom"""
CROSS_CHECK = 0.1
"""By so much the real loop's mean share of right answers may be off the range of the in-process seeds"""


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


def take_last(values: Sequence[float], share: float = 0.25) -> float:
    """The mean over the last quarter of the iterations."""
    return statistics.fmean(values[-max(1, round(share * len(values))) :])


def count_to_half(values: Sequence[float]) -> float:
    """The number of the first iteration from which on half of the answers are right, and one past the end if none."""
    for number in range(len(values)):
        if values[number] >= 0.5:
            return number + 1
    return len(values) + 1


def find_best(values: Sequence[float]) -> float:
    """The highest mean over a tenth of the iterations."""
    width = max(1, len(values) // 10)
    return max(statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1))


MEASURES: dict[str, Callable[[Run], float]] = {
    "right at the end": lambda run: take_last(run.right),
    "right at the start": lambda run: statistics.fmean(run.right[: max(1, len(run.right) // 4)]),
    "right over all": lambda run: statistics.fmean(run.right),
    "iterations to half": lambda run: count_to_half(run.right),
    "fall from the best": lambda run: find_best(run.right) - take_last(run.right),
    "surprise at the end": lambda run: take_last(run.surprise),
    "SNR": lambda run: run.snr[0],
    "log10 of SNR": lambda run: math.log10(max(1e-3, run.snr[0])),
    "share in near-solved groups": lambda run: statistics.fmean(run.noise_share[: max(1, len(run.noise_share) // 4)]),
}
"""Numbers of a run by name. `at the end`: mean over the last quarter of the iterations, `at the start`: over
the first; SNR: of the first iteration, in which the policy is untrained and the tokens are fair bits."""


def compute_difference(differences: Sequence[float]) -> Difference:
    """The mean and its 95% interval by Student's t. Raises ValueError for fewer than 2 or more than 10 seeds."""
    if not 2 <= len(differences) <= len(T_975) + 1:
        raise ValueError(f"found {len(differences)} seeds; an interval needs 2 to {len(T_975) + 1}")
    mean = statistics.fmean(differences)
    reach = T_975[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - reach, mean + reach, len(differences))


def judge(difference: Difference, margin: float) -> Verdict:
    """The verdict of a difference; see the module."""
    if difference.high < margin:
        return Verdict.does_not_hold
    is_clear = difference.low > min(0.0, margin) and difference.mean >= margin
    return Verdict.holds if is_clear else Verdict.cannot_tell


def judge_prediction(prediction: Prediction, runs: Mapping[tuple[str, int], Run], seeds: Sequence[int]) -> Outcome:
    """runs: by arm and seed. Without all seeds of both arms it is not run: no verdict from a part of them."""
    measure, differences = MEASURES[prediction.number], []
    for seed in seeds:
        found = []
        for arm in (prediction.high, prediction.low):
            if isinstance(arm, str):
                if (arm, seed) not in runs:
                    return Outcome(Verdict.not_run, None)
                found.append(measure(runs[arm, seed]))
            else:
                found.append(float(arm))
        differences.append(found[0] - found[1])
    difference = compute_difference(differences)
    return Outcome(judge(difference, prediction.margin), difference)


def judge_claim(claim: Claim, outcomes: Sequence[Outcome]) -> Verdict:
    """Of the predictions that decide: holds where all do, does not hold where one does not."""
    verdicts = [o.verdict for p, o in zip(claim.predictions, outcomes, strict=True) if p.decides]
    for verdict in (Verdict.not_run, Verdict.does_not_hold, Verdict.cannot_tell):
        if verdict in verdicts:
            return verdict
    return Verdict.holds


def is_confirmed(real: Run, runs: Sequence[Run]) -> bool:
    """Whether the real loop's run of an arm ends where the in-process runs of that arm do."""
    ends = [take_last(run.right) for run in runs]
    return min(ends) - CROSS_CHECK <= take_last(real.right) <= max(ends) + CROSS_CHECK
