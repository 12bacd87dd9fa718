"""RUN_DIR/checkpoints: iteration-000020/, iteration-000040/, ... and `latest`, which names the newest complete one.

A checkpoint is built under a name that begins with a dot and renamed once its manifest is on disk, so that a folder
without the dot is complete. `latest` is replaced after that.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from megarl.checkpoint.manifest import (
    CheckpointError,
    FormatError,
    load_manifest,
    sync_directory,
    verify_files,
    write_atomically,
)
from megarl.json_text import parse_json

NAME = "checkpoints"
LATEST = "latest"
RECORD = ".newest_checkpoint"
"""In the run directory: the name of the newest checkpoint, by which a run whose checkpoints were removed is told from
one that has saved none"""
SCORE = "score.json"
RUN_FILE = "run.json"
"""The overrides that the run was started with and its configuration; in the run directory and in every checkpoint"""
_PATTERN = re.compile(r"iteration-(\d{6,}|-\d{5,})")
"""Value pretraining's are iteration--00003, iteration--00002, ..."""


class Folder:
    def __init__(self, path: Path, *, keep_last: int, keep_best: int = 0, record: Path | None = None):
        """path: created with the first checkpoint. keep_last, keep_best: how many are kept (see CheckpointConfig).

        record: a file outside `path` that names the newest checkpoint.
        """
        self.path = path
        self._record = record
        self._keep_last = keep_last
        self._keep_best = keep_best

    def begin(self, iteration: int) -> Path:
        """Create an empty directory in which to build a checkpoint; what an earlier attempt has left is removed."""
        building = self.find_building(iteration)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        return building

    def publish(self, iteration: int) -> Path:
        """Rename the built checkpoint, whose manifest is written, to its final name; remove those no longer kept."""
        load_manifest(self.find_building(iteration))
        final = self.path / name_checkpoint(iteration)
        shutil.rmtree(final, ignore_errors=True)
        self.find_building(iteration).rename(final)
        sync_directory(self.path)
        write_atomically(self.path / LATEST, f"{final.name}\n")
        if self._record is not None:
            write_atomically(self._record, f"{final.name}\n")
        self.prune()
        return final

    def abandon(self, iteration: int) -> None:
        shutil.rmtree(self.find_building(iteration), ignore_errors=True)

    def list_complete(self) -> list[int]:
        """The iterations of the complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = (_PATTERN.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def check_kept(self) -> None:
        """Raise CheckpointError where checkpoints were saved and all of them are gone."""
        if self._record is None or self.list_complete() or not self._record.is_file():
            return
        raise CheckpointError(
            f"{self.path}: found no checkpoint, but the run had saved {self._record.read_text().strip()}: put it back;"
            f" without it the run begins anew, which needs another hydra.run.dir (or remove {self._record})"
        )

    def find_newest(self, say: Callable[[str], None]) -> tuple[int, Path] | None:
        """The newest checkpoint whose checksums are right; None where there never was one.

        Newer damaged ones are reported and renamed to NAME.damaged. Raises CheckpointError where there are or were
        checkpoints and none is intact, and for one of another release; nothing is then changed.
        """
        problems: dict[Path, CheckpointError] = {}
        for iteration in reversed(self.list_complete()):
            directory = self.path / name_checkpoint(iteration)
            try:
                verify_files(directory)
            except FormatError:
                raise
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
        if problems or (self.path / LATEST).is_file():
            causes = "; ".join(map(str, problems.values())) or f"{LATEST} names one that does not exist"
            raise CheckpointError(f"{self.path}: no checkpoint is intact: {causes}")
        return None

    def clean(self) -> None:
        """Remove the files of checkpoints that were never completed."""
        for left in self.path.glob(".iteration-*"):
            shutil.rmtree(left, ignore_errors=True)

    def list_newest(self) -> list[int]:
        """The newest `keep_last` checkpoints, without older ones that are kept for their score."""
        return self.list_complete()[-self._keep_last :]

    def score(self, iteration: int, value: float) -> None:
        """Record the checkpoint's evaluation, by which the best are kept; does nothing where it has been removed.

        The record is not covered by the manifest.
        """
        scores = self._load_scores() | {iteration: value}
        known = {str(number): scores[number] for number in sorted(scores)}
        if self.path.is_dir():
            write_atomically(self.path / SCORE, json.dumps(known))

    def prune(self) -> None:
        """Remove all but the newest `keep_last` and the best `keep_best`."""
        complete = self.list_complete()
        scores = {number: value for number, value in self._load_scores().items() if number in complete}
        best = (
            sorted(scores, key=lambda number: (scores[number], number))[-self._keep_best :] if self._keep_best else []
        )
        for number in set(complete) - set(self.list_newest()) - set(best):
            # Rename it first: a partly removed checkpoint must not look like a complete one.
            going = self.find_building(number)
            (self.path / name_checkpoint(number)).rename(going)
            # What cannot be removed now, because somebody reads it, is removed when the run is resumed.
            shutil.rmtree(going, ignore_errors=True)

    def _load_scores(self) -> dict[int, float]:
        try:
            return {int(number): float(value) for number, value in parse_json((self.path / SCORE).read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            # It decides only which old checkpoints are kept.
            warnings.warn(f"{self.path / SCORE}: is not what a run writes ({error!r}); left out", RuntimeWarning)
            return {}

    def find_building(self, iteration: int) -> Path:
        """The folder in which the checkpoint of this iteration is built."""
        return self.path / f".{name_checkpoint(iteration)}"


def name_checkpoint(iteration: int) -> str:
    return f"iteration-{iteration:06d}"


def check_space(directory: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the file system of `directory` has less than `num_bytes` free."""
    _, free = find_free(directory)
    if num_bytes > free:
        raise CheckpointError(
            f"{directory}: a checkpoint takes about {_format(num_bytes)} and its file system has {_format(free)} free;"
            " make room, or lower checkpoint.keep_last, or set checkpoint.save_every=null to train without any"
        )


def find_free(directory: Path) -> tuple[Path, int]:
    """The directory or its nearest existing parent, and the free bytes of its file system."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return existing, shutil.disk_usage(existing).free


def _format(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
