"""The `evaluate` node: how `python -m megarl.evaluate` asks and counts; training does not read it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite


@dataclass
class EvaluateConfig:
    num_samples: int = 1
    """Responses per problem."""
    temperature: float | None = None
    """Logits are divided by this; 0 is greedy. null: greedy for one sample, 1 for more."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: from all."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    k: list[int] | None = None
    """The k of pass@k and maj@k. null: 2, 4, 8, ... up to num_samples (for k = 1 both are avg)."""
    num_problems: int | None = None
    """Problems of each set, drawn at random under `seed`; null: every problem."""
    heldout: bool = False
    """Ask the prompts on which training evaluates itself: those of data= that the run's seed holds out, at most
    train.num_eval_prompts of them. false: every problem of the set. A model that a run wrote brings true where the data
    are that run's.
    """
    confidence: float = 0.95
    """Coverage of the confidence intervals, between 0 and 1."""
    paths: dict[str, str] = field(default_factory=dict)
    """Local files (.jsonl, .parquet) or dataset directories that replace sets of the hub, by the name of the set:
    evaluate.paths.gsm8k=test.jsonl.
    """


def get_temperature(config: EvaluateConfig) -> float:
    if config.temperature is not None:
        return config.temperature
    return 0.0 if config.num_samples == 1 else 1.0


def list_ks(config: EvaluateConfig) -> tuple[int, ...]:
    """The k of pass@k and maj@k, ascending."""
    if config.k is not None:
        return tuple(sorted(set(config.k)))
    return tuple(2**i for i in range(1, max(1, config.num_samples).bit_length()))


def check_evaluate(config: EvaluateConfig) -> Iterator[str]:
    """One message per problem: the key, what was found, what would be right."""
    for key in ("num_samples", "num_problems"):
        value = getattr(config, key)
        if value is not None and value < 1:
            yield f"evaluate.{key}: found {value}; it must be 1 or more"
    temperature = get_temperature(config)
    if not (isfinite(temperature) and temperature >= 0):
        yield f"evaluate.temperature: found {temperature}; it must be 0 (greedy) or above"
    elif temperature == 0 and config.num_samples > 1:
        yield (
            f"evaluate.num_samples: found {config.num_samples}; at evaluate.temperature=0 all samples of a problem are"
            " the same response; set 1, or a temperature above 0"
        )
    yield from check_truncation("evaluate", temperature, config.top_p, config.top_k)
    if not 0 < config.confidence < 1:
        yield f"evaluate.confidence: found {config.confidence}; it must be above 0 and below 1"
    bad = [k for k in config.k or () if not 1 <= k <= config.num_samples]
    if bad:
        yield f"evaluate.k: found {bad[0]}; each must be between 1 and evaluate.num_samples ({config.num_samples})"


def check_truncation(node: str, temperature: float, top_p: float, top_k: int) -> Iterator[str]:
    """One message per problem of top_p and top_k under the key `node`."""
    if not 0 < top_p <= 1:
        yield f"{node}.top_p: found {top_p}; it must be above 0 and at most 1"
    if top_k != -1 and top_k < 1:
        yield f"{node}.top_k: found {top_k}; it must be 1 or more, or -1 for all tokens"
    for key, is_set in (("top_p", top_p != 1.0), ("top_k", top_k != -1)):
        if is_set and temperature == 0:
            yield f"{node}.{key}: has no effect on greedy responses; leave it out, or set {node}.temperature"
