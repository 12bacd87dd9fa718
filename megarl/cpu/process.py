"""What processes do where there is no GPU: those that train, and how many CPU threads each has; servers, which are
SGLang's CPU engine with stand-ins, and turns in waves that repeat exactly.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import SERVERS, Config, RolloutConfig
from megarl.interfaces import TurnRequest
from megarl.types import Response


class Cpu:
    backend = "gloo"
    """Of torch.distributed, for the training ranks"""
    repeats = True
    """It computes the same from the same, whether or not it is asked to"""
    capability = None
    pins_memory = False

    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self, dtype: Dtype, *, deterministic: bool, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def take(self, rank: int, uuid: str | None) -> str | None:
        """No GPU."""
        return None

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def synchronize(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def count_free(self) -> int:
        """No GPU."""
        return 0

    def import_engine(self) -> None:
        """Without CUDA the import hook lets nobody find it."""

    def measure_tflops(self, dtype: torch.dtype) -> float | None:
        """What matrix products take at most, in 1e12 operations a second: the best of a few that fit into the caches,
        on one core, times the number of cores; some milliseconds.

        In seconds of this thread's own, so that a busy machine has the same peak as an idle one.
        """
        size, before = 512, torch.get_num_threads()
        matrix = torch.ones(size, size, dtype=dtype)
        torch.set_num_threads(1)
        seconds = []
        try:
            for _ in range(5):
                start = time.thread_time()
                matrix @ matrix
                seconds.append(time.thread_time() - start)
        finally:
            torch.set_num_threads(before)
        return float(2 * size**3 * len(os.sched_getaffinity(0)) / min(seconds) / 1e12)

    def take_random_state(self) -> dict[str, Any]:
        return {}

    def put_random_state(self, state: dict[str, Any]) -> bool:
        """Whether what Megatron tracks in this state is of this kind of device: a GPU's generator or the CPU's."""
        return "cuda" not in state


WORKER_KEY, SERVER_KEY = "cluster.cpu_threads_per_worker", "rollout.num_threads"
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""`QUOTA PERIOD` in microseconds of CPU time, or `max PERIOD`, of a container"""
LIMIT = "OMP_NUM_THREADS"
"""Environment variable: the cores that a run may count on, where somebody has set it"""


def count_cores() -> int:
    """The cores that this process may use: of its affinity, its container's quota and OMP_NUM_THREADS the least."""
    counts = [len(os.sched_getaffinity(0))]
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        counts.append(ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        pass
    limit = os.environ.get(LIMIT, "").split(",")[0].strip()
    if limit.isdecimal():
        counts.append(int(limit))
    return max(1, min(counts))


def share_cores(config: Config, gpus: Mapping[str, int], num_cores: int) -> tuple[int, int]:
    """The threads of each training process and of each process of a server: the cores divided by the processes that
    work at the same time, rounded down; at least 1. gpus: `megarl.config.placement.count_gpus`.

    Policy and critic update at the same time. The reference works beside them only while the log-probs are computed,
    for a fraction of an update, and is not counted. Servers rest while these work and the other way round, unless
    rollout.max_staleness has them generate beside the updates: then all share. 1 and 1 where GPUs are counted.
    """
    if config.cluster.gpus_per_node > 0:
        return 1, 1
    workers, servers = gpus.get("policy", 0) + gpus.get("critic", 0), gpus[SERVERS]
    if workers and config.rollout.max_staleness > 0:
        workers = servers = workers + servers
    return max(1, num_cores // max(workers, 1)), max(1, num_cores // max(servers, 1))


def settle_threads(
    config: Config,
    gpus: Mapping[str, int],
    recorded: Mapping[str, Any] | None = None,
    num_cores: int | None = None,
) -> Config:
    """The configuration with both numbers: what it says, else what `recorded` has under the dotted keys, else
    `share_cores` of num_cores (None: `count_cores`).

    recorded: the values of the run that is resumed, which on a CPU repeats bit for bit only with as many threads.
    """
    before = recorded or {}
    shared = share_cores(config, gpus, count_cores() if num_cores is None else num_cores)
    per_worker, per_server = (
        before.get(name) or each if given is None else given
        for (name, given), each in zip(list_threads(config).items(), shared, strict=True)
    )
    return replace(
        config,
        cluster=replace(config.cluster, cpu_threads_per_worker=per_worker),
        rollout=replace(config.rollout, num_threads=per_server),
    )


def list_threads(config: Config) -> dict[str, int | None]:
    """The two numbers by dotted key, as `settle_threads` takes them."""
    return {WORKER_KEY: config.cluster.cpu_threads_per_worker, SERVER_KEY: config.rollout.num_threads}


def describe_threads(config: Config, gpus: Mapping[str, int]) -> str:
    """The two numbers of `settle_threads` in a line; empty where GPUs are counted, on which they have no effect."""
    if config.cluster.gpus_per_node > 0:
        return ""
    served = f", {config.rollout.num_threads} of each server" if gpus[SERVERS] else ""
    return f"CPU threads: {config.cluster.cpu_threads_per_worker} of each training process{served}"


STANDINS = Path(__file__).parent / "standins"


class CpuServing:
    """`megarl.rollout.server.GpuServing` has the same attributes."""

    depends_on_batch = True
    """The log-probs of a token depend on what is computed beside it"""
    default_tokens = 16384
    """Of the KV cache of `megarl serve`"""
    folders = (str(STANDINS),)
    """First on the server's import path"""

    def check(self, config: RolloutConfig) -> Iterator[str]:
        if config.kv_cache_tokens is None:
            # By default SGLang takes most of the machine's memory and zero-fills it for minutes.
            yield "rollout.kv_cache_tokens: null; on a CPU it must be a number of tokens"

    def list_options(self, config: RolloutConfig) -> dict[str, Any]:
        return {"device": "cpu", "attention_backend": "torch_native"}

    def prepare(self, environment: dict[str, str], config: RolloutConfig) -> dict[str, str]:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.num_threads or 1)}
        # Threads that spin while they wait slow down other processes on the same cores.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # A split embedding would be compiled, for which torch needs Triton, of which there is only a stand-in.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if config.tp > 1:
            # One CPU for each rank, round robin where CPUs are fewer.
            cpus = sorted(os.sched_getaffinity(0))
            bound = (str(cpus[rank % len(cpus)]) for rank in range(config.tp))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        return environment


Wave = Sequence[tuple[TurnRequest, "asyncio.Future[Response]"]]
Generate = Callable[[Sequence[TurnRequest], Callable[[int, Response], None]], Awaitable[None]]
"""`generate(requests, take)` generates all turns as one batch; `take(i, turn)` gets the i-th as soon as it is there"""


class Lockstep:
    """Sends a wave once every episode that has not left waits for its next turn.

    A wave has the episodes' order, whatever the order in which they came, so that the same episodes are sent in the
    same batches in every run. A turn is handed out as soon as it is there, while others of its wave go on.
    """

    def __init__(self, generate: Generate, num_episodes: int):
        self._generate = generate
        self._num_left = num_episodes
        self._waiting: dict[int, tuple[TurnRequest, asyncio.Future[Response]]] = {}
        self._waves: set[asyncio.Task[None]] = set()

    async def send(self, episode: int, request: TurnRequest) -> Response:
        """The generated turn of this episode."""
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = (request, future)
        self._send_if_complete()
        return await future

    def leave(self, episode: int) -> None:
        """The episode asks for no further turn. Called once for each."""
        self._num_left -= 1
        self._send_if_complete()

    async def close(self) -> None:
        """Break off the wave that is under way."""
        for wave in self._waves:
            wave.cancel()
        await asyncio.gather(*self._waves, return_exceptions=True)

    def _send_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._num_left:
            wave = [self._waiting[episode] for episode in sorted(self._waiting)]
            self._waiting = {}
            task = asyncio.ensure_future(self._send_wave(wave))
            self._waves.add(task)
            task.add_done_callback(partial(self._end_wave, wave))

    def _end_wave(self, wave: Wave, task: asyncio.Task[None]) -> None:
        self._waves.discard(task)
        error = None if task.cancelled() else task.exception()
        for _, future in wave:
            if not future.done():
                future.cancel() if error is None else future.set_exception(error)

    async def _send_wave(self, wave: Wave) -> None:
        def take(index: int, response: Response) -> None:
            if not wave[index][1].done():
                wave[index][1].set_result(response)

        await self._generate([request for request, _ in wave], take)
