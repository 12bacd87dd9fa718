"""Groups of a saved rollouts.jsonl (rollout.file), from which policy and critic train without a server.

The responses count as sampled before the first iteration, by weights that this run never has: their age in iteration n
is n, and log mu is what the file recorded (`rollout_logprobs`), never the trainer's own log-probs. Which weights of the
run that sampled them generated a token (`weight_versions`) enters no ratio.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.algo.rewards import check_score
from megarl.config.schema.root import Config
from megarl.data.sampler import PromptSampler
from megarl.interfaces import RolloutEngine
from megarl.report.failures import count_failed
from megarl.rollout.collector import Collector
from megarl.rollout.dynamic_sampling import Group
from megarl.rollout.rollout_file import Limits, Line, read_sample, read_with_lines
from megarl.rollout.source import GroupSource, IterationBatch, SourceState
from megarl.types import Metrics, Prompt, Sample


@dataclass(frozen=True)
class SavedGroup:
    """Where the responses to one prompt are in the file."""

    id: str
    """SHA-256 of its lines"""
    where: str
    """FILE:LINE of the first of its lines"""
    start: int
    """Bytes of the file before it"""
    num_bytes: int
    num_samples: int


@dataclass(frozen=True)
class SavedGroups:
    """A file that has been read once and found valid, and where each of its groups is."""

    path: Path
    groups: tuple[SavedGroup, ...]
    num_rollouts: int
    num_failed: int
    """Responses without a reward, which are not learned from"""
    has_turns: bool
    """Whether an environment answered between turns of the policy"""
    prompts: tuple[Prompt, ...]
    """Those of the first rollout"""
    dropped: tuple[str, ...]
    """What of the file is left out, a message each"""

    @property
    def num_samples(self) -> int:
        return sum(group.num_samples for group in self.groups)


def find_groups(path: Path, limits: Limits, wrong: float = 0.0) -> SavedGroups:
    """Validate the whole file, with one rollout at a time in memory. wrong: reward.wrong.

    Raises ValueError and FileNotFoundError as `read_rollouts`, and ValueError where no response has a reward or a
    score is not one that reward.wrong can scale.
    """
    groups: list[SavedGroup] = []
    num_rollouts = num_failed = 0
    has_turns = False
    prompts: dict[str, Prompt] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for rollout, lines in read_with_lines(path, limits):
            for line, sample in zip(lines, rollout.samples, strict=True):
                _check_score(line.where, sample, wrong)
                has_turns |= len(sample.response.turns) > 1
            if num_rollouts == 0:
                prompts = {sample.prompt.id: sample.prompt for sample in rollout.samples}
            num_rollouts, num_failed = num_rollouts + 1, num_failed + count_failed(rollout.samples)
            pairs = zip(lines, rollout.samples, strict=True)
            for _, group in groupby(pairs, key=lambda pair: pair[1].group):
                groups.append(_locate([line for line, _ in group]))
    dropped = tuple(str(warning.message) for warning in caught)
    saved = SavedGroups(path, tuple(groups), num_rollouts, num_failed, has_turns, tuple(prompts.values()), dropped)
    if num_failed == saved.num_samples:
        raise ValueError(f"{path}: none of its {num_failed} responses has a reward, so there is nothing to learn from")
    return saved


def _check_score(where: str, sample: Sample, wrong: float) -> None:
    try:
        if sample.score.failure is None:
            check_score(sample.score.reward, wrong)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _locate(lines: Sequence[Line]) -> SavedGroup:
    text = b"".join(line.text for line in lines)
    return SavedGroup(hashlib.sha256(text).hexdigest(), lines[0].where, lines[0].start, len(text), len(lines))


def read_group(path: Path, group: SavedGroup) -> Group:
    """The samples of one group. Raises RuntimeError where the file has changed since it was validated."""
    with path.open("rb") as file:
        file.seek(group.start)
        text = file.read(group.num_bytes)
    if hashlib.sha256(text).hexdigest() != group.id:
        raise RuntimeError(f"{group.where}: the file has changed since the run was started")
    return tuple(read_sample(line, group.where) for line in text.splitlines())


class SavedSource:
    """The groups of one iteration after the other, out of a file; used by the loop as a `GroupSource` is.

    Each pass over the file takes every group once, in an order that follows from the seed and the number of the pass;
    an iteration may reach from one pass into the next.
    """

    def __init__(self, saved: SavedGroups, num_groups: int, seed: int):
        """num_groups: of an iteration."""
        self._path, self._num_groups, self._num_saved = saved.path, num_groups, len(saved.groups)
        self._sampler = PromptSampler(saved.groups, seed)

    def state(self) -> SourceState:
        """The state after the last iteration taken."""
        return SourceState(self._sampler.state(), ())

    def restore(self, state: SourceState) -> None:
        """Resume after the iteration of `state`. Raises ValueError where the file has changed."""
        self._sampler.restore(state.sampler)

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The groups of this iteration; iterations are taken in order.

        Its metrics: saved/epoch, the number of passes over the file, whole and begun; saved/reward_mean and
        saved/correct_frac of the responses with a reward, which say nothing of the present policy. Raises RuntimeError
        where the file has changed since it was validated.
        """
        groups = [read_group(self._path, group) for group in self._sampler.next_batch(self._num_groups)]
        aged = [tuple(_age(sample, iteration) for sample in group) for group in groups]
        metrics = {"saved/epoch": self._count_passes(), **_compute_metrics([s for group in groups for s in group])}
        return IterationBatch([], aged, (), metrics, self.state())

    def _count_passes(self) -> float:
        state: Mapping[str, int | str] = self._sampler.state()
        return int(state["epoch"]) + int(state["position"]) / self._num_saved

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """Nothing is kept: log mu stays what the file recorded."""

    def begin_again(self) -> None: ...

    def close(self) -> int:
        return 0


def _age(sample: Sample, iteration: int) -> Sample:
    """The sample as the loop takes it. What another run's trainer or router said of it is left out."""
    response = replace(sample.response, routed_experts=None)
    return replace(sample, response=response, age=iteration, first_old_logprobs=None, group_number=None)


def _compute_metrics(samples: Sequence[Sample]) -> Metrics:
    scores = [sample.score for sample in samples if sample.score.failure is None]
    if not scores:
        return {}
    return {
        "saved/reward_mean": sum(score.reward for score in scores) / len(scores),
        "saved/correct_frac": sum(score.correct for score in scores) / len(scores),
    }


def build_source(
    config: Config,
    saved: SavedGroups | None,
    engine: RolloutEngine | None,
    collector: Collector | None,
    sampler: PromptSampler[Prompt] | None,
    with_servers: Callable[[Callable[[], Any]], Any],
) -> GroupSource | SavedSource:
    """Where the groups of each iteration come from: the file, or what generates, of which then nothing is None."""
    if saved is not None:
        return SavedSource(saved, config.train.num_prompts, config.seed)
    assert engine is not None
    assert collector is not None
    assert sampler is not None
    return GroupSource(config, engine, collector, sampler, with_servers)


class NoSync:
    """The `WeightSync` of a run without servers."""

    def publish(self, version: int) -> Metrics:
        return {}

    def reconnect(self) -> None: ...
