"""How servers run without a GPU: SGLang's CPU engine with stand-ins, and turns in waves that repeat exactly."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.schema.run import RolloutConfig
from megarl.interfaces import TurnRequest
from megarl.types import Response

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
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind_ranks(sorted(os.sched_getaffinity(0)), config.tp)
        return environment


def bind_ranks(cpus: Sequence[int], tp: int) -> str:
    """The value of SGLANG_CPU_OMP_THREADS_BIND: one CPU per rank of a server, round robin where CPUs are fewer."""
    return "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))


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
