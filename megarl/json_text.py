"""JSON from files that others may have written or damaged: everything that is wrong with it is a ValueError.

And errors of writing that name the file.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError, also for what is nested too deeply to be read."""
    return _parse(text)


def parse_strict_json(text: str | bytes) -> Any:
    """As `parse_json`, and without NaN and infinity, which are not JSON, or a key twice in an object."""
    return _parse(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys)


def load_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError that names the file, and OSError."""
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}; a JSON object was expected") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}; an object was expected")
    return content


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Within the block, an OSError that names no file, as that of a write on a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_state(where: str, state: Any) -> Any:
    """What is kept in a checkpoint of a user's own object, as it is. Raises ValueError, naming `where`, for what JSON
    does not give back as it was."""
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: state_dict() cannot be saved: {error}; it must be JSON") from error
    if not same:
        raise ValueError(
            f"{where}: state_dict() comes back from JSON as another value (a tuple as a list, a key that is a number as"
            " a text); it must be lists, dicts with texts as keys, texts, numbers, true, false and None"
        )
    return state


def _parse(text: str | bytes, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; every metric is a finite number")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the same key twice: {', '.join(repeated)}")
    return record
