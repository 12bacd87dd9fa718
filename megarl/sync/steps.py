"""The steps of a weight sync at a server: errors name the step, and a step is undone where a later one fails."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megarl.interfaces import DeadlineError, SyncError
from megarl.rollout.calls import find_cause
from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient

CLEAN_UP_DEADLINE_S = 10.0
"""The deadline of each clean-up call after a failed step"""


@contextlib.contextmanager
def explain_lost_servers(check_processes: Callable[[], None] | None) -> Iterator[None]:
    """Adds exit status and log of a server that is down to a SyncError of an unanswered call within the block."""
    try:
        yield
    except SyncError as error:
        unanswered = isinstance(error.__cause__, (ConnectionLostError, DeadlineError))
        cause = find_cause(check_processes) if unanswered else None
        if cause is None:
            raise
        raise SyncError(f"{error}\n{cause}") from error


@contextlib.contextmanager
def sync_step(client: SGLangClient, step: str) -> Iterator[None]:
    """Turns a refused, lost or late call within the block into a SyncError that names server and step."""
    try:
        yield
    except (RequestError, ConnectionLostError, DeadlineError) as error:
        raise SyncError(f"SGLang server {client.url} failed at the {step}: {error}") from error


@contextlib.contextmanager
def bracket(
    client: SGLangClient, step: str, opening: Callable[[], None], closing: Callable[..., None]
) -> Iterator[None]:
    """Calls `opening` before the block and `closing` after it, whatever happens; a failure of `closing` never hides an
    earlier one.
    """
    with sync_step(client, step):
        opening()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
            closing(deadline_s=CLEAN_UP_DEADLINE_S)
        raise
    with sync_step(client, f"end of the {step}"):
        closing()


def paused(clients: Sequence[SGLangClient]) -> contextlib.AbstractContextManager[None]:
    """Within the block no server generates; requests in flight wait."""
    return _bracket_all(clients, "pause", SGLangClient.pause, SGLangClient.resume)


def updating(clients: Sequence[SGLangClient]) -> contextlib.AbstractContextManager[None]:
    """Within the block all servers are in a weight update."""
    return _bracket_all(clients, "weight update", SGLangClient.begin_update, SGLangClient.end_update)


@contextlib.contextmanager
def _bracket_all(
    clients: Sequence[SGLangClient], step: str, opening: Callable[..., None], closing: Callable[..., None]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(bracket(client, step, partial(opening, client), partial(closing, client)))
        yield
