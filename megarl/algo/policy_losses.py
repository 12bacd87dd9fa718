"""Policy losses: what algo.surrogate names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.config.schema.algo import AlgoConfig, RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.losses import PolicyTokens


def compute_clipped(
    log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), for A < 0 at most dual_clip * |A|, with w = exp(log_ratio).

    Token losses, float [R], and where the clips were active (bool [R] by metric name). log_ratio_R: float [R],
    logprobs - old_logprobs. Raises NonFiniteError where w overflows.
    """
    import torch

    from megarl.algo.statistics import check_finite

    ratio = log_ratio_R.exp()
    check_finite("importance ratio exp(logprobs - old_logprobs)", ratio.detach())
    free = -ratio * advantages_R
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_R
    loss = torch.maximum(free, clipped)
    flags = {"policy/clip_frac": clipped > free}
    if dual_clip is not None:
        bound = -dual_clip * advantages_R
        bounded = (advantages_R < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        flags["policy/dual_clip_frac"] = bounded
    return loss, flags


def _compute_clip_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_clipped(tokens.log_ratio, tokens.advantages, algo.clip_low, algo.clip_high, algo.dual_clip)


def format_clipped(algo: AlgoConfig, ratio: str = "w") -> str:
    """The formula of `compute_clipped`, with this symbol for the ratio."""
    text = f"-min({ratio} A, clip({ratio}, {1 - algo.clip_low:g}, {1 + algo.clip_high:g}) A)"
    return text if algo.dual_clip is None else f"min({text}, {algo.dual_clip:g} |A| where A < 0)"


CLIP = PolicyLoss(format_clipped, _compute_clip_loss)


# The clipped importance ratio of the response: GSPO (2507.18071, equations 5 to 7), without the tokens' own ratios.


def _compute_gspo_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """As `compute_clipped`, with the geometric mean s = exp(mean_t (logprobs - old_logprobs)) of a response as w."""
    from megarl.algo.losses import compute_log_ratio

    targets = tokens.targets
    mean = compute_log_ratio(tokens.log_ratio, targets.rows, targets.row_lengths, RatioLevel.geometric)
    return compute_clipped(mean, tokens.advantages, algo.clip_low, algo.clip_high, algo.dual_clip)


def _format_gspo(algo: AlgoConfig) -> str:
    return f"{format_clipped(algo, 's')} with s = (prod_t w)^(1/l)"


GSPO = PolicyLoss(_format_gspo, _compute_gspo_loss)


# The clipped importance ratio as a weight of the log-probs: CISPO (MiniMax-M1 2506.13585, equations 4 and 5).
#
# Unlike under PPO's clip every token has a gradient, also one whose ratio is clipped.


def compute_cispo(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-clip(w, 1 - clip_low, 1 + clip_high) A log pi with w = pi / pi_old, no gradient through the clipped ratio.

    Token losses, float [R], and where the ratio is clipped (bool [R] by metric name). With clip_low = 1 there is no
    lower bound, as in the paper's experiments. A ratio that overflows is clipped.
    """
    ratio = (logprobs_R.detach() - old_logprobs_R).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages_R * logprobs_R, {"policy/clip_frac": ratio != weight}


def _compute_cispo_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_cispo(tokens.logprobs, tokens.old_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format_cispo(algo: AlgoConfig) -> str:
    high = f"{1 + algo.clip_high:g}"
    weight = f"min(w, {high})" if algo.clip_low == 1 else f"clip(w, {1 - algo.clip_low:g}, {high})"
    return f"-sg({weight}) A log pi"


CISPO = PolicyLoss(_format_cispo, _compute_cispo_loss)


# A soft gate in place of the clip: SAPO (2511.20347).
#
# A token's gradient shrinks smoothly with the distance of its ratio from 1, faster where A < 0.


def compute_sapo(
    log_ratio_R: Tensor, advantages_R: Tensor, tau_positive: float, tau_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-f(w) A with f(w) = 4 / tau sigmoid(tau (w - 1)), w = exp(log_ratio), tau = tau_positive where A > 0.

    Token losses, float [R], and f'(w), what the gate leaves of the gradient of -w A (float [R] by metric name): 1 at
    w = 1.
    """
    import torch

    tau = torch.full_like(advantages_R, tau_negative).masked_fill(advantages_R > 0, tau_positive)
    # Of a ratio beyond e^20 no gradient is left, and the infinite one of an overflow would make it NaN.
    gate = (tau * (log_ratio_R.clamp(max=20.0).exp() - 1.0)).sigmoid()
    return -4.0 / tau * gate * advantages_R, {"policy/gate": 4.0 * gate * (1.0 - gate)}


def _compute_sapo_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_sapo(tokens.log_ratio, tokens.advantages, **SAPO.read(algo))


def _format_sapo(algo: AlgoConfig) -> str:
    taus = SAPO.read(algo)
    return "-4/tau sigmoid(tau (w - 1)) A with tau = {tau_positive:g} where A > 0, else {tau_negative:g}".format(**taus)


def _check_sapo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    for name, value in SAPO.read(algo).items():
        if value <= 0:
            yield f"algo.surrogate_options.{name}: {value:g} found; the gate divides by it: must be above 0"


SAPO = PolicyLoss(
    _format_sapo, _compute_sapo_loss, check=_check_sapo, options={"tau_positive": 1.0, "tau_negative": 1.05}
)


# Direct double-sided importance sampling: SAO (2607.07508, equations 1 to 3), first in GLM-5 (2602.15763).
#
# The ratio is to the log-probs with which the rollout engine sampled, so that no other weights have to score the
# responses, however old they are. A token whose ratio has left the interval is masked, not clipped: unlike under PPO's
# clip it has no gradient whatever the sign of its advantage.


def compute_dis(
    logprobs_R: Tensor, rollout_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-f(r) A log pi with r = pi / pi_rollout, f(r) = r for 1 - clip_low < r < 1 + clip_high and 0 elsewhere.

    Token losses, float [R], and where f is 0 (bool [R] by metric name). No gradient flows through f(r): that of a token
    in the interval is -r A grad log pi. The paper does not say where its gradient flows. -f(r) A, with a gradient
    through r, has the same one, because grad r = r grad log pi. A ratio that overflows is outside.
    """
    import torch

    ratio = (logprobs_R.detach() - rollout_logprobs_R).exp()
    outside = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
    return -torch.where(outside, 0.0, ratio) * advantages_R * logprobs_R, {"policy/clip_frac": outside}


def _compute_dis_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_dis(tokens.logprobs, tokens.rollout_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format_dis(algo: AlgoConfig) -> str:
    return f"-[{1 - algo.clip_low:g} < r < {1 + algo.clip_high:g}] sg(r) A log pi with r = pi/pi_rollout"


def _check_dis(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if not 0 < algo.clip_low < 1:
        yield (
            f"algo.clip_low: {algo.clip_low:g} found with algo.surrogate=dis; the ratio must be above 1 - clip_low, so"
            " that at 0 no token of the policy itself is learned from and at 1 there is no bound: must be above 0 and"
            " below 1"
        )
    if algo.clip_high == 0:
        yield (
            "algo.clip_high: 0 found with algo.surrogate=dis; the ratio must be below 1 + clip_high, so that no token"
            " of the policy itself is learned from: must be above 0"
        )


DIS = PolicyLoss(_format_dis, _compute_dis_loss, check=_check_dis, ratio_to_rollout=True)


# Clipping by probability instead of ratio: DPPO (2602.04879) with its binary total variation, the loss of BPCO.
#
# The divergence of the policy from the one that sampled is estimated from the sampled token alone, as |pi - mu|, with
# mu = exp(rollout_logprobs). A rare token may therefore become many times likelier, and a frequent one may not.


def compute_dppo(
    logprobs_R: Tensor, rollout_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A with r = pi / mu; 0 where A > 0 and pi - mu > clip_high, and where A < 0 and mu - pi > clip_low.

    The gradient is that of -min(r A, clip(r, 1 - clip_low / mu, 1 + clip_high / mu) A) (BPCO 2608.23566, equation 2),
    without the bounds, which overflow where mu is tiny; a clipped token has the loss 0 instead of the bound, a
    constant.
    Token losses, float [R], and where they are clipped (bool [R] by metric name). Raises NonFiniteError where r of a
    token that is not clipped overflows.
    """
    import torch

    from megarl.algo.statistics import check_finite

    moved = logprobs_R.detach().exp() - rollout_logprobs_R.exp()
    clipped = ((advantages_R > 0) & (moved > clip_high)) | ((advantages_R < 0) & (moved < -clip_low))
    # Replaced before the exponential: an infinite one would make its gradient NaN.
    ratio = torch.where(clipped, 0.0, logprobs_R - rollout_logprobs_R).exp()
    check_finite("importance ratio exp(logprobs - rollout_logprobs)", ratio.detach())
    return torch.where(clipped, 0.0, -ratio * advantages_R), {"policy/clip_frac": clipped}


def _compute_dppo_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_dppo(tokens.logprobs, tokens.rollout_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format_dppo(algo: AlgoConfig) -> str:
    return (
        f"-[pi - mu <= {algo.clip_high:g} where A > 0, mu - pi <= {algo.clip_low:g} where A < 0] r A with r = pi/mu,"
        " mu = pi_rollout"
    )


def _check_dppo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    for key, value in (("clip_low", algo.clip_low), ("clip_high", algo.clip_high)):
        if not 0 < value <= 1:
            yield (
                f"algo.{key}: {value:g} found with algo.surrogate=dppo; it is by how much a token's probability may"
                " change (0.15 to 0.2 in use): must be above 0 and at most 1"
            )


DPPO = PolicyLoss(_format_dppo, _compute_dppo_loss, check=_check_dppo, ratio_to_rollout=True)


# The log-probs weighted by the advantage (REINFORCE, RLOO): right only for the first optimizer step of a rollout.


def _compute_logprob_loss(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return -tokens.advantages * tokens.logprobs, {}


def _check_logprob(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if optimizer_steps != 1:
        yield (
            f"algo.surrogate: logprob found with {optimizer_steps} optimizer steps per iteration; it has no ratio to"
            " correct with from the second step on: must be clip, or train.num_minibatches=1 and"
            " train.epochs_per_iteration=1"
        )


LOGPROB = PolicyLoss(lambda algo: "-A log pi", _compute_logprob_loss, check=_check_logprob)

POLICY_LOSSES = {"cispo": CISPO, "clip": CLIP, "dis": DIS, "dppo": DPPO, "gspo": GSPO, "logprob": LOGPROB, "sapo": SAPO}
"""By the values of algo.surrogate"""
