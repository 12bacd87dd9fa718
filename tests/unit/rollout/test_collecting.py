"""The collector over a scripted engine: which server is asked, what is repeated, when rewards are computed."""

import asyncio
import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
from generation import build_collector

from megarl.interfaces import Truncation
from megarl.rollout import collector as collector_module
from megarl.rollout.client import ConnectionLostError
from megarl.rollout.collector import Collector, EvalSet
from megarl.rollout.engine import OnEventLoop, call_in_thread
from megarl.rollout.episodes import EpisodeRunner
from megarl.task.scorer import Scorer
from megarl.types import FinishReason, Prompt, Response, Score, Turn

PROMPTS = [Prompt(name, name, (number + 3,), "") for number, name in enumerate("abcd")]


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
        self.truncations += [request.truncation for request in requests]
        if any(request.token_ids[0] == 99 for request in requests):
            self.hanging.set()
            await asyncio.sleep(60)
        for index, request in enumerate(requests):
            if self.num_losses and index == len(requests) - 1:
                self.num_losses -= 1
                raise ConnectionLostError("gone")
            await asyncio.sleep(self.pause_s)
            self.num_given += 1
            take(index, Response(request.token_ids[-1:], "x", (-0.5,), (True,), (0,), FinishReason.stop))

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


def test_rewards_are_computed_while_others_generate():
    engine, given = Engine(pause_s=0.02), []

    def reward(_prompt, _response):
        given.append(engine.num_given)
        return Score(1.0, True)

    build_collector(engine, scorer=Scorer(reward)).sample(PROMPTS, 2, key="k")
    assert given == list(range(1, 9))
    engine.close()


def test_a_group_is_begun_without_waiting_and_goes_to_the_server_with_the_least_under_way():
    engine = Engine(num_servers=3)
    collector = build_collector(engine, in_lockstep=False)
    hanging = collector.start_group(Prompt("h", "", (99,), ""), 2, key="group-0")
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


def test_cancelling_the_engine_ends_a_wait_in_another_thread():
    engine, caught = Engine(), []

    def sample():
        try:
            build_collector(engine).sample([Prompt("h", "", (99,), "")], 1, key="k")
        except CancelledError:
            caught.append(True)

    thread = threading.Thread(target=sample)
    thread.start()
    assert engine.hanging.wait(10)
    engine.cancel()
    thread.join(10)
    assert caught == [True]
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


def test_a_reward_that_raises_costs_its_sample_only():
    def reward(prompt, _response):
        if prompt.id == "b":
            raise KeyError("tests")
        return Score(1.0, True)

    engine = Engine()
    samples = build_collector(engine, scorer=Scorer(reward)).sample(PROMPTS[:3], 1, key="k")
    assert [sample.score.failure is None for sample in samples] == [True, False, True]
    assert "KeyError" in samples[1].score.failure
    engine.close()


def test_a_sample_has_the_verifiers_score_and_the_rewards_of_its_turns():
    class Played(EpisodeRunner):
        async def run(self, request, send):
            episode = await super().run(request, send)
            turns = [Turn(0, 1, "x", 0.2), Turn(1, 1, "y", 0.0)]
            return replace(episode, response=replace(episode.response, turns=turns))

    engine = Engine()
    collector = Collector(engine, Scorer(lambda _p, _r: Score(1.0, True)), Played(16), seed=1, temperature=1.0)
    (sample,) = collector.sample(PROMPTS[:1], 1, key="k")
    assert (sample.score.reward, sample.score.correct) == (1.2, True)
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


def test_the_sampling_of_a_further_set_is_that_sets_and_no_others():
    engine, own = Engine(), Truncation(0.9, 20)
    sets = [EvalSet("one", tuple(PROMPTS[:2]), 1, 0.7, own), EvalSet("two", tuple(PROMPTS[2:3]), 1, 0.0)]
    build_collector(engine, eval_sets=sets).evaluate(PROMPTS[3:], weight_version=0, key="e")
    assert engine.truncations == [None, own, own, None]
