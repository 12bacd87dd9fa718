"""A reward for programs: the code of a response is run on the tests of its problem, in the sandbox."""

import asyncio
import json
import re
import secrets
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.config.schema.task import CodeRewardConfig
from megarl.files import parse_json
from megarl.task.reward import AsyncReward, RewardFailedError, choose_num_workers
from megarl.task.sandbox import Finished, Limits, SandboxError, run_python, warn_of_gaps
from megarl.types import Prompt, Response, Score

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
