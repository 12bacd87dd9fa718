"""A run's checkpoints: the loop's own state and that of its roles, written while training continues, and loaded."""

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algo.statistics import RunningMoments
from megarl.checkpoint.folder import RUN_FILE, Folder, check_space
from megarl.checkpoint.manifest import CheckpointError, write_atomically, write_manifest
from megarl.config.schema.checkpoint import CheckpointConfig
from megarl.config.schema.roles import Dtype
from megarl.interfaces import DeadlineError, TrainBackend, wait_all
from megarl.mcore.weights.dist_format import describe_role
from megarl.mcore.weights.hf_reader import count_parameters
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.report import metrics as metrics_file
from megarl.report.report import Report
from megarl.rollout import rollout_file
from megarl.rollout.dynamic_sampling import join_groups, split_groups
from megarl.rollout.source import SourceState
from megarl.run.signals import Stopped, deferring_stops
from megarl.types import Metrics

STATE = "state.json"
REPLAY = "replay.jsonl"
POLL_S = 0.05
CLOSE_DEADLINE_S = 10.0
TRACKED = (metrics_file.FILE_NAME, metrics_file.PRETRAINING_FILE_NAME, rollout_file.FILE_NAME)
"""Files that a run appends to; a resumed run truncates them to their size at the checkpoint"""
WEIGHT_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
OPTIMIZER_BYTES = 12
"""Per parameter in a checkpoint: a float32 master weight and the two moments of Adam"""


@dataclass(frozen=True)
class TrainerState:
    """The loop's state after the update of an iteration, before its weights are published and its metrics logged."""

    iteration: int
    metrics: Metrics
    """Metrics of the iteration so far"""
    num_samples: int
    heldout_reward: float | None
    """Of the last evaluation; None: there was none"""
    kl_coef: float
    reward_moments: RunningMoments
    source: SourceState
    sizes: Mapping[str, int]
    """Size in bytes of each existing file of TRACKED"""


def save_trainer_state(directory: Path, state: TrainerState) -> None:
    """Write state.json, whose numbers are read back bit for bit, and replay.jsonl where there are groups to replay."""
    content = dataclasses.asdict(dataclasses.replace(state, source=SourceState(state.source.sampler, ())))
    content["source"] = dict(state.source.sampler)
    write_atomically(directory / STATE, json.dumps(content, indent=1, allow_nan=False))
    if any(state.source.replay):
        rollouts = [join_groups(groups, state.iteration) for groups in state.source.replay]
        rollout_file.write_rollouts(directory / REPLAY, rollouts)


def load_trainer_state(directory: Path) -> TrainerState:
    """Read what `save_trainer_state` wrote. Raises CheckpointError where it is not valid."""
    try:
        content = json.loads((directory / STATE).read_text(encoding="utf-8"))
        replay: tuple[Any, ...] = ()
        if (directory / REPLAY).is_file():
            rollouts = rollout_file.load_rollouts(directory / REPLAY)
            replay = tuple(split_groups(rollout.samples) for rollout in rollouts)
        source = SourceState(content.pop("source"), replay)
        moments = RunningMoments(**content.pop("reward_moments"))
        return TrainerState(**content, reward_moments=moments, source=source)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise CheckpointError(f"{directory / STATE}: is not the state of a run: {error!r}") from error


def measure_files(run_dir: Path) -> dict[str, int]:
    return {name: (run_dir / name).stat().st_size for name in TRACKED if (run_dir / name).is_file()}


def sync_files(run_dir: Path) -> None:
    """Sync the files of TRACKED to disk, since the checkpoint relies on them."""
    for name in TRACKED:
        if (run_dir / name).is_file():
            with (run_dir / name).open("rb") as file:
                os.fsync(file.fileno())


def cut_files(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Truncate the files to these sizes, to 0 where none is given.

    Raises CheckpointError where a file is shorter, that is where lines are lost.
    """
    for name in TRACKED:
        path, size = run_dir / name, sizes.get(name, 0)
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            raise CheckpointError(f"{path}: has {found} bytes; when the checkpoint was written it had {size}")
        if path.is_file():
            os.truncate(path, size)


def estimate_bytes(specs: Iterable[WorkerSpec]) -> int:
    """The approximate size of a checkpoint of these roles."""
    return sum(count_parameters(Path(spec.checkpoint)) * (WEIGHT_BYTES[spec.dtype] + OPTIMIZER_BYTES) for spec in specs)


class Saver:
    """Writes checkpoints while training continues: the roles write their parts, a thread hashes and publishes."""

    def __init__(
        self,
        run_dir: Path,
        folder: Folder,
        roles: Mapping[str, TrainBackend],
        specs: Mapping[Role, WorkerSpec],
        forget: Callable[[int], None],
        *,
        say: Callable[[str], None],
        kind: str = "training",
        unit: str = "iteration",
    ):
        """Arguments that need a word:

        specs: of these roles at least. forget: called when a checkpoint is complete with the oldest iteration kept,
        removes what is no longer needed. kind: recorded in the manifest. unit: the iterations' name in messages.
        """
        self.run_dir = run_dir
        self.folder = folder
        self.unit = unit
        self.last: int | None = None
        """Iteration of the newest checkpoint that is complete or in progress"""
        self._roles, self._forget, self._say = roles, forget, say
        self._specs = {name: specs[Role(name)] for name in roles}
        self._num_bytes = estimate_bytes(self._specs.values())
        self._kind = kind
        self._under_way: int | None = None
        self._publishing: Future[Path] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megarl-publish")

    def begin(self, state: TrainerState, end: float | None = None) -> None:
        """Begin a checkpoint of `state` and of the roles' current state; an earlier one is completed first.

        Raises CheckpointError where there is no disk space, what the roles raise, and DeadlineError at `end`
        (time.monotonic).
        """
        self.settle(end)
        check_space(self.folder.path, self._num_bytes)
        with deferring_stops():
            building = self.folder.begin(state.iteration)
            self._under_way = self.last = state.iteration
            sync_files(self.run_dir)
            if (self.run_dir / RUN_FILE).is_file():
                shutil.copyfile(self.run_dir / RUN_FILE, building / RUN_FILE)
            save_trainer_state(building, state)
            wait_all([role.begin_save(building / name) for name, role in self._roles.items()], end=end)

    def proceed(self, end: float | None = None) -> None:
        """Wait until the roles' files are written, and start hashing and publishing them in the background."""
        if self._publishing is not None:
            if self._publishing.done():
                self._complete()
        elif self._under_way is not None:
            with deferring_stops():
                wait_all([role.finish_save() for role in self._roles.values()], end=end)
                self._publishing = self._pool.submit(self._publish, self._under_way)

    def settle(self, end: float | None = None) -> None:
        """Wait until no checkpoint is in progress. Raises what failed, DeadlineError at `end`."""
        self.proceed(end)
        while self._publishing is not None:
            if self._publishing.done():
                self._complete()
            elif end is not None and time.monotonic() > end:
                raise DeadlineError(f"checkpoint of {self.unit} {self._under_way}: hashing is not finished")
            else:
                time.sleep(POLL_S)

    def score(self, iteration: int, value: float | None) -> None:
        """Record the evaluation of the iteration, where it has a checkpoint, complete or in progress."""
        if value is not None and iteration == self.last:
            self.folder.score(iteration, value)

    def close(self) -> None:
        """Abandon a checkpoint in progress; complete ones stay."""
        if self._publishing is not None:
            wait([self._publishing], CLOSE_DEADLINE_S)
        if self._publishing is None or not self._publishing.done():
            if self._under_way is not None:
                self.folder.abandon(self._under_way)
        elif error := self._publishing.exception():
            self._say(f"the checkpoint of {self.unit} {self._under_way} is not complete: {error}")
        self._pool.shutdown(wait=False)

    def _complete(self) -> None:
        assert self._publishing is not None
        with deferring_stops():
            publishing, iteration = self._publishing, self._under_way
            self._publishing = self._under_way = None
        final = publishing.result()
        self._say(f"checkpoint of {self.unit} {iteration}: {final}")

    def _publish(self, iteration: int) -> Path:
        building = self.folder.find_building(iteration)
        for name, spec in self._specs.items():
            write_manifest(building / name, describe_role(spec.role, spec.dtype, spec.parallel, iteration))
        write_manifest(building, {"kind": self._kind, "iteration": iteration, "roles": sorted(self._roles)})
        final = self.folder.publish(iteration)
        self._forget(self.folder.list_newest()[0])
        return final


class LoopSaver:
    """Saves a loop every `checkpoint.save_every` iterations, at its end, and when it is asked to stop.

    The loop says what its weights are (`begin_update`, `commit`), so that half an update is never saved.
    """

    def __init__(self, settings: CheckpointConfig, saver: Saver, report: Report, how: str):
        """how: what resumes from the checkpoints, in messages."""
        self.run_dir = saver.run_dir
        self._settings, self._saver, self._report, self._how = settings, saver, report, how
        self._state: TrainerState | None = None
        self._is_whole = True
        self._score: float | None = None
        """Score of the current weights, once they are evaluated"""

    def restore(self, state: TrainerState) -> None:
        """Resume after the checkpoint of `state`."""
        self._state, self._saver.last = state, state.iteration

    def proceed(self) -> None:
        """As `Saver.proceed`."""
        self._saver.proceed()

    def begin_update(self) -> None:
        """Mark the weights as those of no iteration, until `commit`."""
        self._is_whole, self._score = False, None

    def commit(self, state: TrainerState) -> None:
        """Record `state`, with which the roles' weights now agree."""
        self._state, self._is_whole = state, True

    def score(self, value: float | None) -> None:
        """Record the value of checkpoint.best_metric, where the current weights have been evaluated."""
        assert self._state is not None
        self._score = value
        self._saver.score(self._state.iteration, value)

    def save_if_due(self) -> None:
        every = self._settings.save_every
        if every is not None and self._state is not None and self._state.iteration % every == 0:
            self.save(wait=False)

    def save(self, wait: bool = True, end: float | None = None) -> None:
        """Write a checkpoint of the current state, unless there is one; without `wait` in the background.

        Raises DeadlineError at `end` (time.monotonic), RuntimeError after an aborted update.
        """
        assert self._state is not None
        iteration = self._state.iteration
        if not self._is_whole:
            message = f"the update of {self._saver.unit} {iteration + 1} was aborted: its weights cannot be saved"
            raise RuntimeError(message)
        with self._report.phase("checkpoint"):
            if self._saver.last != iteration:
                self._saver.begin(self._state, end)
                self._saver.score(iteration, self._score)
            if wait:
                self._saver.settle(end)

    def settle(self) -> None:
        """Wait until no checkpoint is in progress."""
        with self._report.phase("checkpoint"):
            self._saver.settle()

    def close(self) -> None:
        """As `Saver.close`."""
        self._saver.close()

    @contextlib.contextmanager
    def saving_stops(self) -> Iterator[None]:
        """Saves the newest state where a signal raises Stopped within the block, within checkpoint.stop_deadline_s."""
        try:
            yield
        except Stopped as stopped:
            if self._state is not None:
                self._save_stopped(stopped, f"{self._saver.unit} {self._state.iteration}")
            raise

    def _save_stopped(self, stopped: Stopped, what: str) -> None:
        deadline_s, say = self._settings.stop_deadline_s, self._report.message
        say(f"{stopped}: saving {what}, within {deadline_s:g} s")
        try:
            # The deadline counts from here: finishing the update may have taken longer than that.
            self.save(end=time.monotonic() + deadline_s)
            say(f"saved: {self._how} resumes it")
        except Exception as error:
            causes = [f"{what} was not saved: {error}"]
            if isinstance(stopped.__context__, Exception):
                causes.append(f"before that: {stopped.__context__}")
            say("\n".join(causes))
