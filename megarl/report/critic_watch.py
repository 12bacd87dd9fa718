"""A warning where the critic has been a worse baseline than the mean of the group, or of the batch, would be."""

from collections import deque

from megarl.types import Metrics

BASELINES = {
    "critic/mse_vs_group": ("the mean reward of the prompt's other responses", "algo=rloo"),
    "critic/mse_vs_batch": ("the mean reward of the batch's other responses", "algo=reinforce_pp"),
}
"""Ratios of mean squared errors, the critic's over that of a baseline; what the baseline is, and a preset that has it
or one like it"""
UPDATED = "policy/loss"
"""What only an iteration has in which the policy was updated"""
NUM_ITERATIONS = 10
"""A critic no worse than the mean is worse by chance in all of them in one of 1,024 cases."""
FEW, CLEARLY = 5, 1.25
"""Before there are NUM_ITERATIONS: so many in a row in which the critic's error was this many times the baseline's"""
ADVICE = (
    "train it longer before the policy (algo.value_pretrain.steps), change critic.optimizer.lr, or raise"
    " critic.updates_per_policy_update"
)


class CriticWatch:
    """Judges the last `NUM_ITERATIONS` iterations together, since one value is noisy, and speaks once per stretch.

    It speaks when the critic's error has been the larger one in each of them, or clearly larger in FEW of the first
    ones, and not again before it has been the smaller one in half of them. Iterations that do not update the policy
    (value pretraining, policy.frozen_iterations) are not counted.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_ITERATIONS)
        self.has_warned = False
        """Whether the stretch in which it has spoken still goes on"""

    def check(self, metrics: Metrics) -> str | None:
        """Take one iteration's metrics; the warning, where it is due."""
        name = next((name for name in BASELINES if name in metrics), None)
        if name is None or UPDATED not in metrics:
            return None
        self._ratios.append(metrics[name])
        num_worse = sum(ratio > 1 for ratio in self._ratios)
        if self.has_warned:
            self.has_warned = 2 * num_worse > NUM_ITERATIONS
            return None
        num = NUM_ITERATIONS if num_worse == NUM_ITERATIONS else 0
        if FEW <= len(self._ratios) < NUM_ITERATIONS and min(list(self._ratios)[-FEW:]) >= CLEARLY:
            num = FEW
        if num:
            self.has_warned = True
            middle = sorted(list(self._ratios)[-num:])[num // 2]
            baseline, preset = BASELINES[name]
            return (
                f"warning: in each of the last {num} iterations the critic's squared error was larger than"
                f" that of {baseline} ({name}: {middle:.3g} in the median, should be below 1): {ADVICE}; {preset} needs"
                " no critic"
            )
        return None
