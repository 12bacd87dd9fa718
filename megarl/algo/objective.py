"""The effective objective of a configuration, printed as formulas with its numbers in them."""

from megarl.config.schema.algo import ADAPTIVE, AlgoConfig, needs_critic, uses_topr
from megarl.config.schema.algo_choices import (
    Advantage,
    AdvantageStd,
    KLEstimator,
    LossAggMode,
    MismatchCorrection,
    NormScope,
    StdOf,
    Surrogate,
)

_KL_FORMULA = {"k1": "d", "abs": "|d|", "k2": "d^2/2", "k3": "(exp(-d) + d - 1)"}


def format_objective(algo: AlgoConfig, responses_per_prompt: int) -> str:
    """A few lines: name, policy loss, advantage, reward, and the critic's loss where there is one."""
    lines = [
        f"algorithm   = {algo.name}",
        f"policy loss = {_format_policy_loss(algo)}",
        f"advantage   = {_format_advantage(algo, responses_per_prompt)}",
        f"reward      = {_format_reward(algo)}",
    ]
    if needs_critic(algo):
        lines.append(f"critic loss = {_format_critic_loss(algo)}")
    return "\n".join(lines)


def _format_policy_loss(algo: AlgoConfig) -> str:
    terms = []
    if algo.rl_loss_coef != 0:
        terms.append(_weighted(algo.rl_loss_coef, _format_surrogate(algo)))
    if uses_topr(algo):
        rho = "pi/mu" if algo.topr.ratio_level.name == "token" else "prod_t pi/mu"
        terms.append(f"{algo.topr.positive_loss_coef:g} * [A >= 0] * -A log pi")
        terms.append(f"{algo.topr.negative_loss_coef:g} * [A < 0] * -clip({rho}, 0, 1) A log pi")
    if algo.kl.in_loss:
        terms.append(f"{algo.kl.loss_coef:g} * {_format_kl(algo.kl.loss_estimator, 'pi')}")
    inner = " + ".join(terms)
    if algo.entropy_coef != 0:
        inner += f" - {algo.entropy_coef:g} * H"
    loss = f"{_format_aggregation(algo.loss_agg_mode)}[ {inner} ]"
    if algo.overlong.filter:
        loss += " without the responses cut at the limit"
    if algo.positive_lm_coef != 0:
        loss += (
            f" + {algo.positive_lm_coef:g} * mean over the tokens of responses with "
            f"reward >= {algo.positive_threshold:g}[ -log pi ]"
        )
    return loss


def _format_surrogate(algo: AlgoConfig) -> str:
    if algo.surrogate is Surrogate.logprob:
        text = "-A log pi"
    else:
        text = f"-min(w A, clip(w, {1 - algo.clip_low:g}, {1 + algo.clip_high:g}) A)"
        if algo.dual_clip is not None:
            text = f"min({text}, {algo.dual_clip:g} |A| where A < 0)"
    mismatch = algo.mismatch
    if mismatch.correction is not MismatchCorrection.none:
        bounds = f"{mismatch.low:g}, {mismatch.high:g}"
        text = f"{mismatch.correction.name}(pi_old/mu per {mismatch.level.name}, {bounds}) * {text}"
    return text


def _format_aggregation(mode: LossAggMode) -> str:
    return {
        "token-mean": "1/N_tok sum_i sum_t",
        "seq-mean-token-sum": "1/N_seq sum_i sum_t",
        "seq-mean-token-mean": "1/N_seq sum_i 1/l_i sum_t",
        "seq-mean-token-sum-norm": "1/(N_seq response_length) sum_i sum_t",
    }[mode.value]


def _format_advantage(algo: AlgoConfig, responses_per_prompt: int) -> str:
    if algo.advantage is Advantage.gae:
        lambda_ = algo.lambda_policy
        if lambda_ == ADAPTIVE:
            lambda_ = f"clip(1 - 1/({algo.length_alpha:g} l), {algo.lambda_min:g}, 1)"
        text = f"GAE(gamma = {algo.gamma:g}, lambda = {lambda_})"
    elif algo.advantage is Advantage.reinforce:
        text = f"sum_k>=t {algo.gamma:g}^(k-t) reward_k"
    elif algo.advantage is Advantage.rloo:
        text = f"R - mean R of the other {responses_per_prompt - 1} responses to the prompt"
    else:
        text = f"R - mean R of the prompt's {responses_per_prompt} responses"
        if algo.advantage_std is AdvantageStd.group:
            text = f"({text}) / (std of their R + 1e-6)"
        elif algo.advantage_std is AdvantageStd.batch:
            what = "centered R" if algo.std_of is StdOf.centered else "R"
            text = f"({text}) / (std of the batch's {what} + 1e-6)"
    if algo.whiten_advantages:
        text += ", whitened over the batch"
    if algo.advantage_clip is not None:
        text += f", clipped to +-{algo.advantage_clip:g}"
    return text + f"; {responses_per_prompt} response" + ("s" if responses_per_prompt > 1 else "") + " per prompt"


def _format_reward(algo: AlgoConfig) -> str:
    text, norm = "R", algo.reward_norm
    if algo.overlong.penalty:
        buffer, share = algo.overlong.buffer, f"{algo.overlong.buffer_frac:g} of the length limit"
        text += f" - {algo.overlong.penalty:g} * ramp over the last {share if buffer is None else f'{buffer} tokens'}"
    if norm.mean is not NormScope.none:
        text = f"({text} - {norm.mean.name} mean)"
    if norm.std is not NormScope.none:
        text = f"{text} / ({norm.std.name} std + 1e-6)"
    if algo.reward_clip is not None:
        text = f"clip({text}, +-{algo.reward_clip:g})"
    text += " at the last token"
    if algo.kl.in_reward:
        coef = f"{algo.kl.coef:g}"
        if algo.kl.target is not None:
            coef = f"beta (from {coef}, adapted to KL = {algo.kl.target:g})"
        text += f" - {coef} * {_format_kl(algo.kl.reward_estimator, 'pi_old')}"
    return text


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


def _format_kl(estimator: KLEstimator, policy: str) -> str:
    if estimator is KLEstimator.full:
        return f"sum_v {policy}(v) (log {policy}(v) - log pi_ref(v))"
    return f"{_KL_FORMULA[estimator.name]} with d = log {policy} - log pi_ref"


def _weighted(coef: float, text: str) -> str:
    return text if coef == 1 else f"{coef:g} * {text}"
