"""Rollouts and weight loads whose server hangs, hangs up or refuses, over HTTP servers on loopback."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from generation import generate_groups

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.rollout.client import SGLangClient
from megarl.rollout.engine import SGLangEngine
from megarl.signals import Stopped, stopping_on_signals
from megarl.sync.sync import DiskSync
from megarl.types import Prompt

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
    ("what", "asked"),
    [("rollout", ["/flush_cache?timeout=30", "/generate"]), ("load", [*LOAD, *CLEAN_UP])],
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
