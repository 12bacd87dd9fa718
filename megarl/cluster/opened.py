"""Ray for one run, a cluster of this machine alone or one that is already running, and the run's places in it."""

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # native code
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster import calls
from megarl.cluster.calls import ADDRESS_FILE, RayLostError, ask, wait_for
from megarl.cluster.process import Gpu, build_variables, choose_gpus, find_gpus, resolve_host
from megarl.config.placement import DeviceSlot, find_ray_address, format_numbers
from megarl.config.schema.root import ClusterConfig
from megarl.files import read_tail, write_private
from megarl.interfaces import DeadlineError
from megarl.signals import GUARD, STOPPING_SIGNALS

ORDER_VARIABLE = "MEGARL_NODES"
"""Environment variable: names of the nodes, separated by commas, in the order in which they are filled"""
POLL_S = 0.2
INIT_S = 10.0
"""How long a connection in progress is waited for when a signal ends the run: Ray crashes where it is cut short."""
TEMP_DIR, LOG, TOKEN = "ray", "head.log", "token"
"""In the scratch folder: Ray's own folder, which it opens to everybody, the output of what starts it, its key"""
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For the training processes, which inherit it and start OpenMP before they run code of ours: a thread that waits for
work, which by default spins for some milliseconds, leaves its core to the other roles"""
LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Node:
    name: str
    node_id: str
    """Ray's id of the node"""
    gpus: tuple[Gpu, ...] = ()
    """The job's GPUs there, in the order of their numbers; empty: GPUs are not counted"""

    @property
    def place(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.node_id, soft=False)


@dataclass(frozen=True)
class Cluster:
    """Ray as a run uses it."""

    nodes: tuple[Node, ...]
    scratch: Path
    """A folder of this run on the driver's machine"""
    host: str
    """The address on which the driver listens"""
    listen_host: str
    """`cluster.listen_host`; each process resolves `auto` for itself"""
    joins_servers: bool = True
    """Whether training ranks and servers meet in a communicator, as on several nodes or with rollout.transport=split"""

    def options(self, slot: DeviceSlot, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Ray's options for an actor in this slot, whose process is started with the environment of its GPUs.

        variables: further environment variables.
        """
        chosen = build_variables(self.find_gpus(slot)) if slot.gpus else {}
        environment = chosen | dict(variables or {})
        placed = {"scheduling_strategy": self.nodes[slot.node].place}
        return placed | ({"runtime_env": {"env_vars": environment}} if environment else {})

    def find_gpus(self, slot: DeviceSlot) -> tuple[Gpu, ...]:
        return tuple(self.nodes[slot.node].gpus[number] for number in slot.gpus)

    def describe(self, slots: Sequence[DeviceSlot]) -> str:
        """The nodes and GPUs of these slots, as `n1 GPU 0-3; n2 GPU 0`; empty where GPUs are not counted."""
        parts: dict[str, list[int]] = {}
        for slot in slots:
            parts.setdefault(self.nodes[slot.node].name, []).extend(slot.gpus)
        return "; ".join(f"{node} GPU {format_numbers(gpus)}" for node, gpus in parts.items() if gpus)


@contextmanager
def open_ray(config: ClusterConfig, num_actors: int) -> Iterator[Cluster]:
    """Ray for `num_actors` actors of one logical CPU each; on leaving, what was started for this run is shut down.

    Where cluster.ray_address is null it is a Ray of this machine alone, which listens on 127.0.0.1 and answers only who
    has its key; on leaving, for whatever reason, every process of it is ended within `cluster.shutdown_deadline_s`, and
    its files and shared memory are removed.

    Raises DeadlineError where nothing answers at cluster.ray_address, and where nodes are missing or one does not
    answer; RayLostError where Ray itself does not start or answer; ConfigError where a node has fewer GPUs than
    cluster.gpus_per_node.
    """
    remove_left_over()
    calls.begin(config.ray_deadline_s)
    # A short path: Ray puts unix sockets under it, whose paths may have 107 characters at most.
    scratch = Path(tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp"))
    grace_s = config.shutdown_deadline_s / 3
    try:
        opened = nullcontext(_wait_for_ray(config)) if config.ray_address else _local_ray(config, num_actors, scratch)
        with opened as address, _joined_ray(address, grace_s):
            nodes = wait_for_nodes(config.num_nodes, config.worker_start_deadline_s)
            if config.gpus_per_node > 0:
                nodes = _find_gpus(nodes[: config.num_nodes], config)
            yield Cluster(nodes, scratch, resolve_host(config.listen_host), config.listen_host)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def wait_for_nodes(number: int, deadline_s: float) -> tuple[Node, ...]:
    """The nodes of Ray in the order of MEGARL_NODES, else this machine first and the others by name.

    Raises DeadlineError naming those that have joined, where they are fewer than `number` at the deadline; RayLostError
    where Ray does not answer.
    """

    def list_alive() -> dict[str, str]:
        return {each["NodeID"]: each["NodeName"] for each in ask("its nodes", ray.nodes) if each["Alive"]}

    end = time.monotonic() + deadline_s
    while len(alive := list_alive()) < number:
        if time.monotonic() > end:
            raise DeadlineError(
                f"{len(alive)} of {number} nodes (cluster.num_nodes) have joined Ray within {deadline_s:g} s"
                f" (cluster.worker_start_deadline_s): {', '.join(sorted(alive.values())) or 'none'}"
            )
        time.sleep(POLL_S)
    order = os.environ.get(ORDER_VARIABLE, "").split(",")
    own = ask("this node", lambda: ray.get_runtime_context().get_node_id())

    def rank(item: tuple[str, str]) -> tuple[int, bool, str]:
        node_id, name = item
        return (order.index(name) if name in order else len(order), node_id != own, name)

    return tuple(Node(name, node_id) for node_id, name in sorted(alive.items(), key=rank))


def _find_gpus(nodes: Sequence[Node], config: ClusterConfig) -> tuple[Node, ...]:
    """The nodes with the job's GPUs, of which a process of Ray on each node tells."""
    task, what = ray.remote(num_cpus=0, max_retries=0)(find_gpus), "the GPUs of the nodes"
    refs = ask(what, lambda: [task.options(scheduling_strategy=node.place).remote() for node in nodes])
    found = wait_for(refs, [node.name for node in nodes], what, config.worker_start_deadline_s)
    return tuple(
        replace(node, gpus=choose_gpus(node.name, each, config.gpus_per_node))
        for node, each in zip(nodes, found, strict=True)
    )


@contextmanager
def _local_ray(config: ClusterConfig, num_actors: int, scratch: Path) -> Iterator[str]:
    """Yields the HOST:PORT of a Ray that is started in this folder. Raises RayLostError where it does not start."""
    grace_s = config.shutdown_deadline_s / 3
    with _using_key(scratch / TOKEN):
        head = _start_head(scratch, num_actors, config.object_store_mb * 2**20)
        try:
            path, end = scratch / TEMP_DIR / ADDRESS_FILE, time.monotonic() + config.worker_start_deadline_s
            while not path.exists():
                status = head.poll()
                if status is not None or time.monotonic() > end:
                    within = f"within {config.worker_start_deadline_s:g} s (cluster.worker_start_deadline_s)"
                    what = within if status is None else f"(exit status {status})"
                    calls.lose(f"Ray did not start {what}:\n{read_tail(scratch / LOG, LOG_TAIL_LINES)}")
                time.sleep(POLL_S)
            yield path.read_text()
        finally:
            # The guard ends all processes of Ray; those that still run after that are killed.
            processes = list[psutil.Process]()
            with suppress(psutil.NoSuchProcess):
                processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
            assert head.stdin is not None
            head.stdin.close()
            _, alive = psutil.wait_procs(processes, timeout=grace_s)
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait(grace_s)
            calls.settle(grace_s)


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
    # Ray would end this process and its workers where the GCS is silent for a minute; calls.py does, with a reason.
    own["RAY_gcs_rpc_server_reconnect_timeout_s"] = "100000"
    # Otherwise ray.init takes the machine's public address in place of the loopback's.
    is_cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False

    def reload_key() -> None:
        """Have Ray read its settings and its key from the environment again, as ray.init does for a key of its own."""
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    before = dict(os.environ)
    os.environ.update(own)
    reload_key()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster
        for name in own:
            del os.environ[name]
        os.environ.update({name: before[name] for name in own if name in before})
        reload_key()


def _start_head(scratch: Path, num_cpus: int, object_store_bytes: int) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-S", "-I", str(GUARD), str(scratch)]
    command = [sys.executable, "-m", "megarl.cluster.calls"]

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


def _wait_for_ray(config: ClusterConfig) -> str:
    """HOST:PORT of cluster.ray_address, once something listens there: Ray itself would try for minutes without a word.

    Raises DeadlineError.
    """
    address = find_ray_address(str(config.ray_address))
    host, _, port = address.rpartition(":")
    end = time.monotonic() + config.worker_start_deadline_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=POLL_S).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise DeadlineError(
                    f"nothing listens at {address} (cluster.ray_address) within {config.worker_start_deadline_s:g} s"
                    f" (cluster.worker_start_deadline_s): {error}"
                ) from error
            time.sleep(POLL_S)
    # As `ray start` does: the address alone would not make ray.init use the user's key, where there is one.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return address


@contextmanager
def _joined_ray(address: str, leave_s: float) -> Iterator[None]:
    """Ray at HOST:PORT, which ends this driver's actors on leaving, within `leave_s`. Raises RayLostError."""
    # It warns of the missing handler of SIGTERM: the driver has its own, which Ray leaves alone in other threads.
    logging.getLogger("ray").setLevel(logging.ERROR)
    done = threading.Event()

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            hint = "it may have another key (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH) or another version than"
            raise RayLostError(f"{error}: {hint} {ray.__version__} here") from error
        finally:
            done.set()

    try:
        try:
            ask("connecting to it", init)
        except BaseException:
            if not done.wait(0.0 if calls.is_lost() else INIT_S):
                calls.give_up()
            raise
        finally:
            # Ray has put native handlers of signals in the place of this process's.
            if threading.current_thread() is threading.main_thread():
                for number in STOPPING_SIGNALS:
                    signal.signal(number, signal.getsignal(number))
        calls.watch_raylet()
        yield
    finally:
        if done.is_set() and not calls.is_lost():
            if calls.settle(leave_s):
                with suppress(RayLostError):
                    ask("leaving it", ray.shutdown, deadline_s=leave_s)
            else:
                calls.give_up()
