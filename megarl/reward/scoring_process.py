"""A process of its own for scorers that may hang, use up memory or fail on what a model wrote.

Its time limit holds in any thread and inside C code (a power of powers), which a signal handler's would not.
Only JSON goes between the two processes.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from megarl.config.errors import ConfigError

START_DEADLINE_S = 180.0
"""Seconds for importing the scorers' packages on a busy machine."""
GRACE_S = 20.0
"""Seconds beyond the process's own time limit before it is killed: it must have been stopped or swapped out."""


class ScoringProcess:
    """Asks `megarl.reward.scoring_worker` one question at a time; started by the first and after a time-out.

    It ends when this object is collected, when this process ends in any way, or with the question it is at.
    """

    def __init__(self, kind: str, timeout_s: float):
        self._command = [sys.executable, "-m", "megarl.reward.scoring_worker", kind, str(timeout_s)]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The worker's answer, or None where the time limit passed or the scorer took its process down.

        Raises RuntimeError where the scorer rejects the question itself or the process does not start.
        """
        with self._lock:
            process = self._process or self._start()
            line = None
            try:
                _write_line(process, question)
                line = _read_line(process, self._timeout_s + GRACE_S)
            except BrokenPipeError:
                pass
            if line is None:
                self._stop()
                return None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        # A session of its own: Ctrl-C at the terminal is the parent's to handle.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        line = _read_line(process, START_DEADLINE_S)
        if line is None:
            status = process.poll()
            self._stop()
            raise RuntimeError(
                f"{' '.join(self._command)} did not become ready within {START_DEADLINE_S:.0f} s (exit status {status})"
            )
        message = json.loads(line)
        if "error" in message:
            self._stop()
            raise RuntimeError(f"{' '.join(self._command)} could not start: {message['error']}")
        return process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def check_timeout(timeout_s: float) -> None:
    """Raises ConfigError for a time limit that is no time."""
    if not 0 < timeout_s < 86400:
        raise ConfigError([f"reward.timeout_s: found {timeout_s}; it must be above 0 and below a day"])


def _write_line(process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    """One line without its end, or None after `seconds` or where the process closed its end."""
    assert process.stdout is not None
    descriptor, received, deadline = process.stdout.fileno(), b"", time.monotonic() + seconds
    while not received.endswith(b"\n"):
        poll = select.poll()  # Unlike select(), with descriptors above 1023 too.
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return None
        received += chunk
    return received[:-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(timeout=30)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
