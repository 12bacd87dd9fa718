"""Runs one program behind the kernel's limits and ends everything that it started.

`megarl.sandbox.program` starts it and holds the other end of its standard input: one line of JSON comes from there, and
when it closes, because the owner is done or dead, the program is killed. One line of JSON goes back.

Standard library only, so that it starts at once. Linux only.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

from megarl.guard import list_descendants
from megarl.sandbox import confinement, seccomp

KILL_DEADLINE_S = 10.0
INSIDE = "/tmp"
"""The program's own folder, where it has a file system of its own"""


def main() -> None:
    """Serve one program. SIGTERM ends it, and what is left of it is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return
        line += chunk
    answer = run(json.loads(line))
    with contextlib.suppress(BrokenPipeError):
        write_line(1, answer)


def run(task: dict[str, Any]) -> dict[str, Any]:
    """{"stdout", "stderr", "status", "stopped"}, or {"error"} where the program could not be started as asked.

    status: exit status, or minus the signal's number. stopped: null, "time" or "output".
    """
    confinement.adopt_descendants()
    own_files = "namespaces" in task["protections"]
    folder = INSIDE
    try:
        if own_files:
            confinement.enter_namespaces()
        else:
            folder = confinement.make_folder()
        return supervise(task, folder, own_files)
    except OSError as error:
        return {"error": str(error)}
    finally:
        end_descendants()
        if not own_files:
            shutil.rmtree(folder, ignore_errors=True)


def supervise(task: dict[str, Any], folder: str, own_files: bool) -> dict[str, Any]:
    """Start the program, and watch it until it ends or has to."""
    reports, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    text = os.memfd_create("stdin")
    with os.fdopen(os.dup(text), "wb") as file:
        file.write(task["stdin"].encode())
    os.lseek(text, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        become_first(task, folder, own_files, (text, outputs[1], errors[1]), reports[1])
    for descriptor in (reports[1], outputs[1], errors[1], text):
        os.close(descriptor)
    streams = {outputs[0]: bytearray(), errors[0]: bytearray(), reports[0]: bytearray()}
    stopped = watch(streams, task["limits"]["wall_s"], task["limits"]["output_kb"] * 1024, reports[0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    end_descendants()
    report: dict[str, Any] = json.loads(streams[reports[0]].partition(b"\n")[0] or "{}")
    if "error" in report:
        return report
    if not stopped:
        # What was in the pipes when the program ended.
        stopped = watch(streams, KILL_DEADLINE_S, task["limits"]["output_kb"] * 1024, None)
    status = report.get("status", -signal.SIGKILL)
    return {
        "stdout": streams[outputs[0]].decode(errors="replace"),
        "stderr": streams[errors[0]].decode(errors="replace"),
        "status": status,
        "stopped": "time" if status == -signal.SIGXCPU else stopped,
    }


def watch(streams: dict[int, bytearray], seconds: float, limit: int, until: int | None) -> str | None:
    """Read until all streams end, or the stream `until`; why it was broken off, else None."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(0, select.POLLIN)
    open_streams = set(streams)
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    while open_streams and (until is None or until in open_streams):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready or time.monotonic() > deadline:
            return "time"
        for descriptor, _ in ready:
            if descriptor == 0:
                return "owner"
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poll.unregister(descriptor)
                open_streams.discard(descriptor)
            streams[descriptor] += chunk[: limit - len(streams[descriptor])]
            if descriptor != until and len(streams[descriptor]) >= limit:
                return "output"
    return None


def become_first(
    task: dict[str, Any], folder: str, own_files: bool, streams: tuple[int, int, int], report: int
) -> None:
    """The first process of the program's namespace: makes its file system, starts it and reports its exit status."""
    try:
        confinement.set_parent_death_signal(signal.SIGKILL)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.dup2(report, 3)
        os.closerange(4, 1 << 16)
        os.set_inheritable(3, False)
        report = 3
        if own_files:
            confinement.build_root(task["readable"], task["limits"]["files_mb"])
        for name, text in task["files"].items():
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(file.name, 0o644)
        program = os.fork()
        if program == 0:
            become_program(task, folder, own_files)
        for number in range(3):
            os.close(number)
        while True:
            pid, status = os.wait()
            if pid == program:
                break
        write_line(report, {"status": os.waitstatus_to_exitcode(status)})
    except Exception as error:
        # Of the program before it runs, too: the first line counts.
        write_line(report, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def become_program(task: dict[str, Any], folder: str, own_files: bool) -> None:
    limits = task["limits"]
    os.setsid()
    os.umask(0o077)
    os.chdir(folder)
    if own_files:
        confinement.become_nobody()
    confinement.set_parent_death_signal(signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    confinement.limit_resources(
        cpu_s=limits["cpu_s"],
        memory_mb=limits["memory_mb"],
        files_mb=limits["files_mb"],
        open_files=limits["open_files"],
        threads=limits["threads"] if own_files else None,
    )
    if "landlock" in task["protections"]:
        confinement.allow_files(task["readable"], folder)
    if "seccomp" in task["protections"]:
        seccomp.refuse_calls(os.getpid(), own_files)
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **task["environment"]}
    os.execve(task["arguments"][0], task["arguments"], environment)


def write_line(descriptor: int, message: dict[str, Any]) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def end_descendants() -> None:
    """Kill everything below this process until nothing is left."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in list_descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
    sys.exit(0)
