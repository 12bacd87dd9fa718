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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from megarl.cluster.calls import RayLostError, ask, wait_for
from megarl.cluster.head import ADDRESS_FILE
from megarl.cluster.process import Gpu, build_variables, choose_gpus, find_gpus, resolve_host
from megarl.config.placement import DeviceSlot, find_ray_address, format_numbers
from megarl.config.schema.run import ClusterConfig
from megarl.interfaces import DeadlineError
from megarl.rollout.server import GUARD, read_tail, write_private
from megarl.run.process import STOPPING_SIGNALS

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
    """Ray for `num_actors` actors; on leaving, what was started for this run is shut down.

    Raises DeadlineError where nothing answers at cluster.ray_address, and where nodes are missing or one does not
    answer; RayLostError where Ray itself does not answer; ConfigError where a node has fewer GPUs than
    cluster.gpus_per_node.
    """
    opened = local_ray(config, num_actors) if config.ray_address is None else _joined_ray(config)
    with opened as scratch:
        nodes = wait_for_nodes(config.num_nodes, config.worker_start_deadline_s)
        if config.gpus_per_node > 0:
            nodes, what = nodes[: config.num_nodes], "the GPUs of the nodes"
            # A process of Ray on each node says which GPUs the job has there.
            task = ray.remote(num_cpus=0, max_retries=0)(find_gpus)
            refs = ask(what, lambda: [task.options(scheduling_strategy=node.place).remote() for node in nodes])
            found = wait_for(refs, [node.name for node in nodes], what, config.worker_start_deadline_s)
            nodes = tuple(
                replace(node, gpus=choose_gpus(node.name, each, config.gpus_per_node))
                for node, each in zip(nodes, found, strict=True)
            )
        yield Cluster(nodes, scratch, resolve_host(config.listen_host), config.listen_host)


def wait_for_nodes(number: int, deadline_s: float) -> tuple[Node, ...]:
    """The nodes of Ray in the order of MEGARL_NODES, else this machine first and the others by name.

    Raises DeadlineError naming those that have joined, where they are fewer than `number` at the deadline; RayLostError
    where Ray does not answer.
    """
    alive: dict[str, str] = {}

    def are_there() -> bool:
        alive.clear()
        alive.update((each["NodeID"], each["NodeName"]) for each in ask("its nodes", ray.nodes) if each["Alive"])
        return len(alive) >= number

    if not _poll(are_there, deadline_s):
        raise DeadlineError(
            f"{len(alive)} of {number} nodes (cluster.num_nodes) have joined Ray within {deadline_s:g} s"
            f" (cluster.worker_start_deadline_s): {', '.join(sorted(alive.values())) or 'none'}"
        )
    order = os.environ.get(ORDER_VARIABLE, "").split(",")
    own = ask("this node", lambda: ray.get_runtime_context().get_node_id())

    def rank(item: tuple[str, str]) -> tuple[int, bool, str]:
        node_id, name = item
        return (order.index(name) if name in order else len(order), node_id != own, name)

    return tuple(Node(name, node_id) for node_id, name in sorted(alive.items(), key=rank))


@contextmanager
def local_ray(config: ClusterConfig, num_actors: int) -> Iterator[Path]:
    """A Ray cluster of this machine alone, for `num_actors` actors of one logical CPU each; yields its scratch folder.

    It listens on 127.0.0.1 and answers only who has its key. On leaving, for whatever reason, every process of it is
    ended within `cluster.shutdown_deadline_s`, and its files and shared memory are removed.

    Raises RayLostError where Ray does not start within `cluster.worker_start_deadline_s` or answer within
    `cluster.ray_deadline_s`.
    """
    remove_left_over()
    # A short path: Ray puts unix sockets under it, whose paths may have 107 characters at most.
    scratch = Path(tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp"))
    calls.begin(config.ray_deadline_s)
    head: subprocess.Popen[bytes] | None = None
    try:
        with _using_key(scratch / TOKEN):
            head = _start_head(scratch, num_actors, config.object_store_mb * 2**20)
            address = _wait_for_address(scratch, head, config.worker_start_deadline_s)
            with joined_ray(address, config.shutdown_deadline_s / 3):
                yield scratch
    finally:
        if head is not None:
            _end_head(head, config.shutdown_deadline_s / 3)
        calls.settle(config.shutdown_deadline_s / 3)
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
    path = scratch / TEMP_DIR / ADDRESS_FILE

    def has_ended() -> bool:
        calls.watch(_list_tree(head))
        calls.check("its start")
        return path.exists() or head.poll() is not None

    in_time = _poll(has_ended, deadline_s)
    if not path.exists():
        what = (
            f"(exit status {head.poll()})" if in_time else f"within {deadline_s:g} s (cluster.worker_start_deadline_s)"
        )
        tail = read_tail(scratch / LOG, LOG_TAIL_LINES)
        calls.lose(f"Ray did not start {what}" + (f":\n{tail}" if tail else ""))
    return path.read_text()


def _list_tree(head: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """It and what it has started; none where it has ended."""
    try:
        return [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end_head(head: subprocess.Popen[bytes], grace_s: float) -> None:
    """Have the guard end all processes of Ray, and kill those that still run after `grace_s`."""
    processes = _list_tree(head)
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


@contextmanager
def _joined_ray(config: ClusterConfig) -> Iterator[Path]:
    """Joins, as the driver, a Ray that others start and shut down; yields a scratch folder of this run."""
    address = find_ray_address(str(config.ray_address))
    host, _, port = address.rpartition(":")
    refused = list[OSError]()

    def listens() -> bool:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=POLL_S).close()
            return True
        except OSError as error:
            refused.append(error)
            return False

    # Ray itself would try for minutes without a message.
    if not _poll(listens, config.worker_start_deadline_s):
        raise DeadlineError(
            f"nothing listens at {address} (cluster.ray_address) within {config.worker_start_deadline_s:g} s"
            f" (cluster.worker_start_deadline_s): {refused[-1]}"
        ) from refused[-1]
    remove_left_over()
    calls.begin(config.ray_deadline_s)
    scratch = tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp")
    # As `ray start` does: the address alone would not make ray.init use the user's key, where there is one.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with joined_ray(address, config.shutdown_deadline_s / 3):
            calls.watch(find_own_processes())
            yield Path(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def joined_ray(address: str, leave_s: float) -> Iterator[None]:
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
        yield
    finally:
        if done.is_set() and not calls.is_lost():
            if calls.settle(leave_s):
                with suppress(RayLostError):
                    ask("leaving it", ray.shutdown, deadline_s=leave_s)
            else:
                calls.give_up()


def find_own_processes() -> list[psutil.Process]:
    """The processes of the joined Ray on this machine, among others."""
    node = ray._private.worker._global_node
    assert node is not None
    session = str(node.session_name)
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            # Its agents hide their command lines.
            if process.name() in ("gcs_server", calls.RAYLET) and session in " ".join(process.cmdline()):
                found += [process, *process.children()]
    return found


def _poll(is_so: Callable[[], bool], deadline_s: float) -> bool:
    """Ask every POLL_S; whether it is so within the deadline."""
    end = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
