"""KL(policy, reference) over the whole vocabulary, from vocabulary-parallel logits of both.

Shapes: R response tokens, V vocabulary columns on this tensor-parallel rank (of which the last may be
padding). Math is in float32, over chunks of tokens, as in `megarl.mcore.logprobs`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.logprobs import VocabShard, scaled_chunks


def compute_full_kl(logits: Tensor, ref_logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """sum_v pi(v) (log pi(v) - log pi_ref(v)) of the temperature-scaled distributions, float32 [R].

    logits and ref_logits: [R, V] in any float dtype, each rank's columns the same tokens. Differentiable in
    logits only. Raises ValueError for a temperature that is not positive, or shapes that differ.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"ref_logits: shape {list(ref_logits.shape)} found; must be that of logits, {list(logits.shape)}"
        )
    kl: Tensor = _FullKl.apply(logits, ref_logits, temperature, shard)  # type: ignore[no-untyped-call]
    return kl


class _FullKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float, shard: VocabShard) -> Tensor:
        num_tokens = logits.shape[0]
        # Per token, with x and y (policy, reference) less this rank's largest: sum e^x, sum e^y, sum e^x (x - y)
        largest = logits.new_full((2, num_tokens), float("-inf"), dtype=torch.float32)
        sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
        for chunk, x, y in _paired_chunks(logits, ref_logits, shard.num_valid, temperature):
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
            sums = _shift(sums, largest - overall)
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
        for chunk, log_p, log_q in _paired_chunks(logits, ref_logits, ctx.num_valid, ctx.temperature):
            log_p.sub_(log_totals[0, chunk, None])
            log_q.sub_(log_totals[1, chunk, None])
            # dKL/dx_j = p_j (log p_j - log q_j - KL)
            factor = torch.sub(log_p, log_q, out=log_q).sub_(kl[chunk, None])
            grad_logits[chunk, : ctx.num_valid] = factor.mul_(log_p.exp_()).mul_(slope[chunk, None])
        return grad_logits, None, None, None


def _shift(sums: Tensor, shifts: Tensor) -> Tensor:
    """The sums over x and y as those over x + a and y + b; a and b are -inf where a rank has no columns."""
    a, b = shifts
    scale = a.exp()
    # 0 * -inf: a rank without columns adds nothing.
    gap = (a - b).nan_to_num(nan=0.0)
    return torch.stack([scale * sums[0], b.exp() * sums[1], scale * (sums[2] + sums[0] * gap)])


def _paired_chunks(
    logits: Tensor, ref_logits: Tensor, num_valid: int, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of tokens with both models' logits / temperature, as `scaled_chunks`."""
    pairs = zip(
        scaled_chunks(logits, num_valid, temperature), scaled_chunks(ref_logits, num_valid, temperature), strict=True
    )
    for (chunk, x), (_, y) in pairs:
        yield chunk, x, y
