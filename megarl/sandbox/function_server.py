"""The other end of `FunctionProcess`: python -m megarl.sandbox.function_server.

Reads the task and then one call a line from standard input, both JSON, and writes one answer a line, until its input
ends or its parent does.
"""

import asyncio
import importlib
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

from megarl.sandbox.function_process import OUT_OF_MEMORY


def load_callable(path: str) -> Callable[..., Any]:
    """The callable named "package.module:callable", imported as Python finds it (PYTHONPATH, installed packages).

    Raises ValueError saying what was found and why it cannot be called.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"found {path!r}; it must be package.module:callable")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # A user's module can fail in any way while it is imported.
        raise ValueError(
            f"found {path!r}; importing {module_name} failed with {describe(error)}"
            " (the module must be installed or its folder be on PYTHONPATH)"
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ValueError(f"found {path!r}; {module_name} has no {name}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"found {path!r}, a {type(target).__name__}; a callable was expected")
    function: Callable[..., Any] = target
    return function


def describe(error: BaseException) -> str:
    """An exception as one line: its type and its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def limit_memory(more: int) -> None:
    """Limits the address space to what the process has and `more` bytes."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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
    write({"ready": True})
    for line in questions:
        signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])
        try:
            answer = json.dumps({"result": call(function, **json.loads(line))})
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            answer = json.dumps({"error": describe(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
