"""The prompts of each iteration: reshuffled every epoch, resumable at any point."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


class PromptSampler(Generic[T]):
    """Draws prompts, or groups of saved responses, without replacement within an epoch; a batch may span epochs.

    The order depends on the prompts, the seed and the epoch only.
    """

    def __init__(self, prompts: Sequence[T], seed: int):
        if not prompts:
            raise ValueError("the sampler needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._fingerprint = hashlib.sha256("\n".join(p.id for p in self._prompts).encode()).hexdigest()
        self._start_epoch(0)

    def next_batch(self, n: int) -> list[T]:
        """The next `n` prompts (1 or more)."""
        if n < 1:
            raise ValueError(f"a batch needs at least one prompt, asked for {n}")
        batch: list[T] = []
        while len(batch) < n:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            taken = self._order[self._position : self._position + n - len(batch)]
            batch.extend(self._prompts[i] for i in taken)
            self._position += len(taken)
        return batch

    def state(self) -> dict[str, int | str]:
        """Where the sampler stands, as plain values."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompts": self._fingerprint,
        }

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state()` was taken.

        Raises ValueError where the state is of other prompts or another seed, or is not one at all.
        """
        missing = self.state().keys() - state.keys()
        if missing:
            raise ValueError(f"the sampler's state lacks {', '.join(sorted(missing))}; found {dict(state)}")
        for key, own in (("seed", self._seed), ("prompts", self._fingerprint)):
            if state[key] != own:
                raise ValueError(
                    f"the sampler's state is of another run: its {key} is {state[key]!r}, here it is {own!r}"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._prompts):
            raise ValueError(
                f"the sampler's state has epoch {epoch} and position {position}; there are {len(self._prompts)} prompts"
            )
        self._start_epoch(epoch)
        self._position = position

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = list(range(len(self._prompts)))
        random.Random(f"sampler/{self._seed}/{epoch}").shuffle(self._order)
