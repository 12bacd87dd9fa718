"""The targets of an iteration, and what one iteration hands to the next: statistics, coefficients, a critic's curve."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import linear_regression
from typing import Any

from megarl.algo.advantages import update_rho
from megarl.algo.diagnostics import compute_explained_variance
from megarl.algo.registry import load_state, read_state
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import KlController, compute_targets, update_reward_moments, warn_of_returns
from megarl.config.schema.algo import AlgoConfig, ValuePretrainConfig, needs_reward_moments
from megarl.config.schema.root import Config
from megarl.types import Experience, Metrics, TrainingSamples

EXPLAINED = "critic/explained_variance"


class Algorithm:
    def __init__(self, config: Config):
        self.config = config
        self.kl, self.reward_moments = KlController(config.algo.kl.coef, config.algo.kl), RunningMoments()
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


# Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns, in
# the iterations up to 0. Explained variance is measured before the critic trains on a rollout: a held-out figure.

NOTHING = 0.01
"""Explained variance up to which a critic is no better than a constant"""
NUM_ERRORS = 1.5
"""Standard errors of the rise that must lie below min_improvement. One would end a tenth of the runs whose explained
variance rises by 0.004 a step under noise of 0.05; two would miss half of the plateaus for 15 steps and longer."""


def build_pretraining_algo(algo: AlgoConfig) -> AlgoConfig:
    """The algorithm with the same rewards, Monte-Carlo returns and advantages, and no KL in the loss."""
    return replace(algo, lambda_critic=1.0, lambda_policy=1.0, kl=replace(algo.kl, in_loss=False))


def find_end(settings: ValuePretrainConfig, curve: Sequence[float]) -> str | None:
    """Why value pretraining ends after steps of this explained variance; None: it continues.

    It ends after the last step, at `stop_at_explained_variance`, and at a plateau: a line fitted to the last `patience`
    steps rises by less than `min_improvement`, with 1.5 standard errors to spare. The error comes from the scatter
    around the line, so that noise makes value pretraining go on and does not end it.
    """
    goal, patience, least = settings.stop_at_explained_variance, settings.patience, settings.min_improvement
    if goal is not None and curve and curve[-1] >= goal:
        return f"explained variance has reached {curve[-1]:.3f} (aimed at: {goal:g})"
    if patience is not None and len(curve) >= patience:
        rise, error = fit_rise(curve[-patience:])
        if rise + NUM_ERRORS * error < least:
            return f"explained variance has risen by {rise:.3f} +- {error:.3f} in the last {patience} (min {least:g})"
    return f"algo.value_pretrain.steps={settings.steps} are done" if len(curve) >= settings.num_steps else None


def fit_rise(values: Sequence[float]) -> tuple[float, float]:
    """(rise over the n steps of the values on the least-squares line, its standard error); n is 3 or more."""
    steps = range(len(values))
    slope, start = linear_regression(steps, values)
    residuals = sum((value - start - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    spread = len(values) * (len(values) ** 2 - 1) / 12
    return len(values) * slope, len(values) * sqrt(residuals / (len(values) - 2) / spread)


def describe_end(curve: Sequence[float], reason: str) -> str:
    """One line, and a warning where the critic has learned nothing. reason: of `find_end`."""
    text = f"value pretraining ends after {len(curve)} rollouts: {reason}"
    if curve[-1] > NOTHING:
        return text
    return (
        f"{text}\nwarning: the critic explains nothing after value pretraining (explained variance {curve[-1]:.3f}): do"
        " the rewards differ at all? More of algo.value_pretrain.steps, another critic.optimizer.lr, or more of"
        " critic.updates_per_policy_update"
    )
