"""Policy and critic losses of one micro-batch, what they work on, and the counts of the minibatch that divide them.

The policy's is the one that algo.surrogate names (`policy_losses.py`) and the terms of `objective.py`. Suffix: R
response tokens of a micro-batch, flat. Positions that the policy did not generate may hold anything: they are replaced
before any arithmetic, so that neither their value nor a gradient through them gets anywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algo.objective import LOSS_TERMS, find_policy_loss
from megarl.algo.statistics import check_finite
from megarl.config.schema.algo import (
    AlgoConfig,
    LossAggMode,
    MismatchConfig,
    MismatchCorrection,
    RatioLevel,
    ValueLoss,
    compares_pairs,
)
from megarl.types import TrainingSamples


@dataclass(frozen=True)
class TokenTargets:
    """One micro-batch: every response position of its rows, generated or not. A row is never split."""

    rows: Tensor
    """int64 [R], sample index in the micro-batch, 0..num_rows-1"""
    num_rows: int
    row_lengths: Tensor
    """int64 [num_rows], generated tokens per sample"""
    mask: Tensor
    """bool [R]"""
    loss_mask: Tensor
    """bool [R]"""
    positive: Tensor
    """bool [R]: the token's sample is correct"""
    advantages: Tensor
    """float [R]"""
    old_logprobs: Tensor | None
    """float [R]; None: the log-probs of the policy being trained, detached"""
    rollout_logprobs: Tensor
    """float [R]"""
    sampling_logprobs: Tensor | None
    """float [R]"""
    ref_logprobs: Tensor | None
    """float [R]"""
    old_values: Tensor | None
    """float [R]"""
    returns: Tensor | None
    """float [R]"""
    critic_mask: Tensor | None = None
    """bool [R]; None: that of `mask`"""
    samples: Tensor | None = None
    """int64 [R], sample index in the minibatch"""

    def require(self, name: str, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The tensor (float [R]) in this dtype with 0 where not generated.

        Raises ValueError naming it where it is None, NonFiniteError for NaN or infinity at generated tokens.
        """
        if tensor is None:
            raise ValueError(f"{name}: none found, but the configured loss needs it; must be float [{len(self.rows)}]")
        check_finite(name, tensor.detach(), self.mask, self.rows)
        return torch.where(self.mask, tensor, 0.0).to(dtype)


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch for the policy's loss, 0 where the policy did not generate; float [R] in the log-probs' dtype."""

    logprobs: Tensor
    """of the policy being trained, differentiable"""
    log_ratio: Tensor
    """logprobs - old_logprobs, differentiable"""
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    targets: TokenTargets
    entropy: Tensor | None = None
    """as the model gave it, not replaced: read it through `require`"""
    full_kl: Tensor | None = None
    """as the model gave it, not replaced: read it through `require`"""

    def require(self, name: str, tensor: Tensor | None) -> Tensor:
        """As `TokenTargets.require`, in the dtype of the log-probs."""
        return self.targets.require(name, tensor, self.logprobs.dtype)


@dataclass(frozen=True)
class LossCounts:
    """Counts over the global minibatch: what the sums are divided by."""

    num_tokens: int
    """with a policy loss"""
    num_sequences: int
    """with a policy loss in at least one token"""
    num_positive_tokens: int
    """of correct samples, with a policy loss"""
    num_critic_tokens: int
    """generated, and not too stale"""
    num_critic_sequences: int
    """with at least one such token"""
    num_negative_tokens: int
    """with a policy loss and a negative advantage"""


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's contribution."""

    loss: Tensor
    """scalar, differentiable; the minibatch's loss is the sum over its micro-batches and data-parallel ranks"""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """detached scalars, already divided: their sum over micro-batches and ranks is the metric"""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """detached scalars, combined by max"""
    old_logprobs: Tensor | None = None
    """float [R], detached: of the policy's loss whose targets have none"""


def count_minibatch(samples: TrainingSamples, rows: Tensor | None = None) -> LossCounts:
    """The counts of one global minibatch (all data-parallel ranks' rows). rows: int64, its samples; None: all."""
    critic = samples.mask if samples.critic_mask is None else samples.critic_mask
    whole = (samples.loss_mask, critic, samples.positive, samples.advantages)
    loss_mask, critic_mask, positive, advantages = whole if rows is None else (each[rows] for each in whole)
    return LossCounts(
        num_tokens=int(loss_mask.sum()),
        num_sequences=int(loss_mask.any(1).sum()),
        num_positive_tokens=int((loss_mask & positive[:, None]).sum()),
        num_critic_tokens=int(critic_mask.sum()),
        num_critic_sequences=int(critic_mask.any(1).sum()),
        num_negative_tokens=int((loss_mask & (advantages < 0)).sum()),
    )


# Training engine against rollout engine: the same weights score the same tokens differently.
#
# Ratio exp(old_logprobs - rollout_logprobs) as a weight of the policy loss, per token, per sequence, or as the
# geometric mean over a sequence: truncated from above (TIS, https://fengyao.notion.site/off-policy-rl) or 0 outside its
# bounds (masked: MIS, IcePop 2510.18855).
#
# Suffix: R flat response tokens of one micro-batch or batch; `rows` (int64 [R]) gives each one's sample.


def compute_log_ratio(log_ratio_R: Tensor, rows: Tensor, row_lengths: Tensor, level: RatioLevel) -> Tensor:
    """Log of the ratio of two policies at the given level, for each token, float [R].

    log_ratio_R: the difference of the tokens' log-probs, 0 where not generated. row_lengths: int64, generated tokens
    per row.
    """
    if level is RatioLevel.token:
        return log_ratio_R
    zeros = torch.zeros(row_lengths.shape, dtype=log_ratio_R.dtype, device=log_ratio_R.device)
    total = zeros.index_add(0, rows, log_ratio_R)
    if level is RatioLevel.geometric:
        total = total / row_lengths.clamp(min=1)
    return total[rows]


def compute_outside(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """bool [R]: the ratio is outside [low, high]."""
    low = math.log(config.low) if config.low > 0 else -math.inf
    return (log_ratio_R < low) | (log_ratio_R > math.log(config.high))


def compute_mismatch_weight(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """c: min(ratio, high), or the ratio inside [low, high] and 0 outside, float [R]. No gradient flows through it.

    tis has no lower bound: what the training engine holds for unlikely stays unlikely.
    """
    # Clamped in log space: the exponential of a long sequence's ratio overflows.
    truncated = log_ratio_R.detach().clamp(max=math.log(config.high)).exp()
    if config.correction is MismatchCorrection.tis:
        return truncated
    return torch.where(compute_outside(log_ratio_R, config), 0.0, truncated)


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    targets: TokenTargets,
    config: AlgoConfig,
    counts: LossCounts,
    response_length: int,
    full_kl: Tensor | None = None,
) -> LossOutput:
    """rl_loss_coef * surrogate + the terms that are used, each aggregated over the global minibatch.

    logprobs, entropy: float [R] of the policy being trained (entropy None where no term needs it). The loss has their
    dtype. response_length: rollout.response_length. full_kl: float [R], KL(policy, reference) over the vocabulary,
    differentiable (only where kl.loss_estimator=full is in the loss). Without targets.old_logprobs they are `logprobs`,
    detached. Raises NonFiniteError for NaN or infinity at generated tokens, in the inputs or in the importance ratio,
    and ValueError for inputs that the configuration needs and that are None.
    """
    tokens = _prepare(logprobs, entropy, full_kl, targets)
    token_loss, sums = _sum_token_losses(tokens, config, counts)

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
    maxima = {"policy/ratio_max": _largest_ratio(tokens)}
    for term in LOSS_TERMS:
        if term.count is not None and term.is_used(config):
            values, weight = torch.where(targets.loss_mask, term.compute(tokens, config), 0.0), term.weight(config)
            mean = values.sum() / max(count := term.count(counts, config), 1)
            loss, size = loss + weight * mean, size + weight * mean.detach()
            if term.metric is not None:
                sums[term.metric] = mean.detach()
                per_token = weight * counts.num_tokens / count if count else 0.0
                maxima[f"{term.metric}_weight_max"] = logprobs.new_tensor(per_token)
    sums = {"policy/loss": loss.detach(), "policy/loss_size": size, **sums, **_ratio_sums(tokens, counts)}
    return LossOutput(loss, sums, maxima, logprobs.detach() if targets.old_logprobs is None else None)


def _sum_token_losses(tokens: PolicyTokens, config: AlgoConfig, counts: LossCounts) -> tuple[Tensor, dict[str, Tensor]]:
    """What algo.loss_agg_mode aggregates, float [R], and the metrics of its terms."""
    mask, total, sums = tokens.targets.loss_mask, torch.zeros_like(tokens.logprobs), {}
    if config.rl_loss_coef != 0.0:
        surrogate, metrics = find_policy_loss(config.surrogate).compute(tokens, config)
        if config.mismatch.correction is not MismatchCorrection.none:
            surrogate = surrogate * _mismatch_weight(tokens, config)
        total = total + config.rl_loss_coef * surrogate
        sums = {name: _token_mean(value, mask, counts.num_tokens) for name, value in metrics.items()}
    for term in LOSS_TERMS:
        if not term.is_used(config):
            continue
        if term.count is None:
            values = term.compute(tokens, config)
            total = total + term.weight(config) * values
            if term.metric is not None:
                sums[term.metric] = _token_mean(values, mask, counts.num_tokens)
        sums |= term.measure(tokens, config, counts)
    if tokens.entropy is not None:
        sums["policy/entropy"] = _token_mean(tokens.entropy.detach(), mask, counts.num_tokens)
    return total, sums


SMALLEST = 1e-6
"""Of the probabilities in a logarithm; the head's atan has flattened long before."""


def compute_value_loss(
    values: Tensor, returns: Tensor, loss: ValueLoss, value_range: Sequence[float] | None = None
) -> Tensor:
    """0.5 * (V - G)^2; or -(y log p + (1 - y) log(1 - p)), p and y being V and G on the scale of value_range, from 0 to
    1, as a probability of the larger return and its target (2403.03950, section 4); float [R].
    """
    if loss is ValueLoss.squared:
        return 0.5 * (values - returns).square()
    if value_range is None:
        raise ValueError("value_range: none found; algo.value_loss=cross_entropy needs critic.value_range")
    low, high = value_range
    p = ((values - low) / (high - low)).clamp(SMALLEST, 1 - SMALLEST)
    y = ((returns - low) / (high - low)).clamp(0.0, 1.0)
    return -(y * p.log() + (1 - y) * (-p).log1p())


def critic_loss(
    values: Tensor,
    targets: TokenTargets,
    config: AlgoConfig,
    counts: LossCounts,
    value_range: Sequence[float] | None = None,
) -> LossOutput:
    """l(V, G) of `compute_value_loss`, or max(l(V, G), l(clip(V, V_old +- value_clip), G)), aggregated.

    values: of the head, float [R]; the loss has their dtype. value_range: critic.value_range.
    Samples without a policy loss keep theirs here unless overlong.filter_critic. With algo.value_loss=bradley_terry it
    is `_pair_loss`. Raises as `policy_loss` does.
    """
    if compares_pairs(config):
        return _pair_loss(values, targets, counts)
    check_finite("values", values.detach(), targets.mask, targets.rows)
    returns = targets.require("returns", targets.returns, values.dtype)
    filtered = config.overlong.filter_critic
    unfiltered = targets.mask if targets.critic_mask is None else targets.critic_mask
    mask = targets.loss_mask if filtered else unfiltered
    num_tokens = counts.num_tokens if filtered else counts.num_critic_tokens
    num_sequences = counts.num_sequences if filtered else counts.num_critic_sequences
    v = torch.where(mask, values, 0.0)
    losses = compute_value_loss(v, returns, config.value_loss, value_range)
    sums: dict[str, Tensor] = {}
    if config.value_clip is not None:
        old = targets.require("old_values", targets.old_values, values.dtype)
        near = v.clamp(old - config.value_clip, old + config.value_clip)
        clipped = compute_value_loss(near, returns, config.value_loss, value_range)
        sums["critic/clip_frac"] = _token_mean(clipped > losses, mask, num_tokens)
        losses = torch.maximum(losses, clipped)
    loss = aggregate(
        torch.where(mask, losses, 0.0),
        config.value_loss_agg_mode,
        targets.rows,
        targets.row_lengths,
        num_tokens,
        num_sequences,
    )
    sums["critic/loss"] = loss.detach()
    sums["critic/abs_error"] = _token_mean((v - returns).abs(), mask, num_tokens)
    return LossOutput(loss, sums)


def compute_pair_losses(margins: Tensor) -> Tensor:
    """-log sigmoid(r(x, y_w) - r(x, y_l)) of each pair of a better and a worse response to x (Bradley-Terry;
    InstructGPT 2203.02155, equation 1). margins: the difference, float [pairs]."""
    return torch.nn.functional.softplus(-margins)


def measure_pairs(margins: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """These pairs' part of the means over `num_pairs` of loss, accuracy (r_w > r_l; a tie is half right) and margin."""
    right = margins.detach().heaviside(torch.full_like(margins, 0.5))
    loss, accuracy, margin = (x.sum() / max(num_pairs, 1) for x in (compute_pair_losses(margins), right, margins))
    return loss, accuracy, margin.detach()


def _pair_loss(out: Tensor, targets: TokenTargets, counts: LossCounts) -> LossOutput:
    """`compute_pair_losses` over the pairs of the minibatch. Each sample has one token, whose value is its score;
    samples 2i and 2i + 1 are a pair, of which the better one is `positive`."""
    assert targets.samples is not None
    check_finite("values", out.detach(), targets.mask, targets.rows)
    signed = torch.where(targets.positive, out, -out)[targets.samples.argsort()]
    loss, accuracy, margin = measure_pairs(signed.view(-1, 2).sum(1), counts.num_critic_sequences // 2)
    sums = {"critic/loss": loss.detach(), "critic/pair_accuracy": accuracy, "critic/pair_margin": margin}
    return LossOutput(loss, sums)


def _prepare(logprobs: Tensor, entropy: Tensor | None, full_kl: Tensor | None, targets: TokenTargets) -> PolicyTokens:
    check_finite("logprobs", logprobs.detach(), targets.mask, targets.rows)
    current, dtype = torch.where(targets.mask, logprobs, 0.0), logprobs.dtype
    given = targets.old_logprobs
    old = current.detach() if given is None else targets.require("old_logprobs", given, dtype)
    return PolicyTokens(
        logprobs=current,
        log_ratio=current - old,
        old_logprobs=old,
        rollout_logprobs=targets.require("rollout_logprobs", targets.rollout_logprobs, dtype),
        advantages=targets.require("advantages", targets.advantages, dtype),
        targets=targets,
        entropy=entropy,
        full_kl=full_kl,
    )


def _mismatch_weight(tokens: PolicyTokens, config: AlgoConfig) -> Tensor:
    log_ratio, targets = tokens.old_logprobs - tokens.rollout_logprobs, tokens.targets
    level = compute_log_ratio(log_ratio, targets.rows, targets.row_lengths, config.mismatch.level)
    return compute_mismatch_weight(level, config.mismatch)


def _token_mean(tensor: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """Detached part of the mean over the global minibatch's tokens; flags count as 0 and 1."""
    number = tensor.detach().to(torch.get_default_dtype()) if tensor.dtype is torch.bool else tensor.detach()
    return torch.where(mask, number, 0.0).sum() / max(num_tokens, 1)


def _ratio_sums(tokens: PolicyTokens, counts: LossCounts) -> dict[str, Tensor]:
    """Mean ratio, and the k3 estimate of KL(old policy, policy): w - 1 - log w."""
    log_ratio, mask = tokens.log_ratio, tokens.targets.loss_mask
    return {
        "policy/ratio_mean": _token_mean(log_ratio.exp(), mask, counts.num_tokens),
        "policy/approx_kl": _token_mean(torch.expm1(log_ratio) - log_ratio, mask, counts.num_tokens),
    }


def _largest_ratio(tokens: PolicyTokens) -> Tensor:
    inside = torch.where(tokens.targets.loss_mask, tokens.log_ratio.detach(), -torch.inf)
    if inside.numel() == 0:
        return torch.zeros((), dtype=inside.dtype, device=inside.device)
    return inside.max().exp()


# How a minibatch's token losses become one number (`loss_agg_mode`).
#
# Suffix: R flat response tokens of one micro-batch. N_tok and N_seq are counted over the global minibatch, so that the
# sum over micro-batches and ranks does not depend on how the minibatch was cut.

_TOKEN_MEAN = LossAggMode["token-mean"]
_SEQ_TOKEN_MEAN = LossAggMode["seq-mean-token-mean"]
_SEQ_TOKEN_SUM_NORM = LossAggMode["seq-mean-token-sum-norm"]


def aggregate(
    token_loss_R: Tensor,
    mode: LossAggMode,
    rows: Tensor,
    row_lengths: Tensor,
    num_tokens: int,
    num_sequences: int,
    response_length: int | None = None,
) -> Tensor:
    """This micro-batch's part of the aggregate, a scalar.

    token_loss_R: float [R], 0 where the token has no loss. row_lengths: int64 [rows], l_i.
    token-mean: sum / N_tok; seq-mean-token-sum: sum / N_seq; seq-mean-token-mean: sum_i (sum_t / l_i) /
    N_seq; seq-mean-token-sum-norm: sum / (N_seq * response_length), the configured maximum.
    """
    if mode is _TOKEN_MEAN:
        return token_loss_R.sum() / max(num_tokens, 1)
    num_sequences = max(num_sequences, 1)
    if mode is _SEQ_TOKEN_MEAN:
        sums = torch.zeros(row_lengths.shape, dtype=token_loss_R.dtype, device=token_loss_R.device)
        sums = sums.index_add(0, rows, token_loss_R)
        return (sums / row_lengths.clamp(min=1)).sum() / num_sequences
    if mode is _SEQ_TOKEN_SUM_NORM:
        if response_length is None:
            raise ValueError("response_length: none found; loss_agg_mode=seq-mean-token-sum-norm divides by it")
        return token_loss_R.sum() / (num_sequences * response_length)
    return token_loss_R.sum() / num_sequences
