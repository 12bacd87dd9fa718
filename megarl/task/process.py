"""A process of its own for a function that may hang, use up memory or take its process down: both ends of it.

Its time limit holds in any thread and inside C code (a power of powers), which a signal handler's would not. The other
end is python -m megarl.task.process: it reads the task and then one call a line (JSON) from standard input, and writes
one answer a line, until its input ends or its parent does. No torch is imported here, which takes seconds.
"""

import asyncio
import contextlib
import inspect
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from megarl.config.errors import ConfigError, DescribedError, describe_error, load_named
from megarl.task import sandbox

START_DEADLINE_S = 180.0
"""For importing the function's packages on a busy machine"""
GRACE_S = 20.0
"""Beyond the process's own time limit, before it is killed"""
OUT_OF_MEMORY = 77
"""Exit status"""
GIB = 2**30


class CallError(Exception):
    """A call without a result; the message is one line.

    kind: "time" or "memory", of which the function took more than its limit; "died", it took its process down;
    "killed", its process was, from outside, or closed; "raised", with the exception's type and text as the message;
    "start", its process could not load it.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class FunctionProcess:
    """Calls one function in a process of its own, one call at a time. Thread-safe.

    The process is started by `start` or a call. It and what it started end with this object and with this process.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float,
        memory_gb: float,
        options: Mapping[str, Any] | None = None,
        show_output: bool = False,
        sealed: bool = False,
    ):
        """options, JSON: where given, `path` is called once with them and returns the function. memory_gb: address
        space in GiB beyond what the process has after loading. show_output: what the function prints goes to this
        process's standard error; else it is dropped. sealed: after loading, the function can only read Python's own
        folders, as far as the kernel grants it: no other files, no network, no processes."""
        self._task = {"path": path, "options": options, "timeout_s": timeout_s, "sealed": sealed}
        self._task["memory_bytes"] = int(memory_gb * GIB)
        self._path, self._timeout_s, self._memory_gb, self._show_output = path, timeout_s, memory_gb, show_output
        self._lock = threading.Lock()
        self._closed = self._has_answered = False
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self, key: str) -> None:
        """Start the process, where it does not run. Raises ConfigError naming `key` where it cannot load it."""
        with self._lock:
            try:
                self._process = self._process or self._start()
            except CallError as error:
                raise ConfigError([f"{key}: {error}"]) from error

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The function's result for these keywords; both are JSON. A process that was killed from outside (SIGKILL) is
        replaced once, and so is one that has answered before and ran out of memory: calls before may have kept it.

        Raises CallError.
        """
        question = json.dumps(arguments).encode()
        with self._lock:
            try:
                answer = self._ask(question)
            except CallError as first:
                is_passing = first.kind == "killed" or (first.kind == "memory" and self._has_answered)
                if self._closed or not is_passing:
                    raise
                answer = self._ask(question)
        if "error" in answer:
            raise CallError("raised", answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """End the process, once no call is under way; the next call starts it again."""
        with self._lock:
            if self._process is not None:
                self._stop()

    def close(self) -> None:
        """End the process, also in the middle of a call, and start none again."""
        self._closed = True
        # Beside a call only the kill: the pipes are the call's until it has noticed.
        if (process := self._process) is not None and process.poll() is None:
            sandbox.kill_group(process)
        self.stop()

    def _ask(self, question: bytes) -> dict[str, Any]:
        self._check_open()
        process = self._process or self._start()
        answer, status = self._exchange(process, question, self._timeout_s + GRACE_S)
        if answer is not None:
            self._has_answered = True
            return answer
        kind, text = {
            -signal.SIGALRM: ("time", f"it took longer than {self._timeout_s:g} s"),
            OUT_OF_MEMORY: ("memory", f"it needed more than {self._memory_gb:g} GiB of memory"),
            -signal.SIGKILL: ("killed", "its process was killed (SIGKILL) twice"),
        }.get(status, ("died", f"its process died ({sandbox.describe_status(status)})"))
        raise CallError(kind, text)

    def _exchange(
        self, process: "subprocess.Popen[bytes]", question: bytes, seconds: float
    ) -> tuple[dict[str, Any] | None, int]:
        """The answer, or None and the status of the process, which is then ended: SIGALRM's where time ran out."""
        try:
            line = sandbox.exchange(process, question + b"\n", seconds)
        except TimeoutError:
            self._stop()
            return None, -signal.SIGALRM
        if line is not None:
            return json.loads(line), 0
        # Its end of the pipe closes before it is gone: its own status says more than that of a kill.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        status = self._stop()
        self._check_open()
        return None, status

    def _check_open(self) -> None:
        if self._closed:
            raise CallError("killed", "its process was closed")

    def _start(self) -> "subprocess.Popen[bytes]":
        # A session of its own: Ctrl-C at the terminal is the parent's to handle, and the whole group can be killed.
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.task.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._show_output else subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._process, self._has_answered = process, False
        self._finalizer = weakref.finalize(self, sandbox.end_process, process)
        if self._closed:  # `close` may have looked before there was a process to kill.
            self._stop()
            self._check_open()
        # The same modules are found as here.
        task = json.dumps({**self._task, "sys_path": [os.path.abspath(entry) for entry in sys.path]})
        message, status = self._exchange(process, task.encode(), START_DEADLINE_S)
        if message is None and status == -signal.SIGALRM:
            raise CallError("start", f"loading {self._path} took longer than {START_DEADLINE_S:.0f} s")
        if message is None:
            raise CallError("start", f"the process that loads {self._path} died ({sandbox.describe_status(status)})")
        if "error" in message:
            self._stop()
            raise CallError("start", message["error"])
        return process

    def _stop(self) -> int:
        """End the process; returns its exit status."""
        process = self._process
        assert process is not None
        assert self._finalizer is not None
        self._finalizer()
        self._process = self._finalizer = None
        return process.wait(timeout=30)


def load_callable(path: str, key: str = "path") -> Callable[..., Any]:
    """The callable named "file.py:name" or "package.module:name". Raises ConfigError naming the key."""
    target = load_named(key, path)
    if not callable(target):
        raise ConfigError([f"{key}: found {path!r}, a {type(target).__name__}; a callable was expected"])
    return target


@contextlib.contextmanager
def running_users_code(what: str, path: str = "") -> Iterator[None]:
    """What is raised within the block is raised as a ConfigError that begins with `what`, if it is none. path: see
    `describe_error`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError([f"{what} raised {describe_error(error, path)}"]) from error


def describe(error: BaseException) -> str:
    """An exception as one line: its type and its text."""
    if isinstance(error, DescribedError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_loading(error: Exception) -> str:
    """What `load_callable` raised, or the function's own options, as one line."""
    text = str(error).removeprefix("path: ")
    return " ".join(text.split()) if isinstance(error, ValueError) else describe(error)


def shorten(text: str, length: int) -> str:
    """The text, or its first characters and three dots."""
    return text if len(text) <= length else f"{text[:length]}..."


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The function's result; a coroutine is awaited."""

    async def wait(result: Any) -> Any:
        return await result

    result = function(*args, **keywords)
    return asyncio.run(wait(result)) if inspect.isawaitable(result) else result


def build_pattern_matcher(pattern: str) -> Callable[..., bool]:
    """(text) -> whether the text but for white space at its ends matches the pattern."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text: compiled.fullmatch(text.strip()) is not None


def load_tools(paths: Mapping[str, str], result_length: int) -> Callable[..., str]:
    """The function (name, arguments) -> result as text, of the tools at `paths`, package.module:function by name.

    A result that is no text is given as JSON; results are cut to `result_length` characters.
    """
    functions = {name: load_callable(path) for name, path in paths.items()}
    if functions.get("python") is sandbox.python:
        sandbox.find_protections()  # Tries what the machine has, which takes a second: no call's time.

    def run(name: str, arguments: dict[str, Any]) -> str:
        result = call(functions[name], **arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        more = len(text) - result_length
        return text if more <= 0 else f"{text[:result_length]}\n... ({more} more characters)"

    return run


def main() -> None:
    """Serve until standard input ends. A call that runs out of time ends the process, without an answer."""
    # What functions print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What functions read must not be the calls.
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def end_with_parent() -> None:
        """Kill this process's group as soon as the other end of the pipe is closed."""
        poll = select.poll()
        poll.register(questions.fileno(), 0)  # POLLHUP is always reported, whatever there is to read.
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # No handler: the kernel ends the process, also where Python would not come to run one.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def write(message: str) -> None:
        answers.write(message + "\n")
        answers.flush()

    task = json.loads(questions.readline())
    sys.path[:] = task["sys_path"]
    try:
        function = load_callable(task["path"])
        if task["options"] is not None:
            function = function(**task["options"])
    except Exception as error:
        write(json.dumps({"error": describe_loading(error)}))
        return
    sandbox.limit_resource(resource.RLIMIT_AS, psutil.Process().memory_info().vms + task["memory_bytes"])
    if task["sealed"]:  # What the kernel does not grant is left out: it was said before the start.
        with contextlib.suppress(OSError):
            sandbox.allow_files([*sandbox.list_readable(), str(sandbox.ROOT / "megarl")], None)
        with contextlib.suppress(OSError):
            sandbox.refuse_calls(os.getpid(), own_files=False)
    write(json.dumps({"ready": True}))
    served_by = os.getpid()
    for line in questions:
        signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])
        try:
            answer = json.dumps({"result": call(function, **json.loads(line))})
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            answer = json.dumps({"error": describe(error)})
        if os.getpid() != served_by:  # A function that forked: its copy would answer too, and that the next call.
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(answer)


if __name__ == "__main__":
    main()
