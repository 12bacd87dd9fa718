"""The further sets of problems that a run is evaluated on, each with a sampling of its own: train.eval_sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.data.evaluation_set import build_evaluation_set
from megarl.interfaces import Truncation
from megarl.toolbox.prompt import ToolPrompt
from megarl.types import FinishReason, Metrics, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: tuple[Prompt, ...]
    num_samples: int
    """Responses to each prompt"""
    temperature: float
    """0 is greedy"""
    truncation: Truncation | None = None
    notes: tuple[str, ...] = ()
    """How the data were read"""


def build_eval_sets(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    tools: ToolPrompt | None,
    vocab_size: int | None = None,
) -> tuple[EvalSet, ...]:
    """Read all sets. vocab_size: rows of the model's embedding.

    Raises ConfigError naming train.eval_sets.NAME for a file that cannot be read.
    """
    sets: list[EvalSet] = []
    for name, each in config.train.eval_sets.items():
        key, notes = f"train.eval_sets.{name}.path", list[str]()
        try:
            tokenized = build_evaluation_set(
                *(config.data, tokenizer, config.seed),
                name=name,
                path=each.path,
                num_problems=each.num_prompts,
                tools=tools,
                key=key,
                vocab_size=vocab_size,
                notes=notes,
            )
        except ConfigError as error:
            problems = [text if text.startswith(key) else f"{key}: {text}" for text in error.problems]
            raise ConfigError(problems) from error
        truncation = Truncation(each.top_p, each.top_k)
        prompts = tuple(prompt for _, prompt in tokenized)
        sets.append(EvalSet(str(name), prompts, each.num_samples, each.temperature, truncation, tuple(notes)))
    return tuple(sets)


def compute_set_metrics(name: str, samples: Sequence[Sample]) -> Metrics:
    """eval/NAME/* of the responses to one set; those without a reward count as wrong."""
    scores, responses = [sample.score for sample in samples], [sample.response for sample in samples]
    return {
        f"eval/{name}/reward_mean": fmean(0.0 if score.failure else score.reward for score in scores),
        f"eval/{name}/correct": fmean(score.correct and not score.failure for score in scores),
        f"eval/{name}/failed_frac": fmean(score.failure is not None for score in scores),
        f"eval/{name}/length_mean": fmean(int(response.generated.sum()) for response in responses),
        f"eval/{name}/truncated_frac": fmean(each.finish_reason is FinishReason.length for each in responses),
    }
