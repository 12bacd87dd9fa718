"""Responses of an engine without rewards, for tests of what generates them; rollouts of a file."""

from collections.abc import Sequence
from pathlib import Path

from megarl.interfaces import Sampling
from megarl.rollout.collector import Collector
from megarl.rollout.conversation import EpisodeRunner
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.rollout_file import read_rollouts
from megarl.task.scorer import Scorer
from megarl.types import Prompt, Response, Rollout, Score


def build_collector(engine: SGLangEngine, kind: type[Collector] = Collector, **keys) -> Collector:
    """A collector of single turns that are all worth nothing; keys: of `Collector`."""
    length = keys.pop("response_length", None)
    response_length = length or (engine._config.response_length if isinstance(engine, SGLangEngine) else 16)
    scorer = keys.pop("scorer", None) or Scorer(lambda _prompt, _response: Score(0.0, False))
    return kind(engine, scorer, EpisodeRunner(response_length), **{"seed": 1, "temperature": 1.0, **keys})


def generate_groups(
    engine: SGLangEngine,
    prompts: Sequence[Prompt],
    *,
    num_responses: int,
    temperature: float,
    urgent: bool = False,
    key: str | None = None,
    **keys,
) -> list[list[Response]]:
    """`num_responses` responses for each prompt, in order."""
    collector = build_collector(engine, **keys)
    samples = engine.run(collector._collect(prompts, num_responses, key, Sampling(temperature, urgent)))
    rows = range(0, len(samples), num_responses)
    return [[sample.response for sample in samples[row : row + num_responses]] for row in rows]


def load_rollouts(path: Path) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout, _ in read_rollouts(path))
