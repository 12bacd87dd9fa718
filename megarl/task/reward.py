"""The sorts of rewards, and those without a server: by a rule (texts, numbers, mathematics, form, length), by tests of
programs, and by the user's own function, with megarl's, TRL's or verl's parameters."""

import asyncio
import base64
import contextlib
import importlib.util
import inspect
import json
import math
import os
import queue
import re
import secrets
import signal
import subprocess
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import is_dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from megarl import types
from megarl.config.errors import ConfigError, DescribedError, describe_error
from megarl.config.schema import task as schema
from megarl.files import check_state, parse_json
from megarl.task.process import CallError, FunctionProcess, call, load_callable, shorten
from megarl.task.sandbox import Finished, Limits, SandboxError, run_python, warn_of_gaps
from megarl.types import Prompt, Response, RewardFunction, Score


class RewardFailedError(Exception):
    """There is no reward for a response; the message says why, in one line, without what differs between responses."""


class AsyncReward:
    """A reward that is awaited. Many responses are scored at the same time, on one event loop."""

    is_users = False
    """Whether it is the user's own code, which may print, start processes, and use files and the network"""
    sees_group = False
    """Whether a score depends on the other responses to the prompt: `score_group` is then to be called for all that the
    prompt has got, and not `score`"""

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Score a response. Whatever it raises costs the sample."""
        raise NotImplementedError

    async def score_group(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score | BaseException]:
        """The scores of responses to one prompt, or what costs a response its score. What it raises costs all."""
        return await asyncio.gather(*(self.score(prompt, each) for each in responses), return_exceptions=True)

    async def check(self, prompt: Prompt, response: Response) -> Score:
        """Before anything starts: score a response to one of the data's prompts. Raises ValueError where the reward
        cannot read the prompt."""
        return await self.score(prompt, response)

    def state(self) -> Any:
        """What it keeps from the responses that it has scored, JSON, for a checkpoint; None: nothing. It may be called
        from any thread, while responses are scored. Raises ValueError for what is not JSON."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `state` gave. Called before the first response is scored."""

    def close(self) -> None:
        """End what the reward has started. Called once; it may be called from any thread."""


class DirectReward(AsyncReward):
    """Calls a function of this process, for verifiers that take microseconds."""

    def __init__(self, function: RewardFunction):
        self._function = function

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return self._function(prompt, response)


def choose_num_workers() -> int:
    """A process for every four cores of this machine, from 1 to 16."""
    return min(16, max(1, len(os.sched_getaffinity(0)) // 4))


class ProcessReward(AsyncReward):
    """A function in up to reward.num_workers processes of its own, each started when all before it are busy.

    Derived classes say what it is asked and what its answers mean.
    """

    path: str
    """package.module:function of what is called once with `options` and returns the function that answers"""
    key = "reward"
    """The configuration key to name where the function cannot be loaded"""
    given_up: Score | None = None
    """The score of a response whose call ran out of time or memory, or took its process down; None: it failed"""

    def __init__(self, config: schema.ProcessRewardConfig, **options: Any):
        self._config, self._options = config, options
        self._processes = [
            FunctionProcess(
                self.path,
                options=options,
                timeout_s=config.timeout_s,
                memory_gb=config.memory_gb,
                show_output=self.is_users,
                sealed=not self.is_users,
            )
            for _ in range(config.num_workers or choose_num_workers())
        ]
        self._threads = ThreadPoolExecutor(len(self._processes), thread_name_prefix="reward")
        # The last one used is the next: no more processes run than are needed.
        self._idle: queue.LifoQueue[FunctionProcess] = queue.LifoQueue()
        self._lock, self._is_open = threading.Lock(), False

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        """The keywords of the call, JSON. Raises ValueError where the prompt cannot be read."""
        return {"text": response.text}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """The score that the answer means."""
        raise NotImplementedError

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError, and ValueError where the prompt cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, prompt, response)

    def close(self) -> None:
        """End the processes, also in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _start(self) -> int:
        """Start the first process; returns how many may run. Raises ConfigError where its function cannot be loaded."""
        self._processes[0].start(self.key)
        return len(self._processes)

    def _score(self, prompt: Prompt, response: Response) -> Score:
        self._open()
        question = self.ask(prompt, response)
        try:
            return self.read(self._call(question), prompt)
        except CallError as error:
            if self.given_up is not None and error.kind in ("time", "memory", "died"):
                return self.given_up
            raise self._explain(error) from error

    def _open(self) -> None:
        with self._lock:
            if not self._is_open:
                for process in reversed(self._processes[: self._start()]):
                    self._idle.put(process)
                self._is_open = True

    def _call(self, question: dict[str, Any]) -> Any:
        """The answer of a process that is idle. Raises CallError."""
        process = self._idle.get()
        try:
            return process.call(question)
        finally:
            self._idle.put(process)

    def _explain(self, error: CallError) -> RewardFailedError:
        reasons = {
            "start": f"'s process does not start: {error}",
            "raised": f" raised {error}",
            "time": f" took longer than reward.timeout_s={self._config.timeout_s:g} s",
            "memory": f" needed more memory than reward.memory_gb={self._config.memory_gb:g}",
        }
        return RewardFailedError(f"the reward{reasons.get(error.kind, f' failed: {error}')}")


def list_answers(prompt: Prompt, reward: str) -> tuple[str, ...]:
    """The prompt's reference answers. Raises ValueError, naming the prompt, where the data have none."""
    if not prompt.answers:
        found = f"no answer found beside {', '.join(prompt.columns or prompt.metadata) or 'the question'}"
        raise ValueError(f"prompt {prompt.id!r}: {found}; {reward} needs one, whose column data.answer_field names")
    return prompt.answers


def score_exact(prompt: Prompt, response: Response) -> Score:
    """1 where the normalised response is a normalised answer, else 0. Raises ValueError as `list_answers`."""
    answer = normalize_text(response.text)
    equal = answer in map(normalize_text, list_answers(prompt, "reward=exact"))
    return Score(reward=float(equal), correct=equal, answer=answer or None)


def normalize_text(text: str) -> str:
    """The text in lower case, runs of white space as one space, none at the ends, no full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


class FormatReward(ProcessReward):
    """1 where the response, white space at its ends aside, matches reward.pattern, else 0. A process of its own ends a
    match without an end."""

    path = "megarl.task.process:build_pattern_matcher"
    key = "reward.pattern"

    def __init__(self, config: schema.FormatRewardConfig):
        """Raises ConfigError for a pattern that is none."""
        try:
            re.compile(config.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            found = f"found {config.pattern!r}; not a regular expression: {error}"
            raise ConfigError([f"reward.pattern: {found}"]) from error
        super().__init__(config, pattern=config.pattern)

    def read(self, answer: Any, prompt: Prompt) -> Score:
        return Score(float(answer), bool(answer))


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?<![\w.])[-+−]?\$?(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}(?!\d)|/\d+(?![.\d]))?", re.ASCII)
"""An integer or decimal, thousands with commas, scientific notation with up to 4 digits, or a/b"""
MAX_CHARACTERS = 1000
"""A longer number is not read."""


def parse_number(text: str) -> Fraction | None:
    """The number that the text is, exactly; None where it is none. $ before and % after it are left out."""
    text = text.strip().removesuffix("%").rstrip()
    if len(text) > MAX_CHARACTERS or not NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", "").replace("$", "").replace("−", "-"))
    except ZeroDivisionError:
        return None


def find_last_number(text: str) -> Fraction | None:
    """The last number of the text."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return parse_number(last[0].group()) if last else None


def format_number(number: Fraction) -> str:
    """The same text for equal numbers: a decimal where it is exact with 28 digits, else a/b."""
    decimal = (Decimal(number.numerator) / Decimal(number.denominator)).normalize()
    if Fraction(decimal) != number:
        small = max(abs(number.numerator), number.denominator) < 10**MAX_CHARACTERS
        return f"{number.numerator}/{number.denominator}" if small else str(decimal)
    return f"{decimal:f}" if -30 < decimal.adjusted() < 30 else str(decimal)


class NumericReward:
    """1 where the response's last number is one of the prompt's answers, within the tolerances, else 0. details:
    "format" is 1 where the response has a number."""

    def __init__(self, config: schema.NumericRewardConfig):
        # As written: 0.1 is a tenth.
        self._tolerance, self._share = Fraction(repr(config.tolerance)), Fraction(repr(config.relative_tolerance))

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        """Raises ValueError, naming the prompt, where an answer is no number."""
        found, expected = find_last_number(response.text), list[Fraction]()
        for answer in list_answers(prompt, "reward=numeric"):
            number = parse_number(answer)
            if number is None:
                needed = "reward=numeric needs a number, such as 85, 1,234.5 or 3/4"
                raise ValueError(f"prompt {prompt.id!r}: answer {answer!r} found; {needed}")
            expected.append(number)
        if found is None:
            return Score(0.0, False, {"format": 0.0})
        correct = any(abs(found - it) <= max(self._tolerance, self._share * abs(it)) for it in expected)
        return Score(float(correct), correct, {"format": 1.0}, format_number(found))


class MathReward(ProcessReward):
    """1 where the response states one of the prompt's answers and nothing else, else 0.

    An answer that cannot be read as mathematics is compared as text. The rules are in docs/rewards.md.
    details: "format", whether it states one answer that can be read; "timeout", whether time or memory ran out.
    """

    path = "megarl.task.math_grading:build_math_scorer"
    given_up = Score(0.0, False, {"format": 0.0, "timeout": 1.0})

    def __init__(self, config: schema.MathRewardConfig):
        """Raises ConfigError without math-verify."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(["reward: math found, but math-verify is not installed; `make install` brings it"])
        super().__init__(config)
        self._mode = config.answer.value

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        golds = list_answers(prompt, "reward=math")
        return {"golds": list(golds), "text": response.text, "mode": self._mode, "prompt": prompt.text}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        correct, details = bool(answer["correct"]), {"format": float(answer["read"]), "timeout": 0.0}
        return Score(float(correct), correct, details, answer["answer"])


class LengthReward:
    """1 for a response of min_length to max_length tokens, falling linearly to 0 at `falloff` tokens outside. Tokens
    are those that the policy generated. Correct within the range. details: {"tokens": their number}."""

    def __init__(self, config: schema.LengthRewardConfig):
        """Raises ConfigError for an empty range."""
        if config.min_length > config.max_length:
            allowed = f"at most reward.max_length ({config.max_length})"
            raise ConfigError([f"reward.min_length: found {config.min_length}; it must be {allowed}"])
        self._config = config

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        length, falloff = int(response.generated.sum()), self._config.falloff
        outside = max(self._config.min_length - length, length - self._config.max_length, 0)
        # Without a falloff everything outside is 0.
        reward = max(0.0, 1.0 - outside / falloff) if falloff else float(outside == 0)
        return Score(reward, outside == 0, {"tokens": float(length)})


class EnvironmentReward:
    """0, as the rewards of the turns are part of every sample's reward, whatever `reward=` is; correct where their sum
    is at least correct_at."""

    def __init__(self, config: schema.EnvironmentRewardConfig):
        self._correct_at = config.correct_at

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        return Score(0.0, sum(turn.reward for turn in response.turns) >= self._correct_at)


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

    def __init__(self, config: schema.CodeRewardConfig):
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

    JSON: {"inputs": [texts], "outputs": [texts]}, {"asserts": [statements]}, or a list of statements; a list of records
    with "assert_code" or "stdin" and "expected_stdout", as ROLL has them; or plain text of assert statements.
    """
    whole = json.dumps(prompt.references) if prompt.references else prompt.answer
    stored: Any = prompt.metadata.get("tests", whole)
    try:
        if stored.lstrip()[:1] in ("{", "["):
            stored = parse_json(stored)
        else:
            stored = [stored] if "assert" in stored else []
        if isinstance(stored, list) and all(isinstance(each, dict) for each in stored):  # ROLL's test_cases
            pairs = [each for each in stored if "assert_code" not in each]
            inputs, outputs = [it.get("stdin", "") for it in pairs], [it.get("expected_stdout") for it in pairs]
            asserts = [each["assert_code"] for each in stored if "assert_code" in each]
            stored = {"inputs": inputs, "outputs": outputs, "asserts": [add_test_calls(each) for each in asserts]}
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


def add_test_calls(code: str) -> Any:
    """Statements that define test functions, as pytest finds them, with calls of these."""
    names = re.findall(r"^def (test_\w*)\(\s*\)", code, re.MULTILINE) if isinstance(code, str) else []
    return "\n".join([code, *(f"{name}()" for name in names)]) if names else code


def normalize_output(text: str) -> list[str]:
    """The lines without white space at their ends and without empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


RESERVED_NAMES = {"mean", "std", "min", "max", "correct", "positive_frac", "shaped_mean", "equal_groups_frac"}
RESERVED_NAMES |= {"failed_frac", "heldout"}
"""What the trainer itself logs under reward/."""


AT_A_TIME = 64
"""Calls of an async function that one process awaits at a time"""
BLOCKED_S = 2.0
"""Beyond reward.timeout_s, before a process ends whose async function keeps the others from running"""


def serve_function(path: str, timeout_s: float, sees_group: bool = False, state: Any = None) -> Callable[..., Any]:
    """What the process calls: the user's function; without questions it says what the function is and keeps.

    timeout_s: of a call that is awaited. state: what the function is to go on from. Raises ValueError where it cannot
    be loaded or called, or keeps none.
    """
    target: Any = load_callable(path)
    function = UserFunction(path, target, sees_group)
    keeps = hasattr(target, "state_dict") and hasattr(target, "load_state_dict")
    if state is not None:
        if not keeps:
            raise ValueError(f"the checkpoint has a state of {path}, which has no state_dict and load_state_dict now")
        target.load_state_dict(state)
    # One event loop for all calls: what the function keeps open, such as connections, belongs to it.
    runner = asyncio.Runner()

    def answer(question: str) -> Any:
        prompt, responses = decode_question(question)
        with _describing(path, prompt):
            return function.encode(call(function.begin, prompt, responses), responses)

    async def answer_later(question: str) -> Any:
        prompt, responses = decode_question(question)
        limit = asyncio.timeout(timeout_s)
        try:
            with _describing(path, prompt):
                async with limit:
                    found = await function.begin(prompt, responses)
                return function.encode(found, responses)
        except DescribedError as error:
            return {"late": True} if limit.expired() else {"error": str(error)}

    async def answer_all(questions: Sequence[str]) -> list[Any]:
        return await asyncio.gather(*map(answer_later, questions))

    def serve(questions: Sequence[str] | None = None) -> Any:
        if questions is None:
            kept = {"state": check_state(f"reward.path={path}", target.state_dict())} if keeps else {}
            return {"is_async": function.is_async, **kept}
        if not function.is_async:
            return [answer(question) for question in questions]
        signal.setitimer(signal.ITIMER_REAL, timeout_s + BLOCKED_S)
        return runner.run(answer_all(questions))

    return serve


@contextlib.contextmanager
def _describing(path: str, prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DescribedError(_explain(path, error, prompt)) from error


def _explain(path: str, error: Exception, prompt: Prompt) -> str:
    text = describe_error(error, path)
    if isinstance(error, TypeError | AttributeError) and re.search(r"'(Prompt|Response)'", str(error)):
        text += "; the texts are prompt.text and response.text, the reference answer is prompt.answer"
    columns = list_columns(prompt)
    if isinstance(error, KeyError) and columns and error.args[:1] not in [(name,) for name in columns]:
        text += f"; the columns of the data are {', '.join(sorted(columns))}"
    return text


class FunctionReward(ProcessReward):
    """Calls the user's function: of one response, or of a group's; one that keeps a state in one process alone, and an
    async one AT_A_TIME times at once in each."""

    path = f"{serve_function.__module__}:{serve_function.__name__}"
    key = "reward.path"
    is_users = True

    def __init__(self, config: schema.FunctionRewardConfig):
        self.sees_group = isinstance(config, schema.GroupFunctionRewardConfig)
        super().__init__(config, path=config.path, timeout_s=config.timeout_s, sees_group=self.sees_group)
        self._keeps_state, self._at_a_time = False, 1
        self._waiting: deque[tuple[str, Future[Any]]] = deque()

    def _start(self) -> int:
        """Also finds out whether the function keeps a state, and whether it is async."""
        count = super()._start()
        try:
            found = self._processes[0].call({})
        except CallError as error:
            raise ConfigError([f"{self.key}: {error}"]) from error
        self._keeps_state, self._at_a_time = "state" in found, AT_A_TIME if found["is_async"] else 1
        if self._keeps_state and (number := self._config.num_workers or 1) > 1:
            why = "the reward has state_dict and load_state_dict, and each process would keep a state of its own"
            raise ConfigError([f"reward.num_workers: {number} found; {why}: must be 1 or null"])
        return 1 if self._keeps_state else count

    def state(self) -> Any:
        """Of a function that keeps one; where its process has ended by a failure, it goes on from the last one."""
        if self._keeps_state:
            try:
                self._options["state"] = self._processes[0].call({})["state"]
            except CallError as error:
                if error.kind == "raised":
                    raise ValueError(str(error)) from error
                text = f"{self.key}: the reward's state could not be read ({error}); a checkpoint has the last one"
                warnings.warn(f"{text} that could", RuntimeWarning, stacklevel=2)
        return self._options.get("state")

    def load_state(self, state: Any) -> None:
        """A process that has started goes on from this state by being started again."""
        self._options["state"] = state
        for process in self._processes:
            process.stop()

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError, and ValueError for RESERVED_NAMES in the details."""
        (found,) = await self.score_group(prompt, [response])
        if isinstance(found, BaseException):
            raise found
        return found

    async def check(self, prompt: Prompt, response: Response) -> Score:
        """A group is tried as one of two."""
        found = (await self.score_group(prompt, [response] * (1 + self.sees_group)))[-1]
        if isinstance(found, BaseException):
            raise found
        return found

    async def score_group(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score | BaseException]:
        """Raises RewardFailedError."""
        answered: Future[Any] = Future()
        self._waiting.append((encode_question(prompt, responses), answered))
        self._threads.submit(self._serve)
        return [self._read(answer) for answer in await asyncio.wrap_future(answered)]

    def close(self) -> None:
        super().close()
        while taken := self._take(1):
            taken[0][1].set_exception(RewardFailedError("the reward was closed"))

    def _serve(self) -> None:
        """Answer as many of the questions that wait as the function takes at a time."""
        try:
            self._open()
        except Exception as error:
            for _, answered in self._take(1):
                answered.set_exception(error)
        else:
            self._answer(self._take(self._at_a_time))

    def _take(self, most: int) -> list[tuple[str, "Future[Any]"]]:
        taken: list[tuple[str, Future[Any]]] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                question, answered = self._waiting.popleft()
                if answered.set_running_or_notify_cancel():  # Nobody waits for the others any more.
                    taken.append((question, answered))
        return taken

    def _answer(self, asked: Sequence[tuple[str, "Future[Any]"]]) -> None:
        if not asked:
            return
        try:
            answers = self._call({"questions": [question for question, _ in asked]})
        except CallError as error:
            if len(asked) == 1:
                asked[0][1].set_exception(self._explain(error))
                return
            for each in asked:  # One of them took the process down: by itself no other fails with it.
                self._answer([each])
            return
        for (_, answered), answer in zip(asked, answers, strict=True):
            if isinstance(answer, list):
                answered.set_result(answer)
            else:
                kind, text = ("time", "") if "late" in answer else ("raised", answer["error"])
                answered.set_exception(self._explain(CallError(kind, text)))

    def _read(self, answer: dict[str, Any]) -> Score | BaseException:
        if answer["failure"] is not None:
            return RewardFailedError(answer["failure"])
        if reserved := RESERVED_NAMES & answer["details"].keys():
            names = ", ".join(sorted(reserved))
            found = f"reward.path={self._options['path']}: found details {names}"
            return ValueError(f"{found}; megarl's own metrics have these names under reward/")
        return Score(**{**answer, "token_rewards": tuple(answer["token_rewards"])})


ACCEPTED = (
    "(prompt, response), TRL's (prompts, completions, **columns)"
    " or verl's (data_source, solution_str, ground_truth, extra_info)"
)
ACCEPTED_OF_GROUPS = "(prompt, responses) or TRL's (prompts, completions, **columns) with reward=group_function"
RESULTS = 'a number, True or False, a dict with "score" (or "reward"), or a megarl.types.Score'
CORRECT_AT = 1.0
"""The least score that counts as correct, where the function says nothing about it"""


class UserFunction:
    """The user's function as one of a prompt and responses to it: one, or with sees_group those of a group."""

    def __init__(self, path: str, function: Callable[..., Any], sees_group: bool = False):
        """Raises ValueError for parameters of another sort."""
        self._path, self._function, self._sees_group = path, function, sees_group
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # Some builtins have none.
            self._signature = inspect.signature(lambda prompt, response, /: None)
        self._parameters = self._signature.parameters
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        self._is_trl, self._is_verl = "completions" in self._parameters, "solution_str" in self._parameters
        if not self._is_trl:
            try:
                if sees_group and self._is_verl:
                    raise TypeError("verl's functions score one response")
                self._bind(Prompt("", "", (), ""), [])
            except TypeError as error:
                found = ", ".join(map(str, self._parameters.values()))
                accepted = ACCEPTED_OF_GROUPS if sees_group else ACCEPTED
                raise ValueError(f"{path} takes ({found}), {error}; accepted are {accepted}") from error

    def begin(self, prompt: Prompt, responses: Sequence[Response]) -> Any:
        """What the function returns, which may have to be awaited. Raises ValueError for columns that the data do not
        have."""
        try:
            bound = self._bind(prompt, responses)
        except TypeError as error:
            has = ", ".join(sorted({"answer", *list_columns(prompt)}))
            raise ValueError(f"reward.path={self._path}: {error}; the columns of the data are {has}") from error
        return self._function(*bound.args, **bound.kwargs)

    def read(self, result: Any, responses: Sequence[Response]) -> list[Any]:
        """What of a result is of each response. Raises TypeError for another number of them."""
        if not self._sees_group and not self._is_trl:
            return [result]
        results = result.tolist() if getattr(result, "ndim", None) == 1 else result
        if not isinstance(results, list | tuple) or len(results) != len(responses):
            given = "one completion" if len(responses) == 1 else f"{len(responses)} responses"
            needed = "TRL's functions return a list with as many numbers as there are completions"
            if not self._is_trl:
                needed = "reward=group_function needs a list with as many scores as there are responses"
            raise TypeError(f"reward.path={self._path} returned {_show(result)} for {given}; {needed}")
        return list(results)

    def encode(self, result: Any, responses: Sequence[Response]) -> list[dict[str, Any]]:
        """The scores, as JSON. Raises TypeError for what is no result; of a group it costs its response alone."""
        encoded = []
        for found, response in zip(self.read(result, responses), responses, strict=True):
            try:
                encoded.append(encode_score(read_result(self._path, found, response), response))
            except (TypeError, ValueError) as error:
                if not self._sees_group:
                    raise
                encoded.append(encode_score(Score(0.0, False, failure=f"the reward failed: {error}"), response))
        return encoded

    def _bind(self, prompt: Prompt, responses: Sequence[Response]) -> inspect.BoundArguments:
        first = responses[0] if responses else None
        if not self._is_trl and not self._is_verl:
            return self._signature.bind(prompt, list(responses) if self._sees_group else first)
        given = _build_trl(prompt, responses) if self._is_trl else _build_verl(prompt, first)
        chosen = {name: given[name] for name in given if self._takes_all or name in self._parameters}
        return self._signature.bind(**chosen)


def _build_trl(prompt: Prompt, responses: Sequence[Response]) -> dict[str, Any]:
    """TRL's keywords, each a list with an entry for each response: the columns of the data, prompts and completions as
    chats where the data's are."""
    is_chat = any(
        isinstance(value, list) and value and isinstance(value[0], Mapping) and "content" in value[0]
        for value in prompt.columns.values()
    )
    chat, number = [message.to_dict() for message in prompt.messages], len(responses)
    columns = {"answer": prompt.answer, **list_columns(prompt)}
    asked = chat if is_chat else prompt.messages[-1].content if prompt.messages else prompt.text
    return {
        **{name: [value] * number for name, value in columns.items() if name not in ("prompt", "completion")},
        "prompts": [asked] * number,
        "completions": [[{"role": "assistant", "content": it.text}] if is_chat else it.text for it in responses],
        "completion_ids": [response.token_ids.tolist() for response in responses],
    }


def _build_verl(prompt: Prompt, response: Response | None) -> dict[str, Any]:
    """verl's keywords: columns of the data with verl's names where there are such, else what stands for them."""
    columns = list_columns(prompt)
    stated, extra = columns.get("reward_model"), columns.get("extra_info")
    truth = columns.get("ground_truth", prompt.answer)
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": "" if response is None else response.text,
        "ground_truth": stated.get("ground_truth", truth) if isinstance(stated, Mapping) else truth,
        "extra_info": extra if isinstance(extra, Mapping) else columns,
    }


def list_columns(prompt: Prompt) -> dict[str, Any]:
    """The record as the data have it; a generated problem's metadata."""
    return dict(prompt.columns or prompt.metadata)


OF_TURNS, OF_TOKENS = "turn_rewards", "token_rewards"
"""Entries of a dict that a function returns"""


def read_result(path: str, result: Any, response: Response) -> Score:
    """The Score that a function's result means. Of a dict: "score" or "reward", "correct" or verl's "acc", rewards of
    turns and of tokens, which are added, and every other number as a detail; texts and None are left out. Raises
    TypeError for what is no result."""
    if isinstance(result, Score):
        return result
    entries = dict(result) if isinstance(result, Mapping) else {"score": result}
    token_rewards, placed = _read_placed(path, entries, response)
    if token_rewards is not None and "reward" not in entries:
        entries = {"score": 0.0, **entries}
    numbers = {str(key): _read_number(value) for key, value in entries.items()}
    name = "reward" if "reward" in entries and "score" not in entries else "score"
    reward = numbers.get(name)
    if reward is None:
        raise TypeError(f"reward.path={path} returned {_show(result)}; it must return {RESULTS}")
    for key, value in entries.items():
        is_left_out = value is None or (isinstance(value, str) and key != "acc")
        if key == "correct" and value is not None and numbers[key] not in (0.0, 1.0):
            raise TypeError(f"reward.path={path} returned 'correct': {_show(value)}; it must be True or False")
        if numbers[str(key)] is None and not is_left_out:
            logged = f"beside {name!r} there may be numbers, which are logged as means, and texts, which are not"
            raise TypeError(f"reward.path={path} returned {key!r}: {_show(value)}; {logged}")
    stated = next((numbers[key] for key in ("correct", "acc") if numbers.get(key) is not None), None)
    reward += placed
    given = reward >= CORRECT_AT
    details = {key: value for key, value in numbers.items() if value is not None and key not in (name, "correct")}
    correct = given if stated is None else stated >= CORRECT_AT
    return Score(reward, correct, details, token_rewards=token_rewards or ())


def _read_placed(path: str, entries: dict[str, Any], response: Response) -> tuple[tuple[float, ...] | None, float]:
    """What stands at each token, of the two entries that are taken out, None without them; and their sum. Raises
    TypeError for what does not fit the response."""
    if not entries.keys() & {OF_TURNS, OF_TOKENS}:
        return None, 0.0
    placed, total = np.zeros(len(response)), 0.0
    for name, number in ((OF_TURNS, len(response.turns)), (OF_TOKENS, len(response))):
        if name not in entries:
            continue
        value = entries.pop(name)
        items = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
        found = [it for it in map(_read_number, items) if it is not None]
        if not len(found) == len(items) == number:
            needed = f"a list with a number for each of the {number} {name.removesuffix('_rewards')}s of the response"
            raise TypeError(f"reward.path={path} returned {name!r}: {_show(value)}; it must be {needed}")
        total += math.fsum(found)
        if name == OF_TOKENS:
            placed += np.array(found, dtype=np.float64)
            if (wrong := placed[~response.generated]).any():
                why = "the policy did not generate all of these tokens; it must be 0 where response.generated is False"
                raise TypeError(f"reward.path={path} returned {name!r} with {wrong[wrong != 0][0]:g}: {why}")
        else:
            for turn, reward in zip(response.turns, found, strict=True):
                if turn.end > turn.start:  # Of a turn without a token the reward stands at the end.
                    placed[turn.end - 1] += reward
    return tuple(placed.tolist()), total


def _read_number(value: Any) -> float | None:
    """Also an array or tensor of one number; None for what is no number."""
    if not isinstance(value, Real) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except OverflowError:  # An integer of hundreds of digits.
        return math.inf if value > 0 else -math.inf


def _show(value: Any) -> str:
    return f"{shorten(repr(value), 60)} ({type(value).__name__})"


def encode_question(prompt: Prompt, responses: Sequence[Response]) -> str:
    """All that a prompt and its responses have, as JSON; in its columns what JSON has no type for is a text."""

    def encode(value: Any) -> Any:
        match value:
            case np.ndarray():
                return value.tolist()
            case bytes():
                return base64.b64encode(value).decode()
            case types.FinishReason():
                return value.value
            case Mapping():
                return dict(value)
        return vars(value) if is_dataclass(value) else str(value)

    return json.dumps([prompt, list(responses)], default=encode)


def decode_question(text: str) -> tuple[Prompt, list[Response]]:
    """The prompt and the responses that `encode_question` was given."""
    prompt, responses = json.loads(text)
    prompt["token_ids"] = tuple(prompt["token_ids"])
    prompt["references"] = tuple(prompt["references"])
    prompt["messages"] = tuple(types.Message(**message) for message in prompt["messages"])
    return Prompt(**prompt), [_decode_response(response) for response in responses]


def _decode_response(response: dict[str, Any]) -> Response:
    experts, versions = response["routed_experts"], response["weight_versions"]
    response |= {
        "weight_versions": types.WeightVersions(**{name: tuple(values) for name, values in versions.items()}),
        "finish_reason": types.FinishReason(response["finish_reason"]),
        "routed_experts": experts and types.RoutedExperts(**{**experts, "data": base64.b64decode(experts["data"])}),
        "turns": tuple(types.Turn(**turn) for turn in response["turns"]),
    }
    return Response(**response)


def encode_score(score: Score, response: Response) -> dict[str, Any]:
    """All that a score has, as JSON. Raises TypeError and ValueError for what is not a number, or does not fit the
    response."""
    # The text "False" is true to Python, and so is NaN.
    if isinstance(score.correct, str) or score.correct not in (0, 1):
        raise TypeError(f"a Score has the correct {score.correct!r}; it must be True or False")
    details = {str(name): float(value) for name, value in score.details.items()}
    if score.token_rewards and len(score.token_rewards) != len(response):
        raise ValueError(f"a Score has {len(score.token_rewards)} token_rewards for {len(response)} tokens")
    return vars(score) | {"reward": float(score.reward), "correct": bool(score.correct), "details": details}
