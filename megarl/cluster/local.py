"""A local Ray cluster: started for one run and shut down with it, leaving nothing behind."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # native code

from megarl.cluster import ray_calls
from megarl.cluster.head import ADDRESS_FILE
from megarl.cluster.joining import joined_ray
from megarl.config.schema.cluster import ClusterConfig
from megarl.rollout.server import GUARD, read_tail, write_private
from megarl.run.signals import STOPPING_SIGNALS

TEMP_DIR, LOG, TOKEN = "ray", "head.log", "token"
"""In the scratch folder: Ray's own folder, which it opens to everybody, the output of what starts it, its key"""
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For the training processes, which inherit it and start OpenMP before they run code of ours: a thread that waits for
work, which by default spins for some milliseconds, leaves its core to the other roles"""
POLL_S = 0.2
LOG_TAIL_LINES = 15


@contextmanager
def local_ray(config: ClusterConfig, num_actors: int) -> Iterator[Path]:
    """A Ray cluster of this machine alone, for `num_actors` actors of one logical CPU each; yields its scratch folder.

    It listens on 127.0.0.1 and answers only who has its key. On leaving, for whatever reason, every process of it is
    ended within `cluster.shutdown_deadline_s`, and its files and shared memory are removed.

    Raises RayLostError where Ray does not start within `cluster.nodes_deadline_s` or answer within
    `cluster.ray_deadline_s`.
    """
    remove_left_over()
    # A short path: Ray puts unix sockets under it, whose paths may have 107 characters at most.
    scratch = Path(tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp"))
    ray_calls.begin(config.ray_deadline_s)
    head: subprocess.Popen[bytes] | None = None
    try:
        with _using_key(scratch / TOKEN):
            head = _start_head(scratch, num_actors, config.object_store_mb * 2**20)
            address = _wait_for_address(scratch, head, config.nodes_deadline_s)
            with joined_ray(address, config.shutdown_deadline_s / 3):
                yield scratch
    finally:
        if head is not None:
            _end_head(head, config.shutdown_deadline_s / 3)
        ray_calls.settle(config.shutdown_deadline_s / 3)
        shutil.rmtree(scratch, ignore_errors=True)


def remove_left_over(places: Sequence[Path] = (Path("/tmp"), Path("/dev/shm"))) -> None:
    """Remove the scratch and shared memory folders of processes that were killed, by the process id in their names."""
    for path in (path for place in places for path in place.glob("megarl-*")):
        match = re.fullmatch(r"megarl-(?:sync-|sglang-)?(\d+)-\w+", path.name)
        # Another user's folder cannot be removed, and that of a living process is in use.
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _using_key(path: Path) -> Iterator[None]:
    """Within the block this process and those that it starts use a new key for Ray, in a file that is the user's own.

    Ray's own default is a file that all users can read (~/.ray/auth_token).
    """
    write_private(path, secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray would end this process and its workers where the GCS is silent for a minute; ray_calls does, with a reason.
    own["RAY_gcs_rpc_server_reconnect_timeout_s"] = "100000"
    before = {name: os.environ.get(name) for name in own}
    is_cluster = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(own)
    # Otherwise ray.init takes the machine's public address in place of the loopback's.
    ray_constants.ENABLE_RAY_CLUSTER = False
    _reload_key()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _reload_key()


def _reload_key() -> None:
    """Have Ray read its settings and its key from the environment again, as ray.init does for a key of its own."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _start_head(scratch: Path, num_cpus: int, object_store_bytes: int) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-S", "-E", str(GUARD), str(scratch)]
    command = [sys.executable, "-m", "megarl.cluster.head"]

    def ignore_stops() -> None:
        # Sent to all processes of a job, they must not end these before the driver has saved its state.
        for number in {*STOPPING_SIGNALS} - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)

    with (scratch / LOG).open("wb") as log:
        # A session of its own: Ctrl-C of a terminal goes to the driver alone.
        return subprocess.Popen(
            [*guard, *command, str(scratch / TEMP_DIR), str(num_cpus), str(object_store_bytes)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=PASSIVE_WAIT | os.environ,
            start_new_session=True,
            preexec_fn=ignore_stops,
        )


def _wait_for_address(scratch: Path, head: subprocess.Popen[bytes], deadline_s: float) -> str:
    """The HOST:PORT of the started Ray. Raises RayLostError."""
    end = time.monotonic() + deadline_s
    path = scratch / TEMP_DIR / ADDRESS_FILE
    while not path.exists():
        ray_calls.watch(_find_processes(head))
        ray_calls.check("its start")
        is_late = time.monotonic() > end
        if head.poll() is not None or is_late:
            what = f"within {deadline_s:g} s (cluster.nodes_deadline_s)" if is_late else f"(exit status {head.poll()})"
            tail = read_tail(scratch / LOG, LOG_TAIL_LINES)
            ray_calls.lose(f"Ray did not start {what}" + (f":\n{tail}" if tail else ""))
        time.sleep(POLL_S)
    ray_calls.watch(_find_processes(head))
    return path.read_text()


def _find_processes(head: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    try:
        return ray_calls.find_processes(psutil.Process(head.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return {}


def _end_head(head: subprocess.Popen[bytes], grace_s: float) -> None:
    """Have the guard end all processes of Ray, and kill those that still run after `grace_s`."""
    try:
        processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    assert head.stdin is not None
    head.stdin.close()
    try:
        head.wait(grace_s)
    except subprocess.TimeoutExpired:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(grace_s)
    psutil.wait_procs(processes, timeout=grace_s)
