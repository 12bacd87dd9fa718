"""manifest.json: the files of a checkpoint directory with their sizes and SHA-256; it is written last.

{"format": 1, "about": {...}, "files": {"policy/hf/config.json": {"bytes": 512, "sha256": "..."}, ...}}

A subdirectory with a manifest of its own covers its files; the manifest above lists only that manifest. Together they
cover all files.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.json_text import naming_file, parse_json

NAME = "manifest.json"
FORMAT = 1
NFS_LEFT = ".nfs"
"""Beginning of the names of files that NFS keeps as long as a process has them open"""
NUM_THREADS = 8
"""Threads that hash in parallel; hashing releases Python's lock"""


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or damaged; the message names the files."""


class FormatError(CheckpointError):
    """The checkpoint has the format of another release."""


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str
    """64 hex digits"""


@dataclass(frozen=True)
class Manifest:
    about: Mapping[str, Any]
    """The kind of checkpoint, its model and layout"""
    files: Mapping[str, FileRecord]
    """The record of each file, by path below the directory, with /"""


def write_manifest(directory: Path, about: Mapping[str, Any]) -> None:
    """Hash every file of `directory` and write its manifest; all are synced to disk on return."""
    paths = sorted(_list_files(directory))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        records = list(pool.map(_record_on_disk, [directory / path for path in paths]))
    files = {path: asdict(record) for path, record in zip(paths, records, strict=True)}
    write_atomically(directory / NAME, json.dumps({"format": FORMAT, "about": dict(about), "files": files}, indent=1))


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest. Raises CheckpointError where there is none, or where it is not valid."""
    path = directory / NAME
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise FormatError(f"{path}: format {content['format']!r}; this release reads format {FORMAT}")
        files = {name: FileRecord(int(x["bytes"]), str(x["sha256"])) for name, x in content["files"].items()}
        return Manifest(dict(content["about"]), files)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no {NAME}: it is not a checkpoint, or was not completed") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a manifest: {error!r}") from None


def verify_files(directory: Path) -> None:
    """Check every file of the manifest, also in subdirectories with their own.

    A file that is not listed (.DS_Store; .nfs..., which NFS leaves for open files) is named in a RuntimeWarning and
    left alone. Raises CheckpointError naming the files that are missing or changed, up to five of each.
    """
    manifest = load_manifest(directory)
    found = set(_list_files(directory))
    problems = _name("missing", manifest.files.keys() - found)
    present = sorted(manifest.files.keys() & found)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        same = list(pool.map(lambda name: _matches(directory / name, manifest.files[name]), present))
        problems += _name("damaged", {name for name, fine in zip(present, same, strict=True) if fine is False})
        problems += _name("unreadable", {name for name, fine in zip(present, same, strict=True) if fine is None})
    if problems:
        raise CheckpointError(f"{directory}: {'; '.join(problems)}")
    for unlisted in _name("not in the manifest, left alone", found - manifest.files.keys()):
        warnings.warn(f"{directory}: {unlisted}", RuntimeWarning, stacklevel=2)
    for name in present:
        if Path(name).name == NAME:
            verify_files((directory / name).parent)


def name_some(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace the file's text, given as a whole or in pieces, atomically; it is synced to disk on return."""
    partial = path.with_name(f".{path.name}.partial")
    with naming_file(path), partial.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync the directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list_files(directory: Path) -> Iterator[str]:
    """The paths of the files that the manifest of `directory` lists."""
    for entry in sorted(directory.iterdir()):
        if entry.is_dir():
            if (entry / NAME).is_file():
                yield f"{entry.name}/{NAME}"
            else:
                yield from (f"{entry.name}/{name}" for name in _list_files(entry))
        elif entry.name != NAME and not entry.name.startswith(NFS_LEFT):
            yield entry.name


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(os.fstat(file.fileno()).st_size, digest)


def _record_on_disk(path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _record(path)


def _matches(path: Path, record: FileRecord) -> bool | None:
    """Whether the file matches its record; None: it cannot be read."""
    try:
        # The size first: it tells a truncated file without reading it.
        return path.stat().st_size == record.bytes and _record(path) == record
    except OSError:
        return None


def _name(problem: str, names: set[str]) -> list[str]:
    return [f"{problem}: {name_some(sorted(names))}"] if names else []
