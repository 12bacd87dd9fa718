"""Python programs that a model wrote, run within limits and without network."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.task.process import PACKAGES, ROOT, describe_status, end_process, exchange, list_readable

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
