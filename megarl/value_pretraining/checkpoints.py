"""RUN_DIR/value_pretraining: checkpoints of value pretraining while it is under way, iteration-000003/ after step 3.

    state.json, critic/, manifest.json   as in training's, of the critic alone
    begun.json                           beside them, of python -m megarl.pretrain_value: what it was started with

A run that is started again goes on after the newest and gives, on a CPU, bit for bit what an uninterrupted one gives.
The folder goes when training's first checkpoint, or what megarl.pretrain_value leaves, is complete.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.folder import PRETRAINING_NAME, check_space, open_pretraining
from megarl.checkpoint.manifest import CheckpointError, name_some, write_atomically
from megarl.config.schema.root import Config
from megarl.interfaces import TrainBackend
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.report.metrics import ITERATION, PRETRAINING_FILE_NAME, load_metrics
from megarl.report.report import Report
from megarl.rollout import journal as rollout_journal
from megarl.rollout.journal import Journal
from megarl.run.saving import CheckpointSaver, CheckpointWriter, LoopSaver, NoSaver, estimate_bytes
from megarl.run.trainer_state import TrainerState, cut_files, load_trainer_state, measure_files
from megarl.value_pretraining.inputs import find_differing, list_pretraining_inputs

CRITIC = Role.critic.value
EXPLAINED = "pretrain/explained_variance"
BEGUN = "begun.json"


@dataclass(frozen=True)
class ResumePoint:
    """A value pretraining to go on with; the run's files are as they were after its last step."""

    state: TrainerState
    """its iteration: the last step"""
    directory: Path
    curve: tuple[float, ...]
    """explained variance of each step"""


@contextlib.contextmanager
def open_saver(
    config: Config, run_dir: Path, critic: TrainBackend | None, spec: WorkerSpec | None, report: Report, how: str
) -> Iterator[LoopSaver]:
    """Saves value pretraining as training is saved, its steps for iterations.

    NoSaver where there is nothing to save, and where checkpoint.save_every is null. how: as in `CheckpointSaver`.
    """
    has_steps = config.algo.value_pretrain.num_steps > 0
    if critic is None or spec is None or not has_steps or config.checkpoint.save_every is None:
        yield NoSaver()
        return
    writer = CheckpointWriter(
        run_dir,
        open_pretraining(run_dir),
        {CRITIC: critic},
        {Role.critic: spec},
        Journal(run_dir / rollout_journal.NAME).forget_pretraining,
        say=report.message,
        kind="value pretraining under way",
        unit="value pretraining step",
    )
    with contextlib.closing(CheckpointSaver(config.checkpoint, writer, report, how)) as saver:
        yield saver


def find_checkpoint(run_dir: Path, say: Callable[[str], None]) -> tuple[TrainerState, Path] | None:
    """The newest one; None where there never was one. Raises CheckpointError where there were and none is whole."""
    folder = open_pretraining(run_dir)
    folder.clean()
    try:
        found = folder.find_newest(say)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; once {folder.path} is removed, value pretraining begins anew") from error
    return (load_trainer_state(found[1]), found[1]) if found is not None else None


def resume_from(run_dir: Path, state: TrainerState, directory: Path, report: Report) -> ResumePoint:
    """Cut the run's files back to the checkpoint. Raises CheckpointError where lines of them are lost."""
    cut_files(run_dir, state.sizes)
    curve = load_explained(run_dir / PRETRAINING_FILE_NAME, state.iteration)
    report.rewind_pretraining(state.iteration)
    report.message(f"value pretraining goes on after step {state.iteration}: {directory}")
    return ResumePoint(state, directory, curve)


def load_explained(path: Path, num_steps: int) -> tuple[float, ...]:
    """Explained variance of steps 1 to `num_steps`, the last lines. Raises CheckpointError where they are others."""
    try:
        lines = load_metrics(path)[-num_steps:]
        if [line[ITERATION] for line in lines] != list(range(1, num_steps + 1)):
            raise ValueError(f"{path}: its last lines are not those of steps 1 to {num_steps}")
        return tuple(line[EXPLAINED] for line in lines)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: is not of the checkpoint's value pretraining: {error}") from error


def begin_job(config: Config, run_dir: Path, spec: WorkerSpec, report: Report) -> ResumePoint | None:
    """What python -m megarl.pretrain_value goes on from in its folder; None: it begins, its inputs noted there.

    spec: of the critic. Raises CheckpointError where what is there is of other inputs, and where there is no room.
    """
    is_saving = config.checkpoint.save_every is not None
    if is_saving:
        check_space(run_dir, estimate_bytes([spec]))
    path = run_dir / PRETRAINING_NAME / BEGUN
    noted = _load_note(path)
    differing = find_differing(noted["inputs"], config) if noted else []
    found = find_checkpoint(run_dir, report.message)
    if found is not None or differing:
        _check_note(run_dir, noted, differing, config)
    if found is not None:
        return resume_from(run_dir, *found, report)
    # What a start has left that came to no checkpoint; its responses are found again in the journal.
    if noted:
        cut_files(run_dir, noted["sizes"])
    else:
        Journal(run_dir / rollout_journal.NAME).forget_pretraining()
    if is_saving:
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = noted["sizes"] if noted else measure_files(run_dir)
        write_atomically(path, json.dumps({"inputs": list_pretraining_inputs(config), "sizes": sizes}, indent=1))
    return None


def _load_note(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"inputs": dict(content["inputs"]), "sizes": dict(content["sizes"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not what value pretraining writes: {error!r}") from error


def _check_note(run_dir: Path, noted: dict[str, Any] | None, differing: list[str], config: Config) -> None:
    folder = run_dir / PRETRAINING_NAME
    if noted is None:
        raise CheckpointError(f"{folder}: a training run's; python -m megarl.train resume={run_dir} goes on with it")
    if differing:
        before, now = noted["inputs"], list_pretraining_inputs(config)
        named = [f"{key} ({before.get(key)!r} there, now {now.get(key)!r})" for key in differing]
        raise CheckpointError(
            f"{folder}: of another value pretraining, which was not finished: {name_some(named)} differ; set them as"
            " there to go on with it, take another hydra.run.dir, or remove the folder and what that one left beside it"
        )
