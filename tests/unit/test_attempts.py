"""When an attempt is worth another one."""

import pytest

from megarl.attempts import is_loss
from megarl.cluster.waiting import WorkerError
from megarl.seams import DeadlineError, SyncError


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("critic rank 0/1 died", lost=True),
        DeadlineError("policy.update: no answer"),
        caused_by(SyncError("the policy's ranks"), WorkerError("policy rank 1/2 died", lost=True)),
    ],
)
def test_a_dead_process_or_one_that_gives_no_answer_is_a_loss(error: Exception):
    assert is_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("policy rank 0/1 failed: FloatingPointError"),
        SyncError("the servers do not hold the weights"),
        caused_by(RuntimeError("a"), ValueError("b")),
    ],
)
def test_what_would_fail_again_is_none(error: Exception):
    assert not is_loss(error)
