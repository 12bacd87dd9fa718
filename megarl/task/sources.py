"""Problems from files, Hugging Face datasets and functions, the user's own or those of examples/."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.task import (
    FileDataConfig,
    FunctionDataConfig,
    HuggingFaceDataConfig,
    JsonlDataConfig,
    ParquetDataConfig,
)
from megarl.config.user_code import describe_error
from megarl.files import parse_json
from megarl.task.problems import Located, Problem, ProblemSplits, read_problems
from megarl.task.process import load_callable

Read = tuple[list[Problem], str]
"""Problems, and a note on how they were read"""


def load_files(config: JsonlDataConfig | ParquetDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.path and, where it is given, data.heldout_path. Raises ConfigError."""
    read = read_jsonl if isinstance(config, JsonlDataConfig) else read_parquet

    def load(key: str, name: str | None) -> Read:
        if not name:
            raise ConfigError([f"{key}: found nothing; it must be a file, {key}=FILE"])
        path = Path(name).expanduser()
        if not path.is_file():
            what = "is a directory" if path.is_dir() else f"does not exist (from {Path.cwd()})"
            raise ConfigError([f"{key}: {name} {what}; it must be a file"])
        try:
            return read_problems(read(path), config, f"{key}: {name} holds no problems; expected one or more records")
        except OSError as error:
            raise ConfigError([f"{key}: {name} cannot be read: {error}"]) from error

    train, name = load("data.path", config.path), config.heldout_path
    return _join(train, None if name is None else load("data.heldout_path", name))


def _join(train: Read, heldout: Read | None) -> ProblemSplits:
    """Both parts, each with its note; one note where they are alike."""
    (problems, note), (others, other) = train, heldout or (None, train[1])
    notes = (note,) if note == other else (f"for training {note}", f"held out {other}")
    return ProblemSplits(problems, others, notes=notes)


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
            rows = (record for batch in file.iter_batches(batch_size=1024) for record in batch.to_pylist())
            yield from ((f"{path}: row {number}", record) for number, record in enumerate(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError([f"{path}: expected a parquet file: {error}"]) from error


def load_dataset(config: HuggingFaceDataConfig, seed: int) -> ProblemSplits:
    """The problems of data.split and, where it is given, data.heldout_split. Raises ConfigError."""
    if not config.path:
        raise ConfigError(["data.path: found nothing; it must be a dataset's name or directory"])

    def load(key: str, split: str) -> Read:
        records = enumerate(open_dataset(str(config.path), config.subset, split, key))
        located = ((f"{config.path}[{split}]: row {number}", record) for number, record in records)
        return read_problems(located, config, f"{key}: {split!r} of {config.path} holds no problems")

    train, name = load("data.split", config.split), config.heldout_split
    return _join(train, None if name is None else load("data.heldout_split", name))


def open_dataset(path: str, subset: str | None, split: str, key: str) -> Any:
    """One split as a datasets.Dataset. Code inside a dataset is never run. Raises ConfigError."""
    import datasets

    directory = Path(path).expanduser()
    local = directory.is_dir()
    try:
        if any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(directory))
            parts = found if isinstance(found, datasets.DatasetDict) else {str(found.split or split): found}
            if split not in parts:
                raise ConfigError([f"{key}: found {split!r}; {path} has {', '.join(parts)}"])
            return parts[split]
        return datasets.load_dataset(str(directory) if local else path, name=subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises its own, the hub's and the network's
        reason = f"cannot read {split!r} (data.subset {subset})"
        if not local and not isinstance(error, ValueError):
            reason = "no directory here, not in the local cache, and the hub was not reached or does not have it;"
            reason += " offline, give a local directory, or a file with data=jsonl or data=parquet"
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError([f"data.path: {path}: {reason}: {detail}"]) from error


def load_made(config: FunctionDataConfig, seed: int) -> ProblemSplits:
    """What the function makes: problems or records as in a file, held-out ones apart or not. Raises ConfigError for a
    function that cannot be found or called so, and with what it raises."""
    path = config.path
    make = load_callable(path, "data.path")
    parameters = inspect.signature(make).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        check_names("data.options.", config.options, list(parameters), f"such parameter of {path}")
    try:
        found = make(seed, config.num_heldout, **config.options)
    except ConfigError:
        raise
    except Exception as error:  # The user's own code.
        raise ConfigError([f"data.path: {path} raised {describe_error(error, path)}"]) from error
    if isinstance(found, ProblemSplits):
        return found

    def read(records: Any, side: str) -> Read:
        located = [(f"{path}: {side} record {number}", each) for number, each in enumerate(records)]
        for where, record in located:
            if not isinstance(record, Mapping):
                raise ConfigError([f"{where}: found {record!r}; expected a dict with question and answer"])
        return read_problems(located, FileDataConfig(), f"data.path: {path} made no {side} problems")

    train, heldout = found if isinstance(found, tuple) else (found, None)
    return _join(read(train, "training"), None if heldout is None else read(heldout, "held-out"))


def check_names(key: str, names: Iterable[str], known: list[str], what: str) -> None:
    for name in names:
        if name not in known:
            nearest = find_nearest_key(name, known)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(known)}"
            raise ConfigError([f"{key}{name}: no {what}; {hint}"])
