"""RUN_DIR/value_pretraining: checkpoints of an unfinished value pretraining, iteration-000003/ after step 3.

    state.json, critic/, manifest.json   as in training's checkpoints, of the critic alone
    begun.json                           beside them: the inputs that python -m megarl.pretrain_value was started with,
                                         and its numbers of CPU threads

A resumed run continues after the newest one and gives, on a CPU, bit for bit the results of an uninterrupted run. The
folder is removed when training's first checkpoint, or the result of megarl.pretrain_value, is complete.
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
from megarl.config.threads import list_threads
from megarl.interfaces import TrainBackend
from megarl.json_text import parse_json
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.report.metrics import ITERATION, PRETRAINING_FILE_NAME, load_metrics
from megarl.report.report import Report
from megarl.rollout.rollout_file import JOURNAL, Journal
from megarl.run.saving import CheckpointSaver, CheckpointWriter, LoopSaver, NoSaver, estimate_bytes
from megarl.run.trainer_state import TrainerState, cut_files, load_trainer_state, measure_files
from megarl.value_pretraining.inputs import find_differing, list_pretraining_inputs

CRITIC = Role.critic.value
EXPLAINED = "pretrain/explained_variance"
BEGUN = "begun.json"


@dataclass(frozen=True)
class ResumePoint:
    """An unfinished value pretraining to resume; the run's files are as they were after its last step."""

    state: TrainerState
    """Its iteration is the last step"""
    directory: Path
    curve: tuple[float, ...]
    """Explained variance of each step"""


@contextlib.contextmanager
def open_saver(
    config: Config, run_dir: Path, critic: TrainBackend | None, spec: WorkerSpec | None, report: Report, how: str
) -> Iterator[LoopSaver]:
    """A saver for value pretraining, whose iterations are its steps; NoSaver where nothing is to be saved.

    how: as in `CheckpointSaver`.
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
        Journal(run_dir / JOURNAL).forget_pretraining,
        say=report.message,
        kind="value pretraining under way",
        unit="value pretraining step",
    )
    with contextlib.closing(CheckpointSaver(config.checkpoint, writer, report, how)) as saver:
        yield saver


def find_checkpoint(run_dir: Path, say: Callable[[str], None]) -> tuple[TrainerState, Path] | None:
    """The newest checkpoint; None where there never was one. Raises CheckpointError where all are damaged."""
    folder = open_pretraining(run_dir)
    folder.clean()
    try:
        found = folder.find_newest(say)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {folder.path} to start value pretraining over") from error
    return (load_trainer_state(found[1]), found[1]) if found is not None else None


def resume_from(run_dir: Path, state: TrainerState, directory: Path, report: Report) -> ResumePoint:
    """Truncate the run's files to the checkpoint. Raises CheckpointError where lines of them are lost."""
    cut_files(run_dir, state.sizes)
    curve = load_explained(run_dir / PRETRAINING_FILE_NAME, state.iteration)
    report.rewind_pretraining(state.iteration)
    report.message(f"value pretraining resumes after step {state.iteration}: {directory}")
    return ResumePoint(state, directory, curve)


def load_explained(path: Path, num_steps: int) -> tuple[float, ...]:
    """Explained variance of steps 1 to `num_steps`. Raises CheckpointError where the last lines are of other steps."""
    try:
        lines = load_metrics(path)[-num_steps:]
        if [line[ITERATION] for line in lines] != list(range(1, num_steps + 1)):
            raise ValueError(f"{path}: its last lines are not those of steps 1 to {num_steps}")
        return tuple(line[EXPLAINED] for line in lines)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: does not belong to the checkpoint's value pretraining: {error}") from error


def begin_job(config: Config, run_dir: Path, spec: WorkerSpec, report: Report) -> ResumePoint | None:
    """Where python -m megarl.pretrain_value resumes in its folder; None: it starts, and records its inputs there.

    spec: of the critic. Raises CheckpointError where the folder has other inputs, and where there is no disk space.
    """
    is_saving = config.checkpoint.save_every is not None
    if is_saving:
        check_space(run_dir, estimate_bytes([spec]))
    path = run_dir / PRETRAINING_NAME / BEGUN
    noted = _load_note(path)
    differing = find_differing(noted["inputs"], config) if noted else []
    found = find_checkpoint(run_dir, report.message)
    if found is not None or differing:
        _check_note(run_dir, noted, differing)
    if found is not None:
        return resume_from(run_dir, *found, report)
    # Remove what a start without a checkpoint has left; its responses are found in the journal.
    if noted:
        cut_files(run_dir, noted["sizes"])
    else:
        Journal(run_dir / JOURNAL).forget_pretraining()
    if is_saving:
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = noted["sizes"] if noted else measure_files(run_dir)
        content = {"inputs": list_pretraining_inputs(config), "sizes": sizes, "threads": list_threads(config)}
        write_atomically(path, json.dumps(content, indent=1))
    return None


def load_threads(run_dir: Path) -> dict[str, Any]:
    """The numbers of CPU threads of the value pretraining that has begun there; empty where none has."""
    noted = _load_note(run_dir / PRETRAINING_NAME / BEGUN)
    return noted["threads"] if noted else {}


def _load_note(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        noted = {name: dict(content[name]) for name in ("inputs", "sizes")}
        return noted | {"threads": dict(content.get("threads", {}))}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not what value pretraining writes: {error!r}") from error


def _check_note(run_dir: Path, noted: dict[str, Any] | None, differing: list[str]) -> None:
    folder = run_dir / PRETRAINING_NAME
    if noted is None:
        raise CheckpointError(
            f"{folder}: belongs to a training run; python -m megarl.train resume={run_dir} resumes it"
        )
    if differing:
        raise CheckpointError(
            f"{folder}: belongs to another value pretraining, not finished: {name_some(differing)} differ; set them as"
            " there to resume it, choose another hydra.run.dir, or remove the folder and the files beside it"
        )
