"""The targets of an iteration, and what one iteration hands to the next: statistics, coefficients, a critic's curve."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.algo.advantages import update_rho
from megarl.algo.diagnostics import compute_explained_variance
from megarl.algo.registry import load_state, read_state
from megarl.algo.rewards import KlController, update_reward_moments
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import compute_targets, warn_of_returns
from megarl.algo.value_pretraining import build_pretraining_algo, find_end
from megarl.config.schema.algo import AlgoConfig, needs_reward_moments
from megarl.config.schema.root import Config
from megarl.types import Experience, Metrics, TrainingSamples

EXPLAINED = "critic/explained_variance"


class Algorithm:
    def __init__(self, config: Config):
        self.config = config
        self.kl, self.reward_moments = KlController.start(config.algo.kl), RunningMoments()
        self.tether_rho = config.algo.tether.initial
        self.explained: tuple[float, ...] = ()
        """Explained variance of each step of value pretraining so far"""
        load_state(config.algo)

    def state(self) -> dict[str, Any]:
        """The fields of a `TrainerState` that are the algorithm's."""
        return {
            "kl_coef": self.kl.coef,
            "reward_moments": self.reward_moments,
            "tether_rho": self.tether_rho,
            "explained": self.explained,
            "estimator": read_state(self.config.algo),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` gave; other names are ignored."""
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.reward_moments, self.tether_rho = state["reward_moments"], state["tether_rho"]
        self.explained = state["explained"]
        load_state(self.config.algo, state["estimator"])

    def build_targets(
        self, experience: Experience, iteration: int, *, has_old_logprobs: bool = True
    ) -> tuple[TrainingSamples, Metrics]:
        """Advantages and returns over the global batch, up to iteration 0 Monte-Carlo returns for the critic alone.

        has_old_logprobs: False where the update computes them. Metrics of the critic are those before it learns.
        """
        if iteration <= 0:
            samples, metrics = self._compute(experience, build_pretraining_algo(self.config.algo), True)
            assert experience.values is not None
            assert samples.returns is not None
            explained = compute_explained_variance(experience.values, samples.returns, samples.mask)
            found = {name: value for name, value in metrics.items() if name.startswith("critic/")}
            return samples, found | {EXPLAINED: explained}
        algo = self.config.algo
        samples, metrics = self._compute(experience, algo, has_old_logprobs)
        self.tether_rho = update_rho(self.tether_rho, metrics, algo.tether)
        return samples, metrics

    def end_step(self, metrics: Metrics) -> str | None:
        """Take the explained variance of a step of value pretraining; why it was the last one, None: it was not."""
        self.explained = (*self.explained, metrics[EXPLAINED])
        return find_end(self.config.algo.value_pretrain, self.explained)

    def update_kl(self, experience: Experience, *, is_frozen: bool) -> Metrics:
        """kl/*, after an update; the coefficient follows unless the policy is frozen."""
        kl, metrics = self.kl.update(experience)
        self.kl = self.kl if is_frozen else kl
        return metrics

    def _compute(
        self, experience: Experience, algo: AlgoConfig, has_old_logprobs: bool
    ) -> tuple[TrainingSamples, Metrics]:
        length, wrong = self.config.rollout.response_length, self.config.reward.wrong
        if needs_reward_moments(algo):
            self.reward_moments = update_reward_moments(self.reward_moments, experience, algo, length, wrong)
        samples, metrics = compute_targets(
            experience,
            algo,
            self.kl.coef,
            response_length=length,
            reward_moments=self.reward_moments,
            wrong=wrong,
            tether_rho=self.tether_rho,
            has_old_logprobs=has_old_logprobs,
        )
        warn_of_returns(samples, self.config.critic.value_range)
        return samples, metrics
