"""Samples without a reward (`Score.failure`): counted, shown, and too many of them refused."""

from collections import Counter
from collections.abc import Sequence

from megarl.report.text import make_printable
from megarl.types import Sample

NUM_REASONS = 3
"""Most reasons that a message names"""
LONGEST_REASON = 200
"""Maximum characters shown of a reason"""


class TooManyFailuresError(RuntimeError):
    """More responses have no reward than reward.max_failed_frac allows; the message has the most frequent reasons."""


def count_failed(samples: Sequence[Sample]) -> int:
    return sum(sample.score.failure is not None for sample in samples)


def describe_failures(samples: Sequence[Sample]) -> str:
    """How many have no reward and why, the most frequent reasons first; empty where all have one."""
    reasons = Counter(sample.score.failure for sample in samples if sample.score.failure is not None)
    if not reasons:
        return ""
    shown = [f"{count} x {shorten_reason(reason)}" for reason, count in reasons.most_common(NUM_REASONS)]
    if len(reasons) > NUM_REASONS:
        rest = reasons.total() - sum(count for _, count in reasons.most_common(NUM_REASONS))
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


def shorten_reason(reason: str) -> str:
    """The reason on one line, safe to print."""
    text = make_printable(" ".join(reason.split()))
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
