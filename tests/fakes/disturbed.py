"""Runs over the fakes that are disturbed at one place, and what two equal runs have in common."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.run import World
from megarl.report.metrics import load_metrics
from megarl.trainer import Trainer
from megarl.types import Response

RUN = (
    *("algo=vapo", "algo.value_pretrain.steps=3", "algo.value_pretrain.patience=null", "critic.optimizer.lr=0.1"),
    *("train.num_iterations=4", "train.eval_every=2", "checkpoint.save_every=2", "logger.save_rollouts=true"),
)


class Killed(BaseException):
    """The driver is gone: nothing of ours handles it."""


class Disturbance:
    """Raises `error` at one place: before the `number`-th call of a role's verb, or of a token of a call with `key`."""

    def __init__(
        self, error: Callable[[], BaseException], role: str = "", verb: str = "", number: int = 1, key: str = ""
    ):
        self.error, self.place, self.number, self.key = error, (role, verb), number, key
        self.num_seen = 0
        self.has_come = False

    def watch(self, role: str, verb: str) -> None:
        if (role, verb) == self.place:
            self._count()

    def on_token(self, key: str | None, number: int) -> None:
        if self.key and key is not None and key == self.key and number == 3:
            self._count()

    def _count(self) -> None:
        self.num_seen += 1
        if self.num_seen == self.number and not self.has_come:
            self.has_come = True
            raise self.error()


def summarize(run_dir: Path) -> dict[str, Any]:
    """What two equal runs have in common."""
    timed = ("time/", "perf/")
    lines = load_metrics(run_dir / "metrics.jsonl")
    weights = {role: (run_dir / role / "model.safetensors").read_bytes() for role in ("policy", "critic")}
    return {
        "metrics.jsonl": [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines],
        **weights,
        "rollouts": (run_dir / "rollouts.jsonl").read_bytes(),
        "tokens": (run_dir / "tokens.jsonl").read_bytes(),
    }


def run_disturbed(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, disturbance: Disturbance, *overrides: str, **keys: Any
) -> World:
    world = World(watch=disturbance.watch, on_token=disturbance.on_token)
    world.run_job(monkeypatch, run_dir, [*RUN, *overrides], **keys)
    return world


def add_engine_noise(trainer: Trainer, noise: float) -> None:
    """The rollout engine's log-probs of the same tokens, off by `noise`, up and down in turn."""
    engine = trainer.components.engine
    generate_turns = engine.generate_turns

    def shake(turn: Response) -> Response:
        signs = (-1.0) ** np.arange(len(turn), dtype=np.float32)
        return replace(turn, rollout_logprobs=turn.rollout_logprobs + np.float32(noise) * signs)

    async def generate_noisily(requests: Any, take: Any) -> None:
        await generate_turns(requests, lambda index, turn: take(index, shake(turn)))

    engine.generate_turns = generate_noisily  # type: ignore[method-assign]
