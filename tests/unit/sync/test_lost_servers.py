"""Rollouts and weight loads whose server hangs, hangs up or refuses, over HTTP servers on loopback; the probe text of a
weight sync: what it measures, and when it ends a run.
"""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.backend import Done
from generation import generate_groups
from torch import Tensor

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.rollout.client import SGLangClient
from megarl.rollout.engine import SGLangEngine
from megarl.signals import Stopped, stopping_on_signals
from megarl.sync.sync import DiskSync, Probe
from megarl.types import Prompt, Sequences

RAISE = "/update_weight_version"
LOAD = ["/pause_generation", RAISE, "/begin_weight_update", "/update_weights_from_disk"]
CLEAN_UP = ["/end_weight_update", "/continue_generation"]
PROMPTS = [Prompt("p", "", (5,), "")]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, {"weight_version": self.server.version, "version": "0.5.19"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, time.monotonic()))
        behaviour = self.server.behaviour.get(self.path, 200)
        if behaviour == "hang":
            self.server.hanging.set()
            self.server.released.wait(20)
        if behaviour in ("hang", "hang up"):
            self.close_connection = True
            return
        if self.path == RAISE:
            self.server.version = body["new_version"]
        self._answer(behaviour, {"success": behaviour == 200, "message": "no such file"})

    def _answer(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(behaviour):
    """A server that answers, hangs for 20 s, or hangs up, by path; `asked` has every (path, time)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.version = "2"
    server.behaviour, server.asked = behaviour, []
    server.hanging, server.released = threading.Event(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def list_paths(server) -> list[str]:
    return [path for path, _ in server.asked]


class Policy:
    def export_weights(self, directory):
        directory.mkdir()
        return self

    def logprobs(self, *_):
        return self

    rounded_logprobs = logprobs

    def result(self):
        return torch.zeros(1, 1)


def build_sync(servers, directory, *refuted: str, **options) -> DiskSync:
    """refuted: what its verification raises."""

    def verify():
        for reason in refuted:
            raise SyncError(reason)

    clients = [SGLangClient(server.url, vocab_size=50, deadline_s=10.0) for server in servers]
    options |= {"directory": directory, "policy_dtype": Dtype.float32}
    sync = DiskSync(Policy(), clients, RolloutConfig(), SimpleNamespace(verify=verify), (5,), **options)
    sync._probe = SimpleNamespace(ask=lambda _: None, measure=lambda _: 0.0)
    return sync


def build_check(delay_s: float):
    """As a guard that takes `delay_s` to notice that its server has died; counted from the first question."""
    first: list[float] = []

    def check():
        first.append(time.monotonic())
        if first[-1] - first[0] >= delay_s:
            raise RuntimeError("exited with status 137")

    return check


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "eos_token_id": 2}))
    return tmp_path


@pytest.mark.parametrize(
    ("what", "asked"), [("rollout", ["/flush_cache?timeout=30", "/generate"]), ("load", [*LOAD, *CLEAN_UP])]
)
def test_ctrl_c_ends_the_wait_and_its_calls_and_asks_for_no_process(checkpoint, what, asked):
    with serving({"/generate": "hang", "/update_weights_from_disk": "hang"}) as server, stopping_on_signals():
        engine = SGLangEngine([server.url], checkpoint, RolloutConfig(), check_processes=pytest.fail)
        sync = build_sync([server], checkpoint / "sync", check_processes=pytest.fail)
        prompts = [Prompt(str(i), "", (5,) * 40, "") for i in range(2000)]
        begun = []

        def interrupt():
            server.hanging.wait(20)
            begun.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        generate = partial(generate_groups, engine, prompts, num_responses=4, temperature=1.0, key="k")
        with pytest.raises(Stopped):
            generate() if what == "rollout" else sync.publish(1)
        calls = [thread for thread in threading.enumerate() if thread.name == "megarl-call"]
        for thread in calls:
            thread.join(5)
        assert not any(thread.is_alive() for thread in calls)
        assert time.monotonic() - begun[0] < 8  # The server hangs for 20 s.
        assert list_paths(server) == asked


def test_a_lost_server_shows_its_exit_status_once_it_is_known(checkpoint, monkeypatch):
    monkeypatch.setattr("megarl.rollout.engine.ATTEMPT_PAUSE_S", 0.3)
    with serving({"/generate": "hang up"}) as server:
        engine = SGLangEngine([server.url], checkpoint, RolloutConfig(), check_processes=build_check(0.5))
        with pytest.raises(RuntimeError, match="exited with status 137") as caught:
            generate_groups(engine, PROMPTS, num_responses=1, temperature=1.0)
        assert f"{server.url}/generate" in str(caught.value.__cause__)
        times = [at for _, at in server.asked]
        assert len(times) == 3
        assert min(b - a for a, b in itertools.pairwise(times)) > 0.25


@pytest.mark.parametrize(
    ("dies_at", "step"),
    [
        (LOAD[0], "pause"),
        (LOAD[2], "weight update"),
        (LOAD[3], "load of the weights in .*v3"),
        (CLEAN_UP[0], "end of the weight update"),
        (CLEAN_UP[1], "end of the pause"),
        (RAISE, "withdrawal of the weight version"),
    ],
)
def test_a_server_that_dies_during_a_sync_is_named_with_the_step_and_its_exit_status(tmp_path, dies_at, step):
    order = [*LOAD, *CLEAN_UP]
    with serving(dict.fromkeys(order[order.index(dies_at) :], "hang up")) as server:
        sync = build_sync([server], tmp_path, check_processes=build_check(0.3))
        message = rf"(?s){server.url} failed at the {step}: {server.url}{dies_at}: .*exited with status 137"
        with pytest.raises(SyncError, match=message):
            sync.publish(3)


def test_a_server_whose_weights_are_found_wrong_serves_as_no_version(tmp_path):
    def refute(_):
        raise SyncError("it computes another model")

    with serving({}) as server:
        with pytest.raises(SyncError, match="does not hold"):
            build_sync([server], tmp_path, "it does not hold the weights").publish(3)
        assert list_paths(server) == [*LOAD, *CLEAN_UP]
        sync = build_sync([server], tmp_path / "b")
        sync._probe.measure = refute
        with pytest.raises(SyncError, match="another model"):
            sync.publish(3)
        assert list_paths(server)[6:] == [*LOAD, CLEAN_UP[0], RAISE, CLEAN_UP[1], RAISE]
        assert server.version == str(UNPUBLISHED)


def test_a_server_that_refuses_the_weights_is_named_and_resumed_and_no_other_is_waited_for(tmp_path):
    with serving({LOAD[3]: 400}) as server, serving({LOAD[3]: "hang"}) as slow:
        sync = build_sync([slow, server], tmp_path, check_processes=build_check(0.0))
        started = time.monotonic()
        message = rf"{server.url} failed at the load of .*answered 400.*no such file"
        with pytest.raises(SyncError, match=message) as caught:
            sync.publish(3)
        assert time.monotonic() - started < 5
        # It answered: its process is not in question.
        assert "exited" not in str(caught.value)
        assert list_paths(server) == [*LOAD, *CLEAN_UP]


TOKENS = tuple(range(5, 69))
EXPECTED = torch.linspace(-0.1, -12.0, len(TOKENS) - 1)


class RoundingPolicy:
    """Its log-probs change by `rounding` nats where layers compute with random errors."""

    def __init__(self, rounding: float) -> None:
        self.rounding = rounding
        self.units: list[float] = []

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> Done[Tensor]:
        return Done(EXPECTED[None])

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Done[Tensor]:
        assert sequences.lengths.tolist() == [len(TOKENS)] * sequences.num_samples
        self.units.append(unit)
        return Done(EXPECTED + self.rounding * draw_noise(sequences.num_samples))


def draw_noise(num: int, seed: int = 0) -> Tensor:
    """[num, tokens]: normal, the median of its size 1."""
    return torch.randn(num, len(EXPECTED), generator=torch.Generator().manual_seed(seed)) / 0.6745


def build_probe(**fields: Any) -> Probe:
    return Probe(TOKENS, RolloutConfig(dtype=Dtype.bfloat16, **fields), Dtype.bfloat16)


def publish(probe: Probe, policy: RoundingPolicy, *found: Tensor) -> float:
    """A sync with a server for each of these log-probs; the gap."""
    probe.ask(policy)  # type: ignore[arg-type]
    return probe.measure([SimpleNamespace(url="http://server", score=lambda _, x=each: x.tolist()) for each in found])


def test_what_rounding_explains_passes_with_a_few_tokens_far_away_and_a_text_of_unlikely_tokens():
    # Half of the change by random errors to all of it was found; routing flips move single tokens by a nat and more.
    flips = torch.zeros(len(EXPECTED))
    flips[::8] = 2.0
    for seed in range(20):
        noise = draw_noise(1, seed + 1)[0]
        for scale in (0.5, 1.0):
            gap = publish(build_probe(), RoundingPolicy(0.1), EXPECTED + 0.1 * scale * noise + flips)
            assert gap == pytest.approx(0.1 * scale, rel=0.7)


@pytest.mark.parametrize("rounding", [1e-4, 0.01, 0.06])
def test_a_mismatch_at_the_first_sync_ends_the_run_and_says_what_to_look_at_and_which_key_accepts_it(rounding: float):
    # The median of YaRN on one side alone (SmolLM2-135M) and what random errors did to it: 0.31 and 0.066.
    yarn = EXPECTED + 0.31 * draw_noise(1, 9)[0]
    sound = EXPECTED + rounding * draw_noise(1, 8)[0]
    with pytest.raises(SyncError) as error:
        publish(build_probe(), RoundingPolicy(rounding), sound, yarn)
    text = str(error.value)
    start = "SGLang server http://server computes another model than the policy from the same weights"
    numbers = r".*differs by 0\.\d+ nats \(median\), where rounding explains 0\.\d+; on the probe text's token"
    assert re.match(start + numbers, text)
    assert "keys of the model's config.json" in text
    (accepted,) = re.findall(r"rollout.max_probe_logprob_gap=(\S+) accepts", text)
    policy = RoundingPolicy(rounding)
    publish(build_probe(max_probe_logprob_gap=float(accepted)), policy, sound, yarn)
    assert policy.units == []


def test_a_gap_that_grows_after_the_first_sync_is_measured_and_ends_nothing_but_one_without_a_number_does():
    probe, policy = build_probe(), RoundingPolicy(0.01)
    found = [publish(probe, policy, EXPECTED + gap) for gap in (0.01, 0.1, 3.0)]
    assert found == pytest.approx([0.01, 0.1, 3.0], rel=1e-3)
    # The estimate costs one pass, at the first sync alone.
    assert len(policy.units) == 1
    broken = EXPECTED.clone()
    broken[7] = math.nan
    with pytest.raises(SyncError, match=r"token 8 \(id 13\) its log-prob is nan"):
        publish(probe, policy, broken)
    # Nor is it accepted as rounding where the policy's are none.
    with pytest.raises(SyncError, match="or the policy computes no log-probs"):
        publish(build_probe(), RoundingPolicy(math.nan), EXPECTED * math.nan)


@pytest.mark.parametrize(
    ("server", "policy_dtype", "unit"),
    [
        ({"dtype": Dtype.float32}, Dtype.float32, 2.0**-20),
        ({"dtype": Dtype.bfloat16}, Dtype.float32, 2.0**-8),
        ({"dtype": Dtype.float32}, Dtype.bfloat16, 2.0**-8),
        ({"dtype": Dtype.bfloat16, "sglang": {"kv_cache_dtype": "fp8_e4m3"}}, Dtype.bfloat16, 2.0**-4),
    ],
)
def test_random_errors_have_the_size_of_the_coarser_dtype_and_of_an_fp8_cache(server, policy_dtype, unit):
    policy = RoundingPolicy(0.0)
    publish(Probe(TOKENS, RolloutConfig(**server), policy_dtype), policy, EXPECTED)
    assert policy.units == [unit]
