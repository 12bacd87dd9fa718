"""Why the log-probs of trainer and rollout engine differ, as far as the metrics tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from megarl.report.critic_pictures import QUARTERS
from megarl.report.history import History

RECENT = 10
ROUNDING = 1e-5
"""Mean gap that float32 on both sides explains whatever the run, up to here"""
FLOAT32 = 1e-3
"""The same where both sides are known to be float32"""
LOW_PRECISION = 0.06
"""Mean gap that bfloat16 on both sides explains, up to here"""
TILT = 2.0
"""Ratio of the gaps of two quarters from which the gap is said to depend on the position"""
DRIFT = 5.0
FEW = 50.0
"""Ratio of the largest gap to the mean from which single tokens are said to stand out"""
AGREEMENT = 0.95
DTYPES = ("policy.dtype", "rollout.dtype")


@dataclass(frozen=True)
class Cause:
    found: str
    """What the metrics show"""
    likely: str
    """What most often causes it, and what tells whether it does here"""
    do: str
    is_serious: bool


def explain_mismatch(history: History, config: Mapping[str, Any]) -> list[Cause]:
    """The causes that fit the last RECENT points, the likeliest first; empty without mismatch metrics.

    config: the run's value of each dotted key, as far as it is known.
    """
    mean = _find_recent(history, "mismatch/logprob_gap_mean")
    if mean is None:
        return []
    stale = _find_recent(history, "rollout/staleness_mean") or 0.0
    rounding = FLOAT32 if _is_float32(config) else ROUNDING
    causes = [_explain_size(mean, stale, rounding, config)]
    quarters = [_find_recent(history, f"mismatch/logprob_gap_at_{quarter}") for quarter in QUARTERS]
    known = [gap for gap in quarters if gap is not None]
    if mean > rounding and len(known) == len(QUARTERS):
        causes += _explain_position(known)
    causes += _explain_rest(history, mean, rounding)
    return causes


def _is_float32(config: Mapping[str, Any]) -> bool:
    """Whether trainer and servers are known to compute in float32, without options of the servers' own."""
    has_others = config.get("policy.fp8") is not None or config.get("rollout.sglang")
    return not has_others and all(config.get(key) == "float32" for key in DTYPES)


def _name_dtypes(config: Mapping[str, Any]) -> str:
    """`policy.dtype=bfloat16 and rollout.dtype=float32`, where they are known and not both float32."""
    known = {key: config[key] for key in DTYPES if key in config}
    named = [f"{key}={value}" for key, value in known.items()]
    is_low = len(named) == len(DTYPES) and set(known.values()) != {"float32"}
    return " and ".join(named) if is_low else "bfloat16 or FP8"


def _explain_size(mean: float, stale: float, rounding: float, config: Mapping[str, Any]) -> Cause:
    found = f"the mean gap is {mean:.2g} nats per token"
    if stale > 0:
        return Cause(
            f"{found}, and a token is {stale:.2g} updates old in the mean",
            "the rollout engine had older weights (rollout.max_staleness), so that the gap has what was learned since"
            " in it",
            "keep a correction in the loss (algo.mismatch.correction=tis or mis); lower rollout.max_staleness where"
            " policy/clip_frac is large, too",
            mean > 10 * LOW_PRECISION,
        )
    if mean <= rounding:
        return Cause(found, "rounding of float32", "nothing", False)
    if mean <= LOW_PRECISION and not _is_float32(config):
        return Cause(
            found,
            f"the engines compute in low precision ({_name_dtypes(config)}), in a different order of sums",
            "nothing as long as it does not grow; algo.mismatch.correction=tis takes it out of the gradient",
            False,
        )
    return Cause(
        found,
        "more than rounding: the two engines do not compute the same model. In the order of how often it is so: options"
        " that change the distribution which only one side applies (rollout.sglang with top_p, penalties or a"
        " quantization), other experts chosen in a mixture of experts (rollout.router_replay=true mends that), a model"
        " family whose layers differ",
        "compare with sync/probe_logprob_gap: where it is small the weights and the layers agree and the sampling"
        " options are to blame; where it is large the model is"
        + ("" if _is_float32(config) else ". rollout.dtype=float32 rules out precision"),
        True,
    )


def _explain_position(gaps: list[float]) -> list[Cause]:
    shown = ", ".join(f"{gap:.2g}" for gap in gaps)
    if gaps[-1] > TILT * gaps[0]:
        return [
            Cause(
                f"the gap grows along the response ({shown} by quarter)",
                "errors add up: a KV cache of lower precision than the trainer's attention, positions encoded"
                " differently in long contexts, or a policy that is less sure of its ends",
                "give rollout.dtype the trainer's type, and leave kv_cache_dtype out of rollout.sglang; where short"
                " responses have the same, it is the lower probabilities of their ends, and harmless",
                gaps[-1] > LOW_PRECISION,
            )
        ]
    if gaps[0] > TILT * gaps[-1]:
        return [
            Cause(
                f"the gap is largest at the start of the response ({shown} by quarter)",
                "the prompt is not the same on both sides, or a cached prefix is of older weights; a first token that"
                " is a near tie does the same, and is harmless",
                "look at the first tokens of a response in the viewer below, coloured by mismatch",
                gaps[0] > LOW_PRECISION,
            )
        ]
    return []


def _explain_rest(history: History, mean: float, rounding: float) -> list[Cause]:
    causes = []
    early = [p.metrics[name].mean for p in history.points if (name := "mismatch/logprob_gap_mean") in p.metrics]
    first = median_high(early[:RECENT])
    if len(early) >= 2 * RECENT and mean > DRIFT * first and mean > rounding:
        causes.append(
            Cause(
                f"it has grown from {first:.2g} to {mean:.2g} during the run",
                "the policy gets sharper or its weights larger, which makes the same rounding weigh more; often it"
                " comes before a collapse of the reward",
                "lower policy.optimizer.lr, or set algo.mismatch.correction=mis, which leaves out the worst tokens",
                True,
            )
        )
    agreement = _find_recent(history, "policy/moe_routing_agreement")
    if agreement is not None and agreement < AGREEMENT:
        causes.append(
            Cause(
                f"the trainer's own routers would choose the same experts for {agreement:.0%} of tokens and layers",
                "a token near the border between two experts goes to another one for a difference in the last digit",
                "nothing: rollout.router_replay=true, which logs this, sends each token through the experts that the"
                " rollout engine chose",
                False,
            )
        )
    largest = _find_recent(history, "mismatch/logprob_gap_max")
    if largest is not None and largest > max(1.0, FEW * mean):
        causes.append(
            Cause(
                f"single tokens stand out: the largest gap is {largest:.2g}",
                "tokens of very low probability, whose log-prob has few digits in low precision",
                "algo.mismatch.correction=mis with algo.mismatch.level=token leaves them out",
                False,
            )
        )
    return causes


def _find_recent(history: History, metric: str) -> float | None:
    values = history.list_recent(metric, RECENT)
    return median_high(values) if values else None
