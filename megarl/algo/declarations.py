"""What an advantage estimator, a policy loss or a term of the loss declares beside its function. Neither this file nor
those of the declarations import torch, which their functions do when they run: a configuration is checked without it.

Suffixes: B samples, T response positions, R flat response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.algo.losses import LossCounts, PolicyTokens
    from megarl.algo.statistics import Block

Check = Callable[[AlgoConfig, int, int], Iterable[str]]
"""(algo, responses per prompt, optimizer steps per iteration) -> one message per contradiction: the key, what was found
and what would be right."""


def _get_default_dtype() -> torch.dtype:
    import torch

    return torch.get_default_dtype()


@dataclass(frozen=True)
class AdvantageInputs:
    """One iteration's batch, as an advantage estimator sees it."""

    rewards_B: Tensor
    """float64 [B], R': the shaped reward of each response, without the KL"""
    kl_penalty_BT: Tensor | None
    """float [B, T], beta * KL per token, 0 where not generated; None where no KL is in the reward"""
    mask_BT: Tensor
    """bool [B, T]: the policy generated this token"""
    groups_B: Tensor
    """int64 [B]: responses to the same prompt have the same number"""
    values_BT: Tensor | None
    """float [B, T] of the critic; None without one"""
    turn_rewards_BT: Tensor | None = None
    """float [B, T], the part of R' that stands at the last token of a turn before the last, 0 elsewhere; None where
    all of it stands at the end"""
    dtype: torch.dtype = field(default_factory=_get_default_dtype)
    """What results of shape [B, T] are kept in: that of the log-probs"""
    tether_rho: float | None = None
    """The weight of the value in the baseline of advantage=tether; None: that of the first iteration"""

    @property
    def returns_B(self) -> Tensor:
        """float64 [B]: the reward of each response, minus the KL penalty of all its tokens."""
        from megarl.algo.algorithm import sum_penalty

        if self.kl_penalty_BT is None:
            return self.rewards_B
        return self.rewards_B - sum_penalty(self.kl_penalty_BT, self.mask_BT)

    def place_rewards(self, block: Block) -> Tensor:
        """`token_rewards_BT` of the tokens of a block (`megarl.algo.statistics.split_blocks`), float64 [R]."""
        from megarl.algo.algorithm import place_rewards

        return place_rewards(block, self.rewards_B, self.kl_penalty_BT, self.turn_rewards_BT)

    @property
    def token_rewards_BT(self) -> Tensor:
        """float64 [B, T]: the turns' rewards at the ends of their actions, the rest of R' at the last generated token,
        minus the KL penalty at every one; their sum is `returns_B`.
        """
        from megarl.algo.algorithm import compute_token_rewards

        return compute_token_rewards(self.rewards_B, self.mask_BT, self.kl_penalty_BT, self.turn_rewards_BT)


@dataclass(frozen=True)
class Advantages:
    """What an advantage estimator gives back."""

    advantages: Tensor
    """float [B], the same for all tokens of a response, or [B, T]; what stands outside the mask is not looked at"""
    returns: Tensor | None = None
    """float [B, T]: what the critic learns; None without one"""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Stateful(Protocol):
    """What goes on in a resumed run where the checkpoint left it."""

    def state_dict(self) -> Any:
        """JSON, small: it is read after every iteration."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True)
class AdvantageEstimator:
    """One choice of algo.advantage."""

    formula: Callable[[AlgoConfig, int], str]
    """(algo, responses per prompt) -> as the objective is printed"""
    compute: Callable[[AdvantageInputs, AlgoConfig], Advantages]
    check: Check = lambda algo, responses_per_prompt, optimizer_steps: ()
    needs_critic: bool = False
    per_response: bool = False
    """All tokens of a response have the same advantage."""
    compares_group: bool = False
    """The advantage is relative to the other responses to the prompt: it takes at least two, and what is subtracted
    from all rewards of a group cancels."""
    state: Stateful | None = None
    """What `compute` keeps from one iteration to the next; a run begins with the state it was declared with. None:
    nothing."""


@dataclass(frozen=True)
class PolicyLoss:
    """One choice of algo.surrogate; algo.rl_loss_coef is its weight."""

    formula: Callable[[AlgoConfig], str]
    """as the objective is printed"""
    compute: Callable[[PolicyTokens, AlgoConfig], tuple[Tensor, dict[str, Tensor]]]
    """-> the loss of each token, differentiable, float [R]; and metrics by name, float or bool [R], whose mean over the
    tokens is logged"""
    check: Check = lambda algo, responses_per_prompt, optimizer_steps: ()
    ratio_to_rollout: bool = False
    """Its ratio is to rollout_logprobs: it reads no old_logprobs, and samples of older policies and the mismatch with
    the rollout engine are in that ratio, so that it takes no correction."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Its own numbers, with the values that they have where algo.surrogate_options does not name them"""

    def read(self, algo: AlgoConfig) -> dict[str, float]:
        """The values of `options` in this configuration."""
        return {name: float(algo.surrogate_options.get(name, value)) for name, value in self.options.items()}


@dataclass(frozen=True)
class LossTerm:
    """A further part of the policy's loss, with keys of its own that switch it on and weight it."""

    is_used: Callable[[AlgoConfig], bool]
    formula: Callable[[AlgoConfig], str]
    """the weighted term as the objective is printed; it begins with "- " where it is subtracted"""
    compute: Callable[[PolicyTokens, AlgoConfig], Tensor]
    """-> float [R], differentiable, without the weight"""
    weight: Callable[[AlgoConfig], float]
    metric: str | None = None
    """the name under which the mean of the unweighted term is logged"""
    measure: Callable[[PolicyTokens, AlgoConfig, LossCounts], dict[str, Tensor]] = lambda tokens, algo, counts: {}
    """-> further metrics by name, the micro-batch's part: their sum over the minibatch is logged"""
    count: Callable[[LossCounts, AlgoConfig], int] | None = None
    """What the sum over the tokens is divided by; None: the term is aggregated by algo.loss_agg_mode. With a metric,
    METRIC_weight_max is logged too: weight * (all tokens) / count, what the term weighs at one token where an advantage
    of the token-mean surrogate weighs 1."""
    check: Check = lambda algo, responses_per_prompt, optimizer_steps: ()
