"""Advantage estimators and policy losses by the names that the configuration gives them: of ADVANTAGES, POLICY_LOSSES,
or FILE.py:NAME or package.module:NAME for a declaration of the user's own.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from megarl.algo.advantages import ADVANTAGES
from megarl.algo.declarations import AdvantageEstimator, PolicyLoss
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.config.errors import ConfigError, find_nearest_key, load_named
from megarl.config.schema.algo import AlgoConfig, needs_reference, uses_topr
from megarl.config.schema.root import Config
from megarl.files import check_state

Declaration = TypeVar("Declaration")


@cache
def find_advantage(name: str) -> AdvantageEstimator:
    """What algo.advantage names. Raises ConfigError."""
    return _find("algo.advantage", name, ADVANTAGES, AdvantageEstimator)


@cache
def find_policy_loss(name: str) -> PolicyLoss:
    """What algo.surrogate names. Raises ConfigError."""
    return _find("algo.surrogate", name, POLICY_LOSSES, PolicyLoss)


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
    the only term is to the rollout engine's.
    """
    return not has_ratio_to_rollout(algo) or uses_topr(algo) or algo.kl.in_reward or needs_reference(algo)


def needs_pass(config: Config) -> bool:
    """Whether the policy has to score the responses before its update. Otherwise the update's own log-probs, of a first
    optimizer step where the ratio to them is 1, are the same up to rounding.
    """
    return (
        config.train.num_optimizer_steps != 1  # all steps but the first need those before it
        or config.algo.kl.in_reward  # the rewards need them
        or uses_topr(config.algo)  # its terms need them as log-probs of the policy that sampled
        or config.policy.fp8 is not None  # the rounding of a pass for training is another
        or config.rollout.router_replay  # policy/moe_routing_agreement is counted in the pass
        or bool(config.model.megatron.get("moe_input_jitter_eps"))  # a pass for training is random
    )


def reuses_logprobs(config: Config, num_samples: int | None = None, iteration: int | None = None) -> bool:
    """Whether old_logprobs are the update's own, and the policy does not score the responses before it. num_samples: of
    the iteration, which replayed groups may make more than one minibatch. iteration: in some the policy is frozen.
    """
    if num_samples is not None and num_samples > config.train.minibatch_size:
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
