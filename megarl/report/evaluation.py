"""The results of an evaluation: exact avg@k, pass@k and maj@k of each problem, the mean over problems with its
confidence interval for each set, as a table and as evaluation.json.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import comb, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

from megarl.report.scores import count_failed
from megarl.report.text import Decode, has_observations, list_turns
from megarl.types import FinishReason, Sample

FILE_NAME = "evaluation.json"
RESPONSES_FILE_NAME = "responses.jsonl"
UNKNOWN = "-"
PRIOR_WEIGHT = 2.0
"""Problems' worth of a design effect of 1 in its estimate: the smallest whole number with which simulated intervals
of 30 and more problems cover what they promise for chances from U-shaped distributions, also strongly skewed ones."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Votes:
    """The number of responses to one problem by answer."""

    num_correct: int
    """Responses with a correct answer; they all vote for the same answer, however it is written"""
    wrong: tuple[int, ...] = ()
    """Responses for each different wrong answer, each 1 or more"""
    num_silent: int = 0
    """Responses without a readable answer; they are wrong and have no vote"""

    @property
    def num_samples(self) -> int:
        return self.num_correct + sum(self.wrong) + self.num_silent


def compute_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one or more of `k` responses is correct: 1 - C(n - c, k) / C(n, k).

    The unbiased estimate from n responses of which c are correct; Chen et al. 2021, 2107.03374, equation 1.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"found {num_correct} correct of {num_samples} responses, k {k}; k must be 1 to {num_samples}")
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def compute_maj_at_k(votes: Votes, k: int) -> float:
    """Probability that the answer most frequent among `k` of the responses is correct; unbiased like pass@k.

    The mean over all C(n, k) choices of k responses, computed by counting them. Ties are split: a correct answer tied
    with one wrong answer counts one half. No vote at all is wrong.
    """
    total = Fraction(0)
    for most in range(1, min(votes.num_correct, k) + 1):
        ways = _count_ways(votes, k - most, most)
        total += comb(votes.num_correct, most) * sum(Fraction(count, 1 + tied) for tied, count in ways.items())
    return float(total / comb(votes.num_samples, k))


def _count_ways(votes: Votes, num_chosen: int, most: int) -> dict[int, int]:
    """The number of ways to choose `num_chosen` incorrect responses so that no wrong answer has more than `most` votes,
    by the number of wrong answers with exactly `most`.
    """
    num_free = votes.num_silent + sum(count for count in votes.wrong if count < most)
    table = {(0, 0): 1}
    for count in votes.wrong:
        if count < most:
            continue
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (chosen, tied), ways in table.items():
            for taken in range(min(most, num_chosen - chosen) + 1):
                longer[chosen + taken, tied + (taken == most)] += ways * comb(count, taken)
        table = longer
    found: dict[int, int] = defaultdict(int)
    for (chosen, tied), ways in table.items():
        found[tied] += ways * comb(num_free, num_chosen - chosen)
    return found


def compute_mean(values: Sequence[float], num_samples: int, confidence: float) -> Estimate:
    """The mean over problems of values in [0, 1], and its interval over problems.

    The interval is Wilson's (1927) for a proportion, with N / d in place of the N problems, where d is the design
    effect of cluster sampling (Kish 1965): the variance over problems divided by p (1 - p). With one response per
    problem d is 1, and this is Wilson's interval itself. With n responses d is 1 / n + (1 - 1 / n) r for the
    correlation r within a problem, so its estimate is clamped to [1 / n, 1].

    Where nearly all problems are 0, or nearly all 1, few of them tell what d is, and an estimate that is too small
    comes together with a mean that is too far out: with the plain estimate 95% intervals of 30 problems cover down to
    85%. So d is the average of the estimate with weight 4 N p (1 - p), about the number of problems that tell, and of
    1, its upper bound, with weight 2. Where all values are 0, or all 1, d is 1. Unlike a bootstrap or t-interval it
    does not shrink to a point for 0 of 30. Problems count as a random sample of problems like them.

    num_samples: n. Raises ValueError for no values, one outside [0, 1], or a confidence outside (0, 1).
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"one or more values in [0, 1] were expected; found {list(values)[:5]}")
    if num_samples < 1 or not 0 < confidence < 1:
        raise ValueError(f"found num_samples {num_samples} (1 or more), confidence {confidence} (in (0, 1))")
    mean = fmean(values)
    spread = mean * (1 - mean)
    effect = 1.0
    if len(values) > 1 and spread > 0:
        weight = 4 * len(values) * spread
        effect = min(1.0, max(variance(values) / spread, 1 / num_samples))
        effect = (weight * effect + PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
    size = len(values) / effect
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = (mean + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * sqrt(spread / size + z * z / (4 * size * size))
    # Rounding must not put the mean outside the interval: at 0 and 1 a bound is the mean itself.
    return Estimate(mean, min(mean, max(0.0, center - reach)), max(mean, min(1.0, center + reach)))


@dataclass(frozen=True)
class ProblemResult:
    id: str
    votes: Votes


@dataclass(frozen=True)
class SetResult:
    name: str
    num_samples: int
    """Responses per problem"""
    estimates: Mapping[str, Estimate]
    """avg@N, pass@k, maj@k"""
    mean_reward: float
    mean_response_tokens: float
    """Generated tokens of a response"""
    mean_turns: float
    """Actions of a response; 1 without an environment"""
    truncated_frac: float
    """Share of the responses cut at rollout.response_length or environment.turn_length"""
    unread_frac: float | None
    """Share of the responses without a readable answer; None where the verifier reads none"""
    failed_frac: float
    """Share of the responses without a reward, since the verifier or the environment failed; they count as wrong"""
    problems: tuple[ProblemResult, ...]


def summarize_set(
    name: str, samples: Sequence[Sample], ks: Sequence[int], confidence: float, *, reads_answers: bool
) -> SetResult:
    """The result of a set from its samples, the same number for each problem.

    A sample without a reward counts as wrong, with a reward of 0 and without a vote, so that no problem is left out:
    the true estimate is at most `failed_frac` higher, and never lower.
    reads_answers: whether the verifier fills Score.answer; maj@k is left out where it does not. Raises ValueError for
    no samples, or problems with different numbers of them.
    """
    problems = count_votes(samples)
    sizes = {problem.votes.num_samples for problem in problems}
    if len(sizes) != 1:
        raise ValueError(
            f"{name}: found problems with {sorted(sizes)} samples; every problem must have the same number"
        )
    num_samples = sizes.pop()
    values = {f"avg@{num_samples}": [p.votes.num_correct / num_samples for p in problems]}
    for k in ks:
        values[f"pass@{k}"] = [compute_pass_at_k(num_samples, p.votes.num_correct, k) for p in problems]
    for k in ks if reads_answers else ():
        values[f"maj@{k}"] = [compute_maj_at_k(p.votes, k) for p in problems]
    unread = [sample.score.answer is None and sample.score.failure is None for sample in samples]
    return SetResult(
        name=name,
        num_samples=num_samples,
        estimates={key: compute_mean(each, num_samples, confidence) for key, each in values.items()},
        mean_reward=fmean(sample.score.reward for sample in samples),
        mean_response_tokens=fmean(int(sample.response.generated.sum()) for sample in samples),
        mean_turns=fmean(len(sample.response.turns) for sample in samples),
        truncated_frac=fmean(sample.response.finish_reason is FinishReason.length for sample in samples),
        unread_frac=fmean(unread) if reads_answers else None,
        failed_frac=count_failed(samples) / len(samples),
        problems=problems,
    )


def count_votes(samples: Sequence[Sample]) -> tuple[ProblemResult, ...]:
    """The votes of each problem, in order."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt.id].append(sample)
    results = []
    for name, group in groups.items():
        wrong = [sample.score.answer for sample in group if not sample.score.correct]
        counts = Counter(answer for answer in wrong if answer is not None)
        votes = Votes(len(group) - len(wrong), tuple(sorted(counts.values(), reverse=True)), wrong.count(None))
        results.append(ProblemResult(name, votes))
    return tuple(results)


def format_table(results: Sequence[SetResult], *, has_environment: bool = False) -> str:
    """A Markdown table with a row per set; each estimate in percent with its interval.

    The columns "turns" and "no reward" are there where an environment may answer, or a response has no reward.
    """
    names = list(dict.fromkeys(key for result in results for key in result.estimates))
    turns = has_environment or any(result.mean_turns != 1 for result in results)
    failed = any(result.failed_frac for result in results)
    header = ["set", "problems", *names, "reward", "tokens", *["turns"] * turns, "truncated", "no answer"]
    header += ["no reward"] * failed
    rows = []
    for result in results:
        estimates = [_format_estimate(result.estimates.get(key)) for key in names]
        numbers = [f"{result.mean_reward:.3f}", f"{result.mean_response_tokens:.0f}"]
        shares = [_format_share(result.truncated_frac), _format_share(result.unread_frac)]
        numbers += [*[f"{result.mean_turns:.1f}"] * turns, *shares, *[_format_share(result.failed_frac)] * failed]
        rows.append([result.name, str(len(result.problems)), *estimates, *numbers])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write_evaluation(path: Path, results: Sequence[SetResult], settings: Mapping[str, Any]) -> None:
    """Write strict JSON: `settings`, and under "sets" each result by its name.

    Raises ValueError for a number that is not finite.
    """
    sets = {result.name: {"num_problems": len(result.problems), **asdict(result)} for result in results}
    path.write_text(json.dumps({**settings, "sets": sets}, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def format_response(name: str, index: int, sample: Sample, decode: Decode | None = None) -> str:
    """A line of responses.jsonl; `index` counts the responses to one problem from 0. decode: as in `list_turns`.

    Where the environment answered there is also "turns", and without a reward "failure".
    """
    prompt, response, score = sample.prompt, sample.response, sample.score
    record = {
        "set": name,
        "problem": prompt.id,
        "sample": index,
        "prompt": prompt.text,
        "expected": prompt.answer,
        "response": response.text,
        "answer": score.answer,
        "correct": score.correct,
        "reward": score.reward,
        "num_tokens": int(response.generated.sum()),
        "finish_reason": response.finish_reason.value,
    }
    if has_observations(response):
        record["turns"] = [asdict(turn) for turn in list_turns(response, decode)]
    if score.failure is not None:
        record["failure"] = score.failure
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _format_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return UNKNOWN
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _format_share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f}"
