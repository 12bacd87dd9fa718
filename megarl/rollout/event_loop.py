"""An event loop in a thread of its own: coroutines for callers that are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.2
"""How long a wait sleeps at most before it sees that the loop has ended."""
END_DEADLINE_S = 10.0
"""How long cancelled work may take to end: it closes its connections and its environments."""


class OnEventLoop:
    """Runs coroutines on an event loop in a daemon thread, which the first one starts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._running: set[Future[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin `work`; the future has its result. Cancelling the future cancels the work. Thread-safe."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="megarl-rollout", daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Thread-safe, but not for the loop's own thread.

        An exception in the waiting thread (a signal's) cancels the work and waits for its end. What `work` waits for
        has deadlines. Raises CancelledError (concurrent.futures) after `cancel`.
        """
        ended = threading.Event()
        future = self.start(_noting_end(work, ended))
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    if future.done():  # The work itself ran out of time.
                        raise
        except BaseException:
            future.cancel()
            ended.wait(END_DEADLINE_S)
            raise

    def cancel(self) -> None:
        """Cancel all work that other threads wait for: each wait raises CancelledError."""
        with self._starting:  # Work that has begun is in `_running` by then.
            running = list(self._running)
        for future in running:
            future.cancel()

    def close(self) -> None:
        """Cancel all work and end the thread."""
        self.cancel()
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(END_DEADLINE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_DEADLINE_S)
            self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _noting_end(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=END_DEADLINE_S / 2) if others else None


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure cancels the others, waits for their ends, and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def call_in_thread(call: Callable[[], T]) -> T:
    """The result of a blocking call in a daemon thread of its own, which may outlive the wait for it.

    The threads of asyncio.to_thread are few and keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            found, error = call(), None
        except BaseException as raised:
            # A future does not take a StopIteration.
            found, error = None, RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, found, error)

    threading.Thread(target=work, name="megarl-call", daemon=True).start()
    return await future
