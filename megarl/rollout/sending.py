"""How the turns of several episodes reach the servers: in waves that repeat exactly, or each as soon as it can."""

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from megarl.interfaces import RolloutEngine, TurnRequest
from megarl.types import Response

Wave = Sequence[tuple[TurnRequest, "asyncio.Future[Response]"]]


class Sender(Protocol):
    """Generates the turns of numbered episodes."""

    async def send(self, episode: int, request: TurnRequest) -> Response:
        """The generated turn."""
        ...

    def leave(self, episode: int) -> None:
        """The episode asks for no further turn. Called once for each."""
        ...


class Lockstep:
    """Sends a wave once every episode that has not left waits for its next turn.

    A wave has the episodes' order, whatever the order in which they came, so that the same episodes are sent in the
    same batches in every run. A turn is handed out as soon as it is there, while others of its wave go on.
    """

    def __init__(self, engine: RolloutEngine, num_episodes: int):
        self._engine = engine
        self._num_left = num_episodes
        self._waiting: dict[int, tuple[TurnRequest, asyncio.Future[Response]]] = {}
        self._waves: set[asyncio.Task[None]] = set()

    async def send(self, episode: int, request: TurnRequest) -> Response:
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = (request, future)
        self._send_if_complete()
        return await future

    def leave(self, episode: int) -> None:
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

        await self._engine.generate_turns([request for request, _ in wave], take)


class Independent:
    """Sends each turn by itself, as many at a time as keep the servers full.

    Where more wait, the turns of the episodes with the lowest numbers are sent first. Otherwise the second turn of an
    episode would wait for the first turns of all that have been begun since.
    """

    SHARE_QUEUED = 0.25
    """Requests that wait at the servers, as a share of those that run there: the next one is there when one ends."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._num_free = int(engine.num_slots * (1 + self.SHARE_QUEUED)) + 1
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap: episode, order of the turns that wait, what gives the turn its slot"""
        self._order = itertools.count()

    async def send(self, episode: int, request: TurnRequest) -> Response:
        if request.urgent:
            return await self._generate(request)
        await self._take_slot(episode)
        try:
            return await self._generate(request)
        finally:
            self._free_slot()

    def leave(self, episode: int) -> None: ...

    async def _take_slot(self, episode: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (episode, next(self._order), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # It was given to a turn that is broken off.
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        while self._waiting:
            given = heapq.heappop(self._waiting)[-1]
            if not given.done():
                given.set_result(None)
                return
        self._num_free += 1

    async def _generate(self, request: TurnRequest) -> Response:
        found: list[Response] = []
        await self._engine.generate_turns([request], lambda _index, response: found.append(response))
        return found[0]
