"""A whole set of problems to evaluate on: the held-out part where the source has one, else all of it."""

import random
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megarl.config.errors import ConfigError
from megarl.config.schema.data import (
    DataConfig,
    FileDataConfig,
    HuggingFaceDataConfig,
    JsonlDataConfig,
    ParquetDataConfig,
)
from megarl.data.build import Tokenized, build_source, describe_prompts, split_problems, tokenize_problems
from megarl.data.render import Renderer
from megarl.toolbox.prompt import ToolPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Each = TypeVar("Each")


def build_evaluation_set(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    *,
    name: str,
    path: str | None = None,
    num_problems: int | None = None,
    tools: ToolPrompt | None = None,
    key: str | None = None,
    vocab_size: int | None = None,
    notes: list[str] | None = None,
) -> tuple[Tokenized, ...]:
    """The problems of data=`name`, in their order: every one, or `num_problems` drawn at random under `seed`.

    path: a file or directory in place of the one the configuration names. tools: those that the prompts describe. key:
    of the path; None: evaluate.paths.NAME. vocab_size: rows of the model's embedding. notes: grows by how the set was
    read. Raises ConfigError that names the key, also for a prompt longer than
    data.prompt_length: a set without its long problems is another set.
    """
    key = key or f"evaluate.paths.{name}"
    try:
        chosen = _whole(config if path is None else use_local_path(config, path, key))
        found = build_source(chosen).load(seed)
    except ConfigError as error:
        hint = ""
        if isinstance(config, HuggingFaceDataConfig) and path is None:
            hint = f"; {key}=FILE reads a local .jsonl or .parquet file, or a dataset's directory"
        raise ConfigError([f"data={name}: {problem}{hint}" for problem in error.problems]) from error
    problems = _draw(found.train if found.heldout is None else found.heldout, num_problems, seed)
    unlimited = replace(chosen, prompt_length=sys.maxsize)
    renderer, notes = Renderer(unlimited, tokenizer, tools, vocab_size), [] if notes is None else notes
    notes += found.notes
    tokenized = tuple(tokenize_problems(problems, renderer, name, notes))
    notes.append(describe_prompts(renderer, [prompt for _, prompt in tokenized]))
    longest = max(len(prompt.token_ids) for _, prompt in tokenized)
    if longest > config.prompt_length:
        raise ConfigError(
            [
                f"data.prompt_length: found {config.prompt_length}; the longest prompt of data={name} has {longest}"
                " tokens, and an evaluation leaves no problem out"
            ]
        )
    return tokenized


def build_heldout(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    *,
    most: int,
    num_problems: int | None = None,
    tools: ToolPrompt | None = None,
    vocab_size: int | None = None,
    notes: list[str] | None = None,
) -> tuple[Tokenized, ...]:
    """The prompts of these data on which a run evaluates itself, in the run's order; of them `num_problems` at random.

    most: train.num_eval_prompts. notes: gets a text for each thing to be said of how they are read. Raises ConfigError.
    """
    splits, problems = split_problems(config, tokenizer, seed, tools, vocab_size)
    if notes is not None:
        notes += splits.notes
    heldout = list(zip(problems.heldout or (), splits.heldout, strict=True))
    return tuple(_draw(heldout[:most], num_problems, seed))


def find_training_questions(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", seed: int, tools: ToolPrompt | None = None
) -> frozenset[str]:
    """Of the prompts that a run with these data trains on: `Problem.question_key`.

    None of data whose held-out part asks the same by intention. Raises ConfigError where they cannot be read.
    """
    _, kept = split_problems(config, tokenizer, seed, tools)
    return frozenset() if kept.shares_questions else frozenset(problem.question_key for problem in kept.train)


def use_local_path(config: DataConfig, path: str, key: str) -> DataConfig:
    """The same set out of a .jsonl or .parquet file or a dataset's directory. Raises ConfigError naming `key`."""
    if not isinstance(config, FileDataConfig):
        if key.startswith("evaluate."):
            raise ConfigError([f"{key}: found {path}; this set is generated, and reads no file"])
        shared = {field.name: getattr(config, field.name) for field in fields(DataConfig)}
        config = FileDataConfig(**shared)
    place = Path(path).expanduser()
    if place.is_dir():
        known = {field.name: getattr(config, field.name) for field in fields(config)}
        names = {field.name for field in fields(HuggingFaceDataConfig)}
        return HuggingFaceDataConfig(**{k: v for k, v in known.items() if k in names} | {"path": path})
    kinds = {".jsonl": JsonlDataConfig, ".json": JsonlDataConfig, ".parquet": ParquetDataConfig}
    if not place.is_file():
        raise ConfigError([f"{key}: {path} does not exist (from {Path.cwd()})"])
    if place.suffix not in kinds:
        raise ConfigError([f"{key}: found {path}; it must be a .jsonl or .parquet file, or a dataset's directory"])
    common = {field.name: getattr(config, field.name) for field in fields(FileDataConfig)}
    return kinds[place.suffix](**common | {"path": path})


def _whole(config: DataConfig) -> DataConfig:
    """The held-out part as the only one, so that the training part need not be read."""
    if isinstance(config, HuggingFaceDataConfig) and config.heldout_split is not None:
        return replace(config, split=config.heldout_split, heldout_split=None)
    if isinstance(config, JsonlDataConfig | ParquetDataConfig) and config.heldout_path is not None:
        return replace(config, path=config.heldout_path, heldout_path=None)
    return config


def _draw(problems: Sequence[Each], number: int | None, seed: int) -> list[Each]:
    if number is None or number >= len(problems):
        return list(problems)
    rows = random.Random(f"evaluate/{seed}").sample(range(len(problems)), number)
    return [problems[row] for row in sorted(rows)]
