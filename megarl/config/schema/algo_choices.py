"""The choices of the `algo` group's keys that are no modules; OmegaConf matches members by name."""

from enum import Enum


class AdvantageStd(Enum):
    """What advantage=group divides by."""

    none = "none"
    group = "group"
    batch = "batch"


class StdOf(Enum):
    """What the batch's standard deviation is taken of under advantage_std=batch."""

    raw = "raw"
    """the rewards (LitePPO)"""
    centered = "centered"
    """the rewards minus their group's mean (ROLL's div_std_global)"""


class NormScope(Enum):
    none = "none"
    batch = "batch"
    group = "group"
    running = "running"


class KLEstimator(Enum):
    """With d = log-prob difference: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) + d - 1; full is the sum over the
    vocabulary. kl and mse are ROLL's names.
    """

    k1 = "k1"
    kl = "k1"
    abs = "abs"
    k2 = "k2"
    mse = "k2"
    k3 = "k3"
    full = "full"


class RatioLevel(Enum):
    token = "token"
    sequence = "sequence"


class MismatchCorrection(Enum):
    none = "none"
    clip = "clip"
    """the ratio, clamped to the bounds"""
    reject = "reject"
    """the ratio inside the bounds, 0 outside"""


class MismatchLevel(Enum):
    token = "token"
    sequence = "sequence"
    """the product over the response's tokens"""
    geometric = "geometric"
    """the geometric mean over the response's tokens"""


# Functional, because a class body cannot hold names with hyphens.
LossAggMode = Enum(
    "LossAggMode",
    {
        "token-mean": "token-mean",
        "seq-mean-token-sum": "seq-mean-token-sum",
        "seq-mean-token-mean": "seq-mean-token-mean",
        "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    },
)
