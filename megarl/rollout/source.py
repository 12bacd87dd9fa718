"""The groups that each iteration learns from: fresh ones, sampled now or ahead of their use, and replayed ones."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megarl.config.schema.algo import uses_topr
from megarl.config.schema.root import Config
from megarl.data.sampler import PromptSampler
from megarl.interfaces import RolloutEngine
from megarl.rollout.collector import Collector, check_versions, compute_staleness
from megarl.rollout.dynamic_sampling import (
    Group,
    collect_groups_with_signal,
    has_signal,
    join_groups,
    split_groups,
    take_groups_with_signal,
)
from megarl.rollout.replay import ReplayBuffer, keep_logprobs
from megarl.rollout.scheduler import CompleteGroup, GroupScheduler, GroupState
from megarl.types import Metrics, Prompt, Sample

CLOSE_DEADLINE_S = 5.0


@dataclass(frozen=True)
class SourceState:
    """The state of a source after an iteration."""

    sampler: Mapping[str, int | str]
    """PromptSampler.state(), with rollout.max_staleness > 0 before the oldest group that has not been taken"""
    replay: tuple[list[Group], ...]
    """ReplayBuffer.state()"""
    groups: GroupState = field(default_factory=GroupState)
    """With rollout.max_staleness > 0: which groups have been taken"""


@dataclass(frozen=True)
class IterationBatch:
    """The groups of one iteration."""

    fresh: list[Group]
    replayed: list[Group]
    """Groups of past iterations, with the log-probs of their first iteration where these are kept"""
    sampled: tuple[tuple[Sample, ...], ...]
    """All sampled responses, one entry per round; dynamic sampling keeps a part of them"""
    metrics: Metrics
    state: SourceState
    """The source's state after this iteration"""


class GroupSource:
    """Samples the groups of one iteration after the other; with rollout.max_staleness = n up to n iterations ahead.

    With n = 0 an iteration's groups are those of the next prompts. With n > 0 they are those that are complete first:
    nobody waits for a slow one, which a later iteration learns from.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        collector: Collector,
        sampler: PromptSampler[Prompt],
        with_servers: Callable[[Callable[[], Any]], Any] = lambda ask: ask(),
    ):
        """with_servers: repeats a call that failed because a server was lost, once the server is back. Where groups
        are under way, `begin_again` is to be called then.
        """
        self._train = config.train
        self._sampling = config.algo.dynamic_sampling
        self._max_staleness = config.rollout.max_staleness
        self._engine = engine
        self._guard = with_servers
        self._collector = collector
        self._sampler = sampler
        self._replay = ReplayBuffer(config.algo.replay, config.seed)
        self._keeps_logprobs = config.algo.replay.num_iterations > 0 and uses_topr(config.algo)
        self._taken: list[Group] = []
        self._ahead: GroupScheduler | None = None
        self._groups = GroupState()
        self._state = self._find_state()

    def state(self) -> SourceState:
        """The state after the last iteration taken, without what runs ahead; before the first, the current one."""
        return self._state if self._ahead is not None else self._find_state()

    def restore(self, state: SourceState) -> None:
        """Resume after the iteration of `state`. Raises ValueError where the prompts have changed."""
        self._sampler.restore(state.sampler)
        self._replay.restore(state.replay)
        self._groups = state.groups
        self._state = state

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The groups of this iteration; iterations are taken in order.

        weight_version: the trainer's current one, which the servers have. Raises RuntimeError where a fresh token is of
        no version of the trainer's, or with max_staleness=0 of another than this one; NoSignalError; and what
        the engine and the reward raise.
        """
        if self._max_staleness == 0:
            batch = self._sample(iteration, weight_version)
        else:
            batch = self._take_complete(iteration, weight_version)
        self._state, self._taken = batch.state, batch.fresh
        return batch

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """Keep the trainer's log-probs of the iteration taken last for when its samples are replayed (TOPR's mu).

        old_logprobs: float32 [B, T], whose first rows are the fresh samples. A checkpoint of this iteration has them.
        """
        if self._keeps_logprobs:
            keep_logprobs(self._taken, old_logprobs)

    def begin_again(self) -> None:
        """Break off the groups under way, after servers were restarted; the next `take` begins them again."""
        if self._ahead is not None:
            self._ahead.begin_again()

    def close(self) -> int:
        """End what runs ahead; returns how many requested responses are dropped, finished or not."""
        if self._ahead is None:
            return 0
        num_dropped = self._ahead.close(CLOSE_DEADLINE_S) * self._train.responses_per_prompt
        self._ahead = None
        self.restore(self._state)
        return num_dropped

    def _sample(self, iteration: int, weight_version: int) -> IterationBatch:
        """With max_staleness=0: sample the iteration's groups now."""
        self._guard(self._engine.check_health)
        replayed = self._replay.draw(self._train.num_prompts, iteration)
        num_groups = self._train.num_prompts - len(replayed)
        sampled: list[tuple[Sample, ...]] = []
        metrics: Metrics = {}

        def sample(prompts: Sequence[Prompt]) -> Sequence[Sample]:
            num_responses = self._train.responses_per_prompt
            key = f"iteration-{iteration}/round-{len(sampled) + 1}"
            sampled.append(self._guard(lambda: self._collector.sample(prompts, num_responses, key=key)))
            return sampled[-1]

        if self._sampling.enabled:
            fresh, metrics = collect_groups_with_signal(
                self._sampler.next_batch, sample, num_groups, self._sampling.max_rounds, self._sampling.by
            )
        else:
            fresh = split_groups(sample(self._sampler.next_batch(num_groups)))
        self._replay.add(fresh)
        with self._collector.forgetting_failures(f"iteration-{iteration}"):
            check_versions([sample for samples in sampled for sample in samples], weight_version)
        return IterationBatch(fresh, replayed, tuple(sampled), metrics, self._find_state())

    def _take_complete(self, iteration: int, weight_version: int) -> IterationBatch:
        """With max_staleness=n: wait until enough groups are complete, while those of n further iterations are under
        way.

        The groups begun and neither taken nor discarded are never more than these n + 1 iterations need (AReaL
        2505.24298, section 5.1). So what is complete waits for n updates at most, and only the first tokens of groups
        that others overtake become older than n.
        """
        ahead = self._ahead = self._ahead or self._open()
        num_ahead = min(self._max_staleness, max(0, self._train.num_iterations - iteration))
        planned = self._replay.plan_fresh(self._train.num_prompts, 1 + num_ahead)
        ahead.allow(sum(planned))
        replayed = self._replay.draw(self._train.num_prompts, iteration)
        taken: list[Group] = []

        def take() -> Group:
            complete: CompleteGroup = self._guard(ahead.take)
            with self._dropping_failures(complete):
                check_versions(complete.samples, weight_version, may_be_older=True)
            taken.append(complete.samples)
            return complete.samples

        metrics: Metrics = {}
        if self._sampling.enabled:
            fresh, metrics = take_groups_with_signal(take, planned[0], self._sampling.max_rounds, self._sampling.by)
        else:
            fresh = [take() for _ in range(planned[0])]
        self._replay.add(fresh)
        metrics |= compute_staleness([s for group in fresh for s in group], weight_version, self._max_staleness)
        return IterationBatch(fresh, replayed, (join_groups(taken, 0).samples,), metrics, self._find_state())

    def _open(self) -> GroupScheduler:
        self._guard(self._engine.check_health)
        self._state = self._find_state()
        num_responses = self._train.responses_per_prompt
        return GroupScheduler(
            lambda prompt, key: self._collector.start_group(prompt, num_responses, key=key),
            self._sampler,
            num_responses,
            self._collector.journal,
            self._groups,
            partial(has_signal, by=self._sampling.by) if self._sampling.enabled else lambda _group: True,
        )

    @contextlib.contextmanager
    def _dropping_failures(self, complete: CompleteGroup) -> Iterator[None]:
        """Where the block fails, removes the group from the journal: it would fail again."""
        try:
            yield
        except Exception:
            if self._collector.journal:
                self._collector.journal.drop_group(complete.place, complete.number)
            raise

    def _find_state(self) -> SourceState:
        sampler, groups = (self._sampler.state(), self._groups) if self._ahead is None else self._ahead.state()
        return SourceState(sampler, self._replay.state(), groups)
