"""Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns.

It is what the training loop does in the iterations up to 0. Explained variance is measured before the critic trains on
a rollout, so that it is a held-out figure.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import linear_regression

from megarl.config.schema.algo import AlgoConfig, ValuePretrainConfig

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
