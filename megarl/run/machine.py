"""What a configuration asks of the machine that the command runs on, checked before any process is started.

It needs neither torch nor Ray, so that a wrong number is reported within a second.
"""

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from megarl.config.checks.config import describe_iteration_size
from megarl.config.errors import ConfigError
from megarl.config.placement import SERVERS, find_ray_address, list_groups
from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import Config
from megarl.config.schema.run import AUTO, ClusterConfig
from megarl.cpu.dtype import computes_bfloat16

CONNECT_S = 5.0
"""How long cluster.ray_address may take to answer: it is that of a Ray that runs already"""
SHM = Path("/dev/shm")
SHM_NEEDED_FROM = 10**10
"""Bytes above which Ray takes its object store from /dev/shm only; a smaller one may be in a file"""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LEAST_OPEN_FILES = 4096
"""Ray's processes and a server have some hundred connections and files each"""
BYTES_PER_PROCESS = 100 * 2**20
"""Least memory that a process with torch has for itself"""
BYTES_PER_TOKEN = 88
"""Memory of a response's token in the trainer: id and log-prob (Python objects, with their pointers), mask, version"""

BYTES_PER_CACHED_TOKEN = 64
"""Least memory of a token in the KV cache: one layer with one head of 16 keys and values of 16 bits"""


def check_machine(config: Config, command: str = "train") -> Iterator[str]:
    """One message for each key that this machine cannot fulfil; command: as in python -m megarl.COMMAND."""
    cluster = config.cluster
    yield from check_surroundings()
    yield from _check_listen_host(cluster.listen_host)
    yield from _check_memory(config, command)
    if cluster.ray_address is not None:
        yield from _check_ray_address(cluster.ray_address)
        return
    yield from check_object_store(cluster)
    if cluster.gpus_per_node == 0:
        yield from _check_cores(config, command)


def describe_slow_dtypes(config: Config) -> str:
    """The keys of roles and servers that a CPU computes in bfloat16 without instructions for it; empty for none."""
    if config.cluster.gpus_per_node > 0 or computes_bfloat16():
        return ""
    dtypes = {name: getattr(config, name).dtype for name in ("policy", "critic", "reference", "rollout")}
    names = [group.name.replace(SERVERS, "rollout") for group in list_groups(config) if group.num_processes > 0]
    keys = [name for name in names if dtypes[name] is Dtype.bfloat16]
    wanted = " ".join(f"{key}.dtype=float32" for key in keys)
    return f"this CPU has no instructions for bfloat16: {wanted} would be several times as fast" if keys else ""


def check_surroundings() -> Iterator[str]:
    """A message for each limit of this process, and for a TMPDIR, with which no run works.

    The soft limit of open files is raised to LEAST_OPEN_FILES first, where the hard one allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= LEAST_OPEN_FILES:
        if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
    else:
        yield f"ulimit -n: found {hard} open files; Ray and the servers need {LEAST_OPEN_FILES}"
    for option, limit, what in (("-f", resource.RLIMIT_FSIZE, "file"), ("-v", resource.RLIMIT_AS, "process")):
        size = resource.getrlimit(limit)[0]
        if size != resource.RLIM_INFINITY:
            found = f"found {size // 1024} KiB for a {what}"
            yield f"ulimit {option}: {found}; it must be unlimited, for checkpoints, Ray's object store and the servers"
    temporary = os.environ.get("TMPDIR")
    if temporary and not (os.path.isdir(temporary) and os.access(temporary, os.W_OK | os.X_OK)):
        yield f"TMPDIR: found {temporary}, which is no directory that user {os.geteuid()} can write to"


def check_object_store(cluster: ClusterConfig) -> Iterator[str]:
    """A message where Ray would refuse to start with so large an object store on this machine."""
    wanted, memory, shared = cluster.object_store_mb * 2**20, find_memory(), psutil.disk_usage(str(SHM)).free
    if wanted > memory:
        yield (
            f"cluster.object_store_mb: found {cluster.object_store_mb}; this machine has"
            f" {memory // 2**20} MiB of memory"
        )
    elif wanted > max(shared, SHM_NEEDED_FROM):
        yield (
            f"cluster.object_store_mb: found {cluster.object_store_mb}; {SHM} of this machine, where Ray has it, has"
            f" {shared // 2**20} MiB free"
        )


def find_memory() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return total


def _check_listen_host(host: str) -> Iterator[str]:
    if host == AUTO:
        return
    try:
        # Only an address of this machine can be bound.
        with socket.socket(socket.AF_INET) as listener:
            listener.bind((host, 0))
    except (OSError, UnicodeError) as error:
        own = sorted(
            each.address for many in psutil.net_if_addrs().values() for each in many if each.family == socket.AF_INET
        )
        yield (
            f"cluster.listen_host: found {host}, which is no IPv4 address or name of this machine ({error}); it must be"
            f" {AUTO}, or one of {', '.join(own)}"
        )


def _check_ray_address(address: str) -> Iterator[str]:
    try:
        host, _, port = find_ray_address(address).rpartition(":")
    except ConfigError as error:
        yield from error.problems
        return
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            return
        except (OSError, OverflowError, UnicodeError) as error:
            if isinstance(error, ConnectionRefusedError) and time.monotonic() < end:
                time.sleep(0.2)  # of a Ray that is about to listen
                continue
            yield (
                f"cluster.ray_address: found {address}, where nothing answers ({error}); it must be the HOST:PORT of a"
                " Ray that runs, or null for one of this run"
            )
            return


def _check_memory(config: Config, command: str) -> Iterator[str]:
    if command != "train":
        return
    train, rollout = config.train, config.rollout
    samples = train.num_samples * (1 + rollout.max_staleness)
    needed, memory = samples * rollout.response_length * BYTES_PER_TOKEN, find_memory()
    if needed > memory:
        yield (
            f"{describe_iteration_size(train)}; {samples} responses of up to"
            f" rollout.response_length={rollout.response_length} tokens take {needed // 2**30} GiB in the trainer, and"
            f" this machine has {memory // 2**30} GiB"
        )


def _check_cores(config: Config, command: str) -> Iterator[str]:
    """Threads beyond the cores only wait for one another, and processes beyond the memory are killed."""
    cores = os.cpu_count() or 1
    trains, serves = command != "evaluate", command != "train" or config.has_servers
    for key, is_used, found in (
        ("cluster.cpu_threads_per_worker", trains, config.cluster.cpu_threads_per_worker),
        ("rollout.num_threads", serves, config.rollout.num_threads),
    ):
        if is_used and found is not None and found > cores:
            yield f"{key}: found {found}; this machine has {cores} cores"
    cached = (config.rollout.kv_cache_tokens or 0) if serves else 0
    if cached * BYTES_PER_CACHED_TOKEN > find_memory():
        yield (
            f"rollout.kv_cache_tokens: found {cached}, which take {cached * BYTES_PER_CACHED_TOKEN // 2**30} GiB at"
            f" least; this machine has {find_memory() // 2**30} GiB of memory"
        )
    groups = list_groups(config, command)
    number, memory = sum(group.num_gpus for group in groups), find_memory()
    if number * BYTES_PER_PROCESS > memory:
        asked = " + ".join(f"{group.name} {group.num_gpus}" for group in groups)
        yield (
            f"cluster: {asked} processes, each with {BYTES_PER_PROCESS // 2**20} MiB at least; this machine has"
            f" {memory // 2**20} MiB of memory: fewer of parallel.num_processes, rollout.num_servers and rollout.tp"
        )
