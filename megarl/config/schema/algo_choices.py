"""The choices of the `algo` group's keys that are no modules; OmegaConf matches members by name."""

from enum import Enum


class AdvantageStd(Enum):
    """The standard deviation that advantage=group divides by."""

    none = "none"
    """no division"""
    group = "group"
    """that of the group's rewards (GRPO)"""
    batch = "batch"
    """that of the whole batch (LitePPO)"""


class StdOf(Enum):
    """With advantage_std=batch: what the standard deviation is computed from."""

    raw = "raw"
    """the rewards (LitePPO)"""
    centered = "centered"
    """the rewards minus their group's mean (ROLL's div_std_global)"""


class NormScope(Enum):
    none = "none"
    batch = "batch"
    """all responses of the iteration"""
    group = "group"
    """the responses to one prompt"""
    running = "running"
    """all responses of the run so far"""


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


class PositiveLMMean(Enum):
    """What the summed log-likelihood of the positive-example LM loss is divided by."""

    positive_tokens = "positive_tokens"
    """the tokens of correct responses (VAPO, equation 9)"""
    all_tokens = "all_tokens"
    """all tokens with a policy loss"""


class RatioLevel(Enum):
    """What one ratio of two policies is of. sequence_mean is another name of geometric."""

    token = "token"
    sequence = "sequence"
    """the product over the response's tokens"""
    geometric = "geometric"
    """the geometric mean over the response's tokens: normalized by the length"""
    sequence_mean = "geometric"


class MismatchCorrection(Enum):
    none = "none"
    tis = "tis"
    """truncated importance sampling: the ratio, from above bounded by `high`"""
    mis = "mis"
    """masked importance sampling (IcePop): the ratio inside the bounds, 0 outside"""


class SamplingBy(Enum):
    """What must differ within a group that dynamic sampling keeps."""

    correct = "correct"
    """whether a response is correct, as the reward says (DAPO, equation 11), and the rewards too"""
    reward = "reward"
    """the rewards alone: also groups that are all wrong, where a part of the reward differs"""


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
