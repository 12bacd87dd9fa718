"""Replay buffer: groups of past iterations, to be learned from again (off-policy, TOPR 2503.14286)."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megarl.config.schema.algo import ReplayConfig
from megarl.rollout.dynamic_sampling import Group


@dataclass(frozen=True)
class PastGroup:
    """A group that was drawn from the buffer, perhaps before its first iteration has scored it."""

    groups: list[Group]
    """the buffer's own list of that iteration"""
    index: int
    age: int
    """iterations since it was sampled"""

    def read(self) -> Group:
        """Its samples as the buffer has them now."""
        return tuple(replace(sample, age=self.age) for sample in self.groups[self.index])


class ReplayBuffer:
    """Keeps the fresh groups of the last `num_iterations` iterations."""

    def __init__(self, config: ReplayConfig, seed: int):
        self._config = config
        self._seed = seed
        self._iterations: deque[list[Group]] = deque(maxlen=config.num_iterations)

    def draw(self, num_groups: int, iteration: int) -> list[PastGroup]:
        """Draw a random share `frac` of `num_groups` without replacement, at most what the buffer holds.

        The draw is the same for the same seed, iteration and contents.
        """
        pool = [
            PastGroup(groups, index, age)
            for age, groups in zip(range(len(self._iterations), 0, -1), self._iterations, strict=True)
            for index in range(len(groups))
        ]
        wanted = min(len(pool), num_groups - 1, round(self._config.frac * num_groups))
        return random.Random(f"replay/{self._seed}/{iteration}").sample(pool, wanted) if wanted > 0 else []

    def add(self, groups: list[Group]) -> None:
        """Add an iteration's fresh groups; those of the oldest iteration are dropped."""
        self._iterations.append(groups)

    def state(self) -> tuple[list[Group], ...]:
        """The buffer's contents, iteration by iteration."""
        return tuple(self._iterations)

    def restore(self, state: Sequence[list[Group]]) -> None:
        self._iterations = deque(state, maxlen=self._config.num_iterations)


def keep_logprobs(groups: list[Group], old_logprobs: Tensor) -> None:
    """Store in an iteration's fresh groups what the trainer says of them before it learns from them, in place.

    The buffer, its states and what was drawn from it hold the same list, so that all of them have the log-probs.
    old_logprobs: float32 [B, T], whose first rows are these samples.
    """
    rows = iter(old_logprobs)
    for index, group in enumerate(groups):
        groups[index] = tuple(
            replace(sample, first_old_logprobs=next(rows)[: len(sample.response)].numpy(force=True).copy())
            for sample in group
        )
