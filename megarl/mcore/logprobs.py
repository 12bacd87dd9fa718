"""Log-probs and entropy of the temperature-scaled distribution, from vocabulary-parallel logits, in float32 over chunks
of tokens. Shapes: R response tokens, V vocabulary columns of this tensor-parallel rank, C tokens of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Logits of a chunk: on a CPU few enough for the second-level cache; on a GPU enough to fill it with work, in buffers
# of 32 MiB, small beside the logits of a few hundred tokens.
CPU_CHUNK = 1 << 18
GPU_CHUNK = 1 << 23


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary columns of one tensor-parallel rank."""

    start: int
    """Vocabulary number of the first column"""
    num_valid: int
    """Columns that are tokens; the rest is padding, which gets no probability"""
    group: dist.ProcessGroup | None
    """The tensor-parallel group; None: all columns are here"""


def compute_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, shard: VocabShard, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution.

    logits [R, V] in any float dtype, targets int64 [R] -> float32 [R] and, if asked for, float32 [R]; both
    differentiable in logits. Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    found: Any = _Logprobs.apply(logits, targets, temperature, shard, with_entropy)  # type: ignore[no-untyped-call]
    return found[0], found[1] if with_entropy else None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, shard: VocabShard, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens = logits.shape[0]
        # Column of each target on this rank (0 where it is elsewhere), and whether it is here
        columns = targets - shard.start
        here = (columns >= 0) & (columns < shard.num_valid)
        columns = columns.where(here, 0)
        # Per token, with x less this rank's largest: sum e^x; the target's x; sum x e^x
        largest = logits.new_full((num_tokens,), float("-inf"), dtype=torch.float32)
        sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
        for chunk, scaled in scaled_chunks(logits, shard.num_valid, temperature):
            largest[chunk] = scaled.amax(-1)
            scaled.sub_(largest[chunk, None])
            sums[1, chunk] = scaled.gather(1, columns[chunk, None]).squeeze(1)
            weights = scaled.exp() if with_entropy else scaled.exp_()
            sums[0, chunk] = weights.sum(-1)
            if with_entropy:
                sums[2, chunk] = weights.mul_(scaled).sum(-1)
        overall = largest
        if shard.group is not None:
            overall = largest.clone()
            dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=shard.group)
            # The sums over x become those over x + shift, which is -inf where a rank has no columns.
            shift = largest - overall
            scale, target = shift.exp(), torch.where(here, sums[1] + shift, 0.0)
            # 0 * -inf: a rank without columns adds nothing.
            weighted = scale * (sums[2] + sums[0] * shift.nan_to_num(neginf=0.0))
            sums = torch.stack([scale * sums[0], target, weighted])
            dist.all_reduce(sums, group=shard.group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0] if with_entropy else log_sum.new_zeros(0)
        log_total = overall + log_sum
        ctx.save_for_backward(logits, columns, here, log_total, entropy)
        ctx.temperature, ctx.shard = temperature, shard
        ctx.set_materialize_grads(False)  # None: nothing was learned from it, the entropy being a metric alone
        return sums[1] - log_sum, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        logits, columns, here, log_total, entropy = ctx.saved_tensors
        num_valid = ctx.shard.num_valid
        grad_logits = torch.empty_like(logits)
        grad_logits[:, num_valid:] = 0
        slope = torch.zeros_like(log_total) if grad_logprobs is None else grad_logprobs / ctx.temperature
        # Without an entropy term the gradient of float32 logits is computed where it stays.
        target = grad_logits if grad_entropy is None and grad_logits.dtype is torch.float32 else None
        for chunk, log_p in scaled_chunks(logits, num_valid, ctx.temperature, target):
            log_p.sub_(log_total[chunk, None])
            if grad_entropy is not None:
                # dH/dx_j = -p_j (log p_j + H)
                factor = (log_p + entropy[chunk, None]).mul_(-grad_entropy[chunk, None] / ctx.temperature)
                grad = factor.sub_(slope[chunk, None]).mul_(log_p.exp_())
            else:
                grad = log_p.exp_().mul_(-slope[chunk, None])
            grad.scatter_add_(1, columns[chunk, None], (slope * here)[chunk, None])
            if target is None:
                grad_logits[chunk, :num_valid] = grad
        return grad_logits, None, None, None, None


def scaled_chunks(
    logits: Tensor, num_valid: int, temperature: float, target: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of tokens with their logits / temperature, float32 [C, num_valid] in one buffer for all chunks, or in
    `target`, float32 and of the shape of `logits`.

    None where there are no tokens, or only padding columns on this rank.
    """
    num_tokens = logits.shape[0]
    if num_valid == 0 or num_tokens == 0:
        return
    elements = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    size = min(num_tokens, max(1, elements // num_valid))
    buffer = torch.empty((size, num_valid), dtype=torch.float32, device=logits.device) if target is None else target
    for first in range(0, num_tokens, size):
        chunk = slice(first, min(first + size, num_tokens))
        place = buffer[: chunk.stop - first] if target is None else buffer[chunk, :num_valid]
        scaled = place.copy_(logits[chunk, :num_valid])
        yield chunk, scaled if temperature == 1.0 else scaled.div_(temperature)


def compute_full_kl(logits: Tensor, ref_logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """sum_v pi(v) (log pi(v) - log pi_ref(v)) of the temperature-scaled distributions, float32 [R].

    logits and ref_logits: [R, V] in any float dtype, each rank's columns the same tokens. Differentiable in
    logits only. Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    kl: Tensor = _FullKl.apply(logits, ref_logits, temperature, shard)  # type: ignore[no-untyped-call]
    return kl


class _FullKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
        num_tokens = logits.shape[0]
        # Per token, with x and y (policy, reference) less this rank's largest: sum e^x, sum e^y, sum e^x (x - y)
        largest = logits.new_full((2, num_tokens), float("-inf"), dtype=torch.float32)
        sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
        pairs = (scaled_chunks(each, shard.num_valid, temperature) for each in (logits, ref_logits))
        for (chunk, x), (_, y) in zip(*pairs, strict=True):
            largest[0, chunk], largest[1, chunk] = x.amax(-1), y.amax(-1)
            x.sub_(largest[0, chunk, None])
            y.sub_(largest[1, chunk, None])
            difference = x - y
            weights = x.exp_()
            sums[0, chunk], sums[1, chunk] = weights.sum(-1), y.exp_().sum(-1)
            sums[2, chunk] = weights.mul_(difference).sum(-1)
        overall = largest
        if shard.group is not None:
            overall = largest.clone()
            dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=shard.group)
            # The sums over x and y become those over x + a and y + b, which are -inf where a rank has no columns.
            a, b = largest - overall
            scale = a.exp()
            # 0 * -inf: a rank without columns adds nothing.
            gap = (a - b).nan_to_num(nan=0.0)
            sums = torch.stack([scale * sums[0], b.exp() * sums[1], scale * (sums[2] + sums[0] * gap)])
            dist.all_reduce(sums, group=shard.group)
        log_sums = sums[:2].log()
        kl = sums[2] / sums[0] - (log_sums[0] - log_sums[1])
        ctx.save_for_backward(logits, ref_logits, overall + log_sums, kl)
        ctx.temperature, ctx.num_valid = temperature, shard.num_valid
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ref_logits, log_totals, kl = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        grad_logits[:, ctx.num_valid :] = 0
        slope = grad_kl / ctx.temperature
        pairs = (scaled_chunks(each, ctx.num_valid, ctx.temperature) for each in (logits, ref_logits))
        for (chunk, log_p), (_, log_q) in zip(*pairs, strict=True):
            log_p.sub_(log_totals[0, chunk, None])
            log_q.sub_(log_totals[1, chunk, None])
            # dKL/dx_j = p_j (log p_j - log q_j - KL)
            factor = torch.sub(log_p, log_q, out=log_q).sub_(kl[chunk, None])
            grad_logits[chunk, : ctx.num_valid] = factor.mul_(log_p.exp_()).mul_(slope[chunk, None])
        return grad_logits, None, None, None
