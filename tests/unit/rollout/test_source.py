"""Groups begun ahead of their use, and which of them an iteration gets, over groups that the test completes; dynamic
sampling and replay.
"""

import contextlib
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.groups import DEADLINE_S, GroupMaker, make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.schema.algo import DynamicSamplingConfig, ReplayConfig, SamplingBy, SamplingRest
from megarl.report.evaluation import compute_source_metrics
from megarl.rollout.collector import build_tensors
from megarl.rollout.rollout_file import Journal
from megarl.rollout.source import (
    CompleteGroup,
    GroupScheduler,
    GroupSource,
    GroupState,
    IterationBatch,
    NoSignalError,
    ReplayBuffer,
    collect_groups,
    find_fault,
    has_signal,
    join_groups,
)
from megarl.task.data import PromptSampler
from megarl.types import Prompt, Sample, Score

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Each group is synced to disk, which takes longer than all else here"""
FEW = [Prompt(str(i), str(i), (i + 1,), "") for i in range(5)]

KEEPS = partial(has_signal, by=SamplingBy.correct)


def draw(num: int) -> list[str]:
    return [prompt.id for prompt in PromptSampler(FEW, 1).next_batch(num)]


@contextmanager
def scheduling(
    maker: GroupMaker,
    journal: Journal | None = None,
    sampler: PromptSampler | None = None,
    state: GroupState | None = None,
    *,
    in_order: bool = False,
) -> Iterator[GroupScheduler]:
    sampler = sampler or PromptSampler(FEW, 1)
    scheduler = GroupScheduler(maker.start, sampler, 2, journal, state or GroupState(), KEEPS, in_order=in_order)
    try:
        yield scheduler
    finally:
        scheduler.close(DEADLINE_S)
        assert not scheduler._thread.is_alive()


@dataclass
class Run:
    """Iterations of P wanted groups over a scheduler, killed and resumed as the test says, and what must hold of them.

    choose: an index below its argument: which of the groups under way is complete next.
    """

    folder: Path
    num_groups: int
    max_staleness: int
    num_iterations: int
    maker: GroupMaker
    in_order: bool = False
    places: list[int] = field(default_factory=list)
    """Numbers of the groups in the order in which they were complete, or in their own, as the journal has it"""
    taken: dict[int, list[int]] = field(default_factory=dict)
    """Iteration -> numbers of the groups that it has taken"""

    def train(self, start: int, sampler: dict, state: GroupState, choose, is_killed) -> tuple[int, dict, GroupState]:
        """From iteration `start` to the end or to the kill; iteration and state of the last checkpoint."""
        own, journal = PromptSampler(FEW, 1), Journal(self.folder)
        own.restore(sampler)
        waiting, oldest = list(self.places[state.next_place :]), state.first
        scheduled = scheduling(self.maker, journal, own, state, in_order=self.in_order)
        with ThreadPoolExecutor(1) as pool, scheduled as scheduler:
            for iteration in range(start, self.num_iterations + 1):
                self.maker.version = version = iteration - 1
                ahead = min(self.max_staleness, self.num_iterations - iteration)
                allowed, taken, num_wanted = self.num_groups * (1 + ahead), [], 0
                scheduler.allow(allowed)
                while num_wanted < self.num_groups:
                    taking = pool.submit(scheduler.take)
                    while not waiting or (self.in_order and waiting[0] != oldest):
                        self.maker.wait(allowed - sum(len(set(self.maker.rewards(number))) > 1 for number in waiting))
                        number = sorted(self.maker.under_way)[choose(len(self.maker.under_way))]
                        self.maker.complete(number)
                        self.places.append(number)
                        waiting.append(number)
                        if self.in_order:
                            self.places, waiting = sorted(self.places), sorted(waiting)
                    found = taking.result(DEADLINE_S)
                    assert found.number == waiting.pop(0)
                    oldest += 1
                    assert found.place == (found.number if self.in_order else self.places.index(found.number))
                    allowed -= KEEPS(found.samples)
                    num_wanted += KEEPS(found.samples)
                    taken.append(found.number)
                    self.check(found, version)
                # A killed run repeats what it has taken before.
                assert self.taken.setdefault(iteration, taken) == taken
                if iteration < self.num_iterations and is_killed():
                    return start, sampler, state
                if choose(2):
                    start, (sampler, state) = iteration + 1, scheduler.state()
                    journal.forget(0, state.next_place)
            return self.num_iterations + 1, sampler, state

    def check(self, found: CompleteGroup, version: int) -> None:
        assert {sample.group_number for sample in found.samples} == {found.number}
        assert {sample.prompt.id for sample in found.samples} == {draw(found.number + 1)[-1]}
        first, last = found.samples[0].response.weight_versions.expand()
        assert 0 <= first <= last <= version
        # Whenever it was begun: once it is complete it waits for so many updates at most.
        assert version - last <= self.max_staleness
        if self.in_order and len(set(self.maker.rewards(1))) == len(set(self.maker.rewards(0))) == 2:
            assert version - first <= self.max_staleness


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from([0, 2, 3]), st.booleans())
def test_whatever_is_complete_first_and_wherever_it_is_killed_each_group_is_taken_once_and_in_the_same_order(
    data: st.DataObject, num_groups: int, max_staleness: int, num_iterations: int, every: int, in_order: bool
) -> None:
    """every: so many groups have equal rewards and are replaced, 0: none. in_order: those begun first are taken first,
    and without such groups none of their tokens is older than the staleness allows."""
    maker = GroupMaker(lambda number: (1.0, 1.0) if every and number % every == 0 else (0.0, 1.0))
    kills = data.draw(st.integers(0, 3))

    def choose(num: int) -> int:
        return data.draw(st.integers(0, num - 1))

    def is_killed() -> bool:
        return kills > 0 and data.draw(st.booleans())

    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        run = Run(Path(folder), num_groups, max_staleness, num_iterations, maker, in_order)
        start, sampler, state = 1, PromptSampler(FEW, 1).state(), GroupState()
        while start <= num_iterations:
            start, sampler, state = run.train(start, sampler, state, choose, is_killed)
            kills -= 1
    taken = [number for iteration in range(1, num_iterations + 1) for number in run.taken[iteration]]
    assert len(set(taken)) == len(taken)
    if not every:
        # Nothing more was begun than the iterations need, and nothing is lost.
        assert sorted(taken) == list(range(num_groups * num_iterations)) == sorted(set(maker.begun))


def take_after(
    scheduler: GroupScheduler, maker: GroupMaker, num_under_way: int, *complete: int, failed: int | None = None
) -> CompleteGroup:
    """What is taken where these groups are complete in this order, once so many are under way."""
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(scheduler.take)
        try:
            maker.wait(num_under_way)
            for number in complete:
                maker.complete(number)
        except BaseException:
            scheduler.close(DEADLINE_S)
            raise
        if failed is not None:
            maker.fail(failed, RuntimeError("the server is down"))
        return taking.result(DEADLINE_S)


def test_what_fails_is_raised_once_and_begun_again_at_the_next_call_and_forgotten_where_servers_were_restarted():
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        scheduler.allow(2)
        with pytest.raises(RuntimeError, match="the server is down"):
            take_after(scheduler, maker, 2, failed=0)
        assert maker.begun == [0, 1]
        assert take_after(scheduler, maker, 2, 0).number == 0
        assert maker.begun == [0, 1, 0]
        scheduler.allow(2)
        maker.wait(2)
        maker.fail(1, RuntimeError("the server is down"))
        while not scheduler._is_held:
            pass
        scheduler.begin_again()
        assert take_after(scheduler, maker, 2, 1).number == 1
        assert maker.begun == [0, 1, 0, 2, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("x"), CancelledError(), ValueError("a reward")])
def test_what_cannot_begin_is_raised_and_begun_again(error, monkeypatch):
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_start", lambda prompt, key: (_ for _ in ()).throw(error))
            scheduler.allow(1)
            with pytest.raises(type(error)):
                scheduler.take()
        assert take_after(scheduler, maker, 1, 0).number == 0


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [(0, 1, "weight version 0, 1; the trainer's is 0"), (-1, -1, "a server without the trainer's weights")],
)
def test_a_group_with_a_token_of_other_weights_is_an_error_and_not_journaled(first, last, message, tmp_path):
    maker, journal = GroupMaker(version=first), Journal(tmp_path)
    with taking(maker, "rollout.max_staleness=2", journal=journal) as (source, pool):
        running = pool.submit(source.take, 1, 0)
        maker.wait(12)
        maker.version = last
        maker.complete(7)
        with pytest.raises(RuntimeError, match=message):
            running.result(DEADLINE_S)
    assert journal.list_groups(0) == []


def test_a_file_of_the_journal_that_cannot_be_read_costs_its_group_and_no_other(tmp_path):
    maker, journal = GroupMaker(), Journal(tmp_path)
    with scheduling(maker, journal) as scheduler:
        scheduler.allow(3)
        assert take_after(scheduler, maker, 3, 1, 2, 0).number == 1
        assert [scheduler.take().number for _ in range(2)] == [2, 0]
    assert journal.list_groups(0) == [(0, 1), (1, 2), (2, 0)]
    (tmp_path / "group-1-2.samples").write_text("{")
    with contextlib.ExitStack() as stack:
        with pytest.warns(RuntimeWarning, match="sampled again"):
            scheduler = stack.enter_context(scheduling(maker, journal))
        scheduler.allow(3)
        assert [scheduler.take().number for _ in range(2)] == [1, 0]
        assert take_after(scheduler, maker, 1, 2).number == 2
    # What is resumed from there has them in this order.
    with scheduling(maker, journal) as scheduler:
        assert [scheduler.take().number for _ in range(3)] == [1, 0, 2]
    # A disk that takes none is an error where groups are taken.
    (tmp_path / "file").touch()
    with scheduling(maker, Journal(tmp_path / "file")) as scheduler:
        scheduler.allow(1)
        with pytest.raises(OSError, match="file"):
            take_after(scheduler, maker, 1, 0)


PROMPTS = [Prompt(str(i), str(i), (i + 1,), "") for i in range(20)]
SIZES = ["model=tiny", "train.num_iterations=6", "train.prompts_per_iteration=4", "train.responses_per_prompt=2"]
SIZES += ["train.samples_per_minibatch=2"]
DYNAMIC = ("algo=dapo", "algo.dynamic_sampling.enabled=true")
REPLAY = ("algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5")


class FakeCollector:
    """Groups whose rewards go by their order; those ahead are complete at once or when the maker's test says so."""

    def __init__(self, journal: Journal | None = None, maker: GroupMaker | None = None):
        self.journal = journal
        self.maker = maker or GroupMaker()
        self.asked: list[tuple[str, list[str]]] = []
        self.completes = maker is None

    def sample(self, prompts, num_responses, *, key, weight_version):
        self.asked.append((key, [prompt.id for prompt in prompts]))
        version = self.maker.version
        rewards = [self.maker.rewards(int(prompt.id)) for prompt in prompts]
        groups = [make_group(p, (version, version), r) for p, r in zip(prompts, rewards, strict=True)]
        return tuple(Sample(s.prompt, s.response, s.score, i) for i, group in enumerate(groups) for s in group)

    def start_group(self, prompt, num_responses, *, key):
        assert num_responses == 2
        self.asked.append((key, [prompt.id]))
        future = self.maker.start(prompt, key)
        if self.completes:
            self.maker.complete(int(key.removeprefix("group-")))
        return future


def build_source(collector: FakeCollector, *overrides: str) -> GroupSource:
    corrected = [] if "algo=topr" in overrides else ["algo.mismatch.correction=tis"]
    config = load_config([*SIZES, *corrected, *overrides])
    return GroupSource(config, SimpleNamespace(check_health=lambda: None), collector, PromptSampler(PROMPTS, 1))


def list_groups(batch: IterationBatch) -> list[tuple[str, int]]:
    return [(group[0].prompt.id, group[0].age) for group in batch.fresh + batch.replayed]


def take_all(staleness: int, *overrides: str) -> tuple[list[list[tuple[str, int]]], list[str]]:
    """Prompts and ages of the six iterations, and the prompts that were asked for; the order of begin is kept."""
    collector = FakeCollector()
    source = build_source(collector, f"rollout.max_staleness={staleness}", *overrides)
    taken = []
    for iteration in range(1, 7):
        taken.append(list_groups(source.take(iteration, collector.maker.version)))
        collector.maker.version += 1
    assert source.close() == 0
    return taken, [name for _, prompts in collector.asked for name in prompts]


@pytest.mark.parametrize("overrides", [(), REPLAY], ids=["plain", "replay"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_where_no_group_is_overtaken_the_same_prompts_are_learned_from_in_the_same_iterations_at_any_staleness(
    staleness, overrides
):
    assert take_all(staleness, *overrides) == take_all(0, *overrides)


def test_every_call_has_a_key_of_its_iteration_and_round_and_keeps_it_where_it_is_repeated():
    collector = FakeCollector()
    collector.maker.rewards = lambda number: (0.0, float(number % 3 == 0))
    source = build_source(collector, *DYNAMIC)
    source._guard = lambda ask: (ask(), ask())[1]
    for iteration in range(1, 7):
        source.take(iteration, 0)
    assert collector.asked[::2] == collector.asked[1::2]
    keys = [key for key, _ in collector.asked[::2]]
    rounds = [[key for key in keys if key.startswith(f"iteration-{i}/")] for i in range(1, 7)]
    assert any(len(names) > 1 for names in rounds)
    assert keys == [f"iteration-{i}/round-{n}" for i, names in enumerate(rounds, 1) for n, _ in enumerate(names, 1)]


@contextlib.contextmanager
def taking(maker: GroupMaker, *overrides: str, journal: Journal | None = None):
    source = build_source(FakeCollector(journal, maker), *overrides)
    with ThreadPoolExecutor(1) as pool:
        try:
            yield source, pool
        finally:
            source.close()
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())


def test_groups_of_equal_rewards_are_replaced_as_they_come():
    maker = GroupMaker(lambda number: (1.0, 1.0) if number < 3 else (0.0, 1.0))
    with taking(maker, *DYNAMIC, "rollout.max_staleness=1") as (source, pool):
        running = pool.submit(source.take, 1, 0)
        maker.wait(8)
        for number in (0, 1, 2):
            maker.complete(number)
        with maker.changed:
            assert maker.changed.wait_for(lambda: sorted(maker.under_way) == list(range(3, 11)), DEADLINE_S)
        for number in (10, 9, 8, 7):
            maker.complete(number)
        batch = running.result(DEADLINE_S)
    assert [group[0].group_number for group in batch.fresh] == [10, 9, 8, 7]
    assert [sample.group for sample in batch.sampled[0]] == [number // 2 for number in range(14)]
    found = {name: value for name, value in batch.metrics.items() if name.startswith("sampling/")}
    expected = {"sampling/num_prompts": 7, "sampling/rounds": 2, "sampling/equal_correct_frac": 3 / 7}
    assert found | expected == found


def make_named(name: str, rewards: list[float], version: int = 0) -> tuple[Sample, ...]:
    return make_group(Prompt(name, name, (1,), ""), (version,), rewards)


BY = SamplingBy.reward
EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


class Task:
    """Groups "0", "1", ... whose rewards are given; keeps the sizes of the requests."""

    def __init__(self, *rewards: list[float]):
        self.rewards, self.sizes = rewards, list[int]()

    def collect(self, num: int) -> list[tuple[Sample, ...]]:
        first, _ = sum(self.sizes), self.sizes.append(num)
        return [make_named(str(i), self.rewards[i % len(self.rewards)]) for i in range(first, first + num)]


def test_groups_of_equal_rewards_are_replaced_until_there_are_enough():
    task = Task(EASY, MIXED, HARD, MIXED)
    groups, metrics = collect_groups(task.collect, 4, DynamicSamplingConfig(True, BY, 10))
    assert [group[0].prompt.id for group in groups] == ["1", "3", "5", "7"]
    # Half of the first four carried signal: two more need four prompts.
    assert task.sizes == [4, 4]
    assert metrics == {
        "sampling/reward_mean": 0.5,
        "sampling/rounds": 2,
        "sampling/num_prompts": 8,
        "sampling/signal_frac": 0.5,
        "sampling/equal_correct_frac": 0.25,
        "sampling/equal_wrong_frac": 0.25,
    }


@pytest.mark.parametrize(
    ("rewards", "by", "text"),
    [
        ([EASY], BY, "max_rounds=3 rounds.*too easy"),
        ([HARD], BY, "max_rounds=3 rounds.*too hard"),
        # Only partial scores differ: the key that learns from them is named.
        (
            [[-0.1, -0.3], [-0.2, -0.2]],
            SamplingBy.correct,
            "no group with right and wrong responses.*0 are correct and 12 wrong; in 6 of them rewards differ.*by=rew",
        ),
    ],
)
def test_a_task_without_signal_is_an_error_that_says_whether_it_is_too_easy_or_too_hard(rewards, by, text):
    task = Task(*rewards)
    with pytest.raises(NoSignalError, match=text):
        collect_groups(task.collect, 4, DynamicSamplingConfig(True, by, 3))
    assert task.sizes == [4, 4, 4]


@given(st.lists(st.booleans(), min_size=30, max_size=30), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_groups_are_taken_until_there_are_enough_or_up_to_the_bound(signals, num, max_rounds, one_by_one):
    task = Task(*(MIXED if signal else HARD for signal in signals))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            taken, metrics = collect_groups(
                task.collect, num, DynamicSamplingConfig(True, BY, max_rounds), one_by_one=one_by_one
            )
        except NoSignalError:
            taken, metrics = [], {}
    num_asked = sum(task.sizes)
    assert max(task.sizes) <= num
    kept = [int(group[0].prompt.id) for group in taken if has_signal(group, BY)]
    assert kept == [i for i in range(num_asked) if signals[i % 30]][:num]
    assert bool(found) == (0 < len(kept) < num)
    if len(kept) < num:
        assert len(task.sizes) == max_rounds * (num if one_by_one else 1)
    elif one_by_one:
        assert num_asked == kept[-1] + 1
    if taken:
        assert len(taken) == num
        assert metrics["sampling/num_prompts"] == num_asked
        assert metrics["sampling/rounds"] == -(-num_asked // num) if one_by_one else len(task.sizes)


@pytest.mark.parametrize(
    ("correct", "rewards", "by_correct", "by_reward"),
    [
        ((False, False), (0.1, 0.3), False, True),  # All wrong, of different lengths
        ((True, True), (0.8, 1.0), False, True),
        ((False, True), (0.1, 1.0), True, True),
        ((False, True), (1.0, 1.0), False, False),  # What is equally paid teaches nothing.
        ((False, True), (1.0, 1.0 + 1e-9), False, False),
        ((False, False), (-1e6, -1e6 + 1e-4), False, False),
        ((False, True), (0.0, 1e-5), True, True),
    ],
)
def test_a_group_that_is_all_wrong_has_no_signal_whatever_else_its_rewards_pay(correct, rewards, by_correct, by_reward):
    scores = [Score(reward, right) for reward, right in zip(rewards, correct, strict=True)]
    # One without a reward does not count.
    scores.append(Score(9.0, True, failure="the reward raised"))
    group = tuple(
        replace(sample, score=score) for sample, score in zip(make_named("a", [0.0] * 3), scores, strict=True)
    )
    assert has_signal(group, SamplingBy.correct) is by_correct
    assert has_signal(group, SamplingBy.reward) is by_reward


def test_replay_draws_its_share_of_past_groups_without_repeats_and_forgets_the_oldest():
    buffer = ReplayBuffer(ReplayConfig(num_iterations=2, frac=0.5), seed=1)
    assert buffer.draw(8, iteration=1) == []
    for version in range(3):
        buffer.add([make_named(f"{version}-{i}", MIXED, version) for i in range(8)])
    drawn = buffer.draw(8, iteration=4)
    names = [group[0].prompt.id for group in drawn]
    assert len(set(names)) == 4
    assert {name[0] for name in names} <= {"1", "2"}
    assert buffer.draw(8, iteration=4) == drawn
    assert buffer.draw(8, iteration=5) != drawn
    # One group at least is fresh: 0.9 of 4 would be all.
    buffer = ReplayBuffer(ReplayConfig(num_iterations=1, frac=0.9), seed=1)
    buffer.add([make_named(f"{i}", MIXED) for i in range(8)])
    assert len(buffer.draw(4, iteration=2)) == 3


def test_replay_plans_how_many_fresh_groups_the_next_iterations_need():
    for config in (ReplayConfig(num_iterations=2, frac=0.5), ReplayConfig(num_iterations=1, frac=0.9), ReplayConfig()):
        buffer = ReplayBuffer(config, seed=1)
        planned, drawn = buffer.plan_fresh(6, 5), []
        for iteration in range(1, 6):
            assert buffer.plan_fresh(6, 1) == planned[iteration - 1 : iteration]
            drawn.append(6 - len(buffer.draw(6, iteration)))
            buffer.add([make_named(f"{iteration}-{i}", MIXED) for i in range(drawn[-1])])
        assert drawn == planned


def test_the_age_of_a_replayed_sample_is_the_number_of_iterations_since_it_was_sampled_for_one():
    buffer = ReplayBuffer(ReplayConfig(num_iterations=3, frac=0.9), seed=1)
    for number in range(4):
        # Generated ahead: the weights' version says nothing of the iteration.
        buffer.add([make_named(str(number), EASY, version=max(0, number - 1))])
    drawn = sorted(buffer.draw(100, iteration=5), key=lambda group: group[0].prompt.id)
    rollout = join_groups([make_named("fresh", EASY, version=3), *drawn], 4)
    assert build_tensors(rollout).ages.tolist() == [0, 0, 3, 3, 2, 2, 1, 1]


HALF, QUARTER, MOST = [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]


def test_groups_outside_of_the_range_are_dropped_and_counted_as_too_easy_or_too_hard():
    task = Task(QUARTER, HALF, MOST, EASY)
    sampling = DynamicSamplingConfig(True, BY, 10, low=0.25, high=0.75)
    groups, metrics = collect_groups(task.collect, 2, sampling)
    assert [group[0].prompt.id for group in groups] == ["1", "5"]
    assert metrics["sampling/num_prompts"] == 6
    found = {name: metrics[f"sampling/{name}_frac"] for name in ("signal", "too_hard", "too_easy", "equal_correct")}
    assert found == {"signal": 2 / 6, "too_hard": 2 / 6, "too_easy": 1 / 6, "equal_correct": 1 / 6}
    # By correctness the mean is the share of correct responses, whatever they are paid.
    group = make_named("0", [0.0, 0.1, 0.2, 9.0])
    assert [
        find_fault(group, replace(sampling, by=by, low=0.3, high=None))
        for by in (SamplingBy.correct, SamplingBy.reward)
    ] == ["too_hard", None]
    with pytest.raises(
        NoSignalError, match=r"0 are above algo\.dynamic_sampling\.high and 4 below low: the data are too h"
    ):
        collect_groups(Task(QUARTER).collect, 2, replace(sampling, max_rounds=2))


def test_with_a_mask_the_groups_that_are_not_kept_have_no_policy_loss_and_are_not_replayed(recwarn):
    mask = DynamicSamplingConfig(True, BY, 1, low=0.25, high=0.75, rest=SamplingRest.mask)
    groups, metrics = collect_groups(Task(QUARTER, HALF).collect, 4, mask)
    assert [[sample.masked for sample in group] for group in groups] == [[False] * 4] * 2 + [[True] * 4] * 2
    assert metrics["sampling/rounds"] == 1
    assert not recwarn.list
    tensors = build_tensors(join_groups(groups, 0))
    assert tensors.masked.tolist() == [False] * 8 + [True] * 8
    assert build_tensors(join_groups(groups[:2], 0)).masked is None
    mixed = [tuple(replace(s, prompt=replace(s.prompt, source="sums")) for s in group) for group in groups]
    assert compute_source_metrics(mixed, mixed)["source/sums/dropped_frac"] == 0.5
    # No group at all is kept: nothing is learned, and that is said.
    with pytest.warns(RuntimeWarning, match=r"found 0 of 4 groups .*; the rest has no policy loss"):
        groups, _ = collect_groups(Task(QUARTER).collect, 4, mask)
    assert all(sample.masked for group in groups for sample in group)
    collector = FakeCollector()
    collector.maker.rewards = lambda number: (0.0, float(number % 2))
    keys = ("algo.dynamic_sampling.max_rounds=1", "algo.dynamic_sampling.rest=mask")
    source = build_source(collector, *REPLAY, "algo.dynamic_sampling.enabled=true", *keys)
    batch = source.take(1, 0)
    assert 0 < sum(group[0].masked for group in batch.fresh) < len(batch.fresh)
    (kept,) = source.state().replay
    assert kept == [group for group in batch.fresh if not group[0].masked]
    # The log-probs of this iteration come later, into the list that a checkpoint holds.
    rows = torch.arange(8.0)[:, None].expand(8, 2)
    source.keep_logprobs(rows)
    numbers = [sample.first_old_logprobs[0] for group in kept for sample in group]
    assert numbers == [row for row, sample in enumerate(s for g in batch.fresh for s in g) if not sample.masked]


def test_a_prompt_without_a_signal_is_skipped_in_the_next_epochs_and_a_resumed_run_knows_it():
    def take(source: GroupSource, iterations: Sequence[int]) -> list[list[str]]:
        return [[group[0].prompt.id for group in source.take(i, 0).fresh] for i in iterations]

    def build() -> GroupSource:
        collector = FakeCollector()
        collector.maker.rewards = lambda number: (0.0, float(number % 4 > 0))
        return build_source(collector, *DYNAMIC, "algo.dynamic_sampling.skip_epochs=2")

    whole, first = build(), build()
    taken, begun = take(whole, range(1, 13)), take(first, range(1, 7))
    resumed = build()
    resumed.restore(first.state())
    assert begun + take(resumed, range(7, 13)) == taken
    asked = [int(name) for _, prompts in whole._collector.asked for name in prompts]
    epoch = len(PROMPTS) - sum(number % 4 == 0 for number in range(len(PROMPTS)))
    second = asked[len(PROMPTS) : len(PROMPTS) + epoch]
    assert sorted(second) == [number for number in range(len(PROMPTS)) if number % 4]


def test_prompts_whose_value_is_outside_of_the_range_are_passed_over_and_the_nearest_fill_the_rest():
    asked = []

    def find_values(prompts: Sequence[Prompt]) -> list[float]:
        asked.append(len(prompts))
        return [int(prompt.id) / 20 for prompt in prompts]

    def take(*keys: str) -> tuple[list[float], float]:
        asked.clear()
        source = build_source(FakeCollector(), "algo=vapo", "algo.dynamic_sampling.enabled=true", *keys)
        source._find_values = find_values
        batch = source.take(1, 0)
        return [int(group[0].prompt.id) / 20 for group in batch.fresh], batch.metrics["sampling/num_outside_value"]

    values, num_outside = take("algo.dynamic_sampling.value_low=0.25", "algo.dynamic_sampling.value_high=0.75")
    assert len(values) == 4
    assert all(0.25 < value < 0.75 for value in values)
    assert asked[0] == 4
    assert num_outside == sum(asked) - 4 > 0
    # In one epoch nothing is above 1; the four nearest of all that were drawn are taken.
    values, num_outside = take("algo.dynamic_sampling.value_low=1", "algo.dynamic_sampling.max_rounds=5")
    assert (asked, sorted(values), num_outside) == ([4] * 5, [0.8, 0.85, 0.9, 0.95], 16)


def fail(group: tuple[Sample, ...], *numbers: int) -> tuple[Sample, ...]:
    """The group without the rewards of these samples."""
    lost = Score(0.0, False, failure="TimeoutError")
    return tuple(replace(s, score=lost) if i in numbers else s for i, s in enumerate(group))


def test_groups_without_any_reward_are_neither_correct_nor_wrong():
    groups = [
        make_named("0", MIXED),
        fail(make_named("1", EASY), 0),
        fail(make_named("2", HARD), 1),
        fail(make_named("3", MIXED), 0, 1),
    ]
    _, metrics = collect_groups(lambda _: groups, 1, DynamicSamplingConfig(True, BY, 1))
    assert metrics["sampling/equal_correct_frac"] == metrics["sampling/equal_wrong_frac"] == 0.25
    # 0 and 1, one 1 and one 0 are left.
    assert metrics["sampling/reward_mean"] == 0.5
    text = "2 of 2 responses have no reward: 2 x TimeoutError.*fix the reward or the environment$"
    with pytest.raises(NoSignalError, match=text):
        collect_groups(lambda _: groups[3:], 1, DynamicSamplingConfig(True, BY, 1))
