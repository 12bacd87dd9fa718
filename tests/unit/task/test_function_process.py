"""Functions in a process of their own: limits on time and memory, deaths, and what is left of them."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from reward_cases import wait_until_gone

from megarl.task import process as function_process
from megarl.task.process import CallError, FunctionProcess, StartError
from megarl.task.sandbox import find_protections

SOURCE = """
import asyncio, os, subprocess, sys, time

def add(a, b): return a + b
def raise_error(): raise ValueError("a text\\nof two lines")
def hang(): time.sleep(600)
def hang_in_c(): return len(str(10 ** (10 ** 9)))
def backtrack(): import re; return bool(re.match("(a+)+$", "a" * 60 + "b"))
def ignore_signals():
    import signal
    for number in (signal.SIGTERM, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)
    hang()
kept = []
def leak(n): kept.append(bytearray(100 * 2 ** 20)); return n
def flood(): return sum(os.write(1, bytes(2 ** 20)) for _ in range(2 ** 10)) == 2 ** 30
def fork(n): os.fork(); return n
def fill(): return len(bytearray(2 ** 33))
def crash(): os.abort()
def leave(): os._exit(3)
def chatter(): print("noise"); return input() if 0 else sys.stdin.read()
async def wait(): await asyncio.sleep(0); return "waited"
def get_pid(): return os.getpid()
def get_bytes(): return b"bytes"
def spawn(): return subprocess.Popen(["sleep", "600"]).pid
def spawn_and_hang(path): open(path, "w").write(str(spawn())); time.sleep(600)
def reach(path):
    import socket
    found = []
    for act in (lambda: open(path).read(), lambda: open(path, "w"), lambda: os.fork(), lambda: socket.socket()):
        try: act()
        except OSError as error: found.append(type(error).__name__)
    import json.tool
    return found
class Adder:
    def __init__(self, more): self.more = more
    def __call__(self, a): return a + self.more
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "functions_of_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make_process(name, timeout_s=30.0, **keywords):
        keywords = {"memory_gb": 1.0, **keywords}
        made.append(FunctionProcess(f"functions_of_test:{name}", timeout_s=timeout_s, **keywords))
        return made[-1]

    yield make_process
    for process in made:
        process.close()


def test_a_function_is_called_with_keywords_and_its_result_comes_back(make):
    assert make("add").call({"a": [1], "b": ["é"]}) == [1, "é"]


def test_a_coroutine_function_is_awaited(make):
    assert make("wait").call({}) == "waited"


def test_what_a_function_prints_and_reads_does_not_mix_with_the_answers(make):
    assert make("chatter").call({}) == ""


def test_an_exception_is_one_line_and_the_process_goes_on(make):
    process = make("raise_error")
    for _ in range(2):
        with pytest.raises(CallError, match=r"^ValueError: a text of two lines$"):
            process.call({})


def test_a_result_that_json_cannot_hold_is_an_error(make):
    with pytest.raises(CallError, match=r"TypeError.*bytes"):
        make("get_bytes").call({})


@pytest.mark.parametrize("name", ["hang", "hang_in_c", "backtrack"])
def test_a_call_that_takes_too_long_ends_and_the_next_one_is_answered(make, name):
    process = make(name, timeout_s=0.5)
    for _ in range(2):
        with pytest.raises(CallError, match=r"longer than 0\.5 s"):
            process.call({})


def test_a_call_that_needs_too_much_memory_ends(make):
    with pytest.raises(CallError, match="more than 1 GiB"):
        make("fill").call({})


def test_a_call_that_runs_out_of_what_calls_before_have_leaked_is_answered_by_a_new_process(make):
    process = make("leak", memory_gb=0.35)
    assert [process.call({"n": n}) for n in range(8)] == list(range(8))


def test_a_function_that_forks_gives_one_answer_to_each_call(make):
    process = make("fork")
    assert [process.call({"n": n}) for n in range(6)] == list(range(6))


def test_a_gigabyte_on_standard_output_is_no_answer_and_dropped(make):
    assert make("flood").call({}) is True


def test_a_function_that_ignores_the_signals_to_end_is_ended_all_the_same(make, monkeypatch):
    monkeypatch.setattr(function_process, "GRACE_S", 0.5)
    with pytest.raises(CallError, match=r"longer than 0\.5 s"):
        make("ignore_signals", timeout_s=0.5).call({})


@pytest.mark.parametrize(("name", "reason"), [("crash", "SIGABRT"), ("leave", "exit status 3")])
def test_a_function_that_takes_its_process_down_is_an_error_that_says_how(make, name, reason):
    with pytest.raises(CallError, match=reason):
        make(name).call({})


def test_a_process_that_was_killed_from_outside_is_replaced(make):
    process = make("get_pid")
    first = process.call({})
    os.kill(first, signal.SIGKILL)
    assert process.call({}) != first


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("started", [True, False])
def test_closing_ends_a_call_that_has_just_begun_or_is_in_the_middle(make, started, wait_s):
    process = make("hang", timeout_s=600.0)
    if started:
        process.start()
    raised = []

    def call():
        try:
            process.call({})
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(wait_s)
    process.close()
    thread.join(timeout=60)
    assert [error.kind for error in raised] == ["killed"]
    with pytest.raises(CallError, match="closed"):
        process.call({})


def test_a_process_ends_with_its_owner(make):
    process = FunctionProcess(make("get_pid")._path, timeout_s=30.0, memory_gb=1.0)
    pid = process.call({})
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_function_started_ends_with_its_process(make):
    process = make("spawn")
    pid = process.call({})
    process.close()
    wait_until_gone(pid)


def test_a_call_and_what_it_started_end_when_the_parent_is_killed(tmp_path, make):
    path = tmp_path / "pid"
    code = (
        "from megarl.task.process import FunctionProcess\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "process = FunctionProcess('functions_of_test:spawn_and_hang', timeout_s=600, memory_gb=1)\n"
        f"process.call({{'path': {str(path)!r}}})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    wait_until_gone(int(path.read_text()))


@pytest.mark.skipif(not {"landlock", "seccomp"} <= set(find_protections()), reason="needs Landlock and seccomp")
def test_a_sealed_function_reaches_no_files_no_network_and_no_processes(make, tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    refused = make("reach", sealed=True).call({"path": str(tmp_path / "secret")})
    assert refused == ["PermissionError"] * 4


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("functions_of_test:missing", "has no missing"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("f", "must be"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(make, path, reason):
    make("add")
    with pytest.raises(StartError, match=reason):
        FunctionProcess(path, timeout_s=1.0, memory_gb=1.0).start()
