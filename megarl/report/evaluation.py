"""What scores say: of an iteration as metrics, with the samples without a reward; and of an evaluation, avg@n, pass@k
and maj@n of each problem's n responses, the mean over problems with its confidence interval for each set, as a table
and as evaluation.json.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import comb, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

from megarl.report.text import Decode, has_observations, list_turns, make_printable, shorten
from megarl.types import FinishReason, Metrics, Sample

EVALUATION_FILE = "evaluation.json"
RESPONSES_FILE = "responses.jsonl"
UNKNOWN = "-"
CONFIDENCE = 0.95
PRIOR_WEIGHT = 2.0
"""Problems' worth of a design effect of 1 in its estimate: the smallest whole number with which simulated intervals
cover what they promise for chances from U-shaped distributions."""
NUM_REASONS = 3
"""Most reasons that a message names"""
LONGEST_REASON = 200
"""Characters shown of a reason"""


def compute_score_metrics(samples: Sequence[Sample], *, with_environment: bool) -> Metrics:
    """reward/correct and reward/NAME of the verifier's named parts: means over the samples with a reward, of a part
    over those whose score has it. Empty where no sample has a reward. with_environment: environment/* too.
    """
    scored = [sample for sample in samples if sample.score.failure is None]
    if not scored:
        return {}
    means = {f"reward/{name}": _mean(values) for name, values in _collect(s.score.details for s in scored).items()}
    environment = compute_environment_metrics(scored) if with_environment else {}
    return {**means, "reward/correct": _mean(sample.score.correct for sample in scored), **environment}


def compute_environment_metrics(scored: Sequence[Sample]) -> Metrics:
    """environment/*: means over these episodes.

    environment/NAME: the sum over an episode's turns of what `Turn.details` has under that name, 0 where it has none.
    environment/turns_mean: number of turns. environment/max_turns_frac: share cut at environment.max_turns.
    environment/tokens_mean: tokens of actions and observations together, which rollout.response_length limits;
    length/mean counts the actions' alone. environment/segment_tokens, where an episode has several segments: the mean
    over all segments of the tokens generated in one.
    """
    found = _collect(turn.details for sample in scored for turn in sample.response.turns)
    segments = [
        it.generated[own].sum()
        for it in (sample.response for sample in scored)
        for own in (it.find_segments() if it.segment_prompts else [slice(None)])
    ]
    return {
        **({"environment/segment_tokens": _mean(segments)} if len(segments) > len(scored) else {}),
        **{f"environment/{name}": sum(values) / len(scored) for name, values in found.items()},
        "environment/turns_mean": _mean(len(sample.response.turns) for sample in scored),
        "environment/max_turns_frac": _mean(s.response.finish_reason is FinishReason.max_turns for s in scored),
        "environment/tokens_mean": _mean(len(sample.response) for sample in scored),
    }


def compute_heldout_metrics(samples: Sequence[Sample], *, with_environment: bool) -> Metrics:
    """reward/heldout, and heldout/* and heldout/environment/* as `compute_score_metrics`. A response without a reward
    counts as wrong here, with a reward of 0: left out, it could only make the policy look better.
    """
    found = compute_score_metrics(samples, with_environment=with_environment)
    metrics = {f"heldout/{name.removeprefix('reward/')}": value for name, value in found.items()}
    return {
        **metrics,
        "heldout/correct": _mean(sample.score.correct for sample in samples),
        "heldout/failed_frac": count_failed(samples) / len(samples),
        "reward/heldout": _mean(sample.score.reward for sample in samples),
    }


def compute_source_metrics(sampled: Sequence[Sequence[Sample]], fresh: Sequence[Sequence[Sample]]) -> Metrics:
    """source/NAME/* of an iteration's responses; empty without data=mix. sampled: all of them, any number at a time.
    fresh: the groups of them that are learned from."""
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in (sample for samples in sampled for sample in samples):
        by_source[sample.prompt.source].append(sample)
    metrics: Metrics = {}
    for name, samples in by_source.items():
        if not name:
            continue
        num_kept = sum(len(it) for it in fresh if it[0].prompt.source == name and not it[0].masked)
        scored = [sample for sample in samples if sample.score.failure is None]
        found: dict[str, float] = {
            "samples": len(samples),
            "dropped_frac": 1 - num_kept / len(samples),
            "failed_frac": count_failed(samples) / len(samples),
            "response_length": _mean(int(sample.response.generated.sum()) for sample in samples),
        }
        if scored:
            found["reward"] = _mean(sample.score.reward for sample in scored)
            found["correct"] = _mean(sample.score.correct for sample in scored)
        metrics |= {f"source/{name}/{each}": float(value) for each, value in found.items()}
    return metrics


def compute_set_metrics(name: str, samples: Sequence[Sample]) -> Metrics:
    """eval/NAME/* of the responses to one set; those without a reward count as wrong."""
    scores, responses = [sample.score for sample in samples], [sample.response for sample in samples]
    return {
        f"eval/{name}/reward_mean": fmean(0.0 if score.failure else score.reward for score in scores),
        f"eval/{name}/correct": fmean(score.correct and not score.failure for score in scores),
        f"eval/{name}/failed_frac": fmean(score.failure is not None for score in scores),
        f"eval/{name}/length_mean": fmean(int(response.generated.sum()) for response in responses),
        f"eval/{name}/truncated_frac": fmean(each.finish_reason is FinishReason.length for each in responses),
    }


def compute_heldout_by_source(samples: Sequence[Sample]) -> Metrics:
    """eval/NAME/* of the held-out prompts of each source; empty without data=mix."""
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_source[sample.prompt.source].append(sample)
    return {k: v for name, own in by_source.items() if name for k, v in compute_set_metrics(name, own).items()}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _collect(details: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """All values of each name, in order."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in (pair for each in details for pair in each.items()):
        found[name].append(value)
    return found


class TooManyFailuresError(RuntimeError):
    """More responses have no reward than reward.max_failed_frac allows; the message has the most frequent reasons."""


def count_failed(samples: Sequence[Sample]) -> int:
    return sum(sample.score.failure is not None for sample in samples)


def describe_failures(samples: Sequence[Sample]) -> str:
    """How many have no reward and why, the most frequent reasons first; empty where all have one."""
    reasons = Counter(sample.score.failure for sample in samples if sample.score.failure is not None)
    if not reasons:
        return ""
    most = reasons.most_common(NUM_REASONS)
    shown = [f"{n} x {shorten(make_printable(' '.join(why.split())), LONGEST_REASON)}" for why, n in most]
    if rest := reasons.total() - sum(count for _, count in most):
        shown.append(f"{rest} x other reasons")
    return f"{reasons.total()} of {len(samples)} responses have no reward: {'; '.join(shown)}"


def check_failures(samples: Sequence[Sample], max_failed_frac: float) -> None:
    """Raises TooManyFailuresError where a larger share than `max_failed_frac` has no reward."""
    if count_failed(samples) > max_failed_frac * len(samples):
        raise TooManyFailuresError(
            f"{describe_failures(samples)}. reward.max_failed_frac={max_failed_frac:g} allows"
            f" {int(max_failed_frac * len(samples))}: fix the reward or the"
            " environment, or raise reward.max_failed_frac"
        )


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Votes:
    """The number of responses to one problem by answer. Correct ones vote together, however they are written; silent
    ones, without a readable answer, are wrong and have no vote.
    """

    num_correct: int
    wrong: tuple[int, ...] = ()
    """For each different wrong answer, 1 or more"""
    num_silent: int = 0

    @property
    def num_samples(self) -> int:
        return self.num_correct + sum(self.wrong) + self.num_silent


def compute_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n responses of which c are correct (2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"found {num_correct} correct of {num_samples} responses, k {k}; k must be 1 to {num_samples}")
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def compute_majority(votes: Votes) -> float:
    """1 where the most frequent answer is correct; a tie with other answers is split; no vote at all is wrong."""
    most = max(votes.wrong, default=0)
    if not votes.num_correct or votes.num_correct < most:
        return 0.0
    return 1 / (1 + votes.wrong.count(votes.num_correct))


def compute_mean(values: Sequence[float], num_samples: int) -> Estimate:
    """The mean over problems of values in [0, 1], and its interval over problems. num_samples: n, of each problem.

    The interval is Wilson's (1927) for a proportion, with N / d in place of the N problems, where d is the design
    effect of cluster sampling (Kish 1965): the variance over problems divided by p (1 - p), in [1 / n, 1]. Where nearly
    all problems are 0, or nearly all 1, few of them tell what d is; so it is the average of the estimate with weight
    4 N p (1 - p), about the number of problems that tell, and of 1 with weight PRIOR_WEIGHT.

    Raises ValueError for no values, or one outside [0, 1].
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"one or more values in [0, 1] were expected; found {list(values)[:5]}")
    mean = fmean(values)
    spread = mean * (1 - mean)
    effect = 1.0
    if len(values) > 1 and spread > 0:
        weight = 4 * len(values) * spread
        effect = min(1.0, max(variance(values) / spread, 1 / num_samples))
        effect = (weight * effect + PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
    size = len(values) / effect
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    center = (mean + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * sqrt(spread / size + z * z / (4 * size * size))
    # Rounding must not put the mean outside the interval: at 0 and 1 a bound is the mean itself.
    return Estimate(mean, min(mean, max(0.0, center - reach)), max(mean, min(1.0, center + reach)))


@dataclass(frozen=True)
class SetResult:
    name: str
    num_samples: int
    """Responses per problem"""
    estimates: Mapping[str, Estimate]
    """avg@n, pass@k, maj@n"""
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
    problems: Mapping[str, Votes]
    """By the problem's id"""


def summarize_set(name: str, samples: Sequence[Sample], ks: Sequence[int], *, reads_answers: bool) -> SetResult:
    """The result of a set from its samples, the same number for each problem, else ValueError.

    A sample without a reward counts as wrong, with a reward of 0 and without a vote. reads_answers: whether the
    verifier fills Score.answer; without it there is no majority.
    """
    problems = count_votes(samples)
    sizes = {votes.num_samples for votes in problems.values()}
    if len(sizes) != 1:
        raise ValueError(f"{name}: found problems with {sorted(sizes)} samples; each must have the same number")
    num_samples = sizes.pop()
    values = {f"avg@{num_samples}": [votes.num_correct / num_samples for votes in problems.values()]}
    for k in ks:
        values[f"pass@{k}"] = [compute_pass_at_k(num_samples, votes.num_correct, k) for votes in problems.values()]
    if reads_answers and num_samples > 1:
        values[f"maj@{num_samples}"] = [compute_majority(votes) for votes in problems.values()]
    unread = [sample.score.answer is None and sample.score.failure is None for sample in samples]
    return SetResult(
        name=name,
        num_samples=num_samples,
        estimates={key: compute_mean(each, num_samples) for key, each in values.items()},
        mean_reward=fmean(sample.score.reward for sample in samples),
        mean_response_tokens=fmean(int(sample.response.generated.sum()) for sample in samples),
        mean_turns=fmean(len(sample.response.turns) for sample in samples),
        truncated_frac=fmean(sample.response.finish_reason is FinishReason.length for sample in samples),
        unread_frac=fmean(unread) if reads_answers else None,
        failed_frac=count_failed(samples) / len(samples),
        problems=problems,
    )


def count_votes(samples: Sequence[Sample]) -> dict[str, Votes]:
    """The votes of each problem, in order."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt.id].append(sample)
    votes = {}
    for name, group in groups.items():
        wrong = [sample.score.answer for sample in group if not sample.score.correct]
        counts = Counter(answer for answer in wrong if answer is not None)
        votes[name] = Votes(len(group) - len(wrong), tuple(sorted(counts.values(), reverse=True)), wrong.count(None))
    return votes


def format_table(results: Sequence[SetResult]) -> str:
    """A Markdown table with a row per set; each estimate in percent with its interval."""
    names = list(dict.fromkeys(key for result in results for key in result.estimates))
    rows = []
    for result in results:
        row = {"set": result.name, "problems": str(len(result.problems))}
        row |= {name: _format_estimate(result.estimates.get(name)) for name in names}
        row |= {"reward": f"{result.mean_reward:.3f}", "tokens": f"{result.mean_response_tokens:.0f}"}
        row |= {"turns": f"{result.mean_turns:.1f}", "truncated": _format_share(result.truncated_frac)}
        row |= {"no answer": _format_share(result.unread_frac), "no reward": _format_share(result.failed_frac)}
        rows.append(row)
    hidden = {"turns"} if all(result.mean_turns == 1 for result in results) else set()
    hidden |= set() if any(result.failed_frac for result in results) else {"no reward"}
    header = [name for name in rows[0] if name not in hidden]
    cells = [[row[name] for name in header] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * width for width in widths], *cells]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write_evaluation(path: Path, results: Sequence[SetResult], settings: Mapping[str, Any]) -> None:
    """Write strict JSON: `settings`, and under "sets" each result by its name."""
    sets = {result.name: {"num_problems": len(result.problems), **asdict(result)} for result in results}
    path.write_text(json.dumps({**settings, "sets": sets}, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def format_response(name: str, index: int, sample: Sample, decode: Decode | None = None) -> str:
    """A line of responses.jsonl; `index` counts the responses to one problem from 0. decode: as in `list_turns`."""
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
