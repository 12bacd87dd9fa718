"""The steps of a weight sync at a server: each named in errors, and undone where a later one fails."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megarl.interfaces import DeadlineError, SyncError
from megarl.rollout.calls import find_cause
from megarl.rollout.client import ConnectionLostError, RequestError, SGLangClient

CLEAN_UP_DEADLINE_S = 10.0
"""Of each call that follows a failed one."""


@contextlib.contextmanager
def explaining_losses(check_processes: Callable[[], None] | None) -> Iterator[None]:
    """Adds exit status and log of a server that is down to the error of a call that was not answered."""
    try:
        yield
    except SyncError as error:
        unanswered = isinstance(error.__cause__, (ConnectionLostError, DeadlineError))
        cause = find_cause(check_processes) if unanswered else None
        if cause is None:
            raise
        raise SyncError(f"{error}\n{cause}") from error


@contextlib.contextmanager
def naming_step(client: SGLangClient, step: str) -> Iterator[None]:
    """Turns a refused, lost or late call into a SyncError that names server and step."""
    try:
        yield
    except (RequestError, ConnectionLostError, DeadlineError) as error:
        raise SyncError(f"SGLang server {client.url} failed at the {step}: {error}") from error


@contextlib.contextmanager
def bracket(
    client: SGLangClient, step: str, opening: Callable[[], None], closing: Callable[..., None]
) -> Iterator[None]:
    """`closing` follows `opening` whatever happens between; its own failure never hides an earlier one."""
    with naming_step(client, step):
        opening()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
            closing(deadline_s=CLEAN_UP_DEADLINE_S)
        raise
    with naming_step(client, f"{step}, when it was to end"):
        closing()


def paused(clients: Sequence[SGLangClient]) -> contextlib.AbstractContextManager[None]:
    """No server generates inside; requests under way wait."""
    return _bracket_all(clients, "pause", SGLangClient.pause, SGLangClient.resume)


def updating(clients: Sequence[SGLangClient]) -> contextlib.AbstractContextManager[None]:
    """All servers are in a weight update inside."""
    return _bracket_all(clients, "begin of the weight update", SGLangClient.begin_update, SGLangClient.end_update)


@contextlib.contextmanager
def _bracket_all(
    clients: Sequence[SGLangClient], step: str, opening: Callable[..., None], closing: Callable[..., None]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(bracket(client, step, partial(opening, client), partial(closing, client)))
        yield
