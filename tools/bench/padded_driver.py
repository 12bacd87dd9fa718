"""The driver's way with a Python object per token and float64 matrices padded to the longest response, for VAPO.

tools/bench/driver.py compares with it. Suffixes: B samples, T response positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algo.advantages import compute_adaptive_lambda
from megarl.algo.blocks import BLOCK, compute_discounted_sums
from megarl.algo.diagnostics import QUARTERS, compute_calibration
from megarl.config.schema.algo import AlgoConfig
from megarl.types import Metrics, Prompt, Sequences, TrainingSamples


@dataclass(frozen=True)
class Response:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    generated: tuple[bool, ...]
    weight_versions: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    prompt: Prompt
    responses: Sequence[Response]
    rewards: Tensor
    groups: Tensor
    weight_version: int


@dataclass(frozen=True)
class Tensors:
    sequences: Sequences
    rollout: Rollout
    mask: Tensor
    rollout_logprobs: Tensor
    first_old_logprobs: Tensor
    scored: Tensor


def build_response(answer: Mapping[str, Any]) -> Response:
    meta = answer["meta_info"]
    ids = tuple(answer["output_ids"])
    entries = meta["output_token_logprobs"]
    assert tuple(entry[1] for entry in entries) == ids
    spans = meta["weight_versions"]
    versions = tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))
    return Response(ids, tuple(float(entry[0]) for entry in entries), (True,) * len(ids), versions)


def build_rollout(responses: Sequence[Response], prompt: Prompt, group_size: int, weight_version: int) -> Rollout:
    rewards = torch.tensor([i % 3 / 2 for i in range(len(responses))])
    return Rollout(prompt, responses, rewards, torch.arange(len(responses)) // group_size, weight_version)


def build_tensors(rollout: Rollout) -> Tensors:
    prompt, responses = rollout.prompt.token_ids, rollout.responses
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    mask = torch.zeros(len(responses), int(lengths.max()), dtype=torch.bool)
    logprobs = torch.zeros(mask.shape)
    scored = torch.zeros_like(mask)
    for i, response in enumerate(responses):
        length = len(response.token_ids)
        mask[i, :length] = torch.tensor(response.generated, dtype=torch.bool)
        logprobs[i, :length] = torch.tensor(response.logprobs, dtype=torch.float32)
        versions = torch.tensor(response.weight_versions, dtype=torch.int64)
        scored[i, :length] = versions == rollout.weight_version
    tokens = torch.tensor([token for r in responses for ids in (prompt, r.token_ids) for token in ids])
    sequences = Sequences(tokens, lengths + len(prompt), torch.full_like(lengths, len(prompt)))
    rollout_logprobs = logprobs.masked_fill(~mask, 0.0)
    return Tensors(sequences, rollout, mask, rollout_logprobs, torch.zeros_like(logprobs), scored & mask)


def compute(
    tensors: Tensors, old_logprobs: Tensor, values_BT: Tensor, algo: AlgoConfig
) -> tuple[TrainingSamples, Metrics]:
    """As compute_targets and compute_batch_metrics."""
    mask, rewards_B = tensors.mask, tensors.rollout.rewards.double()
    trainers = torch.where(torch.ones(len(mask), 1, dtype=torch.bool), old_logprobs, tensors.first_old_logprobs)
    sampling_logprobs = torch.where(tensors.scored, trainers, tensors.rollout_logprobs)
    for tensor in (old_logprobs, tensors.rollout_logprobs, sampling_logprobs, values_BT):
        assert not bool((~torch.isfinite(tensor) & mask).any())
    token_rewards, values = torch.zeros(mask.shape, dtype=torch.float64), values_BT.double()
    last = (mask * torch.arange(mask.shape[1])).amax(1)
    token_rewards[torch.arange(len(mask)), last] += rewards_B
    lambdas = compute_adaptive_lambda(mask.sum(1), algo.length_alpha, algo.lambda_min)
    advantages = compute_gae(token_rewards, values, mask, algo.gamma, lambdas)
    to_returns = compute_gae(token_rewards, values, mask, algo.gamma, torch.ones(1, dtype=torch.float64))
    returns = torch.where(mask, to_returns + values, 0.0)
    metrics = compute_critic_metrics(values, returns, returns, mask)
    samples = TrainingSamples(
        sequences=tensors.sequences,
        mask=mask,
        loss_mask=mask & torch.ones(len(mask), 1, dtype=torch.bool),
        positive=rewards_B >= algo.positive_threshold,
        advantages=torch.where(mask, advantages, 0.0).float(),
        rollout_logprobs=tensors.rollout_logprobs,
        old_logprobs=old_logprobs,
        sampling_logprobs=None,
        ref_logprobs=None,
        old_values=values_BT,
        returns=returns.float(),
    )
    inside = samples.advantages[mask].double()
    metrics |= {"advantage/mean": float(inside.mean()), "advantage/std": float(inside.std(correction=0))}
    metrics["advantage/max_abs"] = float(inside.abs().max())
    metrics["length/mean"] = float(mask.sum(1).double().mean())
    return samples, metrics | compute_mismatch_metrics(old_logprobs, tensors.rollout_logprobs, mask)


def compute_gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lambda_B: Tensor) -> Tensor:
    out_BT, decay_B = torch.zeros_like(values_BT), gamma * lambda_B
    for rows, width in split_by_extent(mask_BT):
        mask = mask_BT[:, :width].index_select(0, rows)
        rewards, values = (
            t[:, :width].index_select(0, rows).where(mask, 0.0).double() for t in (rewards_BT, values_BT)
        )
        delta = rewards - values
        delta[:, :-1].add_(values[:, 1:], alpha=gamma)
        sums = compute_discounted_sums(delta, decay_B if decay_B.numel() == 1 else decay_B[rows])
        out_BT[:, :width].index_copy_(0, rows, sums)
    return out_BT


def split_by_extent(mask_BT: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Row numbers sorted by extent, and a width that holds all their generated tokens, chunk by chunk."""
    extents, rows = ((mask_BT.sum(1) + BLOCK - 1) // BLOCK * BLOCK).clamp(max=mask_BT.shape[1]).sort()
    limits, start = extents.tolist(), 0
    while start < len(limits):
        stop = start + 1
        while stop < len(limits) and limits[stop] * (stop + 1 - start) <= 1 << 17:
            stop += 1
        yield rows[start:stop], limits[stop - 1]
        start = stop


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    for tensor in (values, returns):
        assert not bool((~torch.isfinite(tensor) & mask).any())
    v, g = values[mask].double(), returns[mask].double()
    return float(1.0 - (g - v).var(correction=0) / g.var(correction=0))


def compute_quarters(mask: Tensor) -> Tensor:
    before = mask.cumsum(1) - 1
    return torch.where(mask, 4 * before // mask.sum(1, keepdim=True).clamp(min=1), -1)


def compute_critic_metrics(values: Tensor, returns: Tensor, outcomes: Tensor, mask: Tensor) -> Metrics:
    metrics = {
        "critic/explained_variance": compute_explained_variance(values, returns, mask),
        "critic/value_mean": float(values[mask].double().mean()),
        "critic/return_mean": float(returns[mask].double().mean()),
    }
    quarters, lengths = compute_quarters(mask), mask.sum(1)
    parts = {f"at_{name}": quarters == quarter for quarter, name in enumerate(QUARTERS)}
    limits = torch.quantile(lengths.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    quartiles = torch.searchsorted(limits, lengths.double())
    parts |= {f"length_q{q + 1}": mask & (quartiles == q)[:, None] for q in range(4)}
    for name, part in parts.items():
        if returns[part].numel():
            metrics[f"critic/ev_{name}"] = compute_explained_variance(values, returns, part)
    order = mask.cumsum(1) - 1
    for name, number in (("first", torch.zeros_like(lengths)), ("middle", lengths // 2)):
        states = mask & (order == number[:, None])
        calibration = compute_calibration(values[states].double(), outcomes[states].double())
        metrics |= {f"critic/calibration_{key}_{name}": value for key, value in calibration.items()}
    return metrics


def compute_mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    rows = mask.nonzero()[:, 0]
    token = (old_logprobs[mask].double() - rollout_logprobs[mask].double()).clamp(-80.0, 80.0)
    fresh = torch.ones(len(mask), dtype=torch.bool)[rows]
    quarters, token, gap = compute_quarters(mask)[mask][fresh], token[fresh], token.abs()
    metrics = {
        "mismatch/ratio_mean": float(token.exp().mean()),
        "mismatch/ratio_max": float(token.exp().max()),
        "mismatch/kl": float((torch.expm1(token) - token).mean()),
        "mismatch/logprob_gap_mean": float(gap.mean()),
        "mismatch/logprob_gap_max": float(gap.max()),
    }
    for quarter, name in enumerate(QUARTERS):
        here = quarters == quarter
        metrics[f"mismatch/logprob_gap_at_{name}"] = float(gap[here].mean())
        metrics[f"mismatch/kl_at_{name}"] = float((torch.expm1(token[here]) - token[here]).mean())
    return metrics
