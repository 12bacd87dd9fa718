"""The results of an evaluation: one per set, as a table and as evaluation.json."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.report.estimators import Estimate, Votes, compute_maj_at_k, compute_mean, compute_pass_at_k
from megarl.report.scores import count_failed
from megarl.report.text import Decode, has_observations, list_turns
from megarl.types import FinishReason, Sample

FILE_NAME = "evaluation.json"
RESPONSES_FILE_NAME = "responses.jsonl"
UNKNOWN = "-"


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
    rows = [
        [
            result.name,
            str(len(result.problems)),
            *(_format_estimate(result.estimates.get(key)) for key in names),
            f"{result.mean_reward:.3f}",
            f"{result.mean_response_tokens:.0f}",
            *[f"{result.mean_turns:.1f}"] * turns,
            _format_share(result.truncated_frac),
            _format_share(result.unread_frac),
            *[_format_share(result.failed_frac)] * failed,
        ]
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def write_evaluation(path: Path, results: Sequence[SetResult], settings: Mapping[str, Any]) -> None:
    """Write strict JSON: `settings`, and under "sets" each result by its name.

    Raises ValueError for a number that is not finite.
    """
    sets = {}
    for result in results:
        record = asdict(result)
        del record["name"]
        sets[result.name] = {"num_problems": len(result.problems), **record}
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
