"""Dynamic sampling (DAPO 2503.14476, section 3.2): an iteration uses only groups with right and wrong responses.

All advantages of a group of equal rewards are 0, and one that is all wrong teaches only what else is paid, such as a
length. Such groups are replaced by further prompts, up to a bound.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from megarl.config.schema.algo_choices import SamplingBy
from megarl.report.failures import describe_failures
from megarl.types import Metrics, Prompt, Rollout, Sample

Group = tuple[Sample, ...]


SAME = 1e-6
"""Rewards that differ by less are equal: what is left is rounding, which a standard deviation would make large."""


class NoSignalError(RuntimeError):
    """No group has a signal: the task is too easy or too hard for the policy; the message says which."""


def split_groups(samples: Sequence[Sample]) -> list[Group]:
    """The samples of each prompt, in order."""
    return [tuple(group) for _, group in groupby(samples, key=lambda sample: sample.group)]


def join_groups(groups: Sequence[Group], weight_version: int) -> Rollout:
    """One rollout of these groups, renumbered from 0."""
    samples = (replace(s, group=i) for i, group in enumerate(groups) for s in group)
    return Rollout(tuple(samples), weight_version)


def has_signal(group: Group, by: SamplingBy) -> bool:
    """Whether the group's raw rewards differ and, by correctness, also some are correct and some are not; a sample
    without a reward does not count."""
    scores = [sample.score for sample in group if sample.score.failure is None]
    if by is SamplingBy.correct and len({score.correct for score in scores}) < 2:
        return False
    return _differ([score.reward for score in scores])


def _differ(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and max(rewards) - min(rewards) > SAME * max(1.0, *map(abs, rewards))


def count_equal(groups: Sequence[Group]) -> tuple[int, int]:
    """(correct, wrong) groups without a signal; one whose samples have all failed is neither."""
    first = [next((s for s in group if s.score.failure is None), None) for group in groups]
    num_correct = sum(sample is not None and sample.score.correct for sample in first)
    return num_correct, sum(sample is not None for sample in first) - num_correct


def collect_groups_with_signal(
    draw: Callable[[int], Sequence[Prompt]],
    collect: Callable[[Sequence[Prompt]], Sequence[Sample]],
    num_groups: int,
    max_rounds: int,
    by: SamplingBy,
) -> tuple[list[Group], Metrics]:
    """Collect `num_groups` groups with a signal; returns them and the metrics sampling/*.

    draw: `draw(n)` gives n further prompts. collect: samples responses to them. From the second round on the number
    of prompts, `num_groups` at most, follows from the share of groups kept so far. After `max_rounds` the rest is
    filled up with groups without one, with a warning. Raises NoSignalError where none has a signal.
    """
    kept: list[Group] = []
    equal: list[Group] = []
    num_rounds = 0
    while len(kept) < num_groups and num_rounds < max_rounds:
        num_rounds += 1
        share = (len(kept) or 0.5) / max(1, len(kept) + len(equal)) if num_rounds > 1 else 1.0
        prompts = draw(min(num_groups, math.ceil((num_groups - len(kept)) / share)))
        for group in split_groups(collect(prompts)):
            (kept if has_signal(group, by) else equal).append(group)
    return _fill_up(kept, equal, num_groups, num_rounds, by)


def take_groups_with_signal(
    take: Callable[[], Group], num_groups: int, max_rounds: int, by: SamplingBy
) -> tuple[list[Group], Metrics]:
    """As `collect_groups_with_signal`, from groups that come one by one.

    take: the next group. At most max_rounds * num_groups are taken; the metric sampling/rounds is their number in
    units of `num_groups`, rounded up.
    """
    kept: list[Group] = []
    equal: list[Group] = []
    while len(kept) < num_groups and len(kept) + len(equal) < max_rounds * num_groups:
        group = take()
        (kept if has_signal(group, by) else equal).append(group)
    return _fill_up(kept, equal, num_groups, math.ceil((len(kept) + len(equal)) / num_groups), by)


def _fill_up(
    kept: list[Group], equal: list[Group], num_groups: int, num_rounds: int, by: SamplingBy
) -> tuple[list[Group], Metrics]:
    wanted = "right and wrong responses" if by is SamplingBy.correct else "different rewards"
    found = _describe(num_rounds, equal)
    if not kept:
        raise NoSignalError(f"dynamic sampling found no group with {wanted} {found}")
    if len(kept) < num_groups:
        warnings.warn(
            f"dynamic sampling: {len(kept)} of {num_groups} groups have {wanted} {found};"
            " the rest is filled up with others",
            RuntimeWarning,
            stacklevel=2,
        )
    num_asked = len(kept) + len(equal)
    num_correct, num_wrong = count_equal(equal)
    rewards = [s.score.reward for group in kept + equal for s in group if s.score.failure is None]
    metrics = {
        "sampling/reward_mean": sum(rewards) / len(rewards),
        "sampling/rounds": float(num_rounds),
        "sampling/num_prompts": float(num_asked),
        "sampling/signal_frac": len(kept) / num_asked,
        "sampling/equal_correct_frac": num_correct / num_asked,
        "sampling/equal_wrong_frac": num_wrong / num_asked,
    }
    return (kept + equal)[:num_groups], metrics


def _describe(num_rounds: int, equal: Sequence[Group]) -> str:
    num_correct, num_wrong = count_equal(equal)
    if failures := describe_failures([sample for group in equal for sample in group]):
        failures = f" ({failures})"
    text = (
        f"in algo.dynamic_sampling.max_rounds={num_rounds} rounds; of the other groups"
        f" {num_correct} are correct and {num_wrong} wrong{failures}"
    )
    rewards = [[s.score.reward for s in group if s.score.failure is None] for group in equal]
    if num_graded := sum(map(_differ, rewards)):
        text += f"; in {num_graded} of them rewards differ, which algo.dynamic_sampling.by=reward learns from"
    if num_correct == num_wrong == 0:
        return f"{text}: the verifier or the environment must be mended"
    if num_correct > num_wrong:
        return f"{text}: the data are too easy for this policy; harder prompts are needed, or training is done"
    return f"{text}: the data are too hard for this policy; easier prompts, or more of train.responses_per_prompt"
