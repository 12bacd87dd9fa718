"""The `reward` group: what a response is compared with, one schema per kind of verifier."""

from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class RewardConfig:
    """How responses are scored. Each kind of reward has different keys."""

    wrong: float = field(default=0.0, kw_only=True)
    """Reward of a wrong answer; a right one has 1, and a score s between them wrong + (1 - wrong) s. What is learned
    from has this scale; metrics, thresholds, evaluation and saved rollouts have the score. Below 1; -1 in DAPO."""


@dataclass
class ExactRewardConfig(RewardConfig):
    """The response is the answer, up to case, spaces and a full stop at the end."""


@dataclass
class LetterCountRewardConfig(RewardConfig):
    """The tiny task: "b...=" asks for about 12 letters b, four for each dot."""

    tolerance: float = 1.25
    """Lengths within this factor of the requested one get the full length score of 1."""
    falloff: float = 4.0
    """A length that is off by a further factor of this gets 0; in between the score is linear in the logarithm."""


@dataclass
class AdditionRewardConfig(RewardConfig):
    """The response is the number and nothing else."""


class StatedAnswer(Enum):
    """What states the answer, after the end of thinking."""

    boxed = "boxed"
    """\\boxed{...} only; for prompts that ask for a box"""
    final = "final"
    """a box or an explicit final statement ("The answer is 72", "Answer: 72", "#### 72", <answer>72</answer>), or a
    response that is nothing but the answer"""
    any = "any"
    """where there is none of these, also the last number or formula of the last sentence; for base models that are not
    told how to end, and counts sentences that happen to end in the right number"""


@dataclass
class MathRewardConfig(RewardConfig):
    """Mathematical equality of the stated answer and the expected one, read by math-verify's parser."""

    answer: StatedAnswer = StatedAnswer.final
    """What states the answer of a response: a box, an explicit final statement too, or also the last value."""
    timeout_s: float = 5.0
    """Time limit in seconds of scoring one response; a response that takes longer counts as wrong."""


@dataclass
class ReasoningGymRewardConfig(RewardConfig):
    """The task's own scorer from reasoning-gym."""

    timeout_s: float = 5.0
    """Time limit in seconds of scoring one response; a response that takes longer counts as wrong."""
    correct_at: float = 1.0
    """The lowest score that counts as correct; scorers give less than 1 for partly right answers."""


@dataclass
class EnvironmentRewardConfig(RewardConfig):
    """The rewards that the environment gave to the turns, and nothing else."""

    correct_at: float = 1.0
    """The least sum of the turns' rewards that counts as correct."""


@dataclass
class FunctionRewardConfig(RewardConfig):
    """Your own function from (Prompt, Response) to Score."""

    path: str = MISSING
    """The function, as package.module:callable."""


SCHEMAS: dict[str, type[RewardConfig]] = {
    "exact": ExactRewardConfig,
    "letter_count": LetterCountRewardConfig,
    "addition": AdditionRewardConfig,
    "math": MathRewardConfig,
    "reasoning_gym": ReasoningGymRewardConfig,
    "environment": EnvironmentRewardConfig,
    "function": FunctionRewardConfig,
}


def register(store: ConfigStore) -> None:
    """Put each kind into Hydra's ConfigStore as reward/<kind>_schema; calling it again changes nothing."""
    for kind, schema in SCHEMAS.items():
        store.store(group="reward", name=f"{kind}_schema", node=schema)
