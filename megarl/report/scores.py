"""What scores and episodes say of an iteration or an evaluation, as metrics, and samples without a reward."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megarl.report.text import make_printable, shorten
from megarl.types import FinishReason, Metrics, Sample

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
    length/mean counts the actions' alone.
    """
    found = _collect(turn.details for sample in scored for turn in sample.response.turns)
    return {
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
            f" {int(max_failed_frac * len(samples))}: the verifier or the environment must be mended, or"
            " reward.max_failed_frac be raised"
        )
