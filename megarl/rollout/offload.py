"""Memory of GPUs that servers give back while roles compute on the same GPUs, and take again (rollout.offload).

SGLang unmaps the memory and keeps its addresses, so that CUDA graphs stay valid; they stay on the GPU themselves. Its
servers must be idle. Weights come back undefined: a weight sync overwrites all of them and verifies their checksums.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from megarl.config.schema.run import ServerOffload
from megarl.interfaces import UNPUBLISHED
from megarl.rollout.client import ConnectionLostError, SGLangClient, run_in_parallel

CACHE = "kv_cache"
WEIGHTS = "weights"
"""SGLang's names (sglang/srt/constants.py)"""
TAGS = {None: (), ServerOffload.kv_cache: (CACHE,), ServerOffload.all: (CACHE, WEIGHTS)}


class ServerOffloader:
    """What all servers of a run have given back. Without `offload` every method does nothing."""

    def __init__(self, clients: Sequence[SGLangClient] = (), offload: ServerOffload | None = None) -> None:
        """clients: of all servers, which hold all of their memory."""
        self.offload = offload
        self._clients = list(clients)
        self._released: set[str] = set()

    @property
    def has_released(self) -> bool:
        """Whether the servers cannot generate before the next weight sync."""
        return bool(self._released)

    def release(self) -> None:
        """Have the servers give back their memory, where they hold it; requests in flight are aborted.

        They then serve no version of the weights, so that nothing they generate before the next sync is used. A server
        that is lost has no memory either. Raises RequestError where a server is not idle, and DeadlineError.
        """
        if tags := [tag for tag in TAGS[self.offload] if tag not in self._released]:
            self._released.update(tags)
            self._call_all(partial(_release, tags=tags))

    def resume_weights(self) -> None:
        """Take the memory of the weights again, whose values are undefined until they are replaced."""
        self._resume(WEIGHTS)

    def resume_cache(self) -> None:
        """Take the memory of the KV cache again, which is empty."""
        self._resume(CACHE)

    def forget(self) -> None:
        """All servers were restarted, and hold all of their memory."""
        self._released.clear()

    def _resume(self, tag: str) -> None:
        if tag in self._released:
            self._call_all(lambda client: client.resume_memory([tag]))
            self._released.remove(tag)

    def _call_all(self, ask: Callable[[SGLangClient], None]) -> None:
        run_in_parallel([partial(ask, client) for client in self._clients], self._clients)


def _release(client: SGLangClient, tags: Sequence[str]) -> None:
    with suppress(ConnectionLostError):
        client.set_weight_version(UNPUBLISHED)
        # SGLang ends where it is not idle.
        client.abort_requests()
        client.flush_cache()
        client.release_memory(tags)
