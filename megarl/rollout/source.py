"""The groups that each iteration learns from: fresh ones, sampled now or prefetched, and replayed ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.config.schema.algo import uses_topr
from megarl.config.schema.root import Config
from megarl.data.sampler import PromptSampler
from megarl.interfaces import RolloutEngine
from megarl.rollout.collector import Collector, check_versions, compute_staleness
from megarl.rollout.dynamic_sampling import Group, collect_groups_with_reward_variance, split_groups
from megarl.rollout.prefetcher import Prefetcher
from megarl.rollout.replay import PastGroup, ReplayBuffer, keep_logprobs
from megarl.types import Metrics, Prompt, Sample

CLOSE_DEADLINE_S = 5.0


@dataclass(frozen=True)
class SourceState:
    """The state of a source after an iteration."""

    sampler: Mapping[str, int | str]
    """PromptSampler.state()"""
    replay: tuple[list[Group], ...]
    """ReplayBuffer.state()"""


@dataclass(frozen=True)
class IterationBatch:
    """The groups of one iteration."""

    fresh: list[Group]
    drawn: list[PastGroup]
    """Groups of past iterations"""
    sampled: tuple[tuple[Sample, ...], ...]
    """All sampled responses, one entry per round; dynamic sampling keeps a part of them"""
    metrics: Metrics
    state: SourceState
    """The source's state after this iteration"""

    @property
    def replayed(self) -> list[Group]:
        """The groups of past iterations, with the log-probs of their first iteration where these are kept."""
        return [past.read() for past in self.drawn]


class GroupSource:
    """Samples the groups of one iteration after the other; with rollout.max_staleness = n up to n iterations ahead.

    Which prompts an iteration gets never depends on timing: one thread at a time draws them, in the iterations' order.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        collector: Collector,
        sampler: PromptSampler,
        with_servers: Callable[[Callable[[], Any]], Any] = lambda ask: ask(),
    ):
        """with_servers: repeats a call that failed because a server was lost, once the server is back. It is not used
        for prefetching: the trainer may be in the middle of an update then, and a lost server ends the run.
        """
        self._train = config.train
        self._sampling = config.algo.dynamic_sampling
        self._max_staleness = config.rollout.max_staleness
        self._engine = engine
        self._guard = with_servers if self._max_staleness == 0 else lambda ask: ask()
        self._collector = collector
        self._sampler = sampler
        self._replay = ReplayBuffer(config.algo.replay, config.seed)
        self._keeps_logprobs = config.algo.replay.num_iterations > 0 and uses_topr(config.algo)
        self._taken: list[Group] = []
        self._ahead: Prefetcher[IterationBatch] | None = None
        self._num_asked = 0
        self._num_taken = 0
        self._state = self._find_state()

    def state(self) -> SourceState:
        """The state after the last iteration taken, without what was prefetched; before the first, the current one."""
        return self._state if self._ahead is not None else self._find_state()

    def restore(self, state: SourceState) -> None:
        """Resume after the iteration of `state`. Raises ValueError where the prompts have changed."""
        self._sampler.restore(state.sampler)
        self._replay.restore(state.replay)
        self._state = state

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The groups of this iteration; with staleness, iterations are taken in order until `close`.

        weight_version: the trainer's current one. Raises RuntimeError where a fresh token has a version outside
        [weight_version - max_staleness, weight_version], NoRewardVarianceError, and what the engine and the reward
        raise.
        """
        if self._max_staleness == 0:
            self._guard(self._engine.check_health)
            batch = self._gather(iteration)
        else:
            batch = self._open().take(iteration)
        self._state, self._taken = batch.state, batch.fresh
        samples = [sample for group in batch.sampled for sample in group]
        self._num_taken += len(samples)
        with self._collector.forgetting_failures(f"iteration-{iteration}"):
            check_versions(samples, weight_version, self._max_staleness)
        if self._max_staleness > 0:
            batch.metrics.update(compute_staleness([s for g in batch.fresh for s in g], weight_version))
        return batch

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """Keep the trainer's log-probs of the iteration taken last for when its samples are replayed (TOPR's mu).

        old_logprobs: float32 [B, T], whose first rows are the fresh samples. A checkpoint of this iteration has them.
        """
        if self._keeps_logprobs:
            keep_logprobs(self._taken, old_logprobs)

    def close(self) -> int:
        """Stop prefetching; returns how many requested responses are dropped, finished or not."""
        if self._ahead is not None:
            self._ahead.close(CLOSE_DEADLINE_S)
        self._ahead = None
        num_dropped, self._num_taken = self._num_asked - self._num_taken, self._num_asked
        return num_dropped

    def _open(self) -> Prefetcher[IterationBatch]:
        if self._ahead is None:
            # Only here: a server that loads weights does not answer, and a prefetching thread would take it for lost.
            self._guard(self._engine.check_health)
            self._ahead = Prefetcher(
                self._gather,
                num_ahead=self._max_staleness,
                last=self._train.num_iterations,
                cancel=self._engine.cancel,
            )
        return self._ahead

    def _gather(self, iteration: int) -> IterationBatch:
        num_groups = self._train.num_prompts
        drawn = self._replay.draw(num_groups, iteration)
        num_groups -= len(drawn)
        sampled: list[tuple[Sample, ...]] = []
        metrics: Metrics = {}

        def sample(prompts: Sequence[Prompt]) -> Sequence[Sample]:
            num_responses = self._train.responses_per_prompt
            self._num_asked += len(prompts) * num_responses
            key = f"iteration-{iteration}/round-{len(sampled) + 1}"
            sampled.append(self._guard(lambda: self._collector.sample(prompts, num_responses, key=key)))
            return sampled[-1]

        if self._sampling.enabled:
            draw, max_rounds = self._sampler.next_batch, self._sampling.max_rounds
            fresh, metrics = collect_groups_with_reward_variance(draw, sample, num_groups, max_rounds)
        else:
            fresh = split_groups(sample(self._sampler.next_batch(num_groups)))
        self._replay.add(fresh)
        return IterationBatch(fresh, drawn, tuple(sampled), metrics, self._find_state())

    def _find_state(self) -> SourceState:
        return SourceState(self._sampler.state(), self._replay.state())
