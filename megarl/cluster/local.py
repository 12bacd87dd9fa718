"""A local Ray cluster: started for one run and shut down with it, leaving nothing behind."""

import logging
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from megarl.config.schema.cluster import ClusterConfig
from megarl.run.signals import STOPPING_SIGNALS


@contextmanager
def local_ray(config: ClusterConfig, num_actors: int) -> Iterator[Path]:
    """A Ray cluster of this machine alone, for `num_actors` actors of one logical CPU each; yields its scratch folder.

    On leaving, for whatever reason, every process that Ray started is ended within `cluster.shutdown_deadline_s`,
    and its files and shared memory are removed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    remove_left_over()
    # A short path: Ray puts unix sockets under it, whose paths may have 107 characters at most.
    temp_dir = tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp")
    before = set(psutil.Process().children(recursive=True))
    try:
        with keep_signal_handlers():
            ray.init(
                address="local",
                num_cpus=num_actors,
                include_dashboard=False,
                object_store_memory=config.object_store_mb * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=temp_dir,
                _node_ip_address="127.0.0.1",
            )
        yield Path(temp_dir)
    finally:
        started = [p for p in psutil.Process().children(recursive=True) if p not in before]
        ray.shutdown()
        _end_processes(started, config.shutdown_deadline_s / 3)
        shutil.rmtree(temp_dir, ignore_errors=True)


def remove_left_over(places: Sequence[Path] = (Path("/tmp"), Path("/dev/shm"))) -> None:
    """Remove the scratch and shared memory folders of processes that were killed, by the process id in their names."""
    for path in (path for place in places for path in place.glob("megarl-*")):
        match = re.fullmatch(r"megarl-(?:sync-|sglang-)?(\d+)-\w+", path.name)
        # Another user's folder cannot be removed, and that of a living process is in use.
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restores this process's signal handlers, native ones included, which ray.init replaces within the block.

    Ray's processes are in this one's process group and get its signals too: they ignore those that must not end them
    before this process has saved its state. (Ray blocks SIGINT there and uses SIGTERM to end them.)
    """
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        for number in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    yield
    if is_main:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Send SIGKILL to those that still run after `grace_s`."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=grace_s)
