"""Returns that a critic whose values are bounded (critic.value_range) cannot predict."""

import warnings
from collections.abc import Sequence

from megarl.algo.blocks import split_blocks
from megarl.algo.statistics import Summary
from megarl.types import TrainingSamples

ROUNDING = 1e-6
"""Of float32 returns, as a share of the range"""


def warn_of_returns(samples: TrainingSamples, value_range: Sequence[float] | None) -> None:
    """RuntimeWarning where a return is outside of the range. The checks before the run know the scores of most rewards,
    and not those of a function or a reward model, or what an environment gives in turns.
    """
    if value_range is None or samples.returns is None:
        return
    (low, high), found = value_range, Summary()
    for block in split_blocks(samples.mask):
        found.add(block.flatten(samples.returns).double())
    room = ROUNDING * (high - low)
    if found.count and not low - room <= found.low <= found.high <= high + room:
        warnings.warn(
            f"critic.value_range: found [{low:g}, {high:g}] and returns from {found.low:.3g} to {found.high:.3g}; the"
            " critic's values cannot leave its range",
            RuntimeWarning,
            stacklevel=2,
        )
