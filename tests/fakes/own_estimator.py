"""An advantage estimator as a user writes it, which keeps a number over the iterations."""

from typing import Any

from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages
from megarl.config.schema.algo import AlgoConfig


class SlowBaseline:
    """R minus the mean of the iterations so far, newer ones more."""

    def __init__(self) -> None:
        self.mean = 0.0

    def compute(self, inputs: AdvantageInputs, _algo: AlgoConfig) -> Advantages:
        advantages_B = inputs.returns_B - self.mean
        self.mean += 0.3 * (float(inputs.returns_B.mean()) - self.mean)
        return Advantages(advantages_B)

    def state_dict(self) -> Any:
        return {"mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.mean = state["mean"]


BASELINE = SlowBaseline()
SLOW = AdvantageEstimator(lambda _algo, _num: "R - slow mean", BASELINE.compute, per_response=True, state=BASELINE)
