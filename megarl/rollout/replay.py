"""Replay buffer: groups of past iterations, to be learned from again (off-policy, TOPR 2503.14286)."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from megarl.config.schema.algo import ReplayConfig
from megarl.rollout.dynamic_sampling import Group


class ReplayBuffer:
    """Keeps the fresh groups of the last `num_iterations` iterations."""

    def __init__(self, config: ReplayConfig, seed: int):
        self._config = config
        self._seed = seed
        self._iterations: deque[list[Group]] = deque(maxlen=config.num_iterations)

    def draw(self, num_groups: int, iteration: int) -> list[Group]:
        """Draw a random share `frac` of `num_groups` without replacement, at most what the buffer holds.

        The age of a drawn sample is the number of iterations since it was sampled. The draw is the same for the same
        seed, iteration and contents.
        """
        pool = [
            tuple(replace(sample, age=age) for sample in group)
            for age, groups in zip(range(len(self._iterations), 0, -1), self._iterations, strict=True)
            for group in groups
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
