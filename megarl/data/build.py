"""From the `data` group to tokenized prompts, training and held-out."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.config.errors import ConfigError
from megarl.config.schema.data import (
    AdditionDataConfig,
    CalculatorDataConfig,
    DataConfig,
    GuessDataConfig,
    HuggingFaceDataConfig,
    JsonlDataConfig,
    LetterCountDataConfig,
    ParquetDataConfig,
    ReasoningGymDataConfig,
    VerifiersDataConfig,
)
from megarl.data.files import JsonlSource, ParquetSource
from megarl.data.hub import HuggingFaceSource
from megarl.data.problem import Problem, Source
from megarl.data.reasoning import ReasoningGymSource
from megarl.data.render import Renderer
from megarl.data.tasks import AdditionSource, CalculatorSource, GuessSource, LetterCountSource
from megarl.data.verifiers import VerifiersSource
from megarl.toolbox.prompt import ToolPrompt
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_HELDOUT_BY_DEFAULT = 256

SOURCES: Mapping[type[DataConfig], Callable[[Any], Source]] = {
    LetterCountDataConfig: LetterCountSource,
    AdditionDataConfig: AdditionSource,
    CalculatorDataConfig: CalculatorSource,
    GuessDataConfig: GuessSource,
    ReasoningGymDataConfig: ReasoningGymSource,
    JsonlDataConfig: JsonlSource,
    ParquetDataConfig: ParquetSource,
    HuggingFaceDataConfig: HuggingFaceSource,
    VerifiersDataConfig: VerifiersSource,
}
"""The source that each configuration asks for; a new source is a new entry."""

Tokenized = tuple[Problem, Prompt]


@dataclass(frozen=True)
class DataSplits:
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    num_dropped: int
    """Problems left out: longer than data.prompt_length, or for training and held out as well."""
    num_repeated: int = 0
    """Of these, repeats of a held-out question"""


def build_data(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", seed: int, tools: ToolPrompt | None = None
) -> DataSplits:
    """The prompts of a run, the same for the same seed. No question is on both sides, unless the source shares them.

    tools: those that the prompts describe.

    Raises ConfigError for bad keys, unreadable or malformed files, and where no prompt is short enough.
    """
    problems = build_source(config).load(seed)
    renderer = Renderer(config, tokenizer, tools)
    train = tokenize_problems(problems.train, renderer, "training")
    num_too_long = len(problems.train) - len(train)
    if problems.heldout is None:
        num_read = len(problems.train)
        train, heldout = split_heldout(train, config.num_heldout, seed)
    else:
        num_read = len(problems.train) + len(problems.heldout)
        heldout = tokenize_problems(problems.heldout, renderer, "held-out")
        unused = len(heldout)
        num_too_long += len(problems.heldout) - unused
        heldout = choose_heldout(heldout, config.num_heldout, seed)
        num_read -= unused - len(heldout)
        if not problems.shares_questions:
            train = remove_questions(train, heldout)
    num_dropped = num_read - len(train) - len(heldout)
    return DataSplits(
        train=tuple(prompt for _, prompt in train),
        heldout=tuple(prompt for _, prompt in heldout),
        num_dropped=num_dropped,
        num_repeated=num_dropped - num_too_long,
    )


def build_source(config: DataConfig) -> Source:
    """The source of this configuration. Raises ConfigError for the base class, which names none."""
    if type(config) not in SOURCES:
        raise ConfigError([f"data: {type(config).__name__} is not a source; choose one with data=letter_count, ..."])
    return SOURCES[type(config)](config)


def tokenize_problems(problems: Sequence[Problem], renderer: Renderer, side: str) -> list[Tokenized]:
    """Problems of at most data.prompt_length tokens with their prompts, in order.

    Raises ConfigError where none is short enough, or where one has no tokens at all.
    """
    texts = [renderer.render(problem) for problem in problems]
    tokens = renderer.tokenize(texts)
    limit = renderer.config.prompt_length
    for problem, ids in zip(problems, tokens, strict=True):
        if not ids:
            where = problem.metadata.get("location", "data")
            raise ConfigError([f"{where}: the tokenizer makes no tokens of {problem.messages[-1].content!r}"])
    if not any(len(ids) <= limit for ids in tokens):
        found = f"the shortest has {min(map(len, tokens))} tokens" if tokens else "the source has none"
        raise ConfigError([f"data.prompt_length: found {limit}; no {side} prompt is left, {found}"])
    repeats: Counter[str] = Counter()
    kept: list[Tokenized] = []
    for problem, text, ids in zip(problems, texts, tokens, strict=True):
        digest = identify(problem)
        repeats[digest] += 1
        if len(ids) <= limit:
            name = digest if repeats[digest] == 1 else f"{digest}-{repeats[digest]}"
            messages = renderer.build_messages(problem)
            kept.append((problem, Prompt(name, text, ids, problem.answer, problem.metadata, messages, problem.columns)))
    return kept


def identify(problem: Problem) -> str:
    """A stable name: 16 hex digits of the SHA-256 of messages and answer."""
    parts = [part for m in problem.messages for part in (m.role, m.content)]
    return hashlib.sha256("\0".join([*parts, problem.answer]).encode()).hexdigest()[:16]


def split_heldout(
    problems: list[Tokenized], num_heldout: int | None, seed: int
) -> tuple[list[Tokenized], list[Tokenized]]:
    """(training, held-out): a random part, repeats of a question kept on one side.

    Raises ConfigError where `num_heldout` would leave a side empty.
    """
    if num_heldout is None:
        num_heldout = max(1, min(MOST_HELDOUT_BY_DEFAULT, len(problems) // 10))
    keys = list(dict.fromkeys(problem.question_key for problem, _ in problems))
    if not 1 <= num_heldout < len(keys):
        raise ConfigError(
            [
                f"data.num_heldout: found {num_heldout}; there are {len(keys)} different questions to split"
                " into training and held-out, each side needs one or more"
            ]
        )
    random.Random(f"heldout/{seed}").shuffle(keys)
    chosen = set(keys[:num_heldout])
    held: dict[str, Tokenized] = {}
    for item in problems:
        if item[0].question_key in chosen:
            held.setdefault(item[0].question_key, item)
    return [item for item in problems if item[0].question_key not in chosen], list(held.values())


def choose_heldout(problems: list[Tokenized], num_heldout: int | None, seed: int) -> list[Tokenized]:
    """All, or a random `num_heldout` of them in their order. Raises ConfigError for a number under 1."""
    if num_heldout is None or num_heldout >= len(problems):
        return problems
    if num_heldout < 1:
        raise ConfigError([f"data.num_heldout: found {num_heldout}; it must be 1 or more"])
    rows = random.Random(f"heldout/{seed}").sample(range(len(problems)), num_heldout)
    return [problems[row] for row in sorted(rows)]


def remove_questions(train: list[Tokenized], heldout: list[Tokenized]) -> list[Tokenized]:
    """Training problems whose question is not held out. Raises ConfigError where none is left."""
    asked = {problem.question_key for problem, _ in heldout}
    left = [item for item in train if item[0].question_key not in asked]
    if not left:
        raise ConfigError(["data: every training question is held out as well; the two files or splits must differ"])
    return left
