"""Whether a server is lost; one that is alive is reset."""

import contextlib
import time

from megarl.interfaces import UNPUBLISHED, DeadlineError
from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient
from megarl.rollout.server import SGLangServer

CALL_DEADLINE_S = 60.0
"""The deadline of each call; the first may have to wait for a weight load that was abandoned."""
NUM_CALLS = 6
EXIT_DEADLINE_S = 5.0
"""How long to wait for an exit status: a connection breaks before the process behind it has been reaped."""


def find_loss(server: SGLangServer, deadline_s: float = CALL_DEADLINE_S) -> str | None:
    """Why the server is lost, in one line: its exit status, or the call that it did not answer within `deadline_s`.

    None where it answers and generates (where it may have given memory back, answers); it then has no requests, no open
    update session, and is not paused.
    """
    unanswered = None
    if server.is_alive():
        with contextlib.closing(build_client(server, deadline_s)) as client:
            unanswered = _find_unanswered(client, deadline_s, gives_memory_back=server.config.offload is not None)
        if unanswered is None:
            return None
    end = time.monotonic() + EXIT_DEADLINE_S
    while server.is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    if server.is_alive():
        return f"{unanswered} (its log: {server.log_file})"
    return f"it exited with status {server.exit_status} (its log: {server.log_file})"


def build_client(server: SGLangServer, deadline_s: float) -> SGLangClient:
    """A client for calls without tokens."""
    return SGLangClient(server.url, vocab_size=1, deadline_s=deadline_s, api_key=server.api_key)


def _find_unanswered(client: SGLangClient, deadline_s: float, gives_memory_back: bool) -> str | None:
    try:
        client.reset()
        # Its memory may be with the roles then, and a token would be its end.
        is_away = gives_memory_back and client.load_weight_version() == UNPUBLISHED
    except (RequestError, ConnectionLostError, DeadlineError) as error:
        return str(error)
    # It covers every rank, where /health covers the HTTP server alone.
    if not client.is_healthy(deadline_s, generating=not is_away):
        return f"{client.url}/health{'' if is_away else '_generate'} gave no healthy answer"
    return None
