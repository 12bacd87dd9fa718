"""Problems from files, one JSON object a line or parquet, and from Hugging Face datasets."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.task import (
    FileDataConfig,
    FunctionDataConfig,
    HuggingFaceDataConfig,
    JsonlDataConfig,
    ParquetDataConfig,
    ReasoningGymDataConfig,
)
from megarl.config.user_code import describe_error, load_named
from megarl.files import parse_json
from megarl.task.problems import Located, Problem, ProblemSplits, ask, note_parts, read_problems

Reader = Callable[[Path], Iterator[Located]]


def load_files(config: JsonlDataConfig | ParquetDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.path and, where it is given, data.heldout_path. Raises ConfigError."""
    read = read_jsonl if isinstance(config, JsonlDataConfig) else read_parquet
    train, note = _load_file(config, "data.path", config.path, read)
    if config.heldout_path is None:
        return ProblemSplits(train, None, notes=(note,))
    heldout, other = _load_file(config, "data.heldout_path", config.heldout_path, read)
    return ProblemSplits(train, heldout, notes=note_parts(note, other))


def read_jsonl(path: Path) -> Iterator[Located]:
    """("FILE:LINE", object) for every line that is not blank. Raises ConfigError for what is no object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                # "utf-8-sig" takes the byte-order mark that some editors put first.
                record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError([f"{where}: found bytes that are not UTF-8 ({error}); expected JSON"]) from None
            except ValueError as error:
                start = line[:60].decode("utf-8", "replace").strip()
                raise ConfigError([f"{where}: found {start!r} ({error}); expected one JSON object a line"]) from None
            if not isinstance(record, dict):
                raise ConfigError([f"{where}: found a JSON {type(record).__name__}; expected one JSON object a line"])
            yield where, record


def read_parquet(path: Path) -> Iterator[Located]:
    """("FILE: row N", record), rows numbered from 0. Raises ConfigError for what is no parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    yield f"{path}: row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError([f"{path}: expected a parquet file: {error}"]) from error


def _load_file(config: FileDataConfig, key: str, name: str | None, read: Reader) -> tuple[list[Problem], str]:
    if not name:
        raise ConfigError([f"{key}: found nothing; it must be a file, {key}=FILE"])
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a directory" if path.is_dir() else f"does not exist (from {Path.cwd()})"
        raise ConfigError([f"{key}: {name} {what}; it must be a file"])
    try:
        problems, note = read_problems(read(path), config)
    except OSError as error:
        raise ConfigError([f"{key}: {name} cannot be read: {error}"]) from error
    if not problems:
        raise ConfigError([f"{key}: {name} holds no problems; expected one or more records"])
    return problems, note


def load_dataset(config: HuggingFaceDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.split and, where it is given, data.heldout_split. Raises ConfigError."""
    train, note = _load_split(config, "data.split", config.split)
    if config.heldout_split is None:
        return ProblemSplits(train, None, notes=(note,))
    heldout, other = _load_split(config, "data.heldout_split", config.heldout_split)
    return ProblemSplits(train, heldout, notes=note_parts(note, other))


def _load_split(config: HuggingFaceDataConfig, key: str, split: str) -> tuple[list[Problem], str]:
    if not config.path:
        raise ConfigError(["data.path: found nothing; it must be a dataset's name or directory"])
    records = enumerate(open_dataset(config.path, config.subset, split, key))
    located = ((f"{config.path}[{split}]: row {number}", record) for number, record in records)
    problems, note = read_problems(located, config)
    if not problems:
        raise ConfigError([f"{key}: {split!r} of {config.path} holds no problems"])
    return problems, note


def open_dataset(path: str, subset: str | None, split: str, key: str) -> Any:
    """One split as a datasets.Dataset. Code inside a dataset is never run. Raises ConfigError."""
    import datasets

    directory = Path(path).expanduser()
    local = directory.is_dir()
    try:
        if (directory / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(directory))
            if split not in found:
                raise ConfigError([f"{key}: found {split!r}; {path} has {', '.join(found)}"])
            return found[split]
        if (directory / "state.json").is_file():
            found = datasets.load_from_disk(str(directory))
            if found.split is not None and str(found.split) != split:
                raise ConfigError([f"{key}: found {split!r}; {path} holds only {str(found.split)!r}"])
            return found
        return datasets.load_dataset(str(directory) if local else path, name=subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the network's
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if local or isinstance(error, ValueError):
            reason = f"cannot read {split!r} (data.subset {subset})"
        else:
            reason = (
                "no directory here, not in the local cache, and the hub was not reached or does not have it;"
                " offline, give a local directory, or a file with data=jsonl or data=parquet"
            )
        raise ConfigError([f"data.path: {path}: {reason}: {detail}"]) from error


def load_made(config: FunctionDataConfig, seed: int) -> ProblemSplits:
    """What the function makes: problems or records as in a file, held-out ones apart or not.

    Raises ConfigError for a function that cannot be found or called so, and with what it raises.
    """
    path, options = config.path, config.options
    make = load_named("data.path", path)
    if not callable(make):
        raise ConfigError([f"data.path: found {path!r}, a {type(make).__name__}; a function was expected"])
    parameters = inspect.signature(make).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        for name in options:
            if name not in parameters:
                nearest = find_nearest_key(name, parameters)
                hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(list(parameters)[2:])}"
                raise ConfigError([f"data.options.{name}: no such parameter of {path}; {hint}"])
    try:
        found = make(seed, config.num_heldout, **options)
    except ConfigError:
        raise
    except Exception as error:  # The user's own code.
        raise ConfigError([f"data.path: {path} raised {describe_error(error, path)}"]) from error
    if isinstance(found, ProblemSplits):
        return found
    train, heldout = found if isinstance(found, tuple) else (found, None)
    problems, note = _read_made(path, train, "training")
    if heldout is None:
        return ProblemSplits(problems, None, notes=(note,))
    others, other = _read_made(path, heldout, "held-out")
    return ProblemSplits(problems, others, notes=note_parts(note, other))


def _read_made(path: str, records: Any, side: str) -> tuple[list[Problem], str]:
    located = [(f"{path}: {side} record {number}", each) for number, each in enumerate(records)]
    for where, record in located:
        if not isinstance(record, Mapping):
            raise ConfigError([f"{where}: found {record!r}; expected a dict with question and answer"])
    problems, note = read_problems(located, FileDataConfig())
    if not problems:
        raise ConfigError([f"data.path: {path} made no {side} problems"])
    return problems, note


TRIES_PER_PROBLEM = 10
"""Problems generated at most for each one wanted: small tasks repeat themselves."""
HELDOUT_SEED_OFFSET = 1_000_000_000
"""The package seeds problem i with seed + i; this keeps the ranges of the two sides apart."""


def load_reasoning_gym(config: ReasoningGymDataConfig, seed: int) -> ProblemSplits:
    """`size` and `num_heldout` problems of different questions.

    metadata["reasoning_gym"] is JSON of {"task": name, "entry": problem, "config": data.options}, for the scorer.
    Raises ConfigError.
    """
    num_heldout = 256 if config.num_heldout is None else config.num_heldout
    seen: set[str] = set()
    first_seed = seed * 1_000_003 % HELDOUT_SEED_OFFSET
    heldout = _generate(config, num_heldout, "num_heldout", first_seed + HELDOUT_SEED_OFFSET, seen)
    return ProblemSplits(_generate(config, config.size, "size", first_seed, seen), heldout)


def _generate(config: ReasoningGymDataConfig, number: int, key: str, seed: int, seen: set[str]) -> list[Problem]:
    """`number` problems of questions that are not in `seen`, which grows by them."""
    if number < 1:
        raise ConfigError([f"data.{key}: found {number}; it must be 1 or more"])
    task, tries = config.task, number * TRIES_PER_PROBLEM
    dataset = create_dataset(task, seed, tries, config.options)
    problems: list[Problem] = []
    for i in range(tries):
        entry = dataset[i]
        problem = to_problem(task, entry, config.options)
        if problem.question_key in seen:
            continue
        seen.add(problem.question_key)
        problems.append(problem)
        if len(problems) == 1:
            check_scorer(task, entry, dataset)
        if len(problems) == number:
            return problems
    raise ConfigError(
        [
            f"data.{key}: found {number}; {tries} tries of reasoning-gym's {task} with these data.options"
            f" gave only {len(problems)} new questions; that many are possible"
        ]
    )


def create_dataset(task: str, seed: int, size: int, options: dict[str, Any]) -> Any:
    """reasoning-gym's dataset. Raises ConfigError for an unknown task or option and for a refused value."""
    from reasoning_gym import factory  # takes a second, which other sources need not wait

    # "composite" mixes other datasets, and its entries do not say how to score them alone.
    known = sorted(name for name in factory.DATASETS if name != "composite")
    if task not in known:
        nearest = find_nearest_key(task, known)
        hint = f"did you mean {nearest}?" if nearest else f"reasoning-gym has {', '.join(known)}"
        raise ConfigError([f"data.task: found {task!r}; {hint}"])
    fields = {f.name for f in dataclasses.fields(factory.DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            nearest = find_nearest_key(name, fields)
            hint = f"did you mean {nearest}?" if nearest else f"{task} has {', '.join(sorted(fields))}"
            raise ConfigError([f"data.options.{name}: no such option of {task}; {hint}"])
    try:
        return factory.create_dataset(task, seed=seed, size=size, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError([f"data.options: {task} refuses {options}: {error}"]) from error


def to_problem(task: str, entry: dict[str, Any], options: dict[str, Any]) -> Problem:
    """One of reasoning-gym's entries. The answer is "" for tasks that have only a scorer."""
    answer = entry["answer"]
    metadata = {"reasoning_gym": json.dumps({"task": task, "entry": entry, "config": options}, default=str)}
    return ask(entry["question"], "" if answer is None else str(answer), metadata)


def check_scorer(task: str, entry: dict[str, Any], dataset: Any) -> None:
    """Raises ConfigError where the task's own answer loses its score on the way through JSON."""
    if entry["answer"] is None:
        return
    stored = json.loads(json.dumps(entry, default=str))
    try:
        scores = [dataset.score_answer(entry["answer"], e) for e in (entry, stored)]
    except Exception as error:  # the scorers are other people's and raise anything
        scores, reason = [1.0, 0.0], f": {type(error).__name__}: {error}"
    else:
        reason = ""
    if scores[1] < scores[0]:
        raise ConfigError([f"data.task: {task} cannot be scored from stored problems{reason}; choose another"])
