"""Policy and critic losses of one micro-batch.

PPO 1707.06347, dual clip 1912.09729, clip-higher 2503.14476, positive-example LM loss 2504.05118, TOPR
2503.14286. Suffix: R response tokens of a micro-batch, flat. Positions that the policy did not generate may
hold anything: they are replaced before any arithmetic, so that neither their value nor a gradient through
them gets anywhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.aggregation import aggregate
from megarl.algo.finite import check_finite
from megarl.algo.kl import compute_kl
from megarl.algo.mismatch import compute_log_mismatch, compute_mismatch_weight
from megarl.algo.tokens import LossCounts, LossOutput, TokenTargets, count_minibatch
from megarl.config.schema.algo import AlgoConfig, needs_entropy, uses_topr
from megarl.config.schema.algo_choices import KLEstimator, MismatchCorrection, RatioLevel, Surrogate

__all__ = [
    "LossCounts",
    "LossOutput",
    "TokenTargets",
    "count_minibatch",
    "critic_loss",
    "policy_loss",
]


@dataclass(frozen=True)
class _Tokens:
    """A micro-batch with its masked-out positions replaced by 0, in the dtype of the log-probs; all float
    [R].
    """

    logprobs: Tensor
    log_ratio: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    targets: TokenTargets,
    config: AlgoConfig,
    counts: LossCounts,
    response_length: int,
    full_kl: Tensor | None = None,
) -> LossOutput:
    """rl_loss_coef * surrogate + TOPR + positive LM + KL - entropy bonus, each aggregated over the global
    minibatch.

    logprobs, entropy: float [R] of the policy being trained (entropy only where `needs_entropy`). The loss
    has their dtype. response_length: rollout.response_length. full_kl: float [R], KL(policy, reference) over
    the vocabulary, differentiable (only where kl.loss_estimator=full is in the loss). Raises NonFiniteError
    for NaN or infinity at generated tokens, in the inputs or in the importance ratio, and ValueError for
    inputs that the configuration needs and that are None.
    """
    tokens = _prepare(logprobs, targets)
    token_loss, sums = _token_losses(tokens, entropy, full_kl, targets, config, counts)

    def aggregated(token_loss: Tensor) -> Tensor:
        return aggregate(
            torch.where(targets.loss_mask, token_loss, 0.0),
            config.loss_agg_mode,
            targets.rows,
            targets.row_lengths,
            counts.num_tokens,
            counts.num_sequences,
            response_length,
        )

    loss, size = aggregated(token_loss), aggregated(token_loss.detach().abs())
    if config.positive_lm_coef != 0.0:
        chosen = targets.loss_mask & targets.positive
        likelihood = torch.where(chosen, -tokens.logprobs, 0.0).sum() / max(counts.num_positive_tokens, 1)
        loss = loss + config.positive_lm_coef * likelihood
        size = size + config.positive_lm_coef * likelihood.detach()
        sums["policy/positive_lm"] = likelihood.detach()
    sums = {"policy/loss": loss.detach(), "policy/loss_size": size, **sums, **_ratio_sums(tokens, targets, counts)}
    return LossOutput(loss, sums, {"policy/ratio_max": _largest_ratio(tokens, targets)})


def _token_losses(
    tokens: _Tokens,
    entropy: Tensor | None,
    full_kl: Tensor | None,
    targets: TokenTargets,
    config: AlgoConfig,
    counts: LossCounts,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What is aggregated, float [R], and the metrics of its terms."""
    total, sums = torch.zeros_like(tokens.logprobs), {}
    if config.rl_loss_coef != 0.0:
        surrogate, flags = compute_surrogate(tokens.log_ratio, tokens.logprobs, tokens.advantages, config)
        if config.mismatch.correction is not MismatchCorrection.none:
            surrogate = surrogate * _mismatch_weight(tokens, targets, config)
        total = total + config.rl_loss_coef * surrogate
        sums = {name: _token_mean(flag, targets.loss_mask, counts.num_tokens) for name, flag in flags.items()}
    if uses_topr(config):
        total = total + _topr(tokens, targets, config)
    if config.kl.in_loss:
        if config.kl.loss_estimator is KLEstimator.full:
            kl = _required("full_kl", full_kl, targets, total.dtype)
        else:
            ref = _required("ref_logprobs", targets.ref_logprobs, targets, total.dtype)
            kl = compute_kl(tokens.logprobs, ref, config.kl.loss_estimator)
        total = total + config.kl.loss_coef * kl
        sums["policy/kl_loss"] = _token_mean(kl, targets.loss_mask, counts.num_tokens)
    if needs_entropy(config):
        inside = _required("entropy", entropy, targets, total.dtype)
        total = total - config.entropy_coef * inside
        sums["policy/entropy"] = _token_mean(inside, targets.loss_mask, counts.num_tokens)
    return total, sums


def compute_surrogate(
    log_ratio_R: Tensor, logprobs_R: Tensor, advantages_R: Tensor, config: AlgoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Token losses, float [R], and where the clips were active (bool [R] by metric name).

    clip: -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), for A < 0 at most dual_clip * |A|.
    logprob: -A * logprobs.
    """
    if config.surrogate is Surrogate.logprob:
        return -advantages_R * logprobs_R, {}
    ratio = log_ratio_R.exp()
    check_finite("importance ratio exp(logprobs - old_logprobs)", ratio.detach())
    free = -ratio * advantages_R
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_R
    loss = torch.maximum(free, clipped)
    flags = {"policy/clip_frac": clipped > free}
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages_R
        bounded = (advantages_R < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        flags["policy/dual_clip_frac"] = bounded
    return loss, flags


def compute_topr(
    logprobs_R: Tensor, log_rho_R: Tensor, advantages_R: Tensor, positive_coef: float, negative_coef: float
) -> Tensor:
    """-w_pos A lp where A >= 0; -w_neg clip(rho, 0, 1) A lp where A < 0, no gradient through rho; float [R].

    log_rho_R: log of the ratio to the sampling policy, of the token or of its whole sequence.
    """
    taper = log_rho_R.detach().clamp(max=0.0).exp()
    weight = torch.where(advantages_R >= 0, positive_coef, negative_coef * taper)
    return -weight * advantages_R * logprobs_R


def critic_loss(values: Tensor, targets: TokenTargets, config: AlgoConfig, counts: LossCounts) -> LossOutput:
    """0.5 * (V - G)^2, or 0.5 * max((V - G)^2, (clip(V, V_old +- value_clip) - G)^2), aggregated.

    values: float [R], the loss has their dtype. Samples without a policy loss keep theirs here unless
    overlong.filter_critic. Raises as `policy_loss` does.
    """
    check_finite("values", values.detach(), targets.mask, targets.rows)
    returns = _required("returns", targets.returns, targets, values.dtype)
    filtered = config.overlong.filter_critic
    mask = targets.loss_mask if filtered else targets.mask
    num_tokens = counts.num_tokens if filtered else counts.num_critic_tokens
    num_sequences = counts.num_sequences if filtered else counts.num_critic_sequences
    v = torch.where(mask, values, 0.0)
    squares = (v - returns).square()
    sums: dict[str, Tensor] = {}
    if config.value_clip is not None:
        old = _required("old_values", targets.old_values, targets, values.dtype)
        clipped = (v.clamp(old - config.value_clip, old + config.value_clip) - returns).square()
        sums["critic/clip_frac"] = _token_mean(clipped > squares, mask, num_tokens)
        squares = torch.maximum(squares, clipped)
    loss = aggregate(
        torch.where(mask, 0.5 * squares, 0.0),
        config.value_loss_agg_mode,
        targets.rows,
        targets.row_lengths,
        num_tokens,
        num_sequences,
    )
    sums["critic/loss"] = loss.detach()
    sums["critic/abs_error"] = _token_mean((v - returns).abs(), mask, num_tokens)
    return LossOutput(loss, sums)


def _prepare(logprobs: Tensor, targets: TokenTargets) -> _Tokens:
    check_finite("logprobs", logprobs.detach(), targets.mask, targets.rows)
    current = torch.where(targets.mask, logprobs, 0.0)
    old = _required("old_logprobs", targets.old_logprobs, targets, logprobs.dtype)
    return _Tokens(
        logprobs=current,
        log_ratio=current - old,
        old_logprobs=old,
        rollout_logprobs=_required("rollout_logprobs", targets.rollout_logprobs, targets, logprobs.dtype),
        advantages=_required("advantages", targets.advantages, targets, logprobs.dtype),
    )


def _required(name: str, tensor: Tensor | None, targets: TokenTargets, dtype: torch.dtype) -> Tensor:
    """The tensor with 0 where not generated; an error where it is missing or not finite."""
    if tensor is None:
        raise ValueError(f"{name}: none found, but the configured loss needs it; must be float [{len(targets.rows)}]")
    check_finite(name, tensor.detach(), targets.mask, targets.rows)
    return torch.where(targets.mask, tensor, 0.0).to(dtype)


def _mismatch_weight(tokens: _Tokens, targets: TokenTargets, config: AlgoConfig) -> Tensor:
    log_ratio = tokens.old_logprobs - tokens.rollout_logprobs
    level = compute_log_mismatch(log_ratio, targets.rows, targets.row_lengths, config.mismatch.level)
    return compute_mismatch_weight(level, config.mismatch)


def _topr(tokens: _Tokens, targets: TokenTargets, config: AlgoConfig) -> Tensor:
    log_rho = (tokens.logprobs - tokens.rollout_logprobs).detach()
    if config.topr.ratio_level is RatioLevel.sequence:
        total = torch.zeros(targets.num_rows, dtype=log_rho.dtype, device=log_rho.device)
        log_rho = total.index_add(0, targets.rows, log_rho)[targets.rows]
    topr = config.topr
    return compute_topr(tokens.logprobs, log_rho, tokens.advantages, topr.positive_loss_coef, topr.negative_loss_coef)


def _token_mean(tensor: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """Detached part of the mean over the global minibatch's tokens; flags count as 0 and 1."""
    number = tensor.detach().to(torch.get_default_dtype()) if tensor.dtype is torch.bool else tensor.detach()
    return torch.where(mask, number, 0.0).sum() / max(num_tokens, 1)


def _ratio_sums(tokens: _Tokens, targets: TokenTargets, counts: LossCounts) -> dict[str, Tensor]:
    """Mean ratio, and the k3 estimate of KL(old policy, policy): w - 1 - log w."""
    log_ratio = tokens.log_ratio
    return {
        "policy/ratio_mean": _token_mean(log_ratio.exp(), targets.loss_mask, counts.num_tokens),
        "policy/approx_kl": _token_mean(torch.expm1(log_ratio) - log_ratio, targets.loss_mask, counts.num_tokens),
    }


def _largest_ratio(tokens: _Tokens, targets: TokenTargets) -> Tensor:
    inside = torch.where(targets.loss_mask, tokens.log_ratio.detach(), -torch.inf)
    if inside.numel() == 0:
        return torch.zeros((), dtype=inside.dtype, device=inside.device)
    return inside.max().exp()
