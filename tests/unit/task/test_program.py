"""Programs that attack the machine: what each protection of the kernel keeps from them, and that nothing is left; the
verifier code: programs of responses against tests.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from reward_cases import build_prompt, build_response, wait_until_gone

from megarl.config.errors import ConfigError
from megarl.config.schema.task import CodeRewardConfig
from megarl.task.reward import CodeReward, RewardFailedError, find_code
from megarl.task.sandbox import PROTECTIONS, Limits, SandboxError, find_protections, run_python, warn_of_gaps
from megarl.task.scorer import build_scorer

LIMITS = Limits(wall_s=20.0, memory_mb=256, files_mb=8, output_kb=64)
BOTH, KERNEL, SPACES = PROTECTIONS, ("landlock", "seccomp"), ("namespaces",)
QUICK = Limits(wall_s=1.0, memory_mb=256, files_mb=8)


def skip_without(protections):
    if missing := set(protections) - set(find_protections()):
        pytest.skip(f"this kernel does not grant {', '.join(missing)} to this user")


@pytest.fixture(params=[BOTH, KERNEL], ids="+".join)
def means(request):
    skip_without(request.param)
    return request.param


def test_a_program_reads_its_input_and_its_files_and_prints(means):
    done = run_python(
        "import math, sys\nprint(sum(map(int, sys.stdin)), open('data.txt').read(), math.pi > 3, file=sys.stderr)\n"
        "print(__name__, sys.argv)",
        stdin="1\n2\n" * 50_000,
        files={"data.txt": "é"},
        protections=means,
        limits=LIMITS,
    )
    assert (done.stderr, done.stdout) == ("150000 é True\n", "__main__ ['main.py']\n")
    assert done.is_well


PACKAGES = """
import numpy, threading
found = []
t = threading.Thread(target=lambda: found.append(int(numpy.arange(4).sum())))
t.start(); t.join(); print(found)
"""
FORKS = """
import os, subprocess
failed = 0
for start in (os.fork, lambda: subprocess.run(['/bin/true']), lambda: os.posix_spawn('/bin/true', ['true'], {})):
    try: start()
    except OSError: failed += 1
print(failed)
while True: os.fork()
"""
GROW = "x = []\nwhile True: x.append(bytearray(2 ** 20))"
TOO_LONG, TOO_MUCH = "it took longer than 1 s", "it printed more than 64 KiB"
EXIT_7 = "it ended with exit status 7"


@pytest.mark.parametrize(
    ("source", "limits", "stdout", "ended"),
    [
        (PACKAGES, Limits(), "[6]\n", "it ended well"),
        ("while True: pass", QUICK, "", TOO_LONG),
        ("import time; time.sleep(600)", QUICK, "", TOO_LONG),
        ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile 1: 1", QUICK, "", TOO_LONG),
        (FORKS, LIMITS, "3\n", "PermissionError: [Errno 1] Operation not permitted"),
        (GROW, LIMITS, "", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 2 ** 30)", LIMITS, "", "OSError: [Errno 12] Cannot allocate memory"),
        ("with open('big', 'wb') as f:\n    while True: f.write(bytes(2 ** 20)); f.flush()", LIMITS, "", None),
        ("import sys\nfor _ in range(1024): sys.stdout.write('x' * 2 ** 20)", LIMITS, "x" * 64 * 1024, TOO_MUCH),
        ("import os, time\nos.closerange(0, 999)\ntime.sleep(0.1)\nos._exit(7)", LIMITS, "", EXIT_7),
    ],
)  # fmt: skip
def test_a_program_ends_at_its_limits_and_starts_no_process(means, source, limits, stdout, ended):
    done = run_python(source, protections=means, limits=limits)
    assert done.stdout == stdout
    assert done.describe() == ended or (ended is None and not done.is_well and not done.stopped)


def test_a_secret_of_the_parent_cannot_be_read_and_nothing_be_written(means, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    monkeypatch.setenv("SECRET_OF_TEST", "hunter2")
    paths = [str(secret), str(Path.home() / ".bashrc"), "/etc/passwd", f"/proc/{os.getpid()}/environ", __file__]
    written = [str(secret), str(tmp_path / "new"), f"{sys.prefix}/new", f"{sys.base_prefix}/new", "/new", "/usr/new"]
    source = f"""
import os
for path, mode in [(path, "r") for path in {paths!r}] + [(path, "w") for path in {written!r}]:
    try: print(path, open(path, mode))
    except OSError: pass
for act in (os.listdir, os.rmdir, lambda path: os.chmod(path, 0)):
    try: print(act({str(tmp_path)!r}))
    except OSError: pass
print("hunter2" in str(os.environ), os.getcwd() in os.environ["HOME"])
"""
    done = run_python(source, protections=means, limits=LIMITS)
    assert done.stdout == "False True\n", done.stderr
    assert secret.read_text() == "hunter2"


NETWORK = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
FULL = """
n = 0
try:
    while True: open(f'{n}', 'wb').write(bytes(2 ** 20)); n += 1
except OSError as e: print(n <= 8, e.errno)
"""
SIGNALS = """
import ctypes, os
for act in (lambda: os.kill({victim}, 9), lambda: os.kill(-1, 9)):
    try: act()
    except OSError: print('refused')
print(ctypes.CDLL(None).syscall(234, {victim}, {victim}, 9))
"""
# chroot, mount, unshare, setns, bpf, io_uring_setup, clone3
CALLS = """
import ctypes
library = ctypes.CDLL(None, use_errno=True)
for number in (161, 165, 272, 308, 321, 425, 435): print(library.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
@pytest.mark.parametrize(
    ("protections", "source", "expected"),
    [
        # The network cannot be reached,
        *[(protections, NETWORK, "PermissionError") for protections in (BOTH, KERNEL)],
        (SPACES, NETWORK, "OSError: [Errno 101]"),
        # all files together have a limited size,
        (BOTH, FULL, "True 28\n"),
        # and other processes get no signal.
        *[(protections, SIGNALS, "refused\nrefused\n-1\n") for protections in (BOTH, KERNEL)],
        # Calls that lead out of the sandbox are refused.
        *[(protections, CALLS, "-1 1\n" * 6 + "-1 38\n") for protections in (BOTH, KERNEL)],
    ],
)
def test_what_leads_out_of_the_sandbox_is_refused(protections, source, expected):
    skip_without(protections)
    victim = subprocess.Popen(["sleep", "600"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            source = source.replace("{port}", str(server.getsockname()[1])).replace("{victim}", str(victim.pid))
            done = run_python(source, protections=protections, limits=LIMITS)
        assert done.stdout == expected or done.describe().startswith(expected)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.parametrize("protections", [(), ("namespaces",)], ids=["none", "namespaces"])
def test_processes_that_hide_end_with_the_program(protections):
    """Without seccomp processes can be started; those in a session of their own whose parent is gone end too."""
    skip_without(protections)
    mark = f"mark{os.getpid()}x{len(protections)}"
    source = (
        "import os, subprocess, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', '{mark}'])\n"
        "    os._exit(0)\nprint('well')"
    )
    done = run_python(source, protections=protections, limits=LIMITS)
    assert done.stdout == "well\n"
    assert not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or ())]


@pytest.mark.parametrize("killed", ["parent", "launcher"])
def test_nothing_is_left_when_the_parent_or_the_launcher_is_killed(means, killed):
    before = set(Path("/tmp").glob("megarl-sandbox-*"))
    code = (
        "from megarl.task.sandbox import Limits, run_python\n"
        f"run_python('import time; time.sleep(600)', limits=Limits(wall_s=600), protections={means!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(below := psutil.Process(parent.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    (parent if killed == "parent" else below[0]).kill()
    parent.wait(timeout=60)
    wait_until_gone(*(process.pid for process in below))
    if killed == "parent":
        assert set(Path("/tmp").glob("megarl-sandbox-*")) <= before


def test_a_sandbox_that_cannot_be_made_runs_nothing(monkeypatch):
    monkeypatch.setattr("megarl.task.sandbox.list_readable", lambda: ["/usr", "/nowhere"])
    with pytest.raises(SandboxError, match=r"could not be made: .*No such file"):
        run_python("print(1)", protections=("namespaces",))


@pytest.mark.parametrize(
    ("protections", "words"),
    [
        (PROTECTIONS, []),
        (("seccomp",), ["files of this user", "limited for each"]),
        ((), ["files of this user", "the network", "start processes", "limited for each"]),
    ],
)
def test_what_is_not_kept_from_programs_is_warned_of(monkeypatch, recwarn, protections, words):
    monkeypatch.setattr("megarl.task.sandbox.find_protections", lambda: protections)
    warn_of_gaps("reward=code")
    gaps = [gap for warning in recwarn.list for gap in str(warning.message).split("; ")]
    assert [word in gap for word, gap in zip(words, gaps, strict=True)] == [True] * len(words)


PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


def fence(source, language="python"):
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("tests", "source", "passed"),
    [
        # Pairs of input and output are compared line by line.
        (PAIRS, "print(sum(map(int, input().split())), '  \\n')", 1.0),
        (PAIRS, "print(1 + int(input().split()[1]))", 0.5),
        (PAIRS, "print('3'); print(1 / 0)", 0.0),
        (PAIRS, "import sys; print(3); sys.exit(1)", 0.0),
        (PAIRS, "syntax error", 0.0),
        (PAIRS, "while True: pass", 0.0),
        # Statements pass where they are reached and raise nothing.
        (ASSERTS, f"{ADD}\nif __name__ == '__main__':\n    raise SystemExit", 1.0),
        (ASSERTS, "def add(a, b):\n    return 0", 0.5),
        (ASSERTS, "raise SystemExit(0)", 0.0),
        (ASSERTS, "import os\nos._exit(0)", 0.0),
        (ASSERTS, "def add(a, b):\n    import sys\n    sys.exit(0)", 0.0),
        (ASSERTS, "print('passed 0'); print('passed 1'); print(0); print(1)", 0.0),
        (ASSERTS, f"import os\nos.close(1)\n{ADD}", 0.0),
    ],
)
def test_a_program_is_scored_by_the_tests_that_it_passes_or_with_partial_by_all(tests, source, passed):
    hangs = "while" in source
    for partial in (True, False):
        config = CodeRewardConfig(timeout_s=1.0 if hangs else 20.0, num_workers=1, partial=partial)
        score = CodeReward(config).run_tests(build_prompt(tests), fence(source))
        assert (score.reward, score.correct) == (passed if partial else float(passed == 1), passed == 1)
        if partial:
            assert score.details == {"block": 1.0, "passed": passed, "timeout": float(hangs)}


BLOCKS = {
    **{fence("a", language): "a\n" for language in ("python", "", "Python3")},
    fence("a") + fence("b"): "b\n",
    **dict.fromkeys((fence("a") + fence("output", "text"), fence("a") + "```python\nb", "~~~py\na\n~~~"), "a\n"),
    "````python\n```\n````\n": "```\n",
    **dict.fromkeys(("```python\na", "no code")),
}


@pytest.mark.parametrize(("text", "code"), BLOCKS.items())
def test_the_last_closed_block_of_python_counts(text, code):
    assert find_code(text) == code


def test_a_prompt_without_tests_is_found_before_the_run():
    with contextlib.closing(build_scorer(CodeRewardConfig())) as scorer:
        for answer, reason in {
            **dict.fromkeys(("Paris", "[]"), "it has no tests"),
            "{": "Expecting property name",
            '{"inputs": ["1"], "outputs": []}': "1 inputs and 0 outputs",
            "[1]": "a text was expected",
        }.items():
            with pytest.raises(ConfigError, match=rf"reward=\.\.\. with data=\.\.\..*prompt 'p1'.*{reason}"):
                scorer.check([build_prompt(answer)])


def test_closing_ends_the_programs_that_run():
    reward = CodeReward(CodeRewardConfig(timeout_s=600.0, num_workers=1))

    async def run():
        task = asyncio.create_task(reward.score(build_prompt(PAIRS), build_response(fence("while True: pass"))))
        while not reward._running:
            await asyncio.sleep(0.01)
        reward.close()
        with pytest.raises(RewardFailedError):
            await asyncio.wait_for(task, 60)

    asyncio.run(run())
