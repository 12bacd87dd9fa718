"""What tools/bench/claims/predictions.yaml says: of each claim the task, the arms and the predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[1] / "claims" / "predictions.yaml"


@dataclass(frozen=True)
class Arm:
    """One variant, trained once for each seed."""

    keys: tuple[str, ...]
    """Configuration of the run, after that of the claim"""
    task: str
    frozen: bool = False
    """Every iteration learns from the responses of the first one"""
    keeps_old_logprobs: bool = False
    """With `frozen`: ratios are to the policy that sampled, not to the one at the iteration's start"""


@dataclass(frozen=True)
class Prediction:
    """A number of one arm against that of another, seed by seed."""

    text: str
    number: str
    """Name of a measure of `verdicts.MEASURES`"""
    high: str
    """The arm that is predicted to have the higher number"""
    low: str
    """The arm that it is compared with; or a number"""
    margin: float
    """The least difference, high - low, that counts"""
    expected: str
    """holds, does not hold or cannot tell: what we think will come out"""
    why: str
    decides: bool = True
    """Whether the claim's verdict depends on it"""


@dataclass(frozen=True)
class Claim:
    name: str
    title: str
    source: str
    task: str
    """What is to be done, in words"""
    loop: str
    """in_process, or real"""
    cross_checked: str | None
    """The arm that is also run with the real loop, once; None with loop=real"""
    seeds: tuple[int, ...]
    deadline_s: float
    """Of one run"""
    arms: Mapping[str, Arm]
    predictions: tuple[Prediction, ...]


def load_claims(path: Path = FILE) -> dict[str, Claim]:
    """All claims, by name. Raises ValueError naming the claim for a key or a name that there is not."""
    return {name: _read_claim(name, node) for name, node in yaml.safe_load(path.read_text()).items()}


def _read_claim(name: str, node: Mapping[str, Any]) -> Claim:
    known = {field.name for field in fields(Claim)} - {"name"} | {"keys", "task_name", "shared"}
    if unknown := set(node) - known:
        raise ValueError(f"{name}: found {', '.join(sorted(unknown))}; the keys are {', '.join(sorted(known))}")
    keys = tuple(_flatten(node["keys"]))
    arms = {
        arm: Arm(
            keys + tuple(_flatten(each.get("keys", ()))),
            each.get("task_name", node.get("task_name")),
            each.get("frozen", False),
            each.get("keeps_old_logprobs", False),
        )
        for arm, each in node["arms"].items()
    }
    predictions = tuple(Prediction(**each) for each in node["predictions"])
    for each in predictions:
        for arm in (each.high, each.low):
            if isinstance(arm, str) and arm not in arms:
                raise ValueError(f"{name}: a prediction about {arm}; the arms are {', '.join(arms)}")
    plain: dict[str, Any] = {
        key: node.get(key) for key in ("title", "source", "task", "loop", "cross_checked", "deadline_s")
    }
    return Claim(name=name, seeds=tuple(node["seeds"]), arms=arms, predictions=predictions, **plain)


def _flatten(keys: Any) -> list[str]:
    """Lists may hold lists, which YAML's anchors name."""
    return [keys] if isinstance(keys, str) else [key for each in keys for key in _flatten(each)]
