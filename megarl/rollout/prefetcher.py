"""Work ahead of its use: a thread makes numbered items in order, up to a bound beyond the one in use."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_S = 0.2


class Prefetcher(Generic[T]):
    """Calls `make(k)`, `make(k + 1)`, ... one after the other in a thread; another thread takes the items in order.

    When item k is taken, the items up to k + num_ahead may be made. So no item is begun before item k - num_ahead is
    taken, whatever the timing.
    """

    def __init__(self, make: Callable[[int], T], *, num_ahead: int, last: int, cancel: Callable[[], None]):
        """last: number of the last item to be made. cancel: breaks off a running `make`; may be called repeatedly."""
        self._make = make
        self._num_ahead = num_ahead
        self._last = last
        self._cancel = cancel
        self._changed = threading.Condition()
        self._allowed = 0
        self._next: int | None = None
        self._closed = False
        self._made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def take(self, number: int) -> T:
        """Wait for item `number`; the first call starts the thread with that item.

        Raises what `make` raised, ValueError for a number out of order. The wait has no deadline of its own: what
        `make` waits for has one. A signal that raises in this thread ends the wait.
        """
        if self._next not in (None, number):
            raise ValueError(f"item {number} was asked for; they are made in order, and {self._next} is the next")
        with self._changed:
            self._allowed = number + self._num_ahead
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(number,), name="megarl-ahead", daemon=True)
            self._thread.start()
        item, error = self._wait()
        if error is not None:
            raise error
        self._next = number + 1
        return item  # type: ignore[return-value]

    def close(self, deadline_s: float) -> None:
        """Drop the items not taken and end the thread, a daemon; after the deadline it is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + deadline_s
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            self._cancel()
            self._thread.join(POLL_S)

    def _wait(self) -> tuple[T | None, BaseException | None]:
        while True:
            try:
                return self._made.get(timeout=POLL_S)
            except queue.Empty:
                assert self._thread is not None
                if not self._thread.is_alive() and self._made.empty():
                    raise RuntimeError("the prefetching thread has ended") from None

    def _work(self, number: int) -> None:
        for k in range(number, max(number, self._last) + 1):
            with self._changed:
                self._changed.wait_for(lambda k=k: self._closed or k <= self._allowed)  # type: ignore[misc]
                if self._closed:
                    return
            try:
                item = self._make(k)
            except BaseException as error:  # Raised in the thread that takes the item.
                self._made.put((None, error))
                return
            self._made.put((item, None))
