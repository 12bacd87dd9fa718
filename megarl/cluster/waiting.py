"""Waiting for Ray: every wait has a deadline, fails as soon as one awaited fails, and says what it waited for."""

import time
from collections.abc import Sequence
from typing import Any

import ray

from megarl.seams import DeadlineError


class WorkerError(RuntimeError):
    """A call failed in another process; the message names the process, the call and where its log is."""


def wait_for(refs: Sequence[ray.ObjectRef], names: Sequence[str], what: str, deadline_s: float) -> list[Any]:
    """The results of `refs` in order; `names` says who computes each, for messages.

    Raises DeadlineError naming those that had not answered, WorkerError as soon as one has failed.
    """
    end = time.monotonic() + deadline_s
    waiting = list(refs)
    who = dict(zip(refs, names, strict=True))
    results: dict[ray.ObjectRef, Any] = {}
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(who[ref] for ref in waiting)
            raise DeadlineError(f"{what}: no answer from {late} within {deadline_s:g} s")
        for ref in ready:
            results[ref] = _get(ref, who[ref], what)
    return [results[ref] for ref in refs]


def _get(ref: ray.ObjectRef, name: str, what: str) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise WorkerError(f"{what}: {name} died: {error}") from error
    except ray.exceptions.RayTaskError as error:
        raise WorkerError(f"{what}: {name} failed:\n{error}") from error
