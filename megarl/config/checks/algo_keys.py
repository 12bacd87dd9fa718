"""Which keys of the `algo` group, and of the roles that it asks for, have an effect under which choice.

What an estimator, a policy loss or a term of the loss reads is in its own module; what all of them share is below.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from megarl.algo.advantages import ADVANTAGES
from megarl.algo.declarations import Reads, is_on
from megarl.algo.loss_terms import LOSS_TERMS
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.algo.registry import (
    find_advantage,
    find_policy_loss,
    name_advantages,
    name_policy_losses,
    needs_critic,
    reads_old_logprobs,
)
from megarl.config.schema.algo import AlgoConfig, needs_reference
from megarl.config.schema.algo_choices import NormScope


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


def list_declared_keys() -> set[str]:
    """Every key that an estimator, a policy loss or a term of this package reads."""
    declared = [it.reads for it in ADVANTAGES.values()]
    declared += [it.reads for it in POLICY_LOSSES.values()]
    declared += [it.reads for it in LOSS_TERMS]
    return {key for every in declared for reads in every for key in reads.keys}


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
