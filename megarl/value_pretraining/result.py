"""RUN_DIR/pretrained: the result of `python -m megarl.pretrain_value`, from which training starts as from its own.

    state.json     position in the data, number of responses, running reward moments, the curve, the inputs
    critic/        weights, optimizer, schedule and random state of the critic
    manifest.json  checksums of all files; written last

A run that starts from it (algo.value_pretrain.taken_from) gives, on a CPU, bit for bit the weights, metrics and
rollouts of a run that does the value pretraining itself, except for time/* of metrics.jsonl and value_pretrain.jsonl.
The policy is not part of it: value pretraining does not change the policy.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algo.statistics import RunningMoments
from megarl.checkpoint.manifest import CheckpointError, name_some, verify_files, write_atomically, write_manifest
from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.interfaces import TrainBackend
from megarl.json_text import parse_json
from megarl.mcore.weights.dist_format import describe_role
from megarl.mcore.worker_spec import WorkerSpec
from megarl.report import metrics as metrics_file
from megarl.report.metrics import load_metrics
from megarl.report.text import TIME
from megarl.rollout import rollout_file
from megarl.run.signals import deferring_stops
from megarl.value_pretraining.inputs import find_differing

NAME = "pretrained"
KEY = "algo.value_pretrain.taken_from"
CRITIC = "critic"
STATE = "state.json"


@dataclass(frozen=True)
class PretrainedState:
    """The state of the training loop after value pretraining."""

    num_samples: int
    """Number of responses sampled for it"""
    reward_moments: RunningMoments
    sampler: Mapping[str, int | str] | None
    """PromptSampler.state(); None: no prompt was drawn"""
    curve: tuple[Mapping[str, float], ...]
    """The lines of value_pretrain.jsonl"""
    inputs: Mapping[str, Any]
    """As `list_pretraining_inputs` gives them"""


def save_pretrained(run_dir: Path, critic: TrainBackend, spec: WorkerSpec, state: PretrainedState) -> None:
    """Write RUN_DIR/pretrained; it appears complete or not at all."""
    building, final = run_dir / f".{NAME}", run_dir / NAME
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    with deferring_stops():
        # Otherwise the checkpoint of a run that is stopped here would find this one incomplete.
        critic.begin_save(building / CRITIC).result()
        finishing = critic.finish_save()
    finishing.result()
    write_manifest(building / CRITIC, describe_role(spec.role, spec.dtype, spec.parallel, 0))
    write_atomically(building / STATE, json.dumps(dataclasses.asdict(state), indent=1, allow_nan=False))
    saved = run_dir / rollout_file.FILE_NAME
    if saved.is_file():
        shutil.copyfile(saved, building / saved.name)
    write_manifest(building, {"kind": "value pretraining", "iteration": 0})
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)


def load_pretrained(config: Config) -> tuple[PretrainedState, Path] | None:
    """The value pretraining that the run starts from, and its folder; None where it pretrains itself.

    Raises ConfigError naming the key where it is missing, damaged or has other inputs.
    """
    settings = config.algo.value_pretrain
    if settings.taken_from is None or settings.num_steps == 0:
        return None
    directory = Path(settings.taken_from).expanduser() / NAME
    try:
        verify_files(directory)
        content = parse_json((directory / STATE).read_text(encoding="utf-8"))
        content["reward_moments"] = RunningMoments(**content["reward_moments"])
        state = PretrainedState(**{**content, "curve": tuple(content["curve"])})
    except CheckpointError as error:
        raise ConfigError([f"{KEY}: {error}"]) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{KEY}: {directory / STATE} is not what value pretraining writes: {error!r}"]) from error
    differing = find_differing(state.inputs, config)
    if differing:
        raise ConfigError(
            [
                f"{KEY}: {directory} has another configuration: {name_some(differing)}"
                " differ, on which value pretraining depends; leave the key out, or set them as there"
            ]
        )
    return state, directory


def load_curve(run_dir: Path) -> tuple[Mapping[str, float], ...]:
    path = run_dir / metrics_file.PRETRAINING_FILE_NAME
    return tuple(load_metrics(path)) if path.is_file() else ()


def split_times(curve: Sequence[Mapping[str, float]]) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of each line, without its times."""
    return [
        (
            int(line[metrics_file.ITERATION]),
            {k: v for k, v in line.items() if k != metrics_file.ITERATION and not k.startswith(TIME)},
        )
        for line in curve
    ]


def copy_rollouts(directory: Path, run_dir: Path) -> None:
    """Copy the responses of value pretraining to the start of the run's rollouts.jsonl, which is open for appending."""
    saved = directory / rollout_file.FILE_NAME
    if saved.is_file():
        with saved.open("rb") as source, (run_dir / saved.name).open("ab") as target:
            shutil.copyfileobj(source, target)
