"""Replay buffer: groups of past iterations, to be learned from again (off-policy, TOPR 2503.14286)."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

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

        Their samples have their age, the iterations since they were sampled. The draw is the same for the same seed,
        iteration and contents.
        """
        pool = [
            (age, group)
            for age, groups in zip(range(len(self._iterations), 0, -1), self._iterations, strict=True)
            for group in groups
        ]
        wanted = self._count_wanted(len(pool), num_groups)
        drawn = random.Random(f"replay/{self._seed}/{iteration}").sample(pool, wanted)
        return [tuple(replace(sample, age=age) for sample in group) for age, group in drawn]

    def plan_fresh(self, num_groups: int, num_iterations: int) -> list[int]:
        """How many of their `num_groups` groups the next iterations do not draw from here."""
        sizes = deque(map(len, self._iterations), maxlen=self._config.num_iterations)
        planned = []
        for _ in range(num_iterations):
            planned.append(num_groups - self._count_wanted(sum(sizes), num_groups))
            sizes.append(planned[-1])
        return planned

    def add(self, groups: list[Group]) -> None:
        """Add an iteration's fresh groups; those of the oldest iteration are dropped."""
        self._iterations.append(groups)

    def _count_wanted(self, num_held: int, num_groups: int) -> int:
        return max(0, min(num_held, num_groups - 1, round(self._config.frac * num_groups)))

    def state(self) -> tuple[list[Group], ...]:
        """The buffer's contents, iteration by iteration."""
        return tuple(self._iterations)

    def restore(self, state: Sequence[list[Group]]) -> None:
        self._iterations = deque(state, maxlen=self._config.num_iterations)


def keep_logprobs(groups: list[Group], old_logprobs: Tensor) -> None:
    """Store in an iteration's fresh groups what the trainer says of them before it learns from them, in place.

    The buffer and its states hold the same list, so that all of them have the log-probs.
    old_logprobs: float32 [B, T], whose first rows are these samples.
    """
    rows = iter(old_logprobs)
    for index, group in enumerate(groups):
        groups[index] = tuple(
            replace(sample, first_old_logprobs=next(rows)[: len(sample.response)].numpy(force=True).copy())
            for sample in group
        )
