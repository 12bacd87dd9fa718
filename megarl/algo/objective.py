"""What a configuration trains for: the advantage estimator and the policy loss that it names (of ADVANTAGES and
POLICY_LOSSES, or FILE.py:NAME or package.module:NAME for a declaration of the user's own), the further terms of the
policy's loss, and all of it as formulas with its numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.algo.advantages import ADVANTAGES, name_gae
from megarl.algo.declarations import AdvantageEstimator, LossTerm, PolicyLoss
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.config.errors import ConfigError, find_nearest_key, load_named
from megarl.config.schema.algo import (
    NO_ADVANTAGE,
    AlgoConfig,
    KLEstimator,
    LossAggMode,
    MismatchCorrection,
    NormScope,
    PositiveLMMean,
    RatioLevel,
    ToprConfig,
    ValueLoss,
    compares_pairs,
    needs_entropy,
    needs_reference,
    uses_topr,
)
from megarl.config.schema.roles import CriticConfig, PolicyConfig, Trainable
from megarl.config.schema.root import Config
from megarl.files import check_state

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.losses import LossCounts, PolicyTokens

Declaration = TypeVar("Declaration")


@cache
def find_advantage(name: str) -> AdvantageEstimator:
    """What algo.advantage names. Raises ConfigError."""
    return _find("algo.advantage", name, ADVANTAGES, AdvantageEstimator)


@cache
def find_policy_loss(name: str) -> PolicyLoss:
    """What algo.surrogate names. Raises ConfigError."""
    return _find("algo.surrogate", name, POLICY_LOSSES, PolicyLoss)


def check_options(algo: AlgoConfig) -> Iterator[str]:
    """One message for each of algo.surrogate_options that the policy loss does not have, or that is no number."""
    known = find_policy_loss(algo.surrogate).options
    for name, value in algo.surrogate_options.items():
        key, right = f"algo.surrogate_options.{name}", ", ".join(known) or "none"
        if name not in known:
            yield f"{key}: algo.surrogate={algo.surrogate} has no such option; it has {right}"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            yield f"{key}: found {value!r}; it must be a finite number, such as {known[name]:g}"


def read_state(algo: AlgoConfig) -> Any:
    """What the estimator keeps over the iterations, JSON; None: nothing. Raises ValueError for what is not JSON."""
    kept = find_advantage(algo.advantage).state
    return None if kept is None else check_state(f"algo.advantage={algo.advantage}", kept.state_dict())


@cache
def _declared_state(name: str) -> str:
    """As JSON, before the first run of this process."""
    kept = find_advantage(name).state
    assert kept is not None
    return json.dumps(check_state(f"algo.advantage={name}", kept.state_dict()))


def load_state(algo: AlgoConfig, state: Any = None) -> None:
    """Bring the estimator into this state; None: the one that it was declared with. Raises ValueError as
    `read_state`."""
    kept = find_advantage(algo.advantage).state
    if kept is not None:
        declared = json.loads(_declared_state(algo.advantage))
        kept.load_state_dict(declared if state is None else state)


def needs_critic(algo: AlgoConfig) -> bool:
    return find_advantage(algo.advantage).needs_critic


def has_ratio_to_rollout(algo: AlgoConfig) -> bool:
    """Whether the loss has a surrogate whose ratio is to the rollout engine's log-probs."""
    return algo.rl_loss_coef != 0 and find_policy_loss(algo.surrogate).ratio_to_rollout


def reads_old_logprobs(algo: AlgoConfig) -> bool:
    """Whether anything reads the log-probs that the policy gives to a rollout before its update: not where the ratio of
    the only term is to the rollout engine's, and not the positive-LM loss.
    """
    has_own_ratio = algo.rl_loss_coef != 0 and not has_ratio_to_rollout(algo)
    return has_own_ratio or uses_topr(algo) or algo.kl.is_subtracted or needs_reference(algo)


def needs_pass(config: Config) -> bool:
    """Whether the policy has to score the responses before its update. Otherwise the update's own log-probs, of a first
    optimizer step where the ratio to them is 1, are the same up to rounding.
    """
    return (
        config.train.num_optimizer_steps != 1  # all steps but the first need those before it
        or config.algo.kl.is_subtracted  # rewards or advantages need them
        or uses_topr(config.algo)  # its terms need them as log-probs of the policy that sampled
        or config.policy.fp8 is not None  # the rounding of a pass for training is another
        or config.rollout.router_replay  # policy/moe_routing_agreement is counted in the pass
        or bool(config.model.megatron.get("moe_input_jitter_eps"))  # a pass for training is random
    )


def reuses_logprobs(config: Config, num_samples: int | None = None, iteration: int | None = None) -> bool:
    """Whether old_logprobs are the update's own, and the policy does not score the responses before it. num_samples: of
    the iteration, which replayed groups may make more than one minibatch. iteration: in some the policy is frozen.
    """
    if config.has_critic_alone or (num_samples is not None and num_samples > config.train.minibatch_size):
        return False
    if iteration is not None and config.policy.is_frozen(iteration):
        return False
    return config.train.reuse_logprobs and reads_old_logprobs(config.algo) and not needs_pass(config)


def scores_first(config: Config) -> bool:
    """Whether the policy has a forward pass over the responses of an iteration before its update."""
    return reads_old_logprobs(config.algo) and not reuses_logprobs(config)


def name_policy_losses(**facts: bool) -> str:
    """The names of this package's policy losses with these facts, as "dis or dppo"."""
    return _name(POLICY_LOSSES, facts)


def name_advantages(**facts: bool) -> str:
    """As `name_policy_losses`, of the estimators."""
    return _name(ADVANTAGES, facts)


def _name(declared: Mapping[str, Any], facts: Mapping[str, bool]) -> str:
    return " or ".join(n for n, it in declared.items() if all(getattr(it, x) is value for x, value in facts.items()))


def _find(key: str, name: str, known: Mapping[str, Declaration], kind: type[Declaration]) -> Declaration:
    if name in known:
        return known[name]
    if ":" not in name:
        nearest = find_nearest_key(name, known)
        hint = f", did you mean {nearest}?" if nearest else ""
        own = "FILE.py:NAME or package.module:NAME for a declaration of your own"
        raise ConfigError([f"{key}: found {name!r}{hint}; it must be one of {', '.join(known)}, or {own}"])
    declared = load_named(key, name)
    if not isinstance(declared, kind):
        found = "nothing" if declared is None else f"a {type(declared).__name__}"
        raise ConfigError([f"{key}: found {name!r}; {name} is {found}; it must be {kind.__name__}(...)"])
    return declared


_ZERO, _ONE = 0.01, 0.99
"""A taper below the first is logged as 0, one above the second as 1."""

_RATIOS = {RatioLevel.token: "pi/mu", RatioLevel.sequence: "prod_t pi/mu", RatioLevel.geometric: "(prod_t pi/mu)^(1/l)"}


def compute_topr(
    logprobs_R: Tensor, log_rho_R: Tensor, advantages_R: Tensor, positive_coef: float, negative_coef: float
) -> Tensor:
    """-w_pos A lp where A >= 0; -w_neg clip(rho, 0, 1) A lp where A < 0, no gradient through rho; float [R].

    log_rho_R: log of the ratio to the sampling policy, of the token or of its whole sequence.
    """
    import torch

    weight = torch.where(advantages_R >= 0, positive_coef, negative_coef * compute_taper(log_rho_R))
    return -weight * advantages_R * logprobs_R


def compute_taper(log_rho_R: Tensor) -> Tensor:
    """clip(rho, 0, 1), the weight of a token of negative advantage, without a gradient; float [R]."""
    return log_rho_R.detach().clamp(max=0.0).exp()


def _compute_topr(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    topr, log_rho = algo.topr, _compute_log_rho(tokens, algo.topr)
    return compute_topr(tokens.logprobs, log_rho, tokens.advantages, topr.positive_loss_coef, topr.negative_loss_coef)


def _compute_log_rho(tokens: PolicyTokens, topr: ToprConfig) -> Tensor:
    from megarl.algo.losses import compute_log_ratio

    targets = tokens.targets
    sampling = tokens.require("sampling_logprobs", targets.sampling_logprobs)
    log_rho = tokens.logprobs.detach() - sampling
    return compute_log_ratio(log_rho, targets.rows, targets.row_lengths, topr.ratio_level)


def _measure_topr(tokens: PolicyTokens, algo: AlgoConfig, counts: LossCounts) -> dict[str, Tensor]:
    if counts.num_negative_tokens == 0:
        return {}
    taper = compute_taper(_compute_log_rho(tokens, algo.topr))
    taper = taper[tokens.targets.loss_mask & (tokens.advantages < 0)]
    return {
        "topr/taper_mean": taper.sum() / counts.num_negative_tokens,
        "topr/taper_zero_frac": (taper < _ZERO).to(taper.dtype).sum() / counts.num_negative_tokens,
        "topr/taper_one_frac": (taper > _ONE).to(taper.dtype).sum() / counts.num_negative_tokens,
    }


def _format_topr(algo: AlgoConfig) -> str:
    return (
        f"{algo.topr.positive_loss_coef:g} * [A >= 0] * -A log pi"
        f" + {algo.topr.negative_loss_coef:g} * [A < 0] * -clip({_RATIOS[algo.topr.ratio_level]}, 0, 1) A log pi"
    )


def _check_topr(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    # The reward to go is the reward itself, at every token, without a discount and a KL.
    undiscounted = algo.advantage == "reinforce" and algo.gamma == 1 and not algo.kl.in_reward
    if algo.kl.in_advantage:
        yield (
            "algo.kl.in_advantage: true found; the topr terms split the responses by the sign of their advantage, one"
            " for all tokens: must be false"
        )
    if not (find_advantage(algo.advantage).per_response or undiscounted):
        yield (
            f"algo.advantage: {algo.advantage} found; the topr terms split the responses by the sign of their"
            f" advantage, one for all tokens: must be {name_advantages(per_response=True)}, or reinforce with"
            " algo.gamma=1 and algo.kl.in_reward=false"
        )


TOPR = LossTerm(
    uses_topr, _format_topr, _compute_topr, weight=lambda algo: 1.0, measure=_measure_topr, check=_check_topr
)


# The KL of policy and reference as a part of the loss (GRPO 2402.03300).

_FORMULAS = {"k1": "d", "abs": "|d|", "k2": "d^2/2", "k3": "(exp(-d) + d - 1)"}


def format_kl(estimator: KLEstimator, policy: str) -> str:
    """The estimate of KL(policy, reference) per token, as the objective is printed."""
    if estimator is KLEstimator.full:
        return f"sum_v {policy}(v) (log {policy}(v) - log pi_ref(v))"
    return f"{_FORMULAS[estimator.name]} with d = log {policy} - log pi_ref"


def _compute_reference_kl(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    from megarl.algo.algorithm import compute_kl

    if algo.kl.loss_estimator is KLEstimator.full:
        return tokens.require("full_kl", tokens.full_kl)
    ref = tokens.require("ref_logprobs", tokens.targets.ref_logprobs)
    return compute_kl(tokens.logprobs, ref, algo.kl.loss_estimator)


def _format_reference_kl(algo: AlgoConfig) -> str:
    return f"{algo.kl.loss_coef:g} * {format_kl(algo.kl.loss_estimator, 'pi')}"


def _check_reference_kl(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if algo.kl.loss_estimator is KLEstimator.k1:
        yield (
            "algo.kl.loss_estimator: k1 found; as a loss its expected gradient on-policy is zero, so that it holds"
            " nothing near the reference: must be k2, k3, abs or full"
        )


REFERENCE_KL = LossTerm(
    lambda algo: algo.kl.in_loss,
    _format_reference_kl,
    _compute_reference_kl,
    weight=lambda algo: algo.kl.loss_coef,
    metric="policy/kl_loss",
    check=_check_reference_kl,
)


# The entropy bonus.


def _compute_entropy(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    return tokens.require("entropy", tokens.entropy)


ENTROPY = LossTerm(
    needs_entropy,
    lambda algo: f"- {algo.entropy_coef:g} * H",
    _compute_entropy,
    weight=lambda algo: -algo.entropy_coef,
    metric="policy/entropy",
)


# The language-model loss of the correct responses (VAPO 2504.05118).


def _compute_positive_lm(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    import torch

    return torch.where(tokens.targets.positive, -tokens.logprobs, 0.0)


def _format_positive_lm(algo: AlgoConfig) -> str:
    positive = f"responses with reward >= {algo.positive_threshold:g}"
    if _over_all_tokens(algo):
        return f"{algo.positive_lm_coef:g} * 1/N_tok sum over the tokens of {positive}[ -log pi ]"
    return f"{algo.positive_lm_coef:g} * mean over the tokens of {positive}[ -log pi ]"


def _over_all_tokens(algo: AlgoConfig) -> bool:
    return algo.positive_lm_mean_over is PositiveLMMean.all_tokens


def _count_positive_lm(counts: LossCounts, algo: AlgoConfig) -> int:
    return counts.num_tokens if _over_all_tokens(algo) else counts.num_positive_tokens


POSITIVE_LM = LossTerm(
    lambda algo: algo.positive_lm_coef != 0.0,
    _format_positive_lm,
    _compute_positive_lm,
    weight=lambda algo: algo.positive_lm_coef,
    metric="policy/positive_lm",
    count=_count_positive_lm,
)

LOSS_TERMS = (TOPR, REFERENCE_KL, ENTROPY, POSITIVE_LM)
"""In the order in which they are added up and printed"""


def format_objective(
    algo: AlgoConfig, responses_per_prompt: int, wrong: float = 0.0, *, has_turns: bool = False
) -> str:
    """A few lines: name, policy loss, advantage, reward, and the critic's loss where there is one.

    wrong: reward.wrong. has_turns: an environment answers the policy, and may give rewards for its turns.
    """
    if compares_pairs(algo):
        formula = "mean over pairs[ -log sigmoid(V(better) - V(worse)) ] of V after the last token"
        return f"algorithm   = {algo.name}\ncritic loss = {formula}"
    lines = [
        f"algorithm   = {algo.name}",
        f"policy loss = {_format_policy_loss(algo)}",
        f"advantage   = {_format_advantage(algo, responses_per_prompt)}",
        f"reward      = {_format_reward(algo, wrong, has_turns)}",
    ]
    if needs_critic(algo):
        lines.append(f"critic loss = {_format_critic_loss(algo)}")
    return "\n".join(lines)


def format_critic(policy: PolicyConfig, critic: CriticConfig, algo: AlgoConfig) -> str | None:
    """A line of what the critic's values are and what is trained when; None where all of it is as usual."""
    parts = []
    if critic.value_range is not None:
        low, high = critic.value_range
        parts.append(f"V = {low:g} + {high - low:g} (1/2 + atan(z)/pi) of the value head's z")
    if critic.lora.rank:
        layers = " and ".join(each.name for each in critic.lora.layers)
        parts.append(f"adapters of rank {critic.lora.rank} ({layers}) and value head alone are trained")
    elif critic.trainable is Trainable.mlp:
        parts.append("MLPs and value head alone are trained")
    if policy.frozen_iterations > 0:
        parts.append(f"the policy is frozen in the first {policy.frozen_iterations} iterations")
    return f"critic      = {'; '.join(parts)}" if parts else None


def _format_policy_loss(algo: AlgoConfig) -> str:
    inner = _weighted(algo.rl_loss_coef, _format_surrogate(algo)) if algo.rl_loss_coef != 0 else ""
    outer = ""
    for term in LOSS_TERMS:
        if not term.is_used(algo):
            continue
        if term.count is None:
            inner = _add(inner, term.formula(algo))
        else:
            outer = _add(outer, term.formula(algo))
    if not inner:
        return outer
    loss = f"{_format_aggregation(algo.loss_agg_mode)}[ {inner} ]"
    if algo.overlong.filter:
        loss += " without the responses cut at the limit"
    return _add(loss, outer) if outer else loss


def _add(text: str, term: str) -> str:
    if not text:
        return term
    return f"{text} {term}" if term.startswith("- ") else f"{text} + {term}"


def _format_surrogate(algo: AlgoConfig) -> str:
    text, mismatch = find_policy_loss(algo.surrogate).formula(algo), algo.mismatch
    if mismatch.correction is not MismatchCorrection.none:
        bounds = "" if mismatch.correction is MismatchCorrection.tis else f"{mismatch.low:g}, "
        name, ratio = mismatch.correction.name, f"pi_old/pi_rollout per {mismatch.level.name}"
        text = f"{name}({ratio}, {bounds}{mismatch.high:g}) * {text}"
    return text


def _format_aggregation(mode: LossAggMode) -> str:
    return {
        "token-mean": "1/N_tok sum_i sum_t",
        "seq-mean-token-sum": "1/N_seq sum_i sum_t",
        "seq-mean-token-mean": "1/N_seq sum_i 1/l_i sum_t",
        "seq-mean-token-sum-norm": "1/(N_seq response_length) sum_i sum_t",
    }[mode.value]


def _format_advantage(algo: AlgoConfig, responses_per_prompt: int) -> str:
    text = find_advantage(algo.advantage).formula(algo, responses_per_prompt)
    if algo.whiten_advantages:
        text += ", whitened over the batch"
    if algo.kl.in_advantage:
        text += f" - {algo.kl.advantage_coef:g} * {format_kl(KLEstimator.k1, 'pi_old')}"
    if algo.advantage_clip is not None:
        text += f", clipped to +-{algo.advantage_clip:g}"
    return text + f"; {responses_per_prompt} response" + ("s" if responses_per_prompt > 1 else "") + " per prompt"


def _format_reward(algo: AlgoConfig, wrong: float, has_turns: bool) -> str:
    text, norm = "R", algo.reward_norm
    if algo.advantage == NO_ADVANTAGE:
        return f"none; R = {wrong:g} + {1 - wrong:g} * score is measured" if wrong else "none; the score is measured"
    if algo.overlong.penalty:
        share = f"{algo.overlong.buffer_frac:g} of the length limit"
        text += f" - {algo.overlong.penalty:g} * ramp over the last {share}"
    if norm.mean is not NormScope.none:
        text = f"({text} - {norm.mean.name} mean)"
    if norm.std is not NormScope.none:
        text = f"{text} / ({norm.std.name} std + 1e-6)"
    if algo.reward_clip is not None:
        text = f"clip({text}, +-{algo.reward_clip:g})"
    text += " at the last token"
    if has_turns and not find_advantage(algo.advantage).per_response:
        text += ", less the environment's rewards of earlier turns, which stand at theirs"
    if algo.kl.in_reward:
        coef = f"{algo.kl.coef:g}"
        if algo.kl.target is not None:
            coef = f"beta (from {coef}, adapted to seq-mean-token-mean KL = {algo.kl.target:g})"
        text += f" - {coef} * {format_kl(algo.kl.reward_estimator, 'pi_old')}"
    if norm.parts:
        parts = " + ".join(f"{weight:g} N({name})" for name, weight in norm.parts.items())
        return f"{text}; R = {parts}, N(r) = (r - group mean) / (group std + 1e-6)"
    return text + (f"; R = {wrong:g} + {1 - wrong:g} * score" if wrong else "")


def _format_critic_loss(algo: AlgoConfig) -> str:
    values, is_squared = ["V"], algo.value_loss is ValueLoss.squared
    if algo.value_clip is not None:
        values.append(f"clip(V, V_old +- {algo.value_clip:g})")
    losses = [f"({v} - G)^2" if is_squared else f"H(G, {v})" for v in values]
    text = ("0.5 " if is_squared else "") + (losses[0] if len(losses) == 1 else f"max({', '.join(losses)})")
    text = f"{_format_aggregation(algo.value_loss_agg_mode)}[ {text} ] with G = V + {name_gae(algo)}(lambda = "
    text += f"{algo.lambda_critic:g})"
    if not is_squared:
        text += ", H(y, p) = -(y log p + (1 - y) log(1 - p)) of both on the scale of critic.value_range, 0 to 1"
    if algo.overlong.filter_critic:
        text += " without the responses cut at the limit"
    if algo.value_pretrain.num_steps:
        text += f"; first {algo.value_pretrain.steps} iterations of it alone (lambda = 1)"
    return text


def _weighted(coef: float, text: str) -> str:
    return text if coef == 1 else f"{coef:g} * {text}"
