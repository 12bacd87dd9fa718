"""The `algo` group: which of its keys, and of the roles that it asks for, have an effect under which choice, and which
values contradict one another.

What an estimator, a policy loss or a term of the loss reads is in its own module; what all of them share is here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite
from typing import Any

from megarl.algo.advantages import ADVANTAGES
from megarl.algo.declarations import Reads, is_on
from megarl.algo.loss_terms import LOSS_TERMS
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.algo.registry import (
    find_advantage,
    find_policy_loss,
    has_ratio_to_rollout,
    name_advantages,
    name_policy_losses,
    needs_critic,
    reads_old_logprobs,
)
from megarl.config.errors import ConfigError
from megarl.config.schema.algo import AlgoConfig, LossAggMode, MismatchCorrection, NormScope, needs_reference, uses_topr


@dataclass(frozen=True)
class Dead:
    """Keys without effect under a configuration."""

    keys: tuple[str, ...]
    """each with everything below it"""
    reason: str
    """why, and what would make them count"""
    switch: bool = False
    """Off (null, false, 0, none) is allowed all the same: there is nothing to switch off."""
    refused: Callable[[Any], bool] = lambda value: False
    """which values are an error even where nobody but a preset set them"""
    but: tuple[str, ...] = ()
    """keys below `keys` that have an effect all the same"""


def find_dead_keys(algo: AlgoConfig) -> Iterator[Dead]:
    """The keys that the chosen estimator, policy loss and terms do not read."""
    advantages = {name: it.reads for name, it in ADVANTAGES.items()}
    advantages[algo.advantage] = find_advantage(algo.advantage).reads
    losses = {name: it.reads for name, it in POLICY_LOSSES.items()}
    losses[algo.surrogate] = find_policy_loss(algo.surrogate).reads
    yield from _find_unread(algo, "algo.advantage", algo.advantage, advantages)
    yield from _find_unread(algo, "algo.surrogate", algo.surrogate, losses, weighted=True)
    for term in LOSS_TERMS:
        for reads in term.reads:
            if not reads.when(algo):
                reason = f"without {reads.needs}; it counts with {reads.needs}"
                yield Dead(reads.keys, reason, reads.switch, reads.refused)
    for counts, dead in (*_list_critic_keys(algo), *_list_reward_keys(algo), *_list_other_keys(algo)):
        if not counts:
            yield dead


def find_contradictions(algo: AlgoConfig) -> Iterator[str]:
    """One message per key without effect whose value is an error whoever set it."""
    seen = set()
    for dead in find_dead_keys(algo):
        for key in dead.keys:
            value = _read(algo, key) if key.startswith("algo.") else None
            if key not in seen and dead.refused(value):
                seen.add(key)
                right = _show(_read(AlgoConfig(), key))
                yield f"{key}: {_show(value)} found; it has no effect {dead.reason}, else it must be {right}"


def _find_unread(
    algo: AlgoConfig, choice: str, chosen: str, readers: Mapping[str, tuple[Reads, ...]], weighted: bool = False
) -> Iterator[Dead]:
    """The keys that modules of this choice read and the chosen one does not; weighted: by algo.rl_loss_coef."""
    idle = weighted and algo.rl_loss_coef == 0
    for key in dict.fromkeys(key for all_reads in readers.values() for reads in all_reads for key in reads.keys):
        by_name = {name: reads for name, all_reads in readers.items() for reads in all_reads if key in reads.keys}
        mine = by_name.get(chosen)
        if mine is not None and mine.when(algo) and not idle:
            continue
        one = mine or next(iter(by_name.values()))
        needs = [one.needs] if one.needs else []
        reason = f"under {choice}={chosen}"
        if weighted:
            reason += f" and algo.rl_loss_coef={algo.rl_loss_coef:g}"
            needs.append("algo.rl_loss_coef above 0")
        if mine is not None and not mine.when(algo):
            reason += f" without {mine.needs}"
        counts = " and ".join([f"{choice}={' or '.join(by_name)}", *needs])
        yield Dead((key,), f"{reason}; it counts with {counts}", one.switch, one.refused)


def _list_critic_keys(algo: AlgoConfig) -> list[tuple[bool, Dead]]:
    """(whether they count, how they are refused where they do not), of the critic's keys and value pretraining's."""
    critic, with_critic = needs_critic(algo), f"algo.advantage={name_advantages(needs_critic=True)}"
    no_critic = f"under algo.advantage={algo.advantage}, which has no critic; it counts with {with_critic}"
    pretrains = not critic or algo.value_pretrain.num_steps > 0
    no_pretraining = "without value pretraining; it counts with algo.value_pretrain.enabled=true and steps above 0"
    details = ("patience", "rollouts", "stop_at_explained_variance")
    return [
        (critic, Dead(("critic", "algo.value_loss_agg_mode"), no_critic)),
        (critic, Dead(("algo.value_clip", "algo.value_pretrain.enabled"), no_critic, switch=True, refused=is_on)),
        (critic, Dead(("algo.value_pretrain", "critic.init", "critic.value_range"), no_critic, switch=True)),
        (critic, Dead(("policy.frozen_iterations",), no_critic, switch=True)),
        (pretrains, Dead(tuple(f"algo.value_pretrain.{name}" for name in details), no_pretraining, switch=True)),
        (pretrains, Dead(("algo.value_pretrain.min_improvement",), no_pretraining)),
        (
            not critic or algo.value_pretrain.enabled,
            Dead(
                ("algo.value_pretrain.steps",),
                "without value pretraining; it counts with algo.value_pretrain.enabled=true",
                switch=True,
            ),
        ),
        (
            algo.value_pretrain.patience is not None,
            Dead(
                ("algo.value_pretrain.min_improvement",),
                "with algo.value_pretrain.patience=null; it counts with a patience",
            ),
        ),
        (
            critic and algo.overlong.filter,
            Dead(
                ("algo.overlong.filter_critic",),
                f"without a critic and algo.overlong.filter=true; it counts with {with_critic} and that filter",
                switch=True,
                refused=is_on,
            ),
        ),
    ]


def _list_reward_keys(algo: AlgoConfig) -> list[tuple[bool, Dead]]:
    """As `_list_critic_keys`, of the keys that shape the reward."""
    kl, norm, overlong = algo.kl, algo.reward_norm, algo.overlong
    no_kl = "without a KL in the reward; it counts with algo.kl.in_reward=true"
    not_adaptive = "without an adaptive weight of the KL in the reward; it counts with algo.kl.in_reward=true and an"
    no_penalty = "with algo.overlong.penalty=0; it counts with a penalty above 0"
    cancels = find_advantage(algo.advantage).compares_group and algo.reward_clip is None
    cancelled = (
        f"under algo.advantage={algo.advantage}, whose comparison within the group cancels it; it counts with"
        f" {name_advantages(compares_group=False)}, or before an algo.reward_clip"
    )
    return [
        (not cancels or norm.mean is NormScope.group, Dead(("algo.reward_norm.mean",), cancelled, switch=True)),
        (overlong.penalty > 0, Dead(("algo.overlong.buffer",), no_penalty, switch=True, refused=is_on)),
        (
            overlong.penalty > 0 and overlong.buffer is None,
            Dead(
                ("algo.overlong.buffer_frac",),
                f"with algo.overlong.penalty={overlong.penalty:g} and algo.overlong.buffer={_show(overlong.buffer)}; it"
                " counts with a penalty above 0 and algo.overlong.buffer=null",
            ),
        ),
        (kl.in_reward, Dead(("algo.kl.reward_estimator", "algo.kl.coef"), no_kl)),
        (kl.in_reward, Dead(("algo.kl.target",), no_kl, switch=True, refused=is_on)),
        (
            kl.in_reward and kl.target is not None,
            Dead(("algo.kl.horizon", "algo.kl.target_agg_mode"), f"{not_adaptive} algo.kl.target"),
        ),
    ]


def _list_other_keys(algo: AlgoConfig) -> list[tuple[bool, Dead]]:
    """As `_list_critic_keys`, of the keys of the whole policy loss, of sampling and of the reference."""
    no_surrogate = "with algo.rl_loss_coef=0; it counts with a weight above 0"
    no_sampling = "without dynamic sampling; it counts with algo.dynamic_sampling.enabled=true"
    no_replay = "without replay; it counts with algo.replay.num_iterations above 0"
    no_reference = (
        "without a reference model of its own; it counts with algo.kl.in_reward=true or algo.kl.in_loss=true and an"
        " estimator other than full, for which the policy's processes hold the reference"
    )
    not_scored = (
        f"under algo.surrogate={algo.surrogate}, where the policy does not score the responses before its update, so"
        " that the mismatch with the rollout engine is not known; it counts with"
        f" algo.surrogate={name_policy_losses(ratio_to_rollout=False)}"
    )
    measured = ("algo.mismatch.level", "algo.mismatch.low", "algo.mismatch.high")
    surrogate, sampling = algo.rl_loss_coef != 0, algo.dynamic_sampling.enabled
    return [
        (surrogate, Dead(("algo.surrogate",), no_surrogate)),
        (surrogate, Dead(("algo.mismatch.correction",), no_surrogate, switch=True, refused=is_on)),
        (reads_old_logprobs(algo), Dead(measured, not_scored)),
        (sampling, Dead(("algo.dynamic_sampling.by", "algo.dynamic_sampling.max_rounds"), no_sampling)),
        (algo.replay.num_iterations > 0, Dead(("algo.replay.frac",), no_replay)),
        (needs_reference(algo), Dead(("reference",), no_reference)),
    ]


def _read(algo: AlgoConfig, key: str) -> Any:
    return reduce(getattr, key.split(".")[1:], algo)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(getattr(value, "name", value))


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
