"""Python programs that a model wrote, run within limits and without network; reward=code, which tests them."""

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.config.schema.task import CodeRewardConfig
from megarl.files import parse_json
from megarl.task.process import PACKAGES, ROOT, describe_status, end_process, exchange, list_readable
from megarl.task.reward import AsyncReward, RewardFailedError, choose_num_workers
from megarl.types import Prompt, Response, Score

PROTECTIONS = ("namespaces", "landlock", "seccomp")
START_S = 60.0
"""Seconds beyond a program's own time for starting and ending it on a busy machine"""
_LAUNCH = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from megarl.task.confinement import main; main()"
_RUN = (
    f"import runpy, sys; sys.path += {PACKAGES!r}; sys.argv = ['main.py']; runpy.run_path('main.py', None, '__main__')"
)


GAPS = {
    "it can read and write the files of this user (neither user namespaces nor Landlock)": {"namespaces", "landlock"},
    "it can reach the network (neither user namespaces nor seccomp)": {"namespaces", "seccomp"},
    "it can start processes, and the memory limit is that of each (no seccomp)": {"seccomp"},
    "the size of its files is limited for each, not together (no user namespaces)": {"namespaces"},
}
"""What is not kept from a program, and the protections of which one keeps it"""


class SandboxError(Exception):
    """The program was not run: the sandbox could not be made."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_s: float = 10.0
    memory_mb: int = 1024
    """Address space in MiB"""
    files_mb: int = 64
    """MiB of files that it writes, together, or of each where it has no file system of its own"""
    open_files: int = 64
    threads: int = 64
    output_kb: int = 256
    """KiB that it may print, on each of standard output and error"""


@dataclass(frozen=True)
class Finished:
    """How a program ended."""

    stdout: str
    stderr: str
    status: int
    """Exit status, or minus the number of the signal that ended it"""
    stopped: str | None
    """Why it was ended: "time", "output"; None: it ended by itself"""
    limits: Limits = field(repr=False)

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.stopped is None and self.status == 0

    def describe(self) -> str:
        """How it ended, as one line."""
        match self.stopped:
            case "time":
                return f"it took longer than {self.limits.wall_s:g} s"
            case "output":
                return f"it printed more than {self.limits.output_kb} KiB"
        last = self.stderr.strip().rpartition("\n")[2].strip()
        if self.status == 0:
            return "it ended well"
        return last if self.status == 1 and last else f"it ended with {describe_status(self.status)}"


def run_python(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str] | None = None,
    protections: tuple[str, ...] | None = None,
    running: set["subprocess.Popen[bytes]"] | None = None,
) -> Finished:
    """Run a Python program in a folder of its own, which is removed with all that the program started.

    It may import what is installed beside megarl, read Python's own folders and the system's libraries, write to its
    folder, and start threads but no processes; its environment is empty. files: texts of the folder, by name.
    protections: of PROTECTIONS; None: all that this machine has. running: has the program while it runs; terminate() on
    what is in it, from any thread, ends it. Raises SandboxError where the protections cannot be had, and where it was
    ended so.
    """
    limits, running = limits or Limits(), set() if running is None else running
    task = {
        "arguments": [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-c", _RUN],
        # The order of a set of texts is the same in each run.
        "environment": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        "files": {**(files or {}), "main.py": source},
        "stdin": stdin,
        "limits": {**asdict(limits), "cpu_s": int(limits.wall_s) + 1},
        "readable": list_readable(),
        "protections": find_protections() if protections is None else protections,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        cwd="/",
    )
    running.add(process)
    seconds = limits.wall_s + START_S
    try:
        line = exchange(process, json.dumps(task).encode() + b"\n", seconds)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not answer within {seconds:g} s") from None
    finally:
        running.discard(process)
        assert process.stdin is not None
        process.stdin.close()  # The launcher then ends its program and itself; it is killed where it does not.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=START_S)
        end_process(process)
    if line is None:
        raise SandboxError(f"the sandbox ended without an answer ({describe_status(process.returncode)})")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise SandboxError(f"the sandbox could not be made: {answer['error']}")
    return Finished(**answer, limits=limits)


@functools.cache
def find_protections() -> tuple[str, ...]:
    """Those of PROTECTIONS that this machine has, each found by running a program with it."""
    found = []
    for name in PROTECTIONS:
        with contextlib.suppress(SandboxError):
            done = run_python("print(6 * 7)", limits=Limits(wall_s=30.0), protections=(name,))
            found += [name] if done.is_well and done.stdout == "42\n" else []
    return tuple(found)


def warn_of_gaps(key: str) -> None:
    """A RuntimeWarning where this machine does not keep programs from something; key: the setting that runs them."""
    has = set(find_protections())
    if gaps := "; ".join(gap for gap, kept_by in GAPS.items() if not has & kept_by):
        text = f"{key}: programs that the policy writes run here, and not everything is kept from one: {gaps}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has the standard library, no files and no network; what it prints is returned.
    """
    done = run_python(code, limits=Limits(wall_s=5.0))
    if done.is_well:
        return done.stdout
    return f"{done.stdout}error: {done.describe()}"


_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*$", re.MULTILINE)
PYTHON = frozenset({"", "python", "python3", "py"})
RUN_ASSERTS = """\
import json, sys
token, tests = json.loads(sys.stdin.read())
names = {"__name__": "solution"}
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), names)
for number, test in enumerate(tests):
    try:
        exec(compile(test, f"test {number}", "exec"), names)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        print(f"\\n{token} {number}", flush=True)
"""


class CodeReward(AsyncReward):
    """Runs the last block of Python code of a response against the prompt's tests.

    1 where all pass, else 0, or with reward.partial the share of those that pass. details: "block" is 1 where there is
    a block, "passed" the share of tests (without reward.partial the first one that fails ends it), "timeout" 1 where
    one ran out of time.
    """

    def __init__(self, config: CodeRewardConfig):
        self._partial = config.partial
        self._limits = Limits(wall_s=config.timeout_s, memory_mb=max(1, int(config.memory_gb * 1024)))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(config.num_workers or choose_num_workers(), thread_name_prefix="code")

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.run_tests, prompt, response.text)

    async def check(self, prompt: Prompt, response: Response) -> Score:
        """Also warns of what this machine does not keep from programs."""
        warn_of_gaps("reward=code")
        return await self.score(prompt, response)

    def run_tests(self, prompt: Prompt, text: str) -> Score:
        """Raises ValueError naming the prompt without tests, and RewardFailedError where there is no sandbox."""
        (pairs, asserts), source = read_tests(prompt), find_code(text)
        if source is None:
            return Score(0.0, False, {"block": 0.0, "passed": 0.0, "timeout": 0.0})
        passed, timeout = 0, False
        try:
            # Each pair is a process of its own, whose output is compared outside of it.
            for given, expected in pairs:
                done = self._run(source, given)
                is_right = done.is_well and normalize_output(done.stdout) == normalize_output(expected)
                passed, timeout = passed + is_right, timeout or done.stopped == "time"
                if not is_right and not self._partial:
                    break
            # Statements are one process, which ends without a word where the response's code calls exit().
            if asserts and (self._partial or passed == len(pairs)):
                token = secrets.token_hex(16)  # So that what the code prints is not taken for a test that passed.
                done = self._run(RUN_ASSERTS, json.dumps([token, asserts]), {"solution.py": source})
                lines = set(done.stdout.splitlines())
                passed += sum(f"{token} {number}" in lines for number in range(len(asserts)))
                timeout = timeout or done.stopped == "time"
        except SandboxError as error:
            raise RewardFailedError(str(error)) from error
        num_tests = len(pairs) + len(asserts)
        share, all_pass = passed / num_tests, passed == num_tests
        details = {"block": 1.0, "passed": share, "timeout": float(timeout)}
        return Score(share if self._partial else float(all_pass), all_pass, details)

    def _run(self, source: str, stdin: str, files: Mapping[str, str] | None = None) -> Finished:
        if self._closed:
            raise SandboxError("the reward was closed")
        return run_python(source, stdin=stdin, files=files, limits=self._limits, running=self._running)

    def close(self) -> None:
        """End the programs that run."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._running):
            process.terminate()


def find_code(text: str) -> str | None:
    """The content of the last closed block of Python code; None where there is none."""
    found, opening = None, None
    for fence in _FENCE.finditer(text):
        marks, language = fence.group(1), fence.group(2).lower()
        if opening is None:
            opening = fence
        elif marks.startswith(opening.group(1)) and not language:
            if opening.group(2).lower() in PYTHON:
                found = text[opening.end() + 1 : fence.start()]
            opening = None
    return found


def read_tests(prompt: Prompt) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of input and output, and statements that must not raise, in metadata["tests"], else in the answer. Raises
    ValueError naming the prompt.

    JSON: {"inputs": [texts], "outputs": [texts]}, {"asserts": [statements]}, or a list of statements; or plain text of
    assert statements.
    """
    stored: Any = prompt.metadata.get("tests", prompt.answer)
    try:
        if stored.lstrip()[:1] in ("{", "["):
            stored = parse_json(stored)
        else:
            stored = [stored] if "assert" in stored else []
        stored = stored if isinstance(stored, dict) else {"asserts": stored}
        inputs, outputs, asserts = ([*stored.get(name, ())] for name in ("inputs", "outputs", "asserts"))
        if wrong := [value for value in (*inputs, *outputs, *asserts) if not isinstance(value, str)]:
            raise ValueError(f"found {wrong[0]!r}, a {type(wrong[0]).__name__}; a text was expected")
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    except (ValueError, TypeError) as error:
        needed = 'JSON such as {"inputs": ["1 2"], "outputs": ["3"]} or ["assert add(1, 2) == 3"]'
        found = f"no tests in metadata['tests'] or the answer ({error}); reward=code needs {needed}"
        raise ValueError(f"prompt {prompt.id!r}: {found}") from error
    if not inputs and not asserts:
        raise ValueError(f"prompt {prompt.id!r}: it has no tests; reward=code needs one at least")
    return list(zip(inputs, outputs, strict=True)), asserts


def normalize_output(text: str) -> list[str]:
    """The lines without white space at their ends and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
