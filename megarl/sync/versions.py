"""The servers' weight version in a sync: raised while they are paused, withdrawn where the sync fails."""

import contextlib
from collections.abc import Sequence
from types import TracebackType

from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient
from megarl.seams import UNPUBLISHED, DeadlineError, SyncError
from megarl.sync.steps import naming_step


class VersionRaise:
    """Gives every server that has the new weights their version; servers that were given it serve as none when the
    block fails.

    SGLang notes in each response under way after which token the version changed. Between pause and resume that is
    the token after which the weights changed; set later, tokens of the new weights would count as old ones.
    """

    def __init__(self, version: int, clean_up_deadline_s: float):
        """clean_up_deadline_s: of each call that withdraws a version."""
        self.version = version
        self._clean_up_deadline_s = clean_up_deadline_s
        self._raised: list[SGLangClient] = []

    def apply(self, client: SGLangClient) -> None:
        """Call it while the server is paused with its new weights; from several threads for several servers.

        Raises SyncError where the server reports another version afterwards, and as the client's calls.
        """
        self._raised.append(client)
        client.set_weight_version(self.version)
        found = client.load_weight_version()
        if found != self.version:
            raise SyncError(
                f"SGLang server {client.url} reports weight version {found} after it was set to {self.version}"
            )

    def apply_all(self, clients: Sequence[SGLangClient]) -> None:
        """`apply` to one after the other; raises SyncError naming server and step."""
        for client in clients:
            with naming_step(client, f"raise of the weight version to {self.version}"):
                self.apply(client)

    def __enter__(self) -> "VersionRaise":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):  # None, or a signal: then the servers end.
            return
        for client in self._raised:
            with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
                client.set_weight_version(UNPUBLISHED, deadline_s=self._clean_up_deadline_s)
