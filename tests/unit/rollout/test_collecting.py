"""The collector over scripted engines: how turns reach the servers, what is repeated, when rewards are computed."""

import asyncio
import contextlib
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from generation import build_collector
from hypothesis import given
from hypothesis import strategies as st

from megarl.cpu.process import Lockstep
from megarl.interfaces import Sampling, Truncation, TurnRequest
from megarl.rollout import collector as collector_module
from megarl.rollout.client import ConnectionLostError, OnEventLoop, call_in_thread
from megarl.rollout.collector import EvalSet, Independent
from megarl.rollout.conversation import Episode
from megarl.rollout.rollout_file import Journal
from megarl.task.reward import AsyncReward
from megarl.task.scorer import Scorer
from megarl.types import FinishReason, Prompt, Response, Score, Turn


def make_turn(token: int = 5) -> Response:
    return Response((token,), "x", (-0.5,), (True,), (0,), FinishReason.stop)


def make_request(number: int, urgent: bool = False) -> TurnRequest:
    return TurnRequest(np.array([number], dtype=np.int32), 3, Sampling(1.0, urgent), 0, str(number))


class BatchEngine:
    """Notes the names of each batch, and hands its turns out in the order of `delays`; what `act` raises is raised."""

    num_servers, num_slots, depends_on_batch = 1, 4, True

    def __init__(self, delays=(0.0,), act=lambda: asyncio.sleep(0)):
        self.batches: list[list[str | None]] = []
        self.delays, self.act = delays, act
        self.num_running = self.most_running = 0

    async def generate_turns(self, requests, take) -> None:
        self.batches.append([request.name for request in requests])
        self.num_running += len(requests)
        self.most_running = max(self.most_running, self.num_running)
        for index in sorted(range(len(requests)), key=lambda i: self.delays[i % len(self.delays)]):
            await self.act()
            take(index, make_turn())
        self.num_running -= len(requests)


def run_episodes(engine: BatchEngine, num_turns: list[int], waits: list[int]) -> list[list[str | None]]:
    """The batches of episodes of so many turns, which yield to the others so often before each."""

    async def run() -> None:
        sender = Lockstep(engine.generate_turns, len(num_turns))

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
    found = run_episodes(BatchEngine(delays), num_turns, waits)
    waves = [[str(100 * t + i) for i, n in enumerate(num_turns) if n > t] for t in range(max(num_turns))]
    assert found == waves


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_what_a_wave_raises_is_raised_in_all_of_its_episodes(error):
    async def fail() -> None:
        raise error

    async def run() -> list[BaseException | Response]:
        sender = Lockstep(BatchEngine(act=fail).generate_turns, 3)
        sends = (sender.send(number, make_request(number)) for number in range(3))
        return await asyncio.gather(*sends, return_exceptions=True)

    with contextlib.nullcontext() if isinstance(error, Exception) else pytest.raises(KeyboardInterrupt):
        assert asyncio.run(run()) == [error] * 3


def test_closing_breaks_off_the_wave_under_way():
    async def run() -> bool:
        sender = Lockstep(BatchEngine(act=lambda: asyncio.sleep(60)).generate_turns, 1)
        task = asyncio.ensure_future(sender.send(0, make_request(0)))
        await asyncio.sleep(0)
        await sender.close()
        await asyncio.wait([task], timeout=5)
        return task.cancelled()

    assert asyncio.run(run())


def test_of_the_turns_that_wait_those_of_the_oldest_episodes_are_sent_first_and_no_slot_is_lost():
    async def run() -> list[int]:
        gates = asyncio.Event()
        engine = BatchEngine(act=gates.wait)
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
        return [int(name) for batch in engine.batches for name in batch]

    found = asyncio.run(run())
    assert found[:6] == list(range(100, 106))
    assert [n for n in found[6:] if n != 5] == [3, 7, 9]


def test_single_requests_are_as_many_at_a_time_as_keep_the_servers_full_and_urgent_ones_do_not_wait():
    async def run() -> BatchEngine:
        engine = BatchEngine()
        sender = Independent(engine)
        await asyncio.gather(*(sender.send(number, make_request(number)) for number in range(40)))
        assert engine.most_running == 6  # 4 slots, a quarter more, and one
        await asyncio.gather(*(sender.send(number, make_request(number, urgent=True)) for number in range(40)))
        return engine

    engine = asyncio.run(run())
    assert engine.most_running == 40
    assert all(len(batch) == 1 for batch in engine.batches)


class Unequal(BatchEngine):
    """Servers of which one takes ten times as long for a turn; notes the turns of each, by episode."""

    num_servers, num_slots = 3, 12

    def __init__(self):
        super().__init__()
        self.took: list[tuple[int, int]] = []
        self.most = [0, 0, 0]
        self.now = [0, 0, 0]

    async def generate_turns(self, requests, take) -> None:
        (request,) = requests
        self.took.append((int(request.name), request.server))
        self.now[request.server] += 1
        self.most = [max(pair) for pair in zip(self.most, self.now, strict=True)]
        for _ in range(100 if request.server == 0 else 10):
            await asyncio.sleep(0)
        self.now[request.server] -= 1
        take(0, make_turn())


def test_turns_go_to_the_server_that_is_free_and_those_of_an_episode_and_mostly_of_a_group_to_one():
    async def run(num_groups: int, size: int) -> Unequal:
        engine = Unequal()
        sender = Independent(engine)
        sender.admit(0, num_groups * size, size)

        async def episode(number: int) -> None:
            for _ in range(2):
                await sender.send(number, make_request(number))
            sender.leave(number)

        await asyncio.gather(*map(episode, range(num_groups * size)))
        assert sender._running == [0, 0, 0]
        assert not sender._groups
        return engine

    engine = asyncio.run(run(num_groups=40, size=4))
    servers = {number: {server for other, server in engine.took if other == number} for number in range(160)}
    assert all(len(each) == 1 for each in servers.values())
    counts = [sum(server == n for _, server in engine.took) for n in range(3)]
    # Bound by count before any was sent, the slow one would have had a third.
    assert counts[0] < 320 / 6
    assert max(engine.most) <= 8  # 16 turns at a time for 12 slots
    together = [set().union(*(servers[4 * group + k] for k in range(4))) for group in range(40)]
    assert sum(len(each) == 1 for each in together) > 20


PROMPTS = [Prompt(name, name, (number + 3,), "") for number, name in enumerate("abcd")]
HANGING = Prompt("h", "", (99,), "")


class Engine(OnEventLoop):
    """Each turn repeats the last token before it. Turns of a wave come `pause_s` apart."""

    num_slots, depends_on_batch = 8, True

    def __init__(self, num_servers: int = 1, num_losses: int = 0, pause_s: float = 0.0):
        super().__init__()
        self.num_servers, self.num_losses, self.pause_s = num_servers, num_losses, pause_s
        self.waves: list[list[tuple[str | None, int]]] = []
        self.truncations: list[Truncation | None] = []
        self.num_flushes = 0
        self.num_given = 0
        self.hanging = threading.Event()

    async def generate_turns(self, requests, take):
        self.waves.append([(request.name, request.server) for request in requests])
        self.truncations += [request.sampling.truncation for request in requests]
        if any(request.token_ids[0] == 99 for request in requests):
            self.hanging.set()
            await asyncio.sleep(60)
        for index, request in enumerate(requests):
            if self.num_losses and index == len(requests) - 1:
                self.num_losses -= 1
                raise ConnectionLostError("gone")
            await asyncio.sleep(self.pause_s)
            self.num_given += 1
            turn = Turn(0, 1, "x", 0.25)
            answer = request.token_ids[-1:], "x", (-0.5,), (True,), (0,), FinishReason.stop
            take(index, Response(*answer, turns=[turn]))

    async def drop_cached_prefixes(self):
        self.num_flushes += 1


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(collector_module, "ATTEMPT_PAUSE_S", 0.0)


def test_groups_are_contiguous_in_the_prompts_order_and_divided_among_the_servers():
    engine = Engine(num_servers=2)
    samples = build_collector(engine).sample(PROMPTS[:3], 2, key="k")
    assert [sample.group for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.prompt.id for sample in samples] == ["a", "a", "b", "b", "c", "c"]
    assert [sample.response.token_ids.tolist() for sample in samples] == [[3], [3], [4], [4], [5], [5]]
    assert engine.waves == [[(f"k/{row}/{k}", row % 2) for row in range(3) for k in range(2)]]
    assert engine.num_flushes == 1
    engine.close()


def test_a_call_whose_connection_is_lost_is_repeated_as_a_whole():
    engine = Engine(num_losses=2)
    samples = build_collector(engine).sample(PROMPTS, 1, key="k")
    assert len(samples) == 4
    assert engine.waves == [engine.waves[0]] * 3
    assert engine.num_flushes == 3
    with pytest.raises(ConnectionLostError):
        build_collector(Engine(num_losses=3)).sample(PROMPTS, 1, key="k")


def test_rewards_are_computed_while_others_generate_and_have_those_of_the_turns():
    engine, given = Engine(pause_s=0.02), []

    def reward(_prompt, _response):
        given.append(engine.num_given)
        return Score(1.0, True)

    samples = build_collector(engine, scorer=Scorer(reward)).sample(PROMPTS, 2, key="k")
    assert given == list(range(1, 9))
    # The verifier's and that of the turn.
    assert {(sample.score.reward, sample.score.correct) for sample in samples} == {(1.25, True)}
    engine.close()


class CountingReward(AsyncReward):
    """The number of responses in the group, as the score of each."""

    sees_group = True

    def __init__(self):
        self.asked = []

    async def score_group(self, prompt, responses):
        self.asked.append((prompt.id, len(responses)))
        return [Score(float(len(responses) + 10 * row), True) for row in range(len(responses))]


def test_a_reward_that_sees_the_group_gets_it_whole_as_soon_as_its_last_episode_has_ended():
    for in_lockstep in (True, False):
        engine, reward = Engine(), CountingReward()
        collector = build_collector(engine, scorer=Scorer(reward), in_lockstep=in_lockstep)
        samples = collector.sample(PROMPTS[:2], 3, key="k")
        assert sorted(reward.asked) == [("a", 3), ("b", 3)]
        # With the turn's own reward.
        assert [sample.score.reward for sample in samples] == [3.25, 13.25, 23.25] * 2
        engine.close()


def test_an_episode_that_has_failed_is_not_in_the_group_that_the_reward_sees():
    async def run() -> list[Score]:
        response = Response((1,), "x", (0.0,), (True,), (0,), FinishReason.stop)
        episodes = [Episode(PROMPTS[0], response, failure) for failure in (None, "it broke", None)]
        meeting = collector_module.Meeting(Scorer(CountingReward()), 3)
        order = (2, 0, 1)
        found = await asyncio.gather(*(meeting.score(n, episodes[n]) for n in order))
        return [found[order.index(n)] for n in range(3)]

    scores = asyncio.run(run())
    assert [(score.reward, score.failure) for score in scores] == [(2.0, None), (0.0, "it broke"), (12.0, None)]


def test_a_group_is_begun_without_waiting_and_goes_to_the_server_with_the_least_under_way():
    engine = Engine(num_servers=3)
    collector = build_collector(engine, in_lockstep=False)
    hanging = collector.start_group(HANGING, 2, key="group-0")
    assert engine.hanging.wait(10)
    futures = [collector.start_group(prompt, 1, key=f"group-{n}") for n, prompt in enumerate(PROMPTS, start=1)]
    assert [future.result(10)[0].prompt.id for future in futures] == ["a", "b", "c", "d"]
    servers = {name: server for wave in engine.waves for name, server in wave}
    assert servers["group-0/0/0"] == servers["group-0/0/1"] == 0
    assert 0 not in {server for name, server in servers.items() if not name.startswith("group-0")}
    hanging.cancel()
    with pytest.raises(CancelledError):
        hanging.result(10)
    engine.close()


def test_work_that_is_just_being_begun_is_cancelled_too(monkeypatch):
    engine = Engine()
    cancelling = threading.Thread(target=engine.cancel)
    begin = asyncio.run_coroutine_threadsafe

    def begin_while_another_thread_cancels(work, loop):
        future = begin(work, loop)
        cancelling.start()
        cancelling.join(0.2)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_while_another_thread_cancels)
    future = engine.start(asyncio.sleep(60))
    monkeypatch.undo()
    with pytest.raises(CancelledError):
        future.result(10)
    engine.close()


def test_a_blocking_call_that_outlives_its_wait_does_not_keep_the_loop():
    may_end = threading.Event()

    async def run() -> None:
        async with asyncio.timeout(0.05):
            await call_in_thread(may_end.wait)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert not may_end.is_set()
    may_end.set()


def test_what_the_journal_holds_is_not_sampled_or_scored_again_and_it_holds_nothing_of_other_weights(tmp_path):
    engine, verdicts = Engine(), iter([0.25, 0.5, 0.75, 1.0])

    def build():
        scorer = Scorer(lambda _prompt, _response: Score(next(verdicts), True))
        return build_collector(engine, scorer=scorer, journal=Journal(tmp_path))

    first = build().sample(PROMPTS[:2], 2, key="iteration-1/round-1")
    assert [sample.score.reward for sample in first] == [0.5, 0.75, 1.0, 1.25]
    assert build().sample(PROMPTS[:2], 2, key="iteration-1/round-1") == first
    assert len(engine.waves) == 1
    with pytest.raises(RuntimeError, match="weight version 0; the trainer's is 3"):
        build_collector(engine, journal=Journal(tmp_path)).sample(PROMPTS, 2, weight_version=3, key="pretraining-1")
    assert len(list(tmp_path.iterdir())) == 1
    engine.close()


def test_the_sampling_of_a_further_set_is_that_sets_and_no_others():
    engine, own = Engine(), Truncation(0.9, 20)
    samplings = Sampling(0.7, True, own), Sampling(0.0, True)
    sets = [EvalSet(name, tuple(PROMPTS[:2]), 1, sampling) for name, sampling in zip("ab", samplings, strict=True)]
    build_collector(engine, eval_sets=sets).evaluate(PROMPTS[3:], weight_version=0, key="e")
    assert engine.truncations == [None, own, own, None, None]
