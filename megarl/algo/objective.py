"""The effective objective of a configuration, printed as formulas with its numbers in them."""

from megarl.algo.loss_terms import LOSS_TERMS, format_kl
from megarl.algo.registry import find_advantage, find_policy_loss, needs_critic
from megarl.config.schema.algo import AlgoConfig, LossAggMode, MismatchCorrection, NormScope
from megarl.config.schema.roles import CriticConfig, PolicyConfig, Trainable


def format_objective(
    algo: AlgoConfig, responses_per_prompt: int, wrong: float = 0.0, *, has_turns: bool = False
) -> str:
    """A few lines: name, policy loss, advantage, reward, and the critic's loss where there is one.

    wrong: reward.wrong. has_turns: an environment answers the policy, and may give rewards for its turns.
    """
    lines = [
        f"algorithm   = {algo.name}",
        f"policy loss = {_format_policy_loss(algo)}",
        f"advantage   = {_format_advantage(algo, responses_per_prompt)}",
        f"reward      = {_format_reward(algo, wrong, has_turns)}",
    ]
    if needs_critic(algo):
        lines.append(f"critic loss = {_format_critic_loss(algo)}")
    return "\n".join(lines)


def format_critic(policy: PolicyConfig, critic: CriticConfig) -> str | None:
    """A line of what the critic's values are and what is trained when; None where all of it is as usual."""
    parts = []
    if critic.value_range is not None:
        low, high = critic.value_range
        parts.append(f"V = {low:g} + {high - low:g} (1/2 + atan(z)/pi) of the value head's z")
    if critic.trainable is Trainable.mlp:
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
    if algo.advantage_clip is not None:
        text += f", clipped to +-{algo.advantage_clip:g}"
    return text + f"; {responses_per_prompt} response" + ("s" if responses_per_prompt > 1 else "") + " per prompt"


def _format_reward(algo: AlgoConfig, wrong: float, has_turns: bool) -> str:
    text, norm = "R", algo.reward_norm
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
    return text + (f"; R = {wrong:g} + {1 - wrong:g} * score" if wrong else "")


def _format_critic_loss(algo: AlgoConfig) -> str:
    squares = "(V - G)^2"
    if algo.value_clip is not None:
        squares = f"max((V - G)^2, (clip(V, V_old +- {algo.value_clip:g}) - G)^2)"
    text = f"{_format_aggregation(algo.value_loss_agg_mode)}[ 0.5 {squares} ] with G = V + GAE(lambda = "
    text += f"{algo.lambda_critic:g})"
    if algo.overlong.filter_critic:
        text += " without the responses cut at the limit"
    if algo.value_pretrain.num_steps:
        text += f"; first {algo.value_pretrain.num_steps} iterations of it alone (lambda = 1)"
    return text


def _weighted(coef: float, text: str) -> str:
    return text if coef == 1 else f"{coef:g} * {text}"
