"""How positions turn a head's numbers: the frequencies of every kind of rope, exactly those of transformers."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    ),
}
"""The keys of each kind beside rope_theta: those that must be there, and others"""
REFUSED_KINDS = {
    "dynamic": "transformers scales beyond max_position_embeddings alone, SGLang 0.5.23 at every length",
    "longrope": "its frequencies change with a sequence's length, which no Megatron-Core up to 0.16.1 computes",
}


@dataclass(frozen=True)
class Rope:
    """Names of fields as in config.json."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention_factor(self) -> float:
        """Of YaRN (2309.00071): cosines and sines are multiplied by it."""
        if self.kind != "yarn" or self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log(self.factor) + 1) / (0.1 * self.mscale_all_dim * log(self.factor) + 1)
        return 0.1 * log(self.factor) + 1


def compute_frequencies(rope: Rope, size: int) -> "Tensor":
    """float32 [size / 2]: radians for each position. size: numbers of a head that positions turn."""
    import torch

    powers = rope.theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    frequencies: Tensor = 1.0 / powers
    if rope.kind == "linear":
        return frequencies / rope.factor
    length = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        wavelengths = 2 * pi / frequencies
        low, high = length / rope.low_freq_factor, length / rope.high_freq_factor
        slow = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
        share = (length / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        between = (1 - share) * slow / rope.factor + share * slow
        return torch.where(~(wavelengths < high) * ~(wavelengths > low), between, slow)
    if rope.kind == "yarn":
        # The places at which a frequency turns so often over the original length.
        first, last = (
            size * log(length / (turns * 2 * pi)) / (2 * log(rope.theta)) for turns in (rope.beta_fast, rope.beta_slow)
        )
        first, last = (floor(first), ceil(last)) if rope.truncate else (first, last)
        first, last = max(first, 0), min(last, size - 1)
        last += 0.001 if first == last else 0
        kept = 1 - torch.clamp((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
        return 1.0 / (rope.factor * powers) * (1 - kept) + frequencies * kept
    return frequencies
