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
LEAST_FREED = 0.5
"""The share of what SGLang counts as its weights and KV cache that must be free after they were given back"""
GIB = 2**30
TAGS = {None: (), ServerOffload.kv_cache: (CACHE,), ServerOffload.all: (CACHE, WEIGHTS)}


class ServerOffloader:
    """What all servers of a run have given back. Without `offload` every method does nothing."""

    def __init__(
        self,
        clients: Sequence[SGLangClient] = (),
        offload: ServerOffload | None = None,
        measure: Callable[[], Sequence[Sequence[int]]] = lambda: (),
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """clients: of all servers, which hold all of their memory. measure: for each of them the bytes in use on its
        GPUs, none where that is not known. say: is told once what was given back.
        """
        self.offload = offload
        self._clients = list(clients)
        self._measure, self._say, self._is_checked = measure, say, False
        self._released: set[str] = set()

    @property
    def has_released(self) -> bool:
        """Whether the servers cannot generate before the next weight sync."""
        return bool(self._released)

    def release(self) -> None:
        """Have the servers give back their memory, where they hold it; requests in flight are aborted.

        They then serve no version of the weights, so that nothing they generate before the next sync is used. A server
        that is lost has no memory either. Raises RequestError where a server is not idle, DeadlineError, and the first
        time RuntimeError where memory is still in use after it.
        """
        tags = [tag for tag in TAGS[self.offload] if tag not in self._released]
        if not tags:
            return
        # A server answers alike whether or not anything was freed.
        before = [] if self._is_checked else self._measure()
        self._released.update(tags)
        self._call_all(partial(_release, tags=tags))
        after = self._measure() if any(before) else []
        if after:
            self._check(tags, before, after)
        self._is_checked = True

    def _check(self, tags: Sequence[str], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> None:
        found = []
        for client, had, has in zip(self._clients, before, after, strict=True):
            with suppress(ConnectionLostError):
                use = client.load_memory_use()
                expected = sum(use[tag] for tag in tags)
                freed = min(((one - two) / GIB for one, two in zip(had, has, strict=False)), default=expected)
                if freed < LEAST_FREED * expected:
                    raise RuntimeError(
                        f"SGLang server {client.url} has given back {freed:.1f} GiB of a GPU; {expected:.1f} GiB of"
                        f" {' and '.join(tags)} were expected: torch_memory_saver does not work there, as its log may"
                        " say; rollout.offload=null does without"
                    )
                found.append((freed, expected))
        if found:
            freed, expected = min(found)
            self._say(f"servers: gave back {freed:.1f} GiB of a GPU; {expected:.1f} GiB were expected")

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
