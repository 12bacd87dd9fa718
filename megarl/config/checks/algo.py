"""The `algo` group: which of its values contradict one another.

What one estimator, policy loss or term of the loss refuses is in its own module; what all share is here.
"""

from collections.abc import Iterator

from megarl.algo.loss_terms import LOSS_TERMS
from megarl.algo.registry import (
    find_advantage,
    find_policy_loss,
    has_ratio_to_rollout,
    name_advantages,
    name_policy_losses,
    needs_critic,
)
from megarl.config.errors import ConfigError
from megarl.config.schema.algo import AlgoConfig, LossAggMode, MismatchCorrection, NormScope, uses_topr


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
    """One message per contradiction of values that are each in their range (`check_keys`): the key, what was found and
    what would be right.
    """
    checks = [find_advantage(algo.advantage).check]
    if algo.rl_loss_coef != 0:
        checks.append(find_policy_loss(algo.surrogate).check)
    checks += [term.check for term in LOSS_TERMS if term.is_used(algo)]
    return [
        *_check_groups(algo, responses_per_prompt),
        *_check_reward(algo),
        *_check_sampling(algo, responses_per_prompt),
        *(problem for check in checks for problem in check(algo, responses_per_prompt, optimizer_steps_per_iteration)),
        *_check_loss(algo),
    ]


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
