"""The log-probs weighted by the advantage (REINFORCE, RLOO): right only for the first optimizer step of a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return -tokens.advantages * tokens.logprobs, {}


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if optimizer_steps != 1:
        yield (
            f"algo.surrogate: logprob found with {optimizer_steps} optimizer steps per iteration; it has no ratio to"
            " correct with from the second step on: must be clip, or train.num_minibatches=1 and"
            " train.epochs_per_iteration=1"
        )


POLICY_LOSS = PolicyLoss(lambda algo: "-A log pi", _compute, check=_check)
