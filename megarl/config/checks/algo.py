"""Contradictions between the values of the `algo` group that no declared key tells (see algo_keys.py)."""

from collections.abc import Iterator
from math import inf, isfinite

from megarl.algo.loss_terms import LOSS_TERMS
from megarl.algo.registry import (
    find_advantage,
    find_policy_loss,
    has_ratio_to_rollout,
    name_advantages,
    name_policy_losses,
    needs_critic,
)
from megarl.config.checks.algo_keys import find_contradictions
from megarl.config.errors import ConfigError
from megarl.config.schema.algo import AlgoConfig, uses_topr
from megarl.config.schema.algo_choices import LossAggMode, MismatchCorrection, NormScope


def check_modules(algo: AlgoConfig) -> list[str]:
    """Why an advantage estimator or a policy loss cannot be found by its name; everything else needs them."""
    problems: list[str] = []
    for find, name in ((find_advantage, algo.advantage), (find_policy_loss, algo.surrogate)):
        try:
            find(name)
        except ConfigError as error:
            problems += error.problems
    return problems


def check_algo(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps_per_iteration: int) -> list[str]:
    """What is wrong with the values: one message each, naming the key, what was found and what would be right."""
    unknown = check_modules(algo)
    if unknown:
        return unknown
    checks = [find_advantage(algo.advantage).check]
    if algo.rl_loss_coef != 0:
        checks.append(find_policy_loss(algo.surrogate).check)
    checks += [term.check for term in LOSS_TERMS if term.is_used(algo)]
    return [
        *_check_ranges(algo),
        *find_contradictions(algo),
        *_check_groups(algo, responses_per_prompt),
        *_check_reward(algo),
        *_check_sampling(algo, responses_per_prompt),
        *(problem for check in checks for problem in check(algo, responses_per_prompt, optimizer_steps_per_iteration)),
        *_check_loss(algo),
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
        ("tether.decay", algo.tether.decay, 0.0, 1.0),
        ("tether.initial", algo.tether.initial, 0.0, 1.0),
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
        ("dynamic_sampling.max_rounds", algo.dynamic_sampling.max_rounds, 1, 1000),
        ("replay.num_iterations", algo.replay.num_iterations, 0, inf),
        ("replay.frac", algo.replay.frac, 0.0, 1.0),
        ("value_clip", algo.value_clip, 1e-9, inf),
        ("value_pretrain.steps", algo.value_pretrain.steps, 0, inf),
        ("value_pretrain.patience", algo.value_pretrain.patience, 3, inf),
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


def _check_groups(algo: AlgoConfig, responses_per_prompt: int) -> Iterator[str]:
    if find_advantage(algo.advantage).compares_group:
        if responses_per_prompt < 2:
            yield (
                f"train.responses_per_prompt: {responses_per_prompt} found; algo.advantage={algo.advantage} compares"
                " the responses of a group, so it must be at least 2"
            )
        if algo.reward_norm.mean is NormScope.group:
            yield (
                f"algo.reward_norm.mean: group found; algo.advantage={algo.advantage} compares the rewards of a group"
                " already, so it must be none (or batch, running)"
            )
    for key, scope in (("mean", algo.reward_norm.mean), ("std", algo.reward_norm.std)):
        if scope is NormScope.group and responses_per_prompt < 2:
            yield (
                f"algo.reward_norm.{key}: group found with train.responses_per_prompt={responses_per_prompt}; a group"
                " of one has no statistics: must be none, batch or running, or at least 2 responses per prompt"
            )


def _check_reward(algo: AlgoConfig) -> Iterator[str]:
    if algo.overlong.penalty > 0 and algo.overlong.buffer == 0:
        yield "algo.overlong.buffer: 0 found with algo.overlong.penalty > 0; must be at least 1 token, or null"
    if algo.kl.in_reward and not (isfinite(algo.kl.coef) and algo.kl.coef > 0):
        yield f"algo.kl.coef: {algo.kl.coef} found with algo.kl.in_reward=true; must be above 0"
    if algo.value_pretrain.rollouts is not None and algo.kl.in_reward:
        yield (
            f"algo.value_pretrain.rollouts: {algo.value_pretrain.rollouts} found with algo.kl.in_reward=true; the saved"
            " responses have no log-probs of the policy and the reference, so that their KL cannot be a part of the"
            " returns: must be null (fresh responses), or algo.kl.in_reward=false"
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
        yield (
            f"{where}; the critic's returns would be of older policies: algo.advantage must be"
            f" {name_advantages(needs_critic=False)}"
        )
    yield from check_older_samples(algo, where)
    if NormScope.running in (algo.reward_norm.mean, algo.reward_norm.std):
        yield f"{where}; algo.reward_norm=running would count a replayed reward again: must be 0, or batch or group"


def check_older_samples(algo: AlgoConfig, where: str, off: str = "0") -> Iterator[str]:
    """Why the loss may not learn from samples of older policies: replayed, sampled ahead or saved.

    where: the key that asks for them and what was found. off: the key's value that does not.
    """
    if algo.rl_loss_coef == 0 or has_ratio_to_rollout(algo):
        return
    if algo.mismatch.correction is MismatchCorrection.none:
        yield (
            f"{where} with algo.mismatch.correction=none; the surrogate takes its samples as the present policy's: must"
            f" be {off}, or algo.mismatch.correction=tis (or mis), which weights them by the ratio to the policy that"
            f" sampled them, algo.surrogate={name_policy_losses(ratio_to_rollout=True)}, whose ratio is to that policy,"
            " or algo.rl_loss_coef=0 with the topr terms"
        )


def _check_loss(algo: AlgoConfig) -> Iterator[str]:
    if algo.rl_loss_coef == 0 and not uses_topr(algo):
        yield (
            "algo.rl_loss_coef: 0 found with both topr weights 0; no term would learn from the reward: must be above 0,"
            " or algo.topr.positive_loss_coef or algo.topr.negative_loss_coef above 0"
        )
    correction = algo.mismatch.correction
    if correction is not MismatchCorrection.none and has_ratio_to_rollout(algo):
        yield (
            f"algo.mismatch.correction: {correction.name} found with algo.surrogate={algo.surrogate}, whose ratio is to"
            " the rollout engine's log-probs already; the correction would count the mismatch twice: must be none"
        )
    modes = {"value_loss_agg_mode": algo.value_loss_agg_mode, "kl.target_agg_mode": algo.kl.target_agg_mode}
    for key, mode in modes.items():
        if mode is LossAggMode["seq-mean-token-sum-norm"]:
            yield (
                f"algo.{key}: seq-mean-token-sum-norm found; must be token-mean, seq-mean-token-sum or"
                " seq-mean-token-mean"
            )
