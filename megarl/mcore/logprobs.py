"""Log-probs and entropy of the temperature-scaled distribution, from vocabulary-parallel logits.

Shapes: R response tokens, V vocabulary columns on this tensor-parallel rank (of which the last may be padding),
C tokens of a chunk. Math is in float32, over chunks of tokens: no float32 [R, V] is held unless the logits are it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Logits of a chunk: large enough to amortise calls, small enough to stay near the processor's cache.
CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary columns of one tensor-parallel rank."""

    start: int
    """Vocabulary number of the first column"""
    num_valid: int
    """Columns that are tokens; the rest is padding, which gets no probability"""
    group: dist.ProcessGroup | None
    """The tensor-parallel group; None: all columns are here"""


def build_vocab_shard(vocab_size: int, num_columns: int, group: dist.ProcessGroup) -> VocabShard:
    """The shard of this rank, of `num_columns` columns a rank and `vocab_size` tokens without padding."""
    start = group.rank() * num_columns
    num_valid = max(0, min(num_columns, vocab_size - start))
    return VocabShard(start, num_valid, group if group.size() > 1 else None)


def compute_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, shard: VocabShard, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution.

    logits [R, V] in any float dtype, targets int64 [R] -> float32 [R] and, if asked for, float32 [R]; both
    differentiable in logits. Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logprobs, entropy = _Logprobs.apply(logits, targets, temperature, shard, with_entropy)
    return logprobs, entropy if with_entropy else None


def _local_columns(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
    columns = targets - shard.start
    here = (columns >= 0) & (columns < shard.num_valid)
    return columns.where(here, 0), here


def _all_reduce(tensor: Tensor, shard: VocabShard, op: Any) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(tensor, op=op, group=shard.group)
    return tensor


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, shard: VocabShard, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens = logits.shape[0]
        columns, here = _local_columns(targets, shard)
        # Per token: the largest scaled logit; sum e^(x - largest); the target's x; sum x e^(x - largest)
        largest = logits.new_full((num_tokens,), float("-inf"), dtype=torch.float32)
        sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
        for chunk in _chunks(num_tokens, shard.num_valid):
            scaled = logits[chunk, : shard.num_valid].float() / temperature
            largest[chunk] = scaled.amax(-1)
            sums[1, chunk] = scaled.gather(1, columns[chunk, None]).squeeze(1) * here[chunk]
            if with_entropy:
                weights = (scaled - largest[chunk, None]).exp_()
                sums[0, chunk] = weights.sum(-1)
                sums[2, chunk] = weights.mul_(scaled).sum(-1)
            else:
                sums[0, chunk] = scaled.sub_(largest[chunk, None]).exp_().sum(-1)
        overall = _all_reduce(largest.clone(), shard, dist.ReduceOp.MAX)
        sums[0::2] *= (largest - overall).exp()
        _all_reduce(sums, shard, dist.ReduceOp.SUM)
        log_total = overall + sums[0].log()
        entropy = log_total - sums[2] / sums[0] if with_entropy else log_total.new_zeros(0)
        ctx.save_for_backward(logits, columns, here, log_total, entropy)
        ctx.temperature, ctx.shard, ctx.with_entropy = temperature, shard, with_entropy
        return sums[1] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits, columns, here, log_total, entropy = ctx.saved_tensors
        num_valid = ctx.shard.num_valid
        grad_logits = torch.empty_like(logits)
        grad_logits[:, num_valid:] = 0
        on_target = grad_logprobs * here / ctx.temperature
        for chunk in _chunks(logits.shape[0], num_valid):
            log_p = (logits[chunk, :num_valid].float() / ctx.temperature).sub_(log_total[chunk, None])
            scale = (-grad_logprobs[chunk, None]) / ctx.temperature
            if ctx.with_entropy:
                # dH/dx_j = -p_j (log p_j + H)
                slope = grad_entropy[chunk, None] / ctx.temperature
                grad = (log_p + entropy[chunk, None]).mul_(-slope).add_(scale).mul_(log_p.exp_())
            else:
                grad = log_p.exp_().mul_(scale)
            grad.scatter_add_(1, columns[chunk, None], on_target[chunk, None])
            grad_logits[chunk, :num_valid] = grad
        return grad_logits, None, None, None, None


def _chunks(num_tokens: int, num_columns: int) -> list[slice]:
    """Slices of tokens; none where the rank has no tokens or only padding columns."""
    if num_columns == 0:
        return []
    size = max(1, CHUNK_ELEMENTS // num_columns)
    return [slice(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]
