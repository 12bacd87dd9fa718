"""A run's checkpoints: the loop's own state, the files that it appends to, and what saves while the loop runs on."""

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

import torch

from megarl import files
from megarl.algo.statistics import RunningMoments
from megarl.config.schema.root import CheckpointConfig
from megarl.interfaces import DeadlineError, TrainBackend, wait_all
from megarl.mcore.checkpoints import count_parameters, describe_role
from megarl.mcore.spec import Role, WorkerSpec
from megarl.plan.memory import ELEMENT_BYTES
from megarl.report.record import METRICS_FILE
from megarl.report.report import Report
from megarl.report.timeline import span
from megarl.report.tokens import TOKENS_FILE
from megarl.rollout.rollout_file import ROLLOUTS_FILE, load_samples, save_samples
from megarl.rollout.source import GroupState, SourceState
from megarl.signals import Stopped, deferring_stops
from megarl.types import Metrics, Sequences, TrainingSamples

STATE = "state.json"
REPLAY, CRITIC_REPLAY = "replay.samples", "critic_replay.pt"
TRACKED = (METRICS_FILE, ROLLOUTS_FILE, TOKENS_FILE)
"""Files that a run appends to; a resumed run truncates them to their size at the checkpoint"""


@dataclass(frozen=True)
class TrainerState:
    """The loop's state after the update of an iteration, before its weights are published and its metrics logged."""

    iteration: int
    """0 is before the first update of the policy; of value pretraining's steps all but the last are below it"""
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
    tether_rho: float = 0.0
    """The weight of the value in the next iteration's baseline of advantage=tether"""
    estimator: Any = None
    """What an advantage estimator of the user's keeps, JSON; None: nothing"""
    reward: Any = None
    """What a reward of the user's keeps, JSON; None: nothing"""
    explained: tuple[float, ...] = ()
    """Explained variance of each step of value pretraining so far"""
    unlogged: tuple[int, Metrics] | None = None
    """An earlier iteration whose evaluation goes on, and its metrics so far"""
    critic_replay: tuple[TrainingSamples, ...] = ()
    """What the critic learns from again, the newest iteration first"""


def save_trainer_state(directory: Path, state: TrainerState) -> None:
    """Write state.json, whose numbers are read back bit for bit, and the groups that are kept."""
    source = dataclasses.replace(state.source, replay=())
    content = dataclasses.asdict(dataclasses.replace(state, source=source, critic_replay=()))
    del content["source"]["replay"], content["critic_replay"]
    files.write_atomically(directory / STATE, json.dumps(content, indent=1, allow_nan=False))
    if any(state.source.replay):
        save_samples(directory / REPLAY, state.source.replay)
    if state.critic_replay:
        parts = [vars(part) | {"sequences": vars(part.sequences)} for part in state.critic_replay]
        torch.save(parts, directory / CRITIC_REPLAY)


def load_trainer_state(directory: Path) -> TrainerState:
    """Read what `save_trainer_state` wrote. Raises CheckpointError where it is not valid."""
    try:
        content = files.parse_json((directory / STATE).read_text(encoding="utf-8"))
        replay = tuple(load_samples(path)) if (path := directory / REPLAY).is_file() else ()
        sampler, groups = content["source"]["sampler"], content.pop("source")["groups"]
        of_groups = GroupState(groups["first"], tuple(groups["taken"]), groups["next_place"])
        source = SourceState(sampler, replay, of_groups)
        moments = RunningMoments(**content.pop("reward_moments"))
        parts = torch.load(path, weights_only=True) if (path := directory / CRITIC_REPLAY).is_file() else ()
        again = tuple(TrainingSamples(**(part | {"sequences": Sequences(**part["sequences"])})) for part in parts)
        content["explained"] = tuple(content["explained"])
        if content["unlogged"] is not None:
            content["unlogged"] = tuple(content["unlogged"])
        return TrainerState(**content, reward_moments=moments, source=source, critic_replay=again)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise files.CheckpointError(f"{directory / STATE}: is not the state of a run: {error!r}") from error


def count_taken_groups(directory: Path) -> int:
    """How many of the groups that were complete first the state in this directory has learned from."""
    content = files.parse_json((directory / STATE).read_text(encoding="utf-8"))
    return int(content["source"]["groups"]["next_place"])


def measure_files(run_dir: Path) -> dict[str, int]:
    return {name: (run_dir / name).stat().st_size for name in TRACKED if (run_dir / name).is_file()}


def cut_files(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Truncate the files to these sizes, to 0 where none is given.

    Raises CheckpointError where a file is shorter, that is where lines are lost.
    """
    found = dict.fromkeys(sizes, 0) | measure_files(run_dir)
    for name, size in found.items():
        if size < sizes.get(name, 0):
            raise files.CheckpointError(
                f"{run_dir / name}: has {size} bytes; when the checkpoint was written it had {sizes[name]}"
            )
        if size:
            os.truncate(run_dir / name, sizes.get(name, 0))


POLL_S = 0.05
CLOSE_DEADLINE_S = 10.0
OPTIMIZER_BYTES = 12
"""Per parameter in a checkpoint: a float32 master weight and the two moments of Adam"""


def estimate_bytes(specs: Iterable[WorkerSpec]) -> int:
    """The approximate size of a checkpoint of these roles."""
    return sum(
        count_parameters(Path(spec.checkpoint)) * (ELEMENT_BYTES[spec.dtype] + OPTIMIZER_BYTES) for spec in specs
    )


class LoopSaver:
    """Saves a loop every `checkpoint.save_every` iterations, at its end, when it is to stop and when it fails: the
    roles write their parts, and a thread hashes and publishes them while training continues.

    It is told of the loop's state, so that half an update is never saved. Without a folder it saves nothing.
    """

    def __init__(
        self,
        settings: CheckpointConfig | None = None,
        folder: files.Folder | None = None,
        roles: Mapping[str, TrainBackend] | None = None,
        specs: Mapping[Role, WorkerSpec] | None = None,
        report: Report | None = None,
        forget: Callable[[int], None] = lambda _oldest: None,
    ):
        """Arguments that need a word:

        folder: below the run's directory. specs: of these roles at least. forget: called from a thread of its own when
        a checkpoint is complete, with the oldest iteration kept; removes what is no longer needed.
        """
        self._settings, self._folder, self._forget = settings or CheckpointConfig(), folder, forget
        self._roles, self._specs = roles or {}, {name: (specs or {})[Role(name)] for name in roles or {}}
        self._say = report.message if report else print
        self._phase = report.phase if report else contextlib.nullcontext
        self._state: TrainerState | None = None
        self._first: int | None = None
        """The iteration that the run starts from"""
        self._last: int | None = None
        """Iteration of the newest checkpoint that is complete or in progress"""
        self._is_whole = True
        self._has_failed = False
        """Whether writing a checkpoint has failed; it is then not tried again"""
        self._score: float | None = None
        """Score of the current weights, once they are evaluated"""
        self._under_way: int | None = None
        self._publishing: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megarl-publish")

    def measure_files(self) -> dict[str, int]:
        """Bytes of each growing file of the run (TRACKED), to which a resumed run cuts them back."""
        return measure_files(self._folder.path.parent) if self._folder else {}

    def restore(self, state: TrainerState) -> None:
        """Resume after the checkpoint that holds `state`."""
        self._state, self._last = state, state.iteration

    def begin_update(self) -> None:
        """From here to `commit` the weights belong to no iteration."""
        self._is_whole, self._score = False, None

    def commit(self, state: TrainerState) -> None:
        """The roles hold what `state` says."""
        self._state, self._is_whole = state, True
        self._first = state.iteration if self._first is None else self._first

    def score(self, iteration: int, value: float | None) -> None:
        """Note checkpoint.best_metric of the weights of this iteration; None: they were not evaluated."""
        if self._state and self._state.iteration == iteration:
            self._score = value
        if self._folder and value is not None and iteration == self._last:
            self._folder.score(iteration, value)

    def save_if_due(self) -> None:
        """Begin a checkpoint where `checkpoint.save_every` asks for one; it is written while the loop runs on."""
        every = self._settings.save_every
        if every is not None and self._state is not None and self._state.iteration % every == 0:
            self.save(wait=False)

    def save(self, wait: bool = True, end: float | None = None) -> None:
        """Checkpoint the present state, unless there is one; without `wait` it is written while the loop runs on.

        Raises CheckpointError where there is no disk space, what the roles raise, DeadlineError at `end`
        (time.monotonic), RuntimeError after an aborted update.
        """
        if self._folder is None or self._state is None:
            return
        iteration = self._state.iteration
        if not self._is_whole:
            raise RuntimeError(f"the update of iteration {iteration + 1} was aborted: its weights cannot be saved")
        with self._phase("checkpoint"), self._noting_failure():
            if self._last != iteration:
                self._begin(self._folder, self._state, end)
                self.score(iteration, self._score)
            if wait:
                self._settle(end)

    def _begin(self, folder: files.Folder, state: TrainerState, end: float | None) -> None:
        """Begin a checkpoint of `state` and of the roles' current state; an earlier one is completed first."""
        self._settle(end)
        files.check_space(folder.path, estimate_bytes(self._specs.values()))
        run_dir = folder.path.parent
        with deferring_stops():
            building = folder.begin(state.iteration)
            self._under_way = self._last = state.iteration
            for name in measure_files(run_dir):  # The checkpoint relies on these files.
                with (run_dir / name).open("rb") as file:
                    os.fsync(file.fileno())
            if (run_dir / files.RUN_FILE).is_file():
                shutil.copyfile(run_dir / files.RUN_FILE, building / files.RUN_FILE)
            save_trainer_state(building, state)
            wait_all([role.begin_save(building / name) for name, role in self._roles.items()], end=end)

    def proceed(self) -> None:
        """Let a checkpoint under way take its next step, waiting for the roles' files where they are being written."""
        with self._noting_failure():
            self._proceed(None)

    def _proceed(self, end: float | None) -> None:
        """Once the roles' files are written, their hashing and publishing begins in the background."""
        if self._publishing is not None:
            if self._publishing.done():
                with deferring_stops():
                    publishing, self._publishing, self._under_way = self._publishing, None, None
                publishing.result()
        elif self._under_way is not None:
            with deferring_stops():
                wait_all([role.finish_save() for role in self._roles.values()], end=end)
                self._publishing = self._pool.submit(self._publish, self._under_way)

    def _settle(self, end: float | None) -> None:
        """Wait until no checkpoint is in progress. Raises what failed, DeadlineError at `end`."""
        self._proceed(end)
        while self._publishing is not None:
            if end is not None and time.monotonic() > end and not self._publishing.done():
                raise DeadlineError(f"checkpoint of iteration {self._under_way}: hashing is not finished")
            wait([self._publishing], POLL_S)
            self._proceed(end)

    @span("hash and publish the checkpoint")
    def _publish(self, iteration: int) -> None:
        assert self._folder is not None
        building = self._folder.find_building(iteration)
        for name, spec in self._specs.items():
            files.write_manifest(building / name, describe_role(spec.role, spec.dtype, spec.parallel, iteration))
        files.write_manifest(building, {"kind": "training", "iteration": iteration, "roles": sorted(self._roles)})
        # Said here, and not when the loop comes by: what it prints in between is later.
        self._say(f"checkpoint of iteration {iteration}: {self._folder.publish(iteration)}")
        self._forget(self._folder.list_newest()[0])

    def close(self) -> None:
        """Abandon a checkpoint in progress; complete ones stay."""
        if self._publishing is not None:
            wait([self._publishing], CLOSE_DEADLINE_S)
        if self._publishing is None or not self._publishing.done():
            if self._folder is not None and self._under_way is not None:
                self._folder.abandon(self._under_way)
        elif error := self._publishing.exception():
            self._say(f"the checkpoint of iteration {self._under_way} is not complete: {error}")
        self._pool.shutdown(wait=False)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    @contextlib.contextmanager
    def saving_newest(self) -> Iterator[None]:
        """Within it a signal that raises Stopped, and any error, has the newest whole state saved, within
        checkpoint.stop_deadline_s. A failed save never replaces the error; notes on it say what is saved and where.
        """
        try:
            yield
        except (Exception, Stopped) as error:
            if self._folder and self._state:
                # The deadline counts from here: finishing the update may have taken longer than that.
                deadline_s, iteration = self._settings.stop_deadline_s, self._state.iteration
                end, saving = time.monotonic() + deadline_s, f"saving iteration {iteration}, within {deadline_s:g} s"
                if isinstance(error, Stopped):
                    self._save_stopped(error, iteration, self._folder, end, saving)
                else:
                    self._save_failed(error, iteration, self._folder, end, saving)
            raise

    def _save_stopped(self, stopped: Stopped, iteration: int, folder: files.Folder, end: float, saving: str) -> None:
        self._say(f"{stopped}: {saving}")
        try:
            self.save(end=end)
            self._say(f"saved: resume={folder.path.parent} resumes it")
        except Exception as error:
            self._say(f"iteration {iteration} was not saved: {error}")
            if isinstance(stopped.__context__, Exception):
                self._say(f"before that: {stopped.__context__}")

    def _save_failed(self, error: Exception, iteration: int, folder: files.Folder, end: float, saving: str) -> None:
        """Save the state after `iteration`, the last whole one, and note on `error` what is saved and where.

        Within an update the roles hold no whole state; a checkpoint that is in progress is then completed.
        """
        try:
            if not self._is_whole:
                error.add_note(f"the update of iteration {iteration + 1} was not finished: its weights are not saved")
            if self._has_failed or (iteration == self._first and self._last is None):
                pass  # The disk, or the processes, would fail again; the start needs no checkpoint.
            elif self._is_whole:
                self._say(f"{type(error).__name__}: {saving}")
                self.save(end=end)
            else:
                self._settle(end)
        except (Exception, Stopped) as problem:
            error.add_note(f"iteration {iteration} was not saved: {problem}")
        newest = folder.list_complete()[-1:]
        where = [f"resumes after iteration {n}: {folder.path / files.name_checkpoint(n)}" for n in newest]
        begins = where[0] if where else "begins anew: there is no checkpoint yet"
        error.add_note(f"resume={folder.path.parent} {begins}")
