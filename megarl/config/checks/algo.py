"""Contradictions between the values of the `algo` group."""

from collections.abc import Iterator
from math import inf, isfinite

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


def check_algo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps_per_iteration: int) -> list[str]:
    """What is wrong with the values: one message each, naming the key, what was found and what would be
    right.
    """
    return [
        *_check_ranges(algo),
        *_check_advantage(algo, responses_per_prompt),
        *_check_reward(algo, responses_per_prompt),
        *_check_sampling(algo, responses_per_prompt),
        *_check_loss(algo, optimizer_steps_per_iteration),
        *_check_critic(algo),
    ]


def _check_ranges(algo: AlgoConfig) -> Iterator[str]:
    ranges: list[tuple[str, float | None, float, float]] = [
        ("gamma", algo.gamma, 0.0, 1.0),
        ("lambda_critic", algo.lambda_critic, 0.0, 1.0),
        ("lambda_min", algo.lambda_min, 0.0, 1.0),
        ("length_alpha", algo.length_alpha, 1e-9, inf),
        ("advantage_clip", algo.advantage_clip, 1e-9, inf),
        ("reward_clip", algo.reward_clip, 1e-9, inf),
        ("overlong.penalty", algo.overlong.penalty, 0.0, inf),
        ("overlong.buffer_frac", algo.overlong.buffer_frac, 0.0, 1.0),
        ("overlong.buffer", algo.overlong.buffer, 0, inf),
        ("kl.target", algo.kl.target, 1e-9, inf),
        ("kl.horizon", algo.kl.horizon, 1e-9, inf),
        ("rl_loss_coef", algo.rl_loss_coef, 0.0, inf),
        ("clip_low", algo.clip_low, 0.0, 1.0),
        ("clip_high", algo.clip_high, 0.0, inf),
        ("positive_lm_coef", algo.positive_lm_coef, 0.0, inf),
        ("topr.positive_loss_coef", algo.topr.positive_loss_coef, 0.0, inf),
        ("topr.negative_loss_coef", algo.topr.negative_loss_coef, 0.0, inf),
        ("mismatch.low", algo.mismatch.low, 0.0, 1.0),
        ("mismatch.high", algo.mismatch.high, 1.0, inf),
        ("dynamic_sampling.max_rounds", algo.dynamic_sampling.max_rounds, 1, inf),
        ("replay.num_iterations", algo.replay.num_iterations, 0, inf),
        ("replay.frac", algo.replay.frac, 0.0, 1.0),
        ("value_clip", algo.value_clip, 1e-9, inf),
        ("value_pretrain.steps", algo.value_pretrain.steps, 0, inf),
        ("value_pretrain.patience", algo.value_pretrain.patience, 1, inf),
        ("value_pretrain.min_improvement", algo.value_pretrain.min_improvement, 0.0, 1.0),
        ("value_pretrain.stop_at_explained_variance", algo.value_pretrain.stop_at_explained_variance, -inf, 1.0),
        ("entropy_coef", algo.entropy_coef, -inf, inf),
        ("positive_threshold", algo.positive_threshold, -inf, inf),
    ]
    for key, value, low, high in ranges:
        if value is not None and not (isfinite(value) and low <= value <= high):
            allowed = "a finite number" if low == -inf else f"at least {low:g}"
            yield f"algo.{key}: {value} found; must be {allowed}" + (f", at most {high:g}" if high < inf else "")
    if algo.dual_clip is not None and not (isfinite(algo.dual_clip) and algo.dual_clip > 1):
        yield f"algo.dual_clip: {algo.dual_clip} found; must be above 1, or null (off)"
    number = algo.lambda_policy
    if isinstance(number, str):
        if number != ADAPTIVE:
            yield f"algo.lambda_policy: {number!r} found; must be a number from 0 to 1, or {ADAPTIVE}"
    elif not 0 <= number <= 1:
        yield f"algo.lambda_policy: {number} found; must be from 0 to 1, or {ADAPTIVE}"


def _check_advantage(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    name, relative = algo.advantage.name, algo.advantage in (Advantage.rloo, Advantage.group)
    if relative and responses_per_prompt < 2:
        yield (
            f"train.responses_per_prompt: {responses_per_prompt} found; algo.advantage={name} compares the "
            "responses of a group, so it must be at least 2"
        )
    if relative and algo.reward_norm.mean is NormScope.group:
        yield (
            f"algo.reward_norm.mean: group found; algo.advantage={name} subtracts the group's mean already, "
            "so it must be none (or batch, running)"
        )
    if relative and algo.gamma != 1:
        yield (
            f"algo.gamma: {algo.gamma} found; it has no effect under algo.advantage={name}, so it must be 1 "
            "(or advantage must be gae or reinforce)"
        )
    if algo.advantage_std is not AdvantageStd.none and algo.advantage is not Advantage.group:
        yield (
            f"algo.advantage_std: {algo.advantage_std.name} found; it belongs to algo.advantage=group and "
            f"has no "
            f"effect under {name}, so it must be none"
        )
    if algo.std_of is not StdOf.raw and algo.advantage_std is not AdvantageStd.batch:
        yield (
            f"algo.std_of: {algo.std_of.name} found; it has an effect only with algo.advantage_std=batch "
            f"({algo.advantage_std.name} found), so it must be raw"
        )
    if algo.lambda_policy == ADAPTIVE and algo.advantage is not Advantage.gae:
        yield (
            f"algo.lambda_policy: {ADAPTIVE} found; it has no effect under algo.advantage={name}, so it "
            f"must be a "
            "number (or advantage must be gae)"
        )


def _check_reward(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    for key, scope in (("mean", algo.reward_norm.mean), ("std", algo.reward_norm.std)):
        if scope is NormScope.group and responses_per_prompt < 2:
            yield (
                f"algo.reward_norm.{key}: group found with "
                f"train.responses_per_prompt={responses_per_prompt}; a group "
                "of one has no statistics: must be none, batch or running, or at least 2 responses per prompt"
            )
    overlong, kl = algo.overlong, algo.kl
    if overlong.penalty > 0 and overlong.buffer == 0:
        yield "algo.overlong.buffer: 0 found with algo.overlong.penalty > 0; must be at least 1 token, or null"
    if overlong.buffer and overlong.penalty == 0:
        yield (
            f"algo.overlong.buffer: {overlong.buffer} found; it has no effect with algo.overlong.penalty=0: "
            "must be null, or the penalty above 0"
        )
    if overlong.filter_critic and not overlong.filter:
        yield "algo.overlong.filter_critic: true found; it has an effect only with algo.overlong.filter=true"
    if kl.in_reward and not (isfinite(kl.coef) and kl.coef > 0):
        yield f"algo.kl.coef: {kl.coef} found with algo.kl.in_reward=true; must be above 0"
    if kl.target is not None and not kl.in_reward:
        yield (
            f"algo.kl.target: {kl.target} found; it adapts algo.kl.coef, which has an effect only with "
            "algo.kl.in_reward=true: must be null"
        )


def _check_sampling(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    if algo.dynamic_sampling.enabled and responses_per_prompt < 2:
        yield (
            f"algo.dynamic_sampling.enabled: true found with train.responses_per_prompt={responses_per_prompt}; it"
            " compares the responses of a group, so there must be at least 2"
        )
    if algo.replay.num_iterations == 0:
        return
    if not 0 < algo.replay.frac < 1:
        yield f"algo.replay.frac: {algo.replay.frac} found; must be above 0 and below 1"
    where = f"algo.replay.num_iterations: {algo.replay.num_iterations} found"
    if needs_critic(algo):
        yield f"{where}; the critic's returns would be of older policies: advantage must be group, rloo or reinforce"
    if algo.rl_loss_coef != 0 and algo.mismatch.correction is MismatchCorrection.none:
        yield (
            f"{where}; the surrogate takes its samples as the present policy's: must be 0, or algo.rl_loss_coef=0 with"
            " the topr terms, or algo.mismatch.correction=clip, which weights them by the ratio to the policy that"
            " sampled them"
        )
    if NormScope.running in (algo.reward_norm.mean, algo.reward_norm.std):
        yield f"{where}; algo.reward_norm=running would count a replayed reward again: must be 0, or batch or group"


def _check_loss(algo: AlgoConfig, optimizer_steps_per_iteration: int) -> Iterator[str]:
    kl, steps = algo.kl, optimizer_steps_per_iteration
    if kl.in_loss and not (isfinite(kl.loss_coef) and kl.loss_coef > 0):
        yield f"algo.kl.loss_coef: {kl.loss_coef} found with algo.kl.in_loss=true; must be above 0"
    if kl.in_loss and kl.loss_estimator is KLEstimator.k1:
        yield (
            "algo.kl.loss_estimator: k1 found; as a loss its expected gradient on-policy is zero, so that it "
            "holds nothing near the reference: must be k2, k3, abs or full"
        )
    if algo.rl_loss_coef == 0 and not uses_topr(algo):
        yield (
            "algo.rl_loss_coef: 0 found with both topr weights 0; no term would learn from the reward: must "
            "be "
            "above 0, or algo.topr.positive_loss_coef or algo.topr.negative_loss_coef above 0"
        )
    if algo.surrogate is Surrogate.logprob and algo.rl_loss_coef != 0 and steps != 1:
        yield (
            f"algo.surrogate: logprob found with {steps} optimizer steps per iteration; it has no ratio to "
            f"correct "
            "with from the second step on: must be clip, or train.num_minibatches=1 and "
            "train.epochs_per_iteration=1"
        )
    if algo.dual_clip is not None and (algo.surrogate is not Surrogate.clip or algo.rl_loss_coef == 0):
        yield f"algo.dual_clip: {algo.dual_clip} found; it belongs to algo.surrogate=clip: must be null"
    if uses_topr(algo) and algo.advantage not in (Advantage.group, Advantage.rloo):
        yield (
            f"algo.advantage: {algo.advantage.name} found; the topr terms split the responses by the sign "
            f"of their "
            "advantage, one for all tokens: must be group or rloo"
        )
    if algo.mismatch.correction is not MismatchCorrection.none and algo.rl_loss_coef == 0:
        yield (
            f"algo.mismatch.correction: {algo.mismatch.correction.name} found; it weights the surrogate, "
            f"which "
            "algo.rl_loss_coef=0 switches off: must be none"
        )


def _check_critic(algo: AlgoConfig) -> Iterator[str]:
    if algo.value_loss_agg_mode is LossAggMode["seq-mean-token-sum-norm"]:
        yield (
            "algo.value_loss_agg_mode: seq-mean-token-sum-norm found; must be token-mean, "
            "seq-mean-token-sum or "
            "seq-mean-token-mean"
        )
    if algo.value_pretrain.rollouts is not None and algo.kl.in_reward:
        yield (
            f"algo.value_pretrain.rollouts: {algo.value_pretrain.rollouts} found with algo.kl.in_reward=true; the saved"
            " responses have no log-probs of the policy and the reference, so that their KL cannot be a part of the"
            " returns: must be null (fresh responses), or algo.kl.in_reward=false"
        )
    if needs_critic(algo):
        return
    if algo.value_pretrain.num_steps > 0:
        yield (
            f"algo.value_pretrain.enabled: true found; algo.advantage={algo.advantage.name} has no critic: must be"
            " false (or advantage must be gae)"
        )
    if algo.value_clip is not None:
        yield (
            f"algo.value_clip: {algo.value_clip} found; algo.advantage={algo.advantage.name} has no critic: "
            f"must be "
            "null (or advantage must be gae)"
        )
