"""The servers' weight version in a sync: raised while they are paused, withdrawn where the sync fails."""

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

from megarl.interfaces import UNPUBLISHED, DeadlineError, SyncError
from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient
from megarl.rollout.offload import ServerOffloader
from megarl.sync.steps import CLEAN_UP_DEADLINE_S, paused, sync_step, updating


class VersionBump:
    """Sets the version of every server that has the new weights, and withdraws it where the block fails.

    SGLang records in each response in flight after which token the version changed. Between pause and resume that is
    the token after which the weights changed; set later, tokens of the new weights would count as old ones.
    """

    def __init__(self, version: int):
        self.version = version
        self._bumped: list[SGLangClient] = []

    def apply(self, clients: Sequence[SGLangClient]) -> None:
        """Set the version; call it while the servers are paused with the new weights. Raises SyncError naming server
        and step.
        """
        for client in clients:
            with sync_step(client, f"update of the weight version to {self.version}"):
                self._bumped.append(client)
                client.set_weight_version(self.version)
                found = client.load_weight_version()
            if found != self.version:
                raise SyncError(
                    f"SGLang server {client.url} reports weight version {found} after it was set to {self.version}"
                )

    def __enter__(self) -> "VersionBump":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):  # None, or a signal: then the servers end.
            return
        for client in self._bumped:
            with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
                client.set_weight_version(UNPUBLISHED, deadline_s=CLEAN_UP_DEADLINE_S)


@contextlib.contextmanager
def explain_memory(what: str) -> Iterator[None]:
    """Turns a refused, lost or late call within the block into a SyncError; the cause names the server."""
    try:
        yield
    except (RequestError, ConnectionLostError, DeadlineError) as error:
        raise SyncError(f"a server did not take the memory of {what} again: {error}") from error


@contextlib.contextmanager
def replacing_weights(clients: Sequence[SGLangClient], bump: VersionBump, offloader: ServerOffloader) -> Iterator[None]:
    """Within the block the servers are paused in a weight update and serve no version; afterwards that of `bump`.

    They take the memory of their weights again before it, and that of their KV cache after it.
    """
    with paused(clients):
        for client in clients:
            with sync_step(client, "withdrawal of the weight version"):
                client.set_weight_version(UNPUBLISHED)
        with explain_memory("the weights"):
            offloader.resume_weights()
        with updating(clients):
            yield
        with explain_memory("the KV cache"):
            offloader.resume_cache()
        bump.apply(clients)
