"""How episodes' turns reach the servers: in waves that do not depend on timing, or each by itself."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.interfaces import TurnRequest
from megarl.rollout.collector import Independent, Lockstep
from megarl.types import FinishReason, Response


def make_turn(token: int = 5) -> Response:
    return Response((token,), "x", (-0.5,), (True,), (0,), FinishReason.stop)


def make_request(number: int, urgent: bool = False) -> TurnRequest:
    return TurnRequest(np.array([number], dtype=np.int32), 3, 1.0, 0, str(number), urgent)


class Engine:
    """Notes the names of each batch, and hands its turns out in the order of `delays`."""

    num_servers, num_slots, depends_on_batch = 1, 4, True

    def __init__(self, delays=(0.0,), error: BaseException | None = None):
        self.batches: list[list[str | None]] = []
        self.delays, self.error = delays, error
        self.num_running = self.most_running = 0

    async def generate_turns(self, requests, take) -> None:
        self.batches.append([request.name for request in requests])
        if self.error:
            raise self.error
        self.num_running += len(requests)
        self.most_running = max(self.most_running, self.num_running)
        order = sorted(range(len(requests)), key=lambda i: self.delays[i % len(self.delays)])
        for index in order:
            await asyncio.sleep(0)
            take(index, make_turn())
        self.num_running -= len(requests)


def run_episodes(engine: Engine, num_turns: list[int], waits: list[int]) -> list[list[str | None]]:
    """The batches of episodes of so many turns, which yield to the others so often before each."""

    async def run() -> None:
        sender = Lockstep(engine, len(num_turns))

        async def episode(number: int) -> None:
            for turn in range(num_turns[number]):
                for _ in range(waits[(number + turn) % len(waits)]):
                    await asyncio.sleep(0)
                await sender.send(number, make_request(100 * turn + number))
            sender.leave(number)

        await asyncio.gather(*map(episode, range(len(num_turns))))
        await sender.close()

    asyncio.run(run())
    return engine.batches


@given(
    num_turns=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    delays=st.lists(st.floats(0, 1), min_size=1, max_size=6),
)
def test_waves_are_the_same_whatever_the_timing(num_turns, waits, delays):
    found = run_episodes(Engine(delays), num_turns, waits)
    waves = [[str(100 * t + i) for i, n in enumerate(num_turns) if n > t] for t in range(max(num_turns))]
    assert found == waves


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_what_a_wave_raises_is_raised_in_all_of_its_episodes(error):
    async def run() -> list[BaseException | Response]:
        sender = Lockstep(Engine(error=error), 3)
        sends = (sender.send(number, make_request(number)) for number in range(3))
        return await asyncio.gather(*sends, return_exceptions=True)

    if isinstance(error, Exception):
        assert asyncio.run(run()) == [error] * 3
    else:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run())


def test_closing_breaks_off_the_wave_under_way():
    async def run() -> bool:
        engine = Engine()

        async def hang(_requests, _take) -> None:
            await asyncio.sleep(60)

        engine.generate_turns = hang
        sender = Lockstep(engine, 1)
        task = asyncio.ensure_future(sender.send(0, make_request(0)))
        await asyncio.sleep(0)
        await sender.close()
        await asyncio.wait([task], timeout=5)
        return task.cancelled()

    assert asyncio.run(run())


def test_of_the_turns_that_wait_those_of_the_oldest_episodes_are_sent_first_and_no_slot_is_lost():
    async def run() -> list[int]:
        engine, sent, gates = Engine(), [], asyncio.Event()

        async def note(requests, take) -> None:
            sent.append(int(requests[0].name))
            await gates.wait()
            take(0, make_turn())

        engine.generate_turns = note
        sender = Independent(engine)
        episodes = [*range(100, 106), 9, 8, 3, 7, 5]
        tasks = [asyncio.ensure_future(sender.send(n, make_request(n))) for n in episodes]
        await asyncio.sleep(0)
        tasks[episodes.index(8)].cancel()
        gates.set()
        # One is broken off in the moment in which it is given its slot.
        tasks[0].add_done_callback(lambda _task: tasks[episodes.index(5)].cancel())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sender._num_free == 6
        return sent

    found = asyncio.run(run())
    assert found[:6] == list(range(100, 106))
    assert [n for n in found[6:] if n != 5] == [3, 7, 9]


def test_single_requests_are_as_many_at_a_time_as_keep_the_servers_full_and_urgent_ones_do_not_wait():
    async def run() -> Engine:
        engine = Engine()
        sender = Independent(engine)
        await asyncio.gather(*(sender.send(number, make_request(number)) for number in range(40)))
        assert engine.most_running == 6  # 4 slots, a quarter more, and one
        await asyncio.gather(*(sender.send(number, make_request(number, urgent=True)) for number in range(40)))
        return engine

    engine = asyncio.run(run())
    assert engine.most_running == 40
    assert all(len(batch) == 1 for batch in engine.batches)
