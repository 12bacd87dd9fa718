"""Advantage estimators and policy losses by the names that the configuration gives them.

A plain name is one of ADVANTAGES or POLICY_LOSSES; FILE.py:NAME or package.module:NAME is a declaration of the user's
own.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from megarl.algo.advantages import ADVANTAGES
from megarl.algo.declarations import AdvantageEstimator, PolicyLoss
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.algo import AlgoConfig, needs_reference, uses_topr
from megarl.config.user_code import load_named
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
    """Whether anything reads the log-probs that the policy gives to a rollout before its update.

    Not where the ratio of the only term is to the rollout engine's; a KL to the reference and TOPR read them.
    """
    return not has_ratio_to_rollout(algo) or uses_topr(algo) or algo.kl.in_reward or needs_reference(algo)


def name_policy_losses(**facts: bool) -> str:
    """The names of this package's policy losses with these facts, as "dis or dppo"."""
    return _name(POLICY_LOSSES, facts)


def name_advantages(**facts: bool) -> str:
    """The names of this package's estimators with these facts, as "gae or reinforce"."""
    return _name(ADVANTAGES, facts)


def _name(declared: Mapping[str, Any], facts: Mapping[str, bool]) -> str:
    found = declared.items()
    return " or ".join(name for name, it in found if all(getattr(it, fact) is value for fact, value in facts.items()))


def _find(key: str, name: str, known: Mapping[str, Declaration], kind: type[Declaration]) -> Declaration:
    if name in known:
        return known[name]
    if ":" not in name:
        nearest = find_nearest_key(name, known)
        raise ConfigError(
            [
                f"{key}: found {name!r}" + (f", did you mean {nearest}?" if nearest else "") + "; it must be one of"
                f" {', '.join(known)}, or FILE.py:NAME or package.module:NAME for a declaration of your own"
            ]
        )
    declared = load_named(key, name)
    if not isinstance(declared, kind):
        found = "nothing" if declared is None else f"a {type(declared).__name__}"
        raise ConfigError([f"{key}: found {name!r}; {name} is {found}; it must be {kind.__name__}(...)"])
    return declared
