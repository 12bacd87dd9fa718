"""Problems from files: one JSON object a line, or parquet."""

from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.schema.data import FileDataConfig, JsonlDataConfig, ParquetDataConfig
from megarl.data.problem import Problem, ProblemSplits, note_parts
from megarl.data.records import Located, read_problems
from megarl.json_text import parse_json

Reader = Callable[[Path], Iterator[Located]]


class JsonlSource:
    def __init__(self, config: JsonlDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """The problems of data.path and, where it is given, data.heldout_path. Raises ConfigError."""
        return _load_both(self.config, self.config.heldout_path, read_jsonl)


class ParquetSource:
    def __init__(self, config: ParquetDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """The problems of data.path and, where it is given, data.heldout_path. Raises ConfigError."""
        return _load_both(self.config, self.config.heldout_path, read_parquet)


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


def _load_both(config: FileDataConfig, heldout_path: str | None, read: Reader) -> ProblemSplits:
    train, note = _load_file(config, "data.path", config.path, read)
    if heldout_path is None:
        return ProblemSplits(train, None, notes=(note,))
    heldout, other = _load_file(config, "data.heldout_path", heldout_path, read)
    return ProblemSplits(train, heldout, notes=note_parts(note, other))


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
