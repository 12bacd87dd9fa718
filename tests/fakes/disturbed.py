"""Runs over the fakes that are disturbed at one place, and what two equal runs have in common."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.run import World, load_untimed, reward_length
from megarl.trainer import Trainer
from megarl.types import Response, RewardFunction

RUN = (
    *("algo=vapo", "algo.value_pretrain.steps=3", "algo.value_pretrain.patience=null", "critic.optimizer.lr=0.1"),
    *("train.num_iterations=4", "train.eval_every=2", "checkpoint.save_every=2", "logger.save_rollouts=true"),
)


class Killed(BaseException):
    """The driver is gone: nothing of ours handles it."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


class Disturbance:
    """Raises what `error` gives, if anything, at one place.

    Before the `number`-th call of a role's verb, or of a token of a call with `key`.
    """

    def __init__(
        self, error: Callable[[], BaseException | None], role: str = "", verb: str = "", number: int = 1, key: str = ""
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
            if (error := self.error()) is not None:
                raise error


def summarize(run_dir: Path) -> dict[str, Any]:
    """What two equal runs have in common."""
    names = ("policy/model.safetensors", "critic/model.safetensors", "rollouts.jsonl", "tokens.jsonl")
    files = {name: (run_dir / name).read_bytes() for name in names if (run_dir / name).is_file()}
    return {"metrics.jsonl": load_untimed(run_dir), **files}


def run_disturbed(run_dir: Path, disturbance: Disturbance, *overrides: str) -> World:
    world = World(watch=disturbance.watch, on_token=disturbance.on_token)
    world.run_job(run_dir, [*RUN, *overrides])
    return world


def check_resumed(
    run_dir: Path, whole: dict[str, Any], run: Sequence[str] = RUN, reward: RewardFunction = reward_length
) -> None:
    """The run in `run_dir` goes on to the end of the whole one."""
    World(reward=reward).run_job(run_dir, run)
    assert summarize(run_dir) == whole


def check_disturbed(
    folder: Path, run: Sequence[str], disturbance: Disturbance, reward: RewardFunction = reward_length
) -> None:
    """A run that `disturbance` ends goes on to the end of one that nobody touched, which is left in folder/whole."""
    World(reward=reward).run_job(folder / "whole", run)
    with pytest.raises(type(disturbance.error())):
        World(disturbance.watch, disturbance.on_token, reward).run_job(folder / "run", run)
    check_resumed(folder / "run", summarize(folder / "whole"), run, reward)


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
