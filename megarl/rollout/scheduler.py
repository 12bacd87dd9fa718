"""Groups of responses begun ahead of their use, many at a time, and taken in the order in which they are complete."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from megarl.data.sampler import PromptSampler
from megarl.rollout.collector import check_published
from megarl.rollout.dynamic_sampling import Group
from megarl.rollout.journal import Journal
from megarl.types import Prompt

POLL_S = 0.2


@dataclass(frozen=True)
class GroupState:
    """Which groups have been taken. A group has a number, from 0 in the order of the prompts, and once it is complete
    a place, from 0 in the order in which groups are complete.
    """

    first: int = 0
    """Number of the oldest group that has not been taken"""
    taken: tuple[int, ...] = ()
    """Numbers of the groups beyond it that have been"""
    next_place: int = 0
    """Place of the next group to be taken"""


@dataclass(frozen=True)
class CompleteGroup:
    """A scored group, whose samples have its number."""

    place: int
    number: int
    samples: Group


@dataclass(frozen=True)
class _Drawn:
    prompt: Prompt
    before: Mapping[str, int | str]
    """State of the sampler before this prompt"""


@dataclass(frozen=True)
class _Waiting:
    place: int
    number: int
    samples: Group | None
    """None: it is in the journal, from an earlier start of the run"""
    is_wanted: bool


class GroupScheduler:
    """Keeps as many groups under way as it is allowed to; a thread begins them and journals each that is complete.

    At most as many groups as `allow` says are under way or wait to be taken. Nobody waits for a slow group: the next
    one to be taken is whichever is complete first. Resumed with its journal and a `GroupState`, it gives out the
    groups that were complete in the same order, and begins the others again under the same numbers.
    """

    def __init__(
        self,
        start: Callable[[Prompt, str], "Future[Group]"],
        sampler: PromptSampler[Prompt],
        num_responses: int,
        journal: Journal | None,
        state: GroupState,
        is_wanted: Callable[[Group], bool] = lambda _group: True,
    ):
        """Arguments that need a word:

        start: begins a group under the key that seeds it and returns at once. sampler: stands where `state` says; its
        prompts are drawn by the scheduler's thread. is_wanted: False for a complete group in whose place a further one
        may begin at once.
        """
        self._start, self._sampler, self._num_responses, self._journal = start, sampler, num_responses, journal
        self._is_wanted = is_wanted
        self._changed = threading.Condition()
        self._allowed = 0
        self._next_number, self._next_place = state.first, state.next_place
        self._taken = set(state.taken)
        """Numbers of the groups taken, from that of the oldest that is not taken on"""
        self._drawn: dict[int, _Drawn] = {}
        """The groups not taken, oldest first"""
        self._again: set[int] = set()
        """Those that were begun before, or by an earlier start of the run, and are not under way"""
        self._under_way: dict[int, Future[Group] | None] = {}
        """None: it is just being begun"""
        self._ended: deque[tuple[int, Future[Group]]] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._num_places = state.next_place
        self._error: BaseException | None = None
        self._is_held = True
        """Whether nothing is begun before `take` is called again"""
        self._is_closed = False
        self._find_complete()
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
        while True:
            found = self._wait()
            samples = found.samples or self._load(found)
            with self._changed:
                # `_wait` has counted it off before anybody knew what it is.
                self._allowed += found.is_wanted and (samples is None or not self._is_wanted(samples))
                self._changed.notify_all()
                if samples is None:
                    self._again.add(found.number)
                    continue
                self._next_place = found.place + 1
                del self._drawn[found.number]
                self._taken.add(found.number)
                oldest = next(iter(self._drawn), self._next_number)
                self._taken = {number for number in self._taken if number >= oldest}
            return CompleteGroup(found.place, found.number, samples)

    def begin_again(self) -> None:
        """Break off all that is under way, after servers were restarted; the next call of `take` begins it again."""
        with self._changed:
            self._is_held, self._error = True, None
            broken_off = [future for future in self._under_way.values() if future is not None]
            self._again |= self._under_way.keys()
            self._under_way.clear()
        for future in broken_off:
            future.cancel()

    def state(self) -> tuple[Mapping[str, int | str], GroupState]:
        """The sampler's state before the oldest group that has not been taken, and which have been."""
        with self._changed:
            oldest = next(iter(self._drawn), None)
            sampler = self._sampler.state() if oldest is None else self._drawn[oldest].before
            first = self._next_number if oldest is None else oldest
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

    def _find_complete(self) -> None:
        """What the journal has of an earlier start of the run; groups that it has not are begun again."""
        for place, number in self._journal.list_groups(self._next_place) if self._journal else ():
            while self._next_number <= number:
                self._again.add(self._draw())
            self._again -= self._taken
            if number in self._again:
                self._again.remove(number)
                self._waiting.append(_Waiting(place, number, None, True))
            self._num_places = place + 1

    def _load(self, found: _Waiting) -> Group | None:
        """A group from the journal; None where it cannot be used, and is begun again."""
        assert self._journal is not None
        prompt = self._drawn[found.number].prompt
        samples = self._journal.load_group(found.place, found.number, prompt, self._num_responses)
        return None if samples is None else _number(samples, found.number)

    def _wait(self) -> _Waiting:
        with self._changed:
            if self._error is None:
                self._is_held = False
                self._changed.notify_all()
            while self._error is None:
                if self._waiting:
                    found = self._waiting.popleft()
                    self._allowed -= found.is_wanted
                    return found
                self._changed.wait(POLL_S)
                if not self._thread.is_alive() and self._error is None:
                    raise RuntimeError("the thread that begins groups has ended")
            error, self._error = self._error, None
        raise error

    def _draw(self) -> int:
        """Draw the next prompt; its number."""
        number, before = self._next_number, self._sampler.state()
        (prompt,) = self._sampler.next_batch(1)
        self._next_number += 1
        if number not in self._taken:
            self._drawn[number] = _Drawn(prompt, before)
        return number

    def _may_begin(self) -> bool:
        num_ahead = len(self._under_way) + sum(each.is_wanted for each in self._waiting)
        return not self._is_held and self._error is None and num_ahead < self._allowed

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._ended or self._may_begin())
                    if self._is_closed:
                        return
                    ended = self._ended.popleft() if self._ended else None
                if ended is not None:
                    self._settle(*ended)
                else:
                    self._begin_next()
        except BaseException as error:  # Raised in the thread that takes the groups.
            self._fail(error)

    def _begin_next(self) -> None:
        with self._changed:
            if self._is_closed or not self._may_begin():
                return
            number = min(self._again, default=None)
            while number is None or number in self._taken:
                number = self._draw()
            self._again.discard(number)
            self._under_way[number] = None
            prompt = self._drawn[number].prompt
        try:
            future = self._start(prompt, f"group-{number}")
        except Exception as error:
            self._fail(error, number)
            return
        with self._changed:
            is_broken_off = number not in self._under_way
            if not is_broken_off:
                self._under_way[number] = future
        if is_broken_off:
            future.cancel()
        future.add_done_callback(lambda future: self._note_end(number, future))

    def _note_end(self, number: int, future: "Future[Group]") -> None:
        with self._changed:
            self._ended.append((number, future))
            self._changed.notify_all()

    def _settle(self, number: int, future: "Future[Group]") -> None:
        """Journal a group that has ended, or note its failure; nothing where it was broken off."""
        with self._changed:
            if self._under_way.get(number) is not future:
                return
        try:
            samples = _number(future.result(), number)
            check_published(samples)
        except Exception as error:  # CancelledError too: the engine's calls were cancelled.
            self._fail(error, number)
            return
        place = self._num_places
        if self._journal is not None:
            self._journal.save_group(place, number, samples)
        with self._changed:
            self._num_places += 1
            self._under_way.pop(number, None)
            self._again.discard(number)
            self._waiting.append(_Waiting(place, number, samples, self._is_wanted(samples)))
            self._changed.notify_all()

    def _fail(self, error: BaseException, number: int | None = None) -> None:
        """Have `take` raise this; number: of the group that has failed, which is begun again after that."""
        with self._changed:
            if number in self._under_way:
                del self._under_way[number]
                self._again.add(number)
            self._is_held, self._error = True, self._error or error
            self._changed.notify_all()


def _number(samples: Group, number: int) -> Group:
    return tuple(replace(sample, group_number=number) for sample in samples)
