"""The other end of `FunctionProcess`: python -m megarl.sandbox.function_server.

Reads the task and then one call a line from standard input, both JSON, and writes one answer a line, until its input
ends or its parent does.
"""

import asyncio
import contextlib
import inspect
import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.user_code import DescribedError, load_named
from megarl.sandbox import confinement, seccomp
from megarl.sandbox.function_process import OUT_OF_MEMORY
from megarl.sandbox.program import ROOT, list_readable


def load_callable(path: str) -> Callable[..., Any]:
    """The callable named "file.py:name" or "package.module:name".

    Raises ValueError saying what was found and why it cannot be called.
    """
    try:
        target = load_named("path", path)
    except ConfigError as error:
        raise ValueError(error.problems[0].removeprefix("path: ")) from error
    if not callable(target):
        raise ValueError(f"found {path!r}, a {type(target).__name__}; a callable was expected")
    return target


def describe(error: BaseException) -> str:
    """An exception as one line: its type and its text."""
    if isinstance(error, DescribedError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def limit_memory(more: int) -> None:
    """Limits the address space to what the process has and `more` bytes."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def seal() -> None:
    """From now on this thread reads Python's own folders and megarl's, and nothing else of the machine.

    What the kernel does not grant is left out: it was said before the start (`megarl.sandbox.program.list_gaps`).
    """
    with contextlib.suppress(OSError):
        confinement.allow_files([*list_readable(), str(ROOT / "megarl")], None)
    with contextlib.suppress(OSError):
        seccomp.refuse_calls(os.getpid(), own_files=False)


def end_with_parent(descriptor: int) -> None:
    """Kill this process's group as soon as the other end of this pipe is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # POLLHUP is always reported, whatever there is to read.
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The function's result; a coroutine is awaited."""
    result = function(*args, **keywords)
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def main() -> None:
    """Serve until standard input ends. A call that runs out of time ends the process, without an answer."""
    # What functions print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What functions read must not be the calls.
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end_with_parent(questions.fileno())
    # No handler: the kernel ends the process, also where Python would not come to run one.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    task = json.loads(questions.readline())
    sys.path[:] = task["sys_path"]
    try:
        function = load_callable(task["path"])
        if task["options"] is not None:
            function = function(**task["options"])
    except ValueError as error:
        write({"error": " ".join(str(error).split())})
        return
    except Exception as error:
        write({"error": describe(error)})
        return
    limit_memory(task["memory_bytes"])
    if task["sealed"]:
        seal()
    write({"ready": True})
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
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
