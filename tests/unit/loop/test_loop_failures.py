"""Whatever ends a run leaves its newest whole state as a checkpoint, and stays the error that is shown.

Over the fakes (tests/fakes); tests/e2e/test_faults.py has a run with the real parts.
"""

import errno
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.backend import FakeBackend
from fakes.disturbed import RUN, Disturbance, run_disturbed, summarize
from fakes.rollout import FakeEngine
from fakes.run import World

from megarl.algo.tokens import LossOutput
from megarl.cluster.calls import WorkerError
from megarl.files import Folder
from megarl.interfaces import DeadlineError, SyncError
from megarl.report.metrics import load_metrics
from megarl.run.process import stopping_on_signals
from megarl.types import Response, TrainingSamples

SELDOM = ("checkpoint.save_every=100", "checkpoint.max_restarts=0")
"""Only the start has a checkpoint that the loop itself asks for."""

PLACES: dict[str, tuple[Callable[[], BaseException], dict[str, Any], int]] = {
    "rollout of value pretraining": (lambda: ValueError("no tokens"), {"key": "pretraining-3"}, -1),
    "rollout": (lambda: ValueError("no tokens"), {"key": "iteration-3/round-1"}, 2),
    "late rollout": (lambda: DeadlineError("no answer within 600 s"), {"key": "iteration-3/round-1"}, 2),
    "evaluation": (lambda: RuntimeError("refused"), {"key": "evaluation-2"}, 2),
    "experience": (lambda: WorkerError("out of memory"), {"role": "policy", "verb": "logprobs", "number": 4}, 3),
    "values": (lambda: WorkerError("out of memory"), {"role": "critic", "verb": "values", "number": 6}, 2),
    "lost worker": (
        lambda: WorkerError("critic rank 0/1 died", lost=True),
        {"role": "critic", "verb": "values", "number": 6},
        2,
    ),
    "update of the critic": (
        lambda: FloatingPointError("the gradient norm is nan"),
        {"role": "critic", "verb": "update", "number": 6},
        0,
    ),
    "update of the policy": (
        lambda: FloatingPointError("the gradient norm is nan"),
        {"role": "policy", "verb": "update", "number": 3},
        0,
    ),
    "sync": (lambda: SyncError("wrong weights"), {"role": "servers", "verb": "publish", "number": 3}, 2),
    "export": (lambda: WorkerError("disk"), {"role": "policy", "verb": "export_weights", "number": 1}, 4),
}
"""The error, where it is raised, and the iteration of the newest checkpoint afterwards"""


def get_notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_stays_the_error_and_leaves_the_newest_whole_state_from_which_a_run_ends_as_untouched(
    place: str, untouched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    make, at, reached = PLACES[place]
    with pytest.raises(type(make())) as caught:
        run_disturbed(monkeypatch, run_dir, Disturbance(make, **at), *SELDOM)
    assert str(caught.value) == str(make())
    assert (run_dir / "checkpoints" / "latest").read_text() == f"iteration-{reached:06}\n"
    if place != "export":  # All is saved before it begins.
        assert (
            f"resume={run_dir} resumes after iteration {reached}: {run_dir}/checkpoints/iteration-{reached:06}"
            in get_notes(caught.value)
        )
    if place.startswith("update"):
        assert "the update of iteration 3 was not finished: its weights are not saved" in get_notes(caught.value)
    World().run_job(monkeypatch, run_dir, [*RUN, *SELDOM])
    assert summarize(run_dir) == untouched


def test_a_checkpoint_in_progress_is_completed_when_the_update_beside_it_fails(
    untouched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    failing = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 3)
    # Each iteration but the last ends with a checkpoint that is written beside the next one.
    with pytest.raises(FloatingPointError):
        run_disturbed(monkeypatch, run_dir, failing, "checkpoint.save_every=1")
    assert (run_dir / "checkpoints" / "latest").read_text() == "iteration-000002\n"
    World().run_job(monkeypatch, run_dir, RUN)
    assert summarize(run_dir) == untouched


def test_a_failure_before_anything_is_learned_writes_no_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    failing = Disturbance(lambda: ValueError("no tokens"), key="iteration-1/round-1")
    world = World(on_token=failing.on_token)
    with pytest.raises(ValueError, match="no tokens") as caught:
        world.run_job(monkeypatch, run_dir, ["algo=grpo", "train.num_iterations=2", "train.eval_every=2"])
    assert get_notes(caught.value) == [f"resume={run_dir} begins anew: there is no checkpoint yet"]
    assert not (run_dir / "checkpoints").exists()


def test_a_failed_save_is_a_note_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    first = Disturbance(lambda: ValueError("no tokens"), key="iteration-3/round-1")
    # The first save is that of the start.
    second = Disturbance(lambda: WorkerError("policy rank 0/1 died", lost=True), "policy", "begin_save", 2)
    with pytest.raises(ValueError, match="no tokens") as caught:
        World(watch=second.watch, on_token=first.on_token).run_job(monkeypatch, run_dir, [*RUN, *SELDOM])
    assert get_notes(caught.value) == [
        "iteration 2 was not saved: policy rank 0/1 died",
        f"resume={run_dir} resumes after iteration 0: {run_dir}/checkpoints/iteration-000000",
    ]


def test_a_signal_while_a_failed_run_is_saved_does_not_replace_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    failing = Disturbance(lambda: ValueError("no tokens"), key="iteration-3/round-1")
    num_saves = 0

    def watch(role: str, verb: str) -> None:
        nonlocal num_saves
        num_saves += (role, verb) == ("policy", "finish_save")
        if num_saves == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ValueError, match="no tokens"), stopping_on_signals():
        World(watch=watch, on_token=failing.on_token).run_job(monkeypatch, run_dir, [*RUN, *SELDOM])


def test_what_failed_to_be_written_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    world = World()
    monkeypatch.setattr(Folder, "publish", refuse_from(4, Folder.publish))
    with pytest.raises(OSError, match="No space left") as caught:
        world.run_job(monkeypatch, run_dir, [*RUN, "checkpoint.save_every=4"])
    (note,) = get_notes(caught.value)
    assert note.startswith(f"resume={run_dir} resumes after iteration 0: ")
    assert world.log.count(("policy", "begin_save")) == 2


def refuse_from(first: int, publish: Callable[..., Path]) -> Callable[..., Path]:
    """`publish`, with a full disk from iteration `first` on."""

    def refuse(folder: Folder, iteration: int) -> Path:
        if iteration >= first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(folder, iteration)

    return refuse


def test_a_critics_rate_far_too_high_is_said_and_the_best_checkpoint_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train.num_iterations=10", "train.eval_every=1", "checkpoint.save_every=1", "checkpoint.keep_best=1"]
    given = ["algo=ppo", "train.responses_per_prompt=4", "critic.optimizer.lr=20", "logger.terminal=true"]
    World().run_job(monkeypatch, tmp_path, [*run, *given])
    assert "the critic's squared error is larger than that of" in " ".join(capsys.readouterr().out.split())
    lines = load_metrics(tmp_path / "metrics.jsonl")
    kept = {int(path.name.removeprefix("iteration-")) for path in (tmp_path / "checkpoints").glob("iteration-*")}
    scores = {line["iteration"]: line["reward/heldout"] for line in lines}
    assert max(scores[iteration] for iteration in kept) == max(scores[iteration] for iteration in range(1, 11))


def raise_rate(_monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["policy.optimizer.lr=10"]


def cut_gradient(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As where the weights that are trained, such as those of an adapter, are not in the loss."""
    compute = FakeBackend._compute_loss

    def detach(self: FakeBackend, samples: TrainingSamples) -> LossOutput:
        output = compute(self, samples)
        return replace(output, loss=output.loss * 0.0)

    monkeypatch.setattr(FakeBackend, "_compute_loss", detach)
    return []


def spoil_one_logprob(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """-1e4 for the first token of the first response."""
    generate, num_seen = FakeEngine.generate_turns, 0

    async def spoil(self: FakeEngine, requests: Any, take: Callable[[int, Response], None]) -> None:
        def change(index: int, turn: Response) -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen == 8 + 1:  # After the evaluation at the start
                logprobs = np.concatenate([np.float32([-1e4]), turn.rollout_logprobs[1:]])
                turn = replace(turn, rollout_logprobs=logprobs)
            take(index, turn)

        await generate(self, requests, change)

    monkeypatch.setattr(FakeEngine, "generate_turns", spoil)
    return []


COLLAPSES = [
    (raise_rate, 1, r"this iteration moved the policy by a KL of 11\.4 per token.*lower policy\.optimizer\.lr"),
    (spoil_one_logprob, 1, "log-probs of trainer and rollout engine differ by 80 nats at one token"),
    (cut_gradient, 3, "the policy's gradient is 0 though the advantages are not"),
]


@pytest.mark.parametrize(("spoil", "iteration", "warning"), COLLAPSES)
def test_what_spoils_a_run_is_said_at_once(
    spoil: Callable[[pytest.MonkeyPatch], list[str]],
    iteration: int,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["algo=grpo", f"train.num_iterations={iteration}", f"train.eval_every={iteration}", "logger.terminal=true"]
    World().run_job(monkeypatch, tmp_path, [*given, *spoil(monkeypatch)])
    assert re.search(warning, " ".join(capsys.readouterr().out.split()))
