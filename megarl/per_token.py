"""What a response has for each of its tokens, stored without an object per token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class RoutedExperts:
    """The experts to which the layers of the rollout engine sent the tokens of a prompt and its response."""

    data: bytes
    """Numbers of experts [N, num_layers, top_k], in one byte each up to 255 experts, else in two; N: all tokens but the
    last, which no layer was given. What stands there for a layer without experts means nothing."""
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.num_experts < 256 else torch.int16

    def to_tensor(self) -> Tensor:
        """uint8 or int16 [N, num_layers, top_k]"""
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(-1, self.num_layers, self.top_k)


@dataclass(frozen=True)
class WeightVersions:
    """The version of the weights that generated each token of a response, as runs of equal versions."""

    versions: tuple[int, ...]
    """Version of each run"""
    ends: tuple[int, ...]
    """Number of the token after each run's last one, increasing; the last is the number of tokens"""

    @classmethod
    def of(cls, per_token: Iterable[int]) -> "WeightVersions":
        """From one version per token."""
        found = np.fromiter(per_token, dtype=np.int64)
        if not found.size:
            return cls((), ())
        ends = np.append(np.flatnonzero(np.diff(found)) + 1, found.size)
        return cls(tuple(found[ends - 1].tolist()), tuple(ends.tolist()))

    def __len__(self) -> int:
        """The number of tokens."""
        return self.ends[-1] if self.ends else 0

    def expand(self) -> NDArray[np.int64]:
        """int64 [T], one version per token."""
        return np.repeat(np.array(self.versions, dtype=np.int64), np.diff((0, *self.ends)))

    def list_runs(self) -> list[tuple[int, int, int]]:
        """(version, number of the first token, number of the token after the last one) of each run."""
        return list(zip(self.versions, (0, *self.ends[:-1]), self.ends, strict=True))

    def find_used(self, mask: NDArray[np.bool_]) -> tuple[int, ...]:
        """The versions, in order, of runs with a token in `mask`, bool [T]."""
        return tuple(version for version, start, end in self.list_runs() if mask[start:end].any())
