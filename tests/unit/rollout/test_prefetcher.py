"""The thread that works ahead: order, bound, errors and end."""

import threading

import pytest

from megarl.rollout.prefetcher import Prefetcher

DEADLINE_S = 20.0


class Maker:
    """Makes k out of k; says what has been begun, and waits for `release` at `holds_at`."""

    def __init__(self, holds_at=None):
        self.holds_at = holds_at
        self.begun = []
        self.changed = threading.Condition()
        self.release = threading.Event()

    def make(self, number):
        with self.changed:
            self.begun.append(number)
            self.changed.notify_all()
        if number == self.holds_at:
            assert self.release.wait(DEADLINE_S)
        return number

    def wait_begun(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.begun, DEADLINE_S)


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_items_come_in_order_and_none_is_begun_before_its_time(num_ahead):
    maker = Maker()
    ahead = Prefetcher(maker.make, num_ahead=num_ahead, last=9, cancel=lambda: None)
    for number in range(1, 10):
        assert ahead.take(number) == number
        maker.wait_begun(min(9, number + num_ahead))
        assert maker.begun == list(range(1, min(9, number + num_ahead) + 1))
    ahead.close(DEADLINE_S)


def test_the_first_item_asked_for_is_where_it_starts():
    maker = Maker()
    ahead = Prefetcher(maker.make, num_ahead=1, last=6, cancel=lambda: None)
    assert ahead.take(5) == 5
    with pytest.raises(ValueError, match=r"item 5 was asked for.*6 is the next"):
        ahead.take(5)
    assert ahead.take(6) == 6
    ahead.close(DEADLINE_S)
    assert maker.begun == [5, 6]


def test_an_error_made_ahead_is_raised_where_its_item_is_asked_for():
    def make(number):
        if number == 2:
            raise LookupError("no such prompt")
        return number

    ahead = Prefetcher(make, num_ahead=3, last=9, cancel=lambda: None)
    assert ahead.take(1) == 1
    with pytest.raises(LookupError, match="no such prompt"):
        ahead.take(2)
    ahead.close(DEADLINE_S)


def test_closing_breaks_off_what_is_under_way_and_ends_the_thread():
    maker = Maker(holds_at=2)
    ahead = Prefetcher(maker.make, num_ahead=2, last=9, cancel=maker.release.set)
    assert ahead.take(1) == 1
    maker.wait_begun(2)
    ahead.close(DEADLINE_S)
    assert maker.begun == [1, 2]
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())


def test_closing_wakes_a_thread_that_waits_for_its_turn():
    maker = Maker()
    ahead = Prefetcher(maker.make, num_ahead=1, last=9, cancel=lambda: None)
    assert ahead.take(1) == 1
    maker.wait_begun(2)
    ahead.close(DEADLINE_S)
    assert maker.begun == [1, 2]
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())
