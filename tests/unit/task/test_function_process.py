"""Functions in a process of their own: limits on time and memory, deaths, and what is left of them; the verifiers of
other packages, which run in such: math and reasoning-gym.
"""

import ast
import gc
import inspect
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reward_cases import build_prompt, build_response, build_reward, wait_until_gone

from megarl.config.schema.task import MathRewardConfig, ReasoningGymRewardConfig
from megarl.examples.reasoning_gym.scorer import SCORERS_WITH_EVAL
from megarl.task import process as function_process
from megarl.task.math_grading import check_source
from megarl.task.process import CallError, FunctionProcess
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


@pytest.mark.parametrize(
    ("name", "memory_gb", "calls"),
    [
        ("add", 1.0, [({"a": [1], "b": ["é"]}, [1, "é"])]),
        ("wait", 1.0, [({}, "waited")]),
        # What a function prints and reads does not mix with the answers,
        *[(name, 1.0, [({}, result)]) for name, result in (("chatter", ""), ("flood", True))],
        # one that forks gives one answer to each call, and what calls before have leaked is a new process's to answer.
        *[(name, memory_gb, [({"n": n}, n) for n in range(8)]) for name, memory_gb in (("fork", 1.0), ("leak", 0.35))],
    ],
)
def test_a_function_is_called_with_keywords_and_its_result_comes_back(make, name, memory_gb, calls):
    process = make(name, memory_gb=memory_gb)
    assert [process.call(arguments) for arguments, _ in calls] == [result for _, result in calls]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("raise_error", "raised", r"^ValueError: a text of two lines$"),
        ("get_bytes", "raised", r"TypeError.*bytes"),
        *[(name, "time", r"longer than 0\.5 s") for name in ("hang", "hang_in_c", "backtrack", "ignore_signals")],
        ("fill", "memory", "more than 1 GiB"),
        ("crash", "died", "SIGABRT"),
        ("leave", "died", "exit status 3"),
    ],
)
def test_a_call_without_a_result_ends_and_says_why_and_so_does_the_next_one(make, monkeypatch, name, kind, text):
    monkeypatch.setattr(function_process, "GRACE_S", 0.5 if name == "ignore_signals" else 20.0)
    process = make(name, timeout_s=0.5 if kind == "time" else 30.0)
    for _ in range(2):
        with pytest.raises(CallError, match=text) as raised:
            process.call({})
        assert raised.value.kind == kind


@pytest.mark.parametrize(("started", "wait_s"), [(True, 0.0), (True, 0.5), (False, 0.0), (False, 0.1)])
def test_closing_ends_a_call_that_has_just_begun_or_is_in_the_middle(make, started, wait_s):
    process = make("hang", timeout_s=600.0)
    if started:
        process.start("key")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(process.call, {})
        time.sleep(wait_s)
        process.close()
        with pytest.raises(CallError) as raised:
            call.result(timeout=60)
    assert raised.value.kind == "killed"
    with pytest.raises(CallError, match="closed"):
        process.call({})


def test_a_process_is_replaced_where_it_was_killed_and_ends_with_what_it_started_and_with_its_owner(make, tmp_path):
    process = FunctionProcess(make("get_pid")._path, timeout_s=30.0, memory_gb=1.0)
    os.kill(killed := process.call({}), signal.SIGKILL)
    pid = process.call({})
    assert pid != killed
    del process
    gc.collect()
    closed = make("spawn")
    started = closed.call({})
    closed.close()
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
    wait_until_gone(pid, started, int(path.read_text()))


@pytest.mark.skipif(not {"landlock", "seccomp"} <= set(find_protections()), reason="needs Landlock and seccomp")
def test_a_sealed_function_reaches_no_files_no_network_and_no_processes(make, tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    refused = make("reach", sealed=True).call({"path": str(tmp_path / "secret")})
    assert refused == ["PermissionError"] * 4


@pytest.fixture(scope="module")
def math_reward():
    return build_reward(MathRewardConfig(timeout_s=2.0))


@pytest.fixture(scope="module")
def gym_reward():
    return build_reward(ReasoningGymRewardConfig(timeout_s=20.0))


def test_an_answer_that_takes_too_long_is_wrong_within_the_time_limit_off_the_main_thread(math_reward):
    prompt, endless = build_prompt("\\sum_{k=1}^{n} k^2"), "\\boxed{\\sum_{k=1}^{99999999} k^{k}}"
    assert math_reward(build_prompt("1"), build_response("1")).correct
    with ThreadPoolExecutor() as threads:
        result = threads.submit(math_reward, prompt, build_response(endless)).result(timeout=60)
    assert (result.reward, result.details) == (0.0, {"format": 0.0, "timeout": 1.0})
    assert math_reward(build_prompt("72"), build_response("72")).correct, "the next response is scored again"


EVALUATED = (
    *("countdown", "puzzle24", "simple_integration", "polynomial_multiplication", "spiral_matrix", "n_queens"),
    *("intermediate_integration", "binary_matrix", "string_insertion", "chain_sum"),
)


def build_gym_prompt(task: str, seed: int = 3):
    entry = reasoning_gym.create_dataset(task, seed=seed, size=1)[0]
    return build_prompt(entry["answer"] or "", reasoning_gym={"task": task, "entry": entry})


@pytest.mark.parametrize("task", EVALUATED)
def test_reasoning_gyms_own_answers_are_correct_others_are_not_and_code_in_one_does_not_run(gym_reward, task, tmp_path):
    prompt, target = build_gym_prompt(task), tmp_path / "ran"
    right = gym_reward(prompt, build_response(f" {prompt.answer}\n"))
    assert not prompt.answer or (right.reward, right.correct) == (1.0, True)
    for text in (
        "banana",
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[open({str(target)!r}, 'w')]",
        f"Symbol('x').__class__.__base__.__subclasses__() or lambdify(1, 'open({str(target)!r}, \"w\")')()",
        f'S(\'open("{target}", "w")\')',
    ):
        wrong = gym_reward(prompt, build_response(text))
        assert wrong.reward < 0.5
        assert not wrong.correct
        assert right.details.keys() == wrong.details.keys()
    assert not target.exists()


def test_every_scorer_that_calls_eval_on_an_answer_is_known():
    """A new version of reasoning-gym with another eval() in a scorer fails here."""
    found = set()
    for dataset, _ in DATASETS.values():
        module = sys.modules[dataset.__module__]
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                names = {getattr(node.func, "id", None) for node in ast.walk(function) if isinstance(node, ast.Call)}
                found |= {module.__name__.rsplit(".", 1)[-1]} if {"eval", "exec"} & names else set()
    # number_sorting evaluates the task's own answer, never the model's.
    assert found - {"number_sorting"} == SCORERS_WITH_EVAL


BEYOND = [
    *("Symbol ('x').__class__", "lambdify (Integer (1 ),'1')", "Function ('open')('/etc/passwd')", "(lambda :1 )()"),
    *("[Symbol ('x')for x in ()]", "'text'", "S ('1')", "Symbol ('x')[Integer (0 )]", "f'{1}'", "1 +"),
]


@pytest.mark.parametrize("source", BEYOND)
def test_source_beyond_mathematics_is_refused(source):
    with pytest.raises(ValueError, match=r"not |part of an answer"):
        check_source(source)


def test_a_prompt_of_another_source_is_an_error_that_names_it(gym_reward):
    with pytest.raises(ValueError, match=r"prompt 'p1'.*data=reasoning_gym"):
        gym_reward(build_prompt("1"), build_response("1"))
