"""The user's agents: programs, functions or a service that are given a task and an endpoint, one for each episode.

A program or a function is a process of its own, which a host forks once it has loaded the function: it costs no start,
and whatever it does ends with its episode. Both ends of the host are here. The other is python -m megarl.task.agents,
which reads what is to begin or to end, a line of JSON each, from standard input, and writes a line for each that has
ended, until its input ends. No torch is imported here, which takes seconds.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import httpx
import psutil

from megarl.config.schema.task import AgentEnvironmentConfig
from megarl.signals import PR_SET_CHILD_SUBREAPER
from megarl.task.process import START_DEADLINE_S, call, describe, describe_loading, load_callable, shorten
from megarl.task.sandbox import describe_status, end_descendants

EPISODE = "MEGARL_EPISODE"
"""Environment variable by which a process is told to be of an episode"""
END_DEADLINE_S = 30.0
"""For ending all agents"""
MOST_OUTPUT = 2**24
"""Bytes of a result"""


class AgentError(Exception):
    """An agent without a result; the message is one line."""


class AgentHost:
    """Programs or a function of the user's (environment.command, environment.path). For one event loop."""

    def __init__(self, config: AgentEnvironmentConfig):
        self._task = {"command": list(config.command), "path": config.path}
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def run(self, name: str, variables: Mapping[str, str], task: Mapping[str, Any]) -> Any:
        """What the agent of this name gives for the task, JSON, once the host was started.

        Cancelling it ends the agent and what it has started. Raises AgentError.
        """
        given = {"name": name, "variables": {**variables, EPISODE: name}, "task": task}
        ended = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            self._send({"begin": given})
            answer = await ended
        except asyncio.CancelledError:
            self._send({"end": name})
            raise
        finally:
            self._waiting.pop(name, None)
        if "error" in answer:
            raise AgentError(answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """End all agents. The host ends by itself, too, once this process does."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(END_DEADLINE_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        if self._reader is not None:
            await self._reader

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # It has ended, as the reader finds out.
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def start(self) -> None:
        """Start the host, where it does not run. Raises AgentError where it cannot load the function."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megarl.task.agents"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=2 * MOST_OUTPUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
            self._send({**self._task, "sys_path": [os.path.abspath(entry) for entry in sys.path]})
            assert self._process.stdout is not None
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    line = await self._process.stdout.readline()
            except TimeoutError as error:
                self._process.kill()
                raise AgentError(f"loading {self._task['path']} took longer than {START_DEADLINE_S:.0f} s") from error
            found = json.loads(line) if line else {"error": "the process of the agents died"}
            if "error" in found:
                await self._process.wait()
                raise AgentError(found["error"])
            self._reader = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, answers: asyncio.StreamReader) -> None:
        while line := await answers.readline():
            answer = json.loads(line)
            if (ended := self._waiting.get(answer["name"])) is not None and not ended.done():
                ended.set_result(answer)
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_result({"error": "the process of the agents died"})


class AgentService:
    """A service of the user's (environment.url), which is sent {"name", "task", "base_url", "api_key", "model"}."""

    def __init__(self, config: AgentEnvironmentConfig):
        assert config.url is not None
        self._url = config.url
        self._http: httpx.AsyncClient | None = None

    async def run(self, name: str, variables: Mapping[str, str], task: Mapping[str, Any]) -> Any:
        """As `AgentHost.run`."""
        given = {own: variables[variable] for own, variable in SENT.items()}
        # Its own deadline is the episode's.
        self._http = self._http or httpx.AsyncClient(timeout=None, limits=httpx.Limits())
        try:
            answer = await self._http.post(self._url, json={"name": name, "task": task, **given})
        except (httpx.TransportError, OSError) as error:
            raise AgentError(f"{self._url}: {describe(error)}") from error
        if answer.status_code != 200:
            raise AgentError(f"{self._url} answered {answer.status_code}: {shorten(answer.text, 300)}")
        try:
            return answer.json() if answer.content else None
        except ValueError:
            return answer.text

    async def start(self) -> None: ...

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()


SENT = {"base_url": "OPENAI_BASE_URL", "api_key": "OPENAI_API_KEY", "model": "OPENAI_MODEL"}
"""What an agent is told of the endpoint, in the request to a service, and as a variable of a process"""


def build_agents(config: AgentEnvironmentConfig) -> AgentHost | AgentService:
    return AgentHost(config) if config.url is None else AgentService(config)


@dataclass
class Running:
    """An agent's process, at the host's end."""

    pid: int
    pidfd: int
    result: int | None
    """The pipe of a function's result"""
    output: BinaryIO
    """What it prints"""
    found: bytearray = field(default_factory=bytearray)


class Host:
    """Begins and ends agents. It has one thread, since it forks."""

    def __init__(self, command: list[str], function: Callable[..., Any] | None, answer: Callable[[Any], None]):
        self._command, self._function, self._answer = command, function, answer
        self._running: dict[str, Running] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, questions: int) -> None:
        """Until the other end of this pipe is closed."""
        self._selector.register(questions, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in self._selector.select():
                if key.fd == questions:
                    if not (read := os.read(questions, 2**16)):
                        return
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                elif key.data in self._running:
                    self._hear(key.data, key.fd)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "begin" in message:
            given = message["begin"]
            try:
                self._begin(given["name"], given["variables"], given["task"])
            except OSError as error:
                self._answer({"name": given["name"], "error": f"it could not be started: {describe(error)}"})
        elif message["end"] in self._running:
            self._end(message["end"])

    def _begin(self, name: str, variables: Mapping[str, str], task: Any) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115  # Open until the agent has ended.
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.close(read)
                self._become(variables, task, output, write)
            finally:
                os._exit(1)
        os.close(write)
        running = Running(pid, os.pidfd_open(pid), read, output)
        self._running[name] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ, name)
        self._selector.register(read, selectors.EVENT_READ, name)

    def _become(self, variables: Mapping[str, str], task: Any, output: BinaryIO, result: int) -> None:
        """In the new process."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(task).encode() + b"\n")
            given.seek(0)
            os.dup2(given.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.environ.update(variables)
        if self._function is None:
            with contextlib.suppress(OSError):
                os.execvp(self._command[0], self._command)
            print(f"{self._command[0]}: cannot be run", flush=True)
            os._exit(127)
        try:
            found = {"result": call(self._function, task)}
            content = json.dumps(found)
        except BaseException as error:
            content = json.dumps({"error": describe(error)})
        with os.fdopen(result, "w") as file:
            file.write(content)
        sys.stdout.flush()
        os._exit(0)

    def _hear(self, name: str, source: int) -> None:
        running = self._running[name]
        if source == running.result:
            read = os.read(source, 2**16)
            running.found += read
            if not read or len(running.found) > MOST_OUTPUT:
                self._selector.unregister(source)
                os.close(source)
                running.result = None
            return
        self._end(name)

    def _end(self, name: str) -> None:
        """Its process has ended, or is to; nothing that it has started outlives it."""
        running = self._running.pop(name)
        with contextlib.suppress(OSError):
            os.killpg(running.pid, signal.SIGKILL)
        _, status = os.waitpid(running.pid, 0)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get(EPISODE) == name:
                    process.kill()
        self._reap_orphans()
        if running.result is not None:
            os.set_blocking(running.result, False)
            with contextlib.suppress(BlockingIOError):
                while len(running.found) <= MOST_OUTPUT and (read := os.read(running.result, 2**16)):
                    running.found += read
            self._selector.unregister(running.result)
            os.close(running.result)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        with running.output as output:
            self._answer(
                {"name": name, **self._read_result(os.waitstatus_to_exitcode(status), bytes(running.found), output)}
            )

    def _reap_orphans(self) -> None:
        """What agents have left behind and what has ended; an agent itself is left to `_end`."""
        own = {running.pid for running in self._running.values()}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in own:
                    return
                os.waitpid(found.si_pid, 0)

    def _read_result(self, status: int, found: bytes, output: BinaryIO) -> dict[str, Any]:
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - MOST_OUTPUT))
        text = output.read().decode(errors="replace").strip()
        if len(found) > MOST_OUTPUT:
            return {"error": f"its result has more than {MOST_OUTPUT} bytes"}
        if status or (self._function is not None and not found):
            said = f"; it said: {' '.join(text[-300:].split())}" if text else ""
            return {"error": f"its process died ({describe_status(status)}){said}"}
        if self._function is not None:
            answer: dict[str, Any] = json.loads(found)
            return answer
        last = text.rpartition("\n")[2]
        try:
            return {"result": json.loads(last) if last.startswith("{") else None}
        except ValueError:
            return {"result": None}


def main() -> None:
    # What is printed must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions = os.dup(0)
    os.set_inheritable(questions, False)

    def write(message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    first = b""
    while not first.endswith(b"\n"):
        if not (read := os.read(questions, 1)):
            return
        first += read
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    task = json.loads(first)
    sys.path[:] = task["sys_path"]
    # What an agent's processes leave behind comes to this one, which ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        function = None if task["path"] is None else load_callable(task["path"])
    except Exception as error:
        write({"error": describe_loading(error)})
        return
    host = Host(task["command"], function, write)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    write({"ready": True})
    try:
        host.serve(questions)
    finally:
        end_descendants()


if __name__ == "__main__":
    main()
