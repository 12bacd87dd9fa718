"""Prompts -> responses -> rewards, as one Rollout."""

import math
from collections.abc import Sequence

from megarl.seams import RolloutEngine
from megarl.types import Prompt, Response, RewardFunction, Rollout, Sample


class Collector:
    """Asks the engine for groups of responses and has each one scored."""

    def __init__(self, engine: RolloutEngine, reward: RewardFunction, *, temperature: float):
        self._engine = engine
        self._reward = reward
        self._temperature = temperature

    def collect(self, prompts: Sequence[Prompt], num_responses: int, *, weight_version: int) -> Rollout:
        """One group of `num_responses` samples per prompt, groups numbered from 0 in the order of `prompts`.

        weight_version: of the trainer's weights now. Raises RuntimeError where a server generated a token with
        other weights, ValueError where a reward is not finite.
        """
        return self._collect(prompts, num_responses, self._temperature, weight_version)

    def collect_greedy(self, prompts: Sequence[Prompt], *, weight_version: int) -> Rollout:
        """The most likely response of each prompt, for evaluation; else as `collect`."""
        return self._collect(prompts, 1, 0.0, weight_version)

    def _collect(
        self, prompts: Sequence[Prompt], num_responses: int, temperature: float, weight_version: int
    ) -> Rollout:
        groups = self._engine.generate(prompts, num_responses=num_responses, temperature=temperature)
        check_versions(prompts, groups, weight_version)
        return Rollout(score_groups(prompts, groups, self._reward), weight_version)


def check_versions(prompts: Sequence[Prompt], groups: Sequence[Sequence[Response]], expected: int) -> None:
    """Raise RuntimeError, naming prompt and versions, for a token generated with other weights than `expected`."""
    for prompt, responses in zip(prompts, groups, strict=True):
        for response in responses:
            used = {v for v, own in zip(response.weight_versions, response.generated, strict=True) if own}
            if used - {expected}:
                versions = ", ".join(str(version) for version in sorted(used))
                raise RuntimeError(
                    f"a response to prompt {prompt.id!r} was generated with the servers' weight version {versions}; "
                    f"the trainer's is {expected}: the servers missed a weight sync, or it came during the rollout"
                )


def score_groups(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Response]], reward: RewardFunction
) -> tuple[Sample, ...]:
    """A scored Sample for every response. Raises ValueError, naming the prompt, for a reward not finite."""
    samples = []
    for group, (prompt, responses) in enumerate(zip(prompts, groups, strict=True)):
        for response in responses:
            score = reward(prompt, response)
            if not math.isfinite(score.reward):
                raise ValueError(
                    f"the reward of a response to prompt {prompt.id!r} is {score.reward}; it must be a finite number"
                )
            samples.append(Sample(prompt, response, score, group))
    return tuple(samples)
