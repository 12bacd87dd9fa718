"""The groups that each iteration learns from: fresh ones, sampled now or ahead of their use, and replayed ones."""

import math
import random
import threading
import warnings
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from megarl.config.schema.algo import (
    DynamicSamplingConfig,
    ReplayConfig,
    SamplingBy,
    SamplingRest,
    ValuePretrainConfig,
    uses_topr,
)
from megarl.config.schema.root import Config, TooStale
from megarl.report.evaluation import describe_failures
from megarl.rollout.collector import Collector, check_versions, compute_staleness
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.rollout_file import Group, Journal, SavedGroups, name_group, read_group
from megarl.task.data import PromptSampler
from megarl.task.mix import MixSampler
from megarl.types import Metrics, Prompt, Rollout, Sample

CLOSE_DEADLINE_S = 5.0
SAME = 1e-6
"""Rewards that differ by less are equal: what is left is rounding, which a standard deviation would make large."""


class NoSignalError(RuntimeError):
    """No group has a signal: the task is too easy or too hard for the policy; the message says which."""


def split_groups(samples: Sequence[Sample]) -> list[Group]:
    """In order."""
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
    rewards = [score.reward for score in scores]
    return len(rewards) > 1 and max(rewards) - min(rewards) > SAME * max(1.0, *map(abs, rewards))


def find_fault(group: Group, config: DynamicSamplingConfig) -> str | None:
    """Why dynamic sampling does not keep a group, as its share is named in the metrics; None: it does."""
    scores = [sample.score for sample in group if sample.score.failure is None]
    if not has_signal(group, config.by):
        # A group whose samples have all failed is neither correct nor wrong.
        return "failed" if not scores else "equal_correct" if scores[0].correct else "equal_wrong"
    mean = fmean(score.correct if config.by is SamplingBy.correct else score.reward for score in scores)
    if config.low is not None and mean <= config.low:
        return "too_hard"
    return "too_easy" if config.high is not None and mean >= config.high else None


def list_unmasked(groups: Sequence[Group]) -> list[Group]:
    """Those with a policy loss."""
    return [group for group in groups if not group[0].masked]


def collect_groups(
    collect: Callable[[int], list[Group]], num_groups: int, config: DynamicSamplingConfig, *, one_by_one: bool = False
) -> tuple[list[Group], Metrics]:
    """Collect `num_groups` groups, with dynamic sampling those that it keeps; returns them and the metrics sampling/*.

    collect: `collect(n)` gives the groups of n further prompts. From the second round on their number, `num_groups` at
    most, follows from the share of groups kept so far. one_by_one: they are asked for one by one, and `num_groups` of
    them count as a round. After `max_rounds` the rest is filled up with groups that are not kept, with a warning.
    Raises NoSignalError where none is kept and they are not masked.
    """
    if not config.enabled:
        return collect(num_groups), {}
    max_rounds, by = config.max_rounds, config.by
    kept: list[Group] = []
    others: list[Group] = []
    faults = Counter[str]()
    num_asked, num_rounds = 0, 0.0
    while len(kept) < num_groups and num_rounds < max_rounds:
        share = (len(kept) or 0.5) / max(1, num_asked) if num_rounds else 1.0
        wanted = 1 if one_by_one else min(num_groups, math.ceil((num_groups - len(kept)) / share))
        for group in collect(wanted):
            fault = find_fault(group, config)
            (kept if fault is None else others).append(group)
            faults.update([] if fault is None else [fault])
        num_asked = len(kept) + len(others)
        num_rounds = num_asked / num_groups if one_by_one else num_rounds + 1
    is_masked = config.rest is SamplingRest.mask
    if len(kept) < num_groups and not (kept and is_masked):
        text = f"with {'right and wrong responses' if by is SamplingBy.correct else 'different rewards'}"
        text += f" {_describe(math.ceil(num_rounds), others, faults)}"
        if not kept and not is_masked:
            raise NoSignalError(f"dynamic sampling found no group {text}")
        rest = "has no policy loss" if is_masked else "is filled up with others"
        text = f"dynamic sampling found {len(kept)} of {num_groups} groups {text}; the rest {rest}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    rewards = [s.score.reward for group in kept + others for s in group if s.score.failure is None]
    metrics = {
        "sampling/reward_mean": sum(rewards) / max(1, len(rewards)),
        "sampling/rounds": float(math.ceil(num_rounds)),
        "sampling/num_prompts": float(num_asked),
        "sampling/signal_frac": len(kept) / num_asked,
        **{f"sampling/{fault}_frac": faults[fault] / num_asked for fault in _list_faults(config)},
    }
    if is_masked:
        others = [tuple(replace(sample, masked=True) for sample in group) for group in others]
    return (kept + others)[:num_groups], metrics


def _list_faults(config: DynamicSamplingConfig) -> Iterator[str]:
    """Those that are measured"""
    yield from ("equal_correct", "equal_wrong")
    yield from ("too_hard",) if config.low is not None else ()
    yield from ("too_easy",) if config.high is not None else ()


def _describe(num_rounds: int, others: Sequence[Group], faults: Mapping[str, int]) -> str:
    failures = describe_failures([sample for group in others for sample in group])
    num_correct, num_wrong = faults["equal_correct"], faults["equal_wrong"]
    text = (
        f"in algo.dynamic_sampling.max_rounds={num_rounds} rounds; of the other groups"
        f" {num_correct} are correct and {num_wrong} wrong{f' ({failures})' if failures else ''}"
    )
    num_correct, num_wrong = num_correct + faults["too_easy"], num_wrong + faults["too_hard"]
    if faults["too_easy"] or faults["too_hard"]:
        text += f"; {faults['too_easy']} are above algo.dynamic_sampling.high and {faults['too_hard']} below low"
    elif num_graded := sum(has_signal(group, SamplingBy.reward) for group in others):
        text += f"; in {num_graded} of them rewards differ, which algo.dynamic_sampling.by=reward learns from"
    if num_correct == num_wrong == 0:
        return f"{text}: fix the reward or the environment"
    if num_correct > num_wrong:
        return f"{text}: the data are too easy for this policy; harder prompts are needed, or training is done"
    return f"{text}: the data are too hard for this policy; easier prompts, or more of train.responses_per_prompt"


class ReplayBuffer:
    """Keeps the fresh groups of the last `num_iterations` iterations."""

    def __init__(self, config: ReplayConfig, seed: int):
        self._config = config
        self._seed = seed
        self._iterations: deque[list[Group]] = deque(maxlen=config.num_iterations)

    def draw(self, num_groups: int, iteration: int) -> list[Group]:
        """Draw a random share `frac` of `num_groups` without replacement, at most what the buffer holds, the same for
        the same seed, iteration and contents. Their samples have their age, the iterations since they were sampled."""
        ages = range(len(self._iterations), 0, -1)
        pool = [(age, group) for age, groups in zip(ages, self._iterations, strict=True) for group in groups]
        wanted = self._count_wanted(len(pool), num_groups)
        drawn = random.Random(f"replay/{self._seed}/{iteration}").sample(pool, wanted)
        return [tuple(replace(sample, age=age) for sample in group) for age, group in drawn]

    def plan_fresh(self, num_groups: int, num_iterations: int) -> list[int]:
        """How many of their `num_groups` groups the next iterations do not draw from here."""
        sizes = deque(map(len, self._iterations), maxlen=self._config.num_iterations)
        planned = []
        for _ in range(num_iterations):
            planned.append(num_groups - self._count_wanted(sum(sizes), num_groups))
            sizes.append(planned[-1])
        return planned

    def add(self, groups: list[Group]) -> None:
        """Add an iteration's fresh groups; those of the oldest iteration are dropped."""
        self._iterations.append(groups)

    def _count_wanted(self, num_held: int, num_groups: int) -> int:
        return max(0, min(num_held, num_groups - 1, round(self._config.frac * num_groups)))

    def state(self) -> tuple[list[Group], ...]:
        """The buffer's contents, iteration by iteration."""
        return tuple(self._iterations)

    def restore(self, state: Sequence[list[Group]]) -> None:
        self._iterations = deque(state, maxlen=self._config.num_iterations)


@dataclass(frozen=True)
class GroupState:
    """Which groups have been taken. A group has a number, from 0 in the order of the prompts, and once it is complete
    a place: from 0 in the order in which groups are complete or, where they are taken in order, its number.
    """

    first: int = 0
    """Number of the oldest group that has not been taken"""
    taken: tuple[int, ...] = ()
    """Numbers of the groups beyond it that have been"""
    next_place: int = 0
    """Place of the next group to be taken"""


class CompleteGroup(NamedTuple):
    """A scored group, whose samples have its number. is_wanted: False where a further one may begin in its place."""

    place: int
    number: int
    samples: Group
    is_wanted: bool


class GroupScheduler:
    """Keeps as many groups under way as it is allowed to; a thread begins them and journals each that is complete.

    At most as many groups as `allow` says are under way or wait to be taken. Nobody waits for a slow group: the next
    one to be taken is whichever is complete first. Resumed with its journal and a `GroupState`, it gives out the
    groups that were complete in the same order, and begins the others again under the same numbers. in_order: the next
    one to be taken is the one that was begun first, so that no group is overtaken.
    """

    def __init__(
        self,
        start: Callable[[Prompt, str], "Future[Group]"],
        sampler: PromptSampler[Prompt] | MixSampler,
        num_responses: int,
        journal: Journal | None,
        state: GroupState,
        is_wanted: Callable[[Group], bool] = lambda _group: True,
        *,
        in_order: bool = False,
    ):
        """start: begins a group under the key that seeds it and returns at once. sampler: stands where `state` says;
        its prompts are drawn by the scheduler's thread. is_wanted: of `CompleteGroup`.
        """
        self._start, self._sampler, self._num_responses, self._journal = start, sampler, num_responses, journal
        self._is_wanted, self._in_order = is_wanted, in_order
        self._changed = threading.Condition()
        self._allowed = 0
        self._next_number, self._next_place, self._num_places = state.first, state.next_place, state.next_place
        self._taken = set(state.taken)
        """Numbers of the groups taken, from that of the oldest that is not taken on"""
        self._drawn: dict[int, tuple[Prompt, Mapping[str, Any]]] = {}
        """The groups not taken, oldest first: prompt, and state of the sampler before it"""
        self._again: set[int] = set()
        """Those that were begun before, or by an earlier start of the run, and are not under way"""
        self._under_way: dict[int, Future[Group]] = {}
        self._ended: deque[tuple[int, Future[Group]]] = deque()
        self._waiting: list[CompleteGroup] = []
        """By their places"""
        self._error: BaseException | None = None
        self._is_held = True
        """Whether nothing is begun before `take` is called again"""
        self._is_closed = False
        for place, number in journal.list_groups(state.next_place) if journal else ():
            self._find_complete(place, number)
        self._thread = threading.Thread(target=self._work, name="megarl-ahead", daemon=True)
        self._thread.start()

    def allow(self, num_groups: int) -> None:
        """Let that many wanted groups be under way or wait to be taken; each that is taken counts off."""
        with self._changed:
            self._allowed = num_groups
            self._changed.notify_all()

    def take(self) -> CompleteGroup:
        """Wait for the next group in the order in which they are complete.

        Raises what a group has failed with; that group is begun again by the next call. The wait has no deadline of its
        own: what a group waits for has one. A signal that raises in this thread ends the wait.
        """
        with self._changed:
            if self._error is None:
                self._is_held = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._error is not None or self._may_take())
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_closed:
                raise RuntimeError("groups were asked for after the end")
            found = self._waiting.pop(0)
            self._allowed -= found.is_wanted
            self._next_place = found.place + 1
            del self._drawn[found.number]
            oldest = next(iter(self._drawn), self._next_number)
            self._taken = {number for number in self._taken | {found.number} if number >= oldest}
            return found

    def begin_again(self) -> None:
        """Break off all that is under way, after servers were restarted; the next call of `take` begins it again."""
        with self._changed:
            self._is_held, self._error = True, None
            broken_off = list(self._under_way.values())
            self._again |= self._under_way.keys()
            self._under_way.clear()
        for future in broken_off:
            future.cancel()

    def state(self) -> tuple[Mapping[str, Any], GroupState]:
        """The sampler's state before the oldest group that has not been taken, and which have been."""
        with self._changed:
            now = self._next_number, (None, self._sampler.state())
            first, (_, sampler) = next(iter(self._drawn.items()), now)
            return sampler, GroupState(first, tuple(sorted(self._taken)), self._next_place)

    def close(self, deadline_s: float) -> int:
        """Break off all that is under way and end the thread, a daemon; after the deadline it is left to itself.

        Returns the number of groups that were begun and not taken.
        """
        with self._changed:
            num_left = len(self._under_way) + len(self._waiting) + len(self._again)
            self._is_closed = True
            self._changed.notify_all()
        self.begin_again()
        self._thread.join(deadline_s)
        return num_left

    def _find_complete(self, place: int, number: int) -> None:
        """Take over what the journal has of an earlier start of the run; groups that it has not, or that cannot be
        read, are begun again."""
        assert self._journal is not None
        while self._next_number <= number:
            self._again.add(self._draw())
        self._again -= self._taken
        self._num_places = place + 1
        if number not in self._again:
            return
        key = name_group(place, number)
        samples = self._journal.load(key, [self._drawn[number][0]], self._num_responses)
        if samples is None:
            self._journal.drop(key)
        else:
            self._add_complete(number, _number(samples, number), place)

    def _add_complete(self, number: int, samples: Group, place: int) -> None:
        self._under_way.pop(number, None)
        self._again.discard(number)
        found = CompleteGroup(place, number, samples, self._is_wanted(samples))
        insort(self._waiting, found, key=lambda each: each.place)

    def _draw(self) -> int:
        """Draw the next prompt; its number."""
        number, before = self._next_number, self._sampler.state()
        (prompt,) = self._sampler.next_batch(1)
        self._next_number += 1
        if number not in self._taken:
            self._drawn[number] = (prompt, before)
        return number

    def _may_take(self) -> bool:
        return bool(self._waiting) and (not self._in_order or self._waiting[0].number == next(iter(self._drawn)))

    def _may_begin(self) -> bool:
        num_ahead = len(self._under_way) + sum(each.is_wanted for each in self._waiting)
        return not self._is_held and self._error is None and num_ahead < self._allowed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._ended or self._may_begin())
                if self._is_closed:
                    return
                ended = self._ended.popleft() if self._ended else None
                if ended is not None and self._under_way.get(ended[0]) is not ended[1]:
                    continue  # It was broken off.
            try:
                if ended is None:
                    self._begin_next()
                else:
                    self._settle(*ended)
            except BaseException as error:  # Raised in the thread that takes the groups, which else waits for ever.
                with self._changed:
                    if ended is not None and self._under_way.pop(ended[0], None) is not None:
                        self._again.add(ended[0])
                    self._is_held, self._error = True, self._error or error
                    self._changed.notify_all()

    def _begin_next(self) -> None:
        with self._changed:
            if self._is_closed or not self._may_begin():
                return
            number = min(self._again, default=None)
            while number is None or number in self._taken:
                number = self._draw()
            self._again.add(number)
            future = self._start(self._drawn[number][0], f"group-{number}")
            self._again.remove(number)
            self._under_way[number] = future
        future.add_done_callback(partial(self._note_end, number))

    def _note_end(self, number: int, future: "Future[Group]") -> None:
        with self._changed:
            self._ended.append((number, future))
            self._changed.notify_all()

    def _settle(self, number: int, future: "Future[Group]") -> None:
        """Journal a group that has ended."""
        samples = _number(future.result(), number)
        check_versions(samples)
        place = number if self._in_order else self._num_places
        if self._journal is not None:
            self._journal.save(name_group(place, number), samples)
        with self._changed:
            self._add_complete(number, samples, place)
            self._num_places = place + 1
            self._changed.notify_all()


def _number(samples: Group, number: int) -> Group:
    return tuple(replace(sample, group_number=number) for sample in samples)


@dataclass(frozen=True)
class SourceState:
    """The state of a source after an iteration."""

    sampler: Mapping[str, Any]
    """The sampler's, complete, with rollout.max_staleness > 0 before the oldest group that has not been taken"""
    replay: tuple[list[Group], ...]
    """ReplayBuffer.state()"""
    groups: GroupState = field(default_factory=GroupState)
    """With rollout.max_staleness > 0: which groups have been taken"""


@dataclass(frozen=True)
class IterationBatch:
    """The groups of one iteration."""

    fresh: list[Group] = field(default_factory=list)
    replayed: list[Group] = field(default_factory=list)
    """Groups of past iterations, with the log-probs of their first iteration where these are kept"""
    sampled: tuple[Group, ...] = ()
    """All sampled responses, one entry per round; dynamic sampling keeps a part of them"""
    metrics: Metrics = field(default_factory=dict)


class SavedPretraining:
    """The rollouts of algo.value_pretrain.rollouts in order, repeated endlessly, for the iterations up to 0."""

    def __init__(self, settings: ValuePretrainConfig, saved: SavedGroups, say: Callable[[str], None]):
        """say: called with a message at the end of each pass over the file."""
        self._settings, self._saved, self._say = settings, saved, say

    def take(self, iteration: int) -> IterationBatch:
        """The groups of this iteration. Raises RuntimeError where the file has changed since it was validated."""
        num_passes, number = divmod(self._settings.count_step(iteration) - 1, self._saved.num_rollouts)
        if num_passes and number == 0:
            self._say(
                f"pass {num_passes} over the rollouts of {self._saved.path} is complete; from here on explained"
                " variance is of responses that the critic has learned from"
            )
        own = (group for group in self._saved.groups if group.rollout == number)
        return IterationBatch([read_group(self._saved.path, group) for group in own])


class GroupSource:
    """Samples the groups of one iteration after the other; with rollout.max_staleness = n up to n iterations ahead.

    With n = 0, and in value pretraining (iterations up to 0), an iteration's groups are those of the next prompts. With
    n > 0 they are those that are complete first, and a later iteration learns from a slow one; or with
    rollout.too_stale=wait those that were begun first.
    """

    def __init__(
        self,
        config: Config,
        engine: SGLangEngine,
        collector: Collector,
        sampler: PromptSampler[Prompt] | MixSampler,
        with_servers: Callable[[Callable[[], Any]], Any] = lambda ask: ask(),
        find_values: Callable[[Sequence[Prompt]], Sequence[float]] | None = None,
    ):
        """with_servers: repeats a call that failed because a server was lost, once the server is back. Where groups
        are under way, `begin_again` is to be called then. find_values: the critic's value of each prompt, before its
        first token; needed for dynamic_sampling.value_low and value_high."""
        self._train = config.train
        self._pretraining, self._sampling = config.algo.value_pretrain, config.algo.dynamic_sampling
        self._rollout = config.rollout
        self._engine = engine
        self._guard, self._find_values = with_servers, find_values
        self._num_outside = 0
        """Prompts passed over in this iteration by the critic's value"""
        self._collector = collector
        self._sampler = sampler
        self._replay = ReplayBuffer(config.algo.replay, config.seed)
        self._keeps_logprobs = config.algo.replay.num_iterations > 0 and uses_topr(config.algo)
        self._taken: list[Group] = []
        self._replayable: list[Group] = []
        """Those of them that the replay buffer holds: all but those without a policy loss"""
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
        if iteration <= 0:
            batch = self._sample_to_pretrain(iteration, weight_version)
        elif self._rollout.max_staleness == 0:
            batch = self._sample(iteration, weight_version)
        else:
            batch = self._take_complete(iteration, weight_version)
        self._sampler.note([sample for group in batch.sampled for sample in group])
        self._state, self._taken = self._find_state(), batch.fresh
        return replace(batch, metrics=batch.metrics | self._sampler.count_epochs())

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """Keep the trainer's log-probs of the iteration taken last for when its samples are replayed (TOPR's mu).

        old_logprobs: float32 [B, T], whose first rows are the fresh samples. They are stored in the groups in place:
        the replay buffer and its states, that of a checkpoint of this iteration too, hold the same list.
        """
        if not self._keeps_logprobs:
            return
        rows = iter(old_logprobs)
        self._taken[:] = [
            tuple(
                replace(sample, first_old_logprobs=next(rows)[: len(sample.response)].numpy(force=True).copy())
                for sample in group
            )
            for group in self._taken
        ]
        self._replayable[:] = list_unmasked(self._taken)

    def _add_to_replay(self, fresh: list[Group]) -> None:
        self._replayable = list_unmasked(fresh)
        self._replay.add(self._replayable)

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

    def _draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts whose value is in the range; after max_rounds draws those with the nearest values fill the
        rest."""
        low, high = self._sampling.value_low, self._sampling.value_high
        if self._find_values is None or (low is None and high is None):
            return self._sampler.next_batch(num_prompts)
        chosen: list[Prompt] = []
        outside: list[tuple[float, Prompt]] = []
        for _ in range(self._sampling.max_rounds):
            drawn = self._sampler.next_batch(num_prompts - len(chosen))
            for prompt, value in zip(drawn, self._find_values(drawn), strict=True):
                distance = max(-math.inf if low is None else low - value, -math.inf if high is None else value - high)
                if distance < 0:
                    chosen.append(prompt)
                else:
                    outside.append((distance, prompt))
            if len(chosen) == num_prompts:
                break
        nearest = sorted(outside, key=lambda found: found[0])[: num_prompts - len(chosen)]
        self._num_outside += len(outside) - len(nearest)
        return chosen + [prompt for _, prompt in nearest]

    def _collect(
        self, num_groups: int, key: str, weight_version: int, draw: Callable[[int], list[Prompt]] | None = None
    ) -> tuple[Sample, ...]:
        """Sample the groups of so many further prompts now."""
        prompts, num_responses = (draw or self._sampler.next_batch)(num_groups), self._train.responses_per_prompt
        return tuple(
            self._guard(lambda: self._collector.sample(prompts, num_responses, key=key, weight_version=weight_version))
        )

    def _sample_to_pretrain(self, iteration: int, weight_version: int) -> IterationBatch:
        number = self._pretraining.count_step(iteration)
        self._guard(self._engine.check_health)
        samples = self._collect(self._train.num_prompts, f"pretraining-{number}", weight_version)
        return IterationBatch(split_groups(samples), sampled=(samples,))

    def _sample(self, iteration: int, weight_version: int) -> IterationBatch:
        """With max_staleness=0: sample the iteration's groups now."""
        self._guard(self._engine.check_health)
        replayed = self._replay.draw(self._train.num_prompts, iteration)
        sampled: list[tuple[Sample, ...]] = []

        def collect(num_groups: int) -> list[Group]:
            key = f"iteration-{iteration}/round-{len(sampled) + 1}"
            sampled.append(self._collect(num_groups, key, weight_version, self._draw))
            return split_groups(sampled[-1])

        fresh, metrics = collect_groups(collect, self._train.num_prompts - len(replayed), self._sampling)
        self._add_to_replay(fresh)
        if (self._sampling.value_low, self._sampling.value_high) != (None, None):
            metrics["sampling/num_outside_value"], self._num_outside = float(self._num_outside), 0
        if self._sampling.enabled and self._sampling.skip_epochs:
            metrics["sampling/num_skipped"] = float(self._skip([group for it in sampled for group in split_groups(it)]))
        return IterationBatch(fresh, replayed, tuple(sampled), metrics)

    def _skip(self, groups: Sequence[Group]) -> int:
        """Note the prompts of groups that are not kept; how many others were passed over for them."""
        dropped = [it[0].prompt for it in groups if find_fault(it, self._sampling) not in (None, "failed")]
        return self._sampler.skip(dropped, self._sampling.skip_epochs)

    def _take_complete(self, iteration: int, weight_version: int) -> IterationBatch:
        """With max_staleness=n: wait until enough groups are complete, while those of n further iterations are under
        way.

        The groups begun and neither taken nor discarded are never more than these n + 1 iterations need (AReaL
        2505.24298, section 5.1). So what is complete waits for n updates at most, and only the first tokens of groups
        that others overtake become older than n: with rollout.too_stale=wait none does.
        """
        ahead = self._ahead = self._ahead or self._open()
        num_ahead = min(self._rollout.max_staleness, max(0, self._train.num_iterations - iteration))
        planned = self._replay.plan_fresh(self._train.num_prompts, 1 + num_ahead)
        ahead.allow(sum(planned))
        replayed = self._replay.draw(self._train.num_prompts, iteration)
        taken: list[Group] = []

        def take(num_groups: int) -> list[Group]:
            for _ in range(num_groups):
                complete: CompleteGroup = self._guard(ahead.take)
                try:
                    check_versions(complete.samples, weight_version, may_be_older=True)
                except RuntimeError:
                    if self._collector.journal:  # It would fail again.
                        self._collector.journal.drop(name_group(complete.place, complete.number))
                    raise
                taken.append(complete.samples)
            return taken[-num_groups:]

        fresh, metrics = collect_groups(take, planned[0], self._sampling, one_by_one=True)
        self._add_to_replay(fresh)
        found = [sample for group in fresh for sample in group]
        metrics |= compute_staleness(found, weight_version, self._rollout.oldest_learned)
        return IterationBatch(fresh, replayed, (join_groups(taken, 0).samples,), metrics)

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
            lambda group: not self._sampling.enabled or find_fault(group, self._sampling) is None,
            in_order=self._rollout.too_stale is TooStale.wait,
        )

    def _find_state(self) -> SourceState:
        sampler, groups = (self._sampler.state(), self._groups) if self._ahead is None else self._ahead.state()
        return SourceState(self._sampler.complete(sampler), self._replay.state(), groups)


class SavedSource:
    """The groups of one iteration after the other, out of a file; used by the loop as a `GroupSource` is.

    The responses count as sampled before the first iteration, by weights that this run never has: their age in
    iteration n is n, and log mu is what the file recorded (`rollout_logprobs`). Each pass over the file takes every
    group once, in an order that follows from the seed; an iteration may reach from one pass into the next.
    """

    def __init__(self, saved: SavedGroups, num_groups: int, seed: int):
        """num_groups: of an iteration."""
        self._path, self._num_groups, self._num_saved = saved.path, num_groups, len(saved.groups)
        self._sampler: PromptSampler[Any] = PromptSampler(saved.groups, seed)

    def state(self) -> SourceState:
        """The state after the last iteration taken."""
        return SourceState(self._sampler.state(), ())

    def restore(self, state: SourceState) -> None:
        """Resume after the iteration of `state`. Raises ValueError where the file has changed."""
        self._sampler.restore(state.sampler)

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The groups of this iteration; iterations are taken in order.

        Its metrics: saved/epoch, the number of passes over the file; saved/reward_mean and saved/correct_frac of the
        responses with a reward. Raises RuntimeError where the file has changed since it was validated.
        """
        groups = [read_group(self._path, group) for group in self._sampler.next_batch(self._num_groups)]
        # What another run's trainer said of them is left out.
        aged = [tuple(replace(sample, age=iteration, group_number=None) for sample in group) for group in groups]
        metrics = {"saved/epoch": self.count_passes()}
        if scores := [s.score for group in groups for s in group if s.score.failure is None]:
            metrics["saved/reward_mean"] = sum(score.reward for score in scores) / len(scores)
            metrics["saved/correct_frac"] = sum(score.correct for score in scores) / len(scores)
        return IterationBatch(replayed=aged, metrics=metrics)

    def count_passes(self) -> float:
        """Passes over the file so far."""
        state = self._sampler.state()
        return int(state["epoch"]) + int(state["position"]) / self._num_saved

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """Nothing is kept: log mu stays what the file recorded."""

    def begin_again(self) -> None: ...

    def close(self) -> int:
        return 0


class GivenSource(SavedSource):
    """What the data give to learn from in place of responses (pairs, demonstrations), each once in a pass, in an order
    that follows from the seed."""

    def __init__(self, given: Sequence[Any], build: Callable[[Any], Group], num_groups: int, seed: int):
        """given: items with an `id`. build: the group of one. num_groups: of an iteration."""
        self._num_groups, self._num_saved, self._build = num_groups, len(given), build
        self._sampler = PromptSampler(given, seed)

    def take(self, iteration: int, weight_version: int) -> IterationBatch:
        """The groups of this iteration. Its metric: saved/epoch, the number of passes over them."""
        groups = map(self._build, self._sampler.next_batch(self._num_groups))
        aged = [tuple(replace(sample, age=iteration) for sample in group) for group in groups]
        return IterationBatch(replayed=aged, metrics={"saved/epoch": self.count_passes()})
