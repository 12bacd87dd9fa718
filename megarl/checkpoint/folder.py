"""RUN_DIR/checkpoints: iteration-000020/, iteration-000040/, ... and `latest`, which names the newest complete one.

A checkpoint is built under a name that begins with a dot and renamed once its manifest is on disk, so that what has a
name without one is whole. `latest` is replaced after that.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megarl.checkpoint.manifest import CheckpointError, load_manifest, sync_directory, verify_files, write_atomically

NAME = "checkpoints"
LATEST = "latest"
SCORE = "score.json"
_PATTERN = re.compile(r"iteration-(\d{6,})")


class Folder:
    def __init__(self, path: Path, *, keep_last: int, keep_best: int = 0):
        """path: made with the first checkpoint. keep_last, keep_best: how many stay (see CheckpointConfig)."""
        self.path = path
        self._keep_last = keep_last
        self._keep_best = keep_best

    def begin(self, iteration: int) -> Path:
        """An empty directory to build a checkpoint in; what an earlier attempt has left in it is gone."""
        building = self.find_building(iteration)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        return building

    def publish(self, iteration: int) -> Path:
        """Give what was built, its manifest written, its name; remove what need not stay."""
        load_manifest(self.find_building(iteration))
        final = self.path / name_checkpoint(iteration)
        shutil.rmtree(final, ignore_errors=True)
        self.find_building(iteration).rename(final)
        sync_directory(self.path)
        write_atomically(self.path / LATEST, f"{final.name}\n")
        self.prune()
        return final

    def abandon(self, iteration: int) -> None:
        shutil.rmtree(self.find_building(iteration), ignore_errors=True)

    def list(self) -> list[int]:
        """Iterations of the complete checkpoints, in order."""
        if not self.path.is_dir():
            return []
        found = (_PATTERN.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def find_newest(self, say: Callable[[str], None]) -> tuple[int, Path] | None:
        """The newest checkpoint whose checksums are right; None where there is none.

        A damaged one is told of and put aside as NAME.damaged, and the one before is looked at.
        """
        for iteration in reversed(self.list()):
            directory = self.path / name_checkpoint(iteration)
            try:
                verify_files(directory)
            except CheckpointError as error:
                say(f"{error}; put aside as {directory.name}.damaged, the checkpoint before is taken")
                aside = directory.with_name(f"{directory.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                directory.rename(aside)
                continue
            write_atomically(self.path / LATEST, f"{directory.name}\n")
            return iteration, directory
        return None

    def clean(self) -> None:
        """Remove what checkpoints that were never completed have left."""
        for left in self.path.glob(".iteration-*"):
            shutil.rmtree(left, ignore_errors=True)

    def score(self, iteration: int, value: float) -> None:
        """Note the checkpoint's evaluation, which decides whether it is among the best; nothing where it is gone.

        The note is no part of what the manifest proves.
        """
        scores = self._load_scores() | {iteration: value}
        known = {str(number): scores[number] for number in sorted(scores)}
        if self.path.is_dir():
            write_atomically(self.path / SCORE, json.dumps(known))

    def prune(self) -> None:
        """Remove all but the newest `keep_last` and the best `keep_best`."""
        complete = self.list()
        scores = {number: value for number, value in self._load_scores().items() if number in complete}
        best = (
            sorted(scores, key=lambda number: (scores[number], number))[-self._keep_best :] if self._keep_best else []
        )
        for number in set(complete[: -self._keep_last]) - set(best):
            # Under another name first: half of a checkpoint must not look like a whole one.
            going = self.find_building(number)
            (self.path / name_checkpoint(number)).rename(going)
            shutil.rmtree(going)

    def _load_scores(self) -> dict[int, float]:
        try:
            return {int(number): float(value) for number, value in json.loads((self.path / SCORE).read_text()).items()}
        except FileNotFoundError:
            return {}

    def find_building(self, iteration: int) -> Path:
        """Where the checkpoint of this iteration is built."""
        return self.path / f".{name_checkpoint(iteration)}"


def name_checkpoint(iteration: int) -> str:
    return f"iteration-{iteration:06d}"


def check_space(directory: Path, num_bytes: int) -> None:
    """Raises CheckpointError where the file system of `directory` has no room for `num_bytes`."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise CheckpointError(
            f"{directory}: a checkpoint takes about {_format(num_bytes)} and its file system has {_format(free)} free;"
            " make room, or lower checkpoint.keep_last, or set checkpoint.save_every=null to train without any"
        )


def _format(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
