"""The loop's own state in a checkpoint, and the files that a run appends to."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algo.statistics import RunningMoments
from megarl.checkpoint.manifest import CheckpointError, write_atomically
from megarl.json_text import parse_json
from megarl.report import metrics as metrics_file
from megarl.report import token_file
from megarl.rollout import rollout_file
from megarl.rollout.source import GroupState, SourceState, join_groups, split_groups
from megarl.types import Metrics

STATE = "state.json"
REPLAY = "replay.jsonl"
TRACKED = (*(metrics_file.FILE_NAME, rollout_file.FILE_NAME, token_file.FILE_NAME),)
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


def save_trainer_state(directory: Path, state: TrainerState) -> None:
    """Write state.json, whose numbers are read back bit for bit, and replay.jsonl where there are groups to replay."""
    content = dataclasses.asdict(dataclasses.replace(state, source=dataclasses.replace(state.source, replay=())))
    del content["source"]["replay"]
    write_atomically(directory / STATE, json.dumps(content, indent=1, allow_nan=False))
    if any(state.source.replay):
        rollouts = [join_groups(groups, state.iteration) for groups in state.source.replay]
        rollout_file.write_rollouts(directory / REPLAY, rollouts)


def load_trainer_state(directory: Path) -> TrainerState:
    """Read what `save_trainer_state` wrote. Raises CheckpointError where it is not valid."""
    try:
        content = parse_json((directory / STATE).read_text(encoding="utf-8"))
        replay: tuple[Any, ...] = ()
        if (directory / REPLAY).is_file():
            rollouts = rollout_file.load_rollouts(directory / REPLAY)
            replay = tuple(split_groups(rollout.samples) for rollout in rollouts)
        sampler, groups = content["source"]["sampler"], content.pop("source")["groups"]
        source = SourceState(sampler, replay, GroupState(groups["first"], tuple(groups["taken"]), groups["next_place"]))
        moments = RunningMoments(**content.pop("reward_moments"))
        explained = tuple(content.pop("explained"))
        return TrainerState(**content, reward_moments=moments, source=source, explained=explained)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise CheckpointError(f"{directory / STATE}: is not the state of a run: {error!r}") from error


def count_taken_groups(directory: Path) -> int:
    """How many of the groups that were complete first the state in this directory has learned from."""
    content = parse_json((directory / STATE).read_text(encoding="utf-8"))
    return int(content["source"]["groups"]["next_place"])


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
