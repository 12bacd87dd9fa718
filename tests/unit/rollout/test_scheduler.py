"""Groups begun ahead: order, bound, failures, and what a resumed run finds, over groups that the test completes."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from fakes.groups import DEADLINE_S, GroupMaker
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema.algo_choices import SamplingBy
from megarl.rollout.rollout_file import Journal
from megarl.rollout.source import CompleteGroup, GroupScheduler, GroupState, has_signal
from megarl.task.data import PromptSampler
from megarl.types import Prompt

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Each group is synced to disk, which takes longer than all else here"""
PROMPTS = [Prompt(str(i), str(i), (i + 1,), "") for i in range(5)]

KEEPS = partial(has_signal, by=SamplingBy.correct)


def draw(num: int) -> list[str]:
    return [prompt.id for prompt in PromptSampler(PROMPTS, 1).next_batch(num)]


@contextmanager
def scheduling(
    maker: GroupMaker,
    journal: Journal | None = None,
    sampler: PromptSampler | None = None,
    state: GroupState | None = None,
) -> Iterator[GroupScheduler]:
    sampler = sampler or PromptSampler(PROMPTS, 1)
    scheduler = GroupScheduler(maker.start, sampler, 2, journal, state or GroupState(), KEEPS)
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
    places: list[int] = field(default_factory=list)
    """Numbers of the groups in the order in which they were complete, as the journal has it"""
    taken: dict[int, list[int]] = field(default_factory=dict)
    """Iteration -> numbers of the groups that it has taken"""

    def train(self, start: int, sampler: dict, state: GroupState, choose, is_killed) -> tuple[int, dict, GroupState]:
        """From iteration `start` to the end or to the kill; iteration and state of the last checkpoint."""
        own, journal = PromptSampler(PROMPTS, 1), Journal(self.folder)
        own.restore(sampler)
        waiting = list(self.places[state.next_place :])
        with ThreadPoolExecutor(1) as pool, scheduling(self.maker, journal, own, state) as scheduler:
            for iteration in range(start, self.num_iterations + 1):
                self.maker.version = version = iteration - 1
                ahead = min(self.max_staleness, self.num_iterations - iteration)
                allowed, taken, num_wanted = self.num_groups * (1 + ahead), [], 0
                scheduler.allow(allowed)
                while num_wanted < self.num_groups:
                    taking = pool.submit(scheduler.take)
                    while not waiting:
                        self.maker.wait(allowed)
                        number = sorted(self.maker.under_way)[choose(len(self.maker.under_way))]
                        self.maker.complete(number)
                        self.places.append(number)
                        waiting.append(number)
                    found = taking.result(DEADLINE_S)
                    assert found.number == waiting.pop(0) == self.places[found.place]
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


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from([0, 2, 3]))
def test_whatever_is_complete_first_and_wherever_it_is_killed_each_group_is_taken_once_and_in_the_same_order(
    data: st.DataObject, num_groups: int, max_staleness: int, num_iterations: int, every: int
) -> None:
    """every: so many groups have equal rewards and are replaced, 0: none."""
    maker = GroupMaker(lambda number: (1.0, 1.0) if every and number % every == 0 else (0.0, 1.0))
    kills = data.draw(st.integers(0, 3))

    def choose(num: int) -> int:
        return data.draw(st.integers(0, num - 1))

    def is_killed() -> bool:
        return kills > 0 and data.draw(st.booleans())

    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        run = Run(Path(folder), num_groups, max_staleness, num_iterations, maker)
        start, sampler, state = 1, PromptSampler(PROMPTS, 1).state(), GroupState()
        while start <= num_iterations:
            start, sampler, state = run.train(start, sampler, state, choose, is_killed)
            kills -= 1
    taken = [number for iteration in range(1, num_iterations + 1) for number in run.taken[iteration]]
    assert len(set(taken)) == len(taken)
    if not every:
        # Nothing more was begun than the iterations need, and nothing is lost.
        assert sorted(taken) == list(range(num_groups * num_iterations)) == sorted(set(maker.begun))


def take_after(scheduler: GroupScheduler, maker: GroupMaker, num_under_way: int, *complete: int) -> CompleteGroup:
    """What is taken where these groups are complete in this order, once so many are under way."""
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(scheduler.take)
        try:
            maker.wait(num_under_way)
            for number in complete:
                maker.complete(number)
            return taking.result(DEADLINE_S)
        except BaseException:
            scheduler.close(DEADLINE_S)
            raise


def test_a_slow_group_delays_nobody_and_is_not_lost():
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        scheduler.allow(3)
        assert take_after(scheduler, maker, 3, 2, 1).number == 2
        assert scheduler.take().number == 1
        _, state = scheduler.state()
        assert state == GroupState(first=0, taken=(1, 2), next_place=2)
        scheduler.allow(3)
        assert take_after(scheduler, maker, 3, 0).number == 0
        sampler, state = scheduler.state()
        assert state == GroupState(first=3, taken=(), next_place=3)
    resumed = PromptSampler(PROMPTS, 1)
    resumed.restore(sampler)
    assert resumed.next_batch(1)[0].id == draw(4)[-1]


def test_what_fails_is_raised_once_and_nothing_is_begun_until_the_next_call():
    maker = GroupMaker()
    with ThreadPoolExecutor(1) as pool, scheduling(maker) as scheduler:
        scheduler.allow(2)
        taking = pool.submit(scheduler.take)
        maker.wait(2)
        maker.fail(0, RuntimeError("the server is down"))
        with pytest.raises(RuntimeError, match="the server is down"):
            taking.result(DEADLINE_S)
        assert maker.begun == [0, 1]
        assert take_after(scheduler, maker, 2, 0).number == 0
        assert maker.begun == [0, 1, 0]


def test_after_servers_were_restarted_all_that_was_under_way_is_begun_again_under_the_same_numbers():
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        scheduler.allow(4)
        assert take_after(scheduler, maker, 4, 1).number == 1
        scheduler.allow(3)
        broken_off = [group.future for group in maker.under_way.values()]
        scheduler.begin_again()
        assert len(broken_off) == 3
        assert all(future.cancelled() for future in broken_off)
        assert len(maker.begun) == 4
        assert take_after(scheduler, maker, 3, 3).number == 3
        assert sorted(maker.begun) == [0, 0, 1, 2, 2, 3, 3]


def test_a_failure_that_was_noted_before_servers_were_restarted_is_forgotten():
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        scheduler.allow(2)
        assert take_after(scheduler, maker, 2, 0).number == 0
        scheduler.allow(2)
        maker.wait(2)
        maker.fail(1, RuntimeError("the server is down"))
        while not scheduler._is_held:
            pass
        scheduler.begin_again()
        assert take_after(scheduler, maker, 2, 1).number == 1


@pytest.mark.parametrize("error", [RuntimeError("x"), CancelledError(), ValueError("a reward")])
def test_what_cannot_begin_is_raised_and_begun_again(error):
    maker, errors = GroupMaker(), [error]

    def start(prompt, key):
        if errors:
            raise errors.pop()
        return maker.start(prompt, key)

    scheduler = GroupScheduler(start, PromptSampler(PROMPTS, 1), 2, None, GroupState())
    scheduler.allow(1)
    with pytest.raises(type(error)):
        scheduler.take()
    assert take_after(scheduler, maker, 1, 0).number == 0
    assert scheduler.close(DEADLINE_S) == 0


def test_a_group_of_a_server_without_the_trainers_weights_is_an_error_and_not_journaled(tmp_path):
    maker, journal = GroupMaker(version=-1), Journal(tmp_path)
    with scheduling(maker, journal) as scheduler:
        scheduler.allow(1)
        with pytest.raises(RuntimeError, match="a server without the trainer's weights"):
            take_after(scheduler, maker, 1, 0)
    assert journal.list_groups(0) == []


def test_closing_cancels_what_is_under_way_and_counts_what_is_not_taken():
    maker = GroupMaker()
    with scheduling(maker) as scheduler:
        scheduler.allow(4)
        assert take_after(scheduler, maker, 4, 0, 2).number == 0
        futures = [group.future for group in maker.under_way.values()]
        assert scheduler.close(DEADLINE_S) == 3
        assert all(future.cancelled() for future in futures)


def test_a_file_of_the_journal_that_cannot_be_read_costs_its_group_and_no_other(tmp_path):
    maker, journal = GroupMaker(), Journal(tmp_path)
    with scheduling(maker, journal) as scheduler:
        scheduler.allow(3)
        assert take_after(scheduler, maker, 3, 1, 2, 0).number == 1
        assert [scheduler.take().number for _ in range(2)] == [2, 0]
    assert journal.list_groups(0) == [(0, 1), (1, 2), (2, 0)]
    (tmp_path / "group-1-2.jsonl").write_text("{")
    with scheduling(maker, journal) as scheduler:
        scheduler.allow(3)
        assert scheduler.take().number == 1
        with pytest.warns(RuntimeWarning, match="sampled again"):
            assert scheduler.take().number == 0
        assert take_after(scheduler, maker, 1, 2).number == 2
        assert journal.list_groups(0) == [(0, 1), (2, 0), (3, 2)]
    # What is resumed from there has them in this order.
    with scheduling(maker, journal) as scheduler:
        assert [scheduler.take().number for _ in range(3)] == [1, 0, 2]


def test_a_disk_that_takes_no_journal_is_an_error_where_groups_are_taken(tmp_path):
    maker = GroupMaker()
    (tmp_path / "journal").write_text("not a folder")
    with scheduling(maker, Journal(tmp_path / "journal")) as scheduler:
        scheduler.allow(1)
        with pytest.raises(OSError, match="journal"):
            take_after(scheduler, maker, 1, 0)


def test_groups_in_the_order_in_which_they_were_begun_are_never_older_than_allowed():
    """The oldest token too, where nobody is overtaken: AReaL 2505.24298, equation 3."""
    num_groups, max_staleness, maker = 3, 2, GroupMaker()
    num_complete, oldest = 0, []
    with scheduling(maker) as scheduler:
        for version in range(8):
            maker.version = version
            num_begun = num_groups * (version + max_staleness + 1)
            scheduler.allow(num_begun - num_groups * version)
            for number in range(num_groups * version, num_groups * (version + 1)):
                # Every other time all that is under way is complete before the next one is taken.
                stop = num_begun if version % 2 else max(num_complete, number + 1)
                found = take_after(scheduler, maker, num_begun - num_complete, *range(num_complete, stop))
                num_complete = stop
                assert found.number == number
                oldest.append(version - found.samples[0].response.weight_versions.versions[0])
    assert max(oldest) == max_staleness
