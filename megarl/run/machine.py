"""What a configuration asks of this machine: memory and open files, checked before any process is started.

It needs neither torch nor Ray, so that a wrong number is reported within a second.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from megarl.config.checks.config import describe_iteration_size
from megarl.config.schema.root import Config

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LEAST_OPEN_FILES = 4096
"""Ray's processes and a server have some hundred connections and files each"""
BYTES_PER_TOKEN = 88
"""Memory of a response's token in the trainer: id and log-prob (Python objects, with their pointers), mask, version"""


def check_machine(config: Config, command: str = "train") -> Iterator[str]:
    """One message for each key that this machine cannot fulfil; command: as in python -m megarl.COMMAND.

    The soft limit of open files is raised to LEAST_OPEN_FILES first, where the hard one allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        yield f"ulimit -n: found {hard} open files; Ray and the servers need {LEAST_OPEN_FILES}"
    elif soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
    train, rollout, memory = config.train, config.rollout, find_memory()
    samples = train.num_samples * (1 + rollout.max_staleness)
    needed = samples * rollout.response_length * BYTES_PER_TOKEN
    if command == "train" and needed > memory:
        yield (
            f"{describe_iteration_size(train)}; {samples} responses of up to"
            f" rollout.response_length={rollout.response_length} tokens take {needed // 2**30} GiB in the trainer, and"
            f" this machine has {memory // 2**30} GiB"
        )


def find_memory() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return total
