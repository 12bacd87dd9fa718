"""The results of an evaluation: one per set, as a table and as evaluation.json."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.report.estimators import Estimate, Votes, compute_maj_at_k, compute_mean, compute_pass_at_k
from megarl.types import Sample

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
    truncated_frac: float
    """Share of the responses cut at rollout.response_length"""
    unread_frac: float | None
    """Share of the responses without a readable answer; None where the verifier reads none"""
    problems: tuple[ProblemResult, ...]


def summarize_set(
    name: str, samples: Sequence[Sample], ks: Sequence[int], confidence: float, *, reads_answers: bool
) -> SetResult:
    """The result of a set from its samples, the same number for each problem.

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
    unread = fmean(sample.score.answer is None for sample in samples) if reads_answers else None
    return SetResult(
        name=name,
        num_samples=num_samples,
        estimates={key: compute_mean(each, num_samples, confidence) for key, each in values.items()},
        mean_reward=fmean(sample.score.reward for sample in samples),
        mean_response_tokens=fmean(len(sample.response.token_ids) for sample in samples),
        truncated_frac=fmean(sample.response.finish_reason.is_truncated for sample in samples),
        unread_frac=unread,
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


def format_table(results: Sequence[SetResult]) -> str:
    """A Markdown table with a row per set; each estimate in percent with its interval."""
    names = list(dict.fromkeys(key for result in results for key in result.estimates))
    header = ["set", "problems", *names, "reward", "tokens", "truncated", "no answer"]
    rows = [
        [
            result.name,
            str(len(result.problems)),
            *(_format_estimate(result.estimates.get(key)) for key in names),
            f"{result.mean_reward:.3f}",
            f"{result.mean_response_tokens:.0f}",
            _format_share(result.truncated_frac),
            _format_share(result.unread_frac),
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


def format_response(name: str, index: int, sample: Sample) -> str:
    """A line of responses.jsonl; `index` counts the responses to one problem from 0."""
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
        "num_tokens": len(response.token_ids),
        "finish_reason": response.finish_reason.value,
    }
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _format_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return UNKNOWN
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _format_share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f}"
