"""Turns of several episodes in waves that repeat exactly, for servers whose numbers depend on the batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from megarl.interfaces import TurnRequest
from megarl.types import Response

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
