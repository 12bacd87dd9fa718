"""Files that a run needs again: JSON that others may have damaged, atomic writes, manifests, lock, checkpoints."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Raises ValueError, also for what is nested too deeply to be read. options: of json.loads."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_strict_json(text: str | bytes) -> Any:
    """As `parse_json`, and without NaN and infinity, which are not JSON."""

    def refuse_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON; every metric is a finite number")

    return parse_json(text, parse_constant=refuse_constant)


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
        raise ValueError(f"{where}: state_dict() comes back from JSON as another value, a tuple as a list for example")
    return state


def name_some(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file's content atomically; it is synced to disk on return."""
    partial = path.with_name(f".{path.name}.partial")
    with naming_file(path), partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_directory(path.parent)


def write_private(path: Path, text: str) -> Path:
    """Write a new file that this user alone can read; returns its path."""
    path.touch(0o600)
    path.write_text(text)
    return path


def read_tail(file: Path, num_lines: int = 25) -> str:
    """The last lines of a text file; where it does not exist, a sentence that says so."""
    if not file.is_file():
        return f"({file} does not exist)"
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - 65536))
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


def _sync_directory(directory: Path) -> None:
    """Sync the directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# manifest.json, which is written last, has the files of a checkpoint directory with their sizes and SHA-256:
#
# {"format": 1, "about": {...}, "files": {"policy/hf/config.json": {"bytes": 512, "sha256": "..."}, ...}}
#
# A subdirectory with a manifest of its own covers its files; the manifest above lists only that manifest.

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
NFS_LEFT = ".nfs"
"""Beginning of the names of files that NFS keeps as long as a process has them open"""
NUM_THREADS = 8
"""Threads that hash in parallel; hashing releases Python's lock"""


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or damaged; the message names the files."""


@dataclass(frozen=True)
class Manifest:
    about: Mapping[str, Any]
    """The kind of checkpoint, its model and layout"""
    files: Mapping[str, tuple[int, str]]
    """Bytes and SHA-256 of each file, by path below the directory, with /"""


def write_manifest(directory: Path, about: Mapping[str, Any]) -> None:
    """Hash every file of `directory` and write its manifest; all are synced to disk on return."""
    paths = sorted(_list_files(directory))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        records = list(pool.map(lambda path: _record(directory / path, os.fsync), paths))
    files = {path: {"bytes": size, "sha256": digest} for path, (size, digest) in zip(paths, records, strict=True)}
    content = {"format": MANIFEST_FORMAT, "about": dict(about), "files": files}
    write_atomically(directory / MANIFEST, json.dumps(content, indent=1))


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest. Raises CheckpointError where there is none, or where it is not valid."""
    path = directory / MANIFEST
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {content['format']!r}; this release reads format {MANIFEST_FORMAT}")
        files = {name: (int(record["bytes"]), str(record["sha256"])) for name, record in content["files"].items()}
        return Manifest(dict(content["about"]), files)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no {MANIFEST}: it is not a checkpoint, or was not completed") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a manifest: {error!r}") from None


def verify_files(directory: Path) -> None:
    """Check every file of the manifest, also in subdirectories with their own.

    A file that is not listed is named in a RuntimeWarning and left alone. Raises CheckpointError naming the files that
    are missing or changed, up to five of each.
    """
    files, found = load_manifest(directory).files, set(_list_files(directory))

    def check(name: str) -> str:
        try:
            # The size first: it tells a truncated file without reading it.
            path, record = directory / name, files[name]
            return "" if path.stat().st_size == record[0] and _record(path) == record else "damaged"
        except OSError:
            return "unreadable" if name in found else "missing"

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        states = dict(zip(files, pool.map(check, files), strict=True))
    wrong = {what: sorted(name for name in files if states[name] == what) for what in set(states.values()) - {""}}
    if wrong:
        problems = "; ".join(f"{what}: {name_some(names)}" for what, names in sorted(wrong.items(), reverse=True))
        raise CheckpointError(f"{directory}: {problems}")
    if unlisted := sorted(found - files.keys()):
        text = f"{directory}: not in the manifest, left alone: {name_some(unlisted)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    for name in files:
        if Path(name).name == MANIFEST:
            verify_files((directory / name).parent)


def _list_files(directory: Path) -> Iterator[str]:
    """The paths of the files that the manifest of `directory` lists."""
    for entry in sorted(directory.iterdir()):
        if entry.is_dir():
            below = [MANIFEST] if (entry / MANIFEST).is_file() else _list_files(entry)
            yield from (f"{entry.name}/{name}" for name in below)
        elif entry.name != MANIFEST and not entry.name.startswith(NFS_LEFT):
            yield entry.name


def _record(path: Path, sync: Callable[[int], None] = lambda _descriptor: None) -> tuple[int, str]:
    """(bytes, SHA-256)"""
    with path.open("rb") as file:
        sync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


# One process at a time may write to a run directory.

LOCK = ".lock"
LOCK_POLL_S = 1.0


@contextlib.contextmanager
def locking(
    directory: Path, patience_s: float = 0.0, say: Callable[[str], None] = lambda _text: None
) -> Iterator[None]:
    """Hold the directory's lock, which is freed when this process ends for whatever reason.

    patience_s: how long to wait for another process that holds it. say: called once with a message when waiting.
    Raises CheckpointError naming the process that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end, is_said = time.monotonic() + patience_s, False
    with (directory / LOCK).open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
            except OSError as error:
                raise CheckpointError(
                    f"{directory}: its file system has no locks ({error}); Lustre: -o flock"
                ) from error
            if time.monotonic() >= end:
                waited = f", even after {patience_s:g} s" if patience_s else ""
                raise CheckpointError(f"{directory}: {holder} uses it{waited}; only one process at a time may be")
            if not is_said:
                why = "a network file system keeps the lock of a lost node for a while"
                say(f"waiting up to {patience_s:g} s for the lock of {directory}, which {holder} holds: {why}")
            is_said = True
            time.sleep(min(LOCK_POLL_S, patience_s))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


# RUN_DIR/checkpoints: iteration-000020/, iteration-000040/, ... and `latest`, which names the newest complete one.
#
# A checkpoint is built under a name that begins with a dot and renamed once its manifest is on disk, so that a folder
# without the dot is complete. `latest` is replaced after that.

CHECKPOINTS = "checkpoints"
LATEST = "latest"
RECORD = ".newest_checkpoint"
"""In the run directory: the name of the newest checkpoint, by which a run whose checkpoints were removed is told from
one that has saved none"""
SCORE = "score.json"
RUN_FILE = "run.json"
"""What a run was started with and how it goes; in the run directory and in every checkpoint"""
_PATTERN = re.compile(r"iteration-(\d{6,}|-\d{5,})")
"""Value pretraining's are iteration--00003, iteration--00002, ..."""


class Folder:
    def __init__(self, path: Path, *, keep_last: int, keep_best: int = 0):
        """path: created with the first checkpoint. keep_last, keep_best: how many are kept (see CheckpointConfig)."""
        self.path, self._keep_last, self._keep_best = path, keep_last, keep_best

    def find_building(self, iteration: int) -> Path:
        """The folder in which the checkpoint of this iteration is built."""
        return self.path / f".{name_checkpoint(iteration)}"

    def begin(self, iteration: int) -> Path:
        """Create an empty directory in which to build a checkpoint; what an earlier attempt has left is removed."""
        self.abandon(iteration)
        building = self.find_building(iteration)
        building.mkdir(parents=True)
        return building

    def publish(self, iteration: int) -> Path:
        """Rename the built checkpoint, whose manifest is written, to its final name; remove those no longer kept."""
        load_manifest(self.find_building(iteration))
        final = self.path / name_checkpoint(iteration)
        shutil.rmtree(final, ignore_errors=True)
        self.find_building(iteration).rename(final)
        _sync_directory(self.path)
        for named in (self.path / LATEST, self.path.parent / RECORD):
            write_atomically(named, f"{final.name}\n")
        self.prune()
        return final

    def abandon(self, iteration: int) -> None:
        shutil.rmtree(self.find_building(iteration), ignore_errors=True)

    def list_complete(self) -> list[int]:
        """The iterations of the complete checkpoints, ascending."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        found = (_PATTERN.fullmatch(entry.name) for entry in entries if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def find_newest(self, say: Callable[[str], None]) -> tuple[int, Path] | None:
        """The newest checkpoint whose checksums are right; None where there never was one.

        Newer damaged ones are reported and renamed to NAME.damaged. Raises CheckpointError where there are or were
        checkpoints and none is intact; nothing is then changed.
        """
        record = self.path.parent / RECORD
        if not self.list_complete() and record.is_file():
            raise CheckpointError(
                f"{self.path}: found no checkpoint, but the run had saved {record.read_text().strip()}: put it back;"
                f" without it the run begins anew, which needs another hydra.run.dir (or remove {record})"
            )
        problems: dict[Path, CheckpointError] = {}
        for iteration in reversed(self.list_complete()):
            directory = self.path / name_checkpoint(iteration)
            try:
                verify_files(directory)
            except CheckpointError as error:
                problems[directory] = error
                continue
            for damaged, problem in problems.items():
                say(f"{problem}; renamed to {damaged.name}.damaged, an earlier checkpoint is used")
                aside = damaged.with_name(f"{damaged.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
            write_atomically(self.path / LATEST, f"{directory.name}\n")
            return iteration, directory
        if problems:
            raise CheckpointError(f"{self.path}: no checkpoint is intact: {'; '.join(map(str, problems.values()))}")
        return None

    def clean(self) -> None:
        """Remove the files of checkpoints that were never completed."""
        for left in self.path.glob(".iteration-*"):
            shutil.rmtree(left, ignore_errors=True)

    def list_newest(self) -> list[int]:
        """The newest `keep_last` checkpoints, without older ones that are kept for their score."""
        return self.list_complete()[-self._keep_last :]

    def score(self, iteration: int, value: float) -> None:
        """Record the checkpoint's evaluation, by which the best are kept; the manifest does not cover the record."""
        if self.path.is_dir():
            scores = self._load_scores() | {iteration: value}
            write_atomically(self.path / SCORE, json.dumps({str(number): scores[number] for number in sorted(scores)}))

    def prune(self) -> None:
        """Remove all but the newest `keep_last` and the best `keep_best`."""
        complete, scores = self.list_complete(), self._load_scores()
        ranked = sorted((number for number in complete if number in scores), key=lambda n: (scores[n], n))
        best = ranked[-self._keep_best :] if self._keep_best else []
        for number in set(complete) - set(self.list_newest()) - set(best):
            # Rename it first: a partly removed checkpoint must not look like a complete one.
            (self.path / name_checkpoint(number)).rename(self.find_building(number))
            # What cannot be removed now, because somebody reads it, is removed when the run is resumed.
            self.abandon(number)

    def _load_scores(self) -> dict[int, float]:
        path = self.path / SCORE
        return {int(number): float(value) for number, value in load_json_object(path).items()} if path.exists() else {}


def name_checkpoint(iteration: int) -> str:
    return f"iteration-{iteration:06d}"


def check_space(directory: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the file system of `directory` has less than `num_bytes` free."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if num_bytes > (free := shutil.disk_usage(existing).free):
        text = f"takes about {num_bytes / 2**30:.2f} GiB and its file system has {free / 2**30:.2f} GiB free"
        how = "make room, or lower checkpoint.keep_last, or set checkpoint.save_every=null to train without any"
        raise CheckpointError(f"{directory}: a checkpoint {text}; {how}")
