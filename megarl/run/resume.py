"""`resume=RUN_DIR`: repeats the command line that a run was started with; says which keys may differ from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megarl.checkpoint.folder import RUN_FILE
from megarl.checkpoint.manifest import write_atomically
from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config

PREFIX = "resume="

MAY_CHANGE = (
    "train.num_iterations",
    "train.max_minutes",
    "train.max_samples",
    "train.stop_at_heldout_reward",
    "train.eval_every",
    "train.tokens_per_microbatch",
    "algo.value_pretrain.taken_from",
    "checkpoint.",
    "cluster.",
    "evaluate.",
    "logger.terminal",
    "logger.tensorboard",
    "logger.num_logged_samples",
    *(
        f"{role}.{name}"
        for role in ("policy", "critic")
        for name in ("parallel.", "recompute", "offload", "optimizer.overlap_param_gather")
    ),
    "reference.parallel.",
    "reference.offload",
    "rollout.num_servers",
    "rollout.tp",
    "rollout.transport",
    "rollout.sync_bucket_mb",
    "rollout.kv_cache_tokens",
    "rollout.max_running_requests",
    "rollout.num_threads",
    "rollout.max_server_restarts",
    "rollout.startup_deadline_s",
    "rollout.request_deadline_s",
    "rollout.sync_deadline_s",
)
"""Beginnings of the keys that may differ when a run is resumed: how long it trains, where and over how many processes
it computes, what is kept and shown. All others decide what is learned."""


def take_resume(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The command line without resume=RUN_DIR, in its place the overrides that the run was started with.

    A key that is given again takes the place of the run's. Raises ConfigError where RUN_DIR holds no run, and for a
    sweep, which is resumed run by run.
    """
    directories = [text.removeprefix(PREFIX) for text in arguments if text.startswith(PREFIX)]
    own = [text for text in arguments if not text.startswith(PREFIX)]
    if not directories:
        return own, None
    if len(directories) > 1 or not directories[0]:
        raise ConfigError([f"resume: found {', '.join(directories) or 'nothing'}; one run directory is needed"])
    if any(text in ("-m", "--multirun") for text in own):
        raise ConfigError(
            [
                "resume: a sweep is resumed by its own command with hydra.sweep.dir=SWEEP_DIR;"
                " resume=SWEEP_DIR/RUN resumes one run"
            ]
        )
    run_dir = Path(directories[0]).expanduser().resolve()
    given = {_name_key(text) for text in own}
    before = [text for text in load_run(run_dir)["overrides"] if _name_key(text) not in given]
    return [*before, *own, f"hydra.run.dir={quote(run_dir)}"], run_dir


def save_run(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """What `resume=RUN_DIR` needs to know: {"overrides": [...], "config": {dotted key: value}}."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # The address of Ray is that of one start alone.
    kept = [text for text in overrides if _name_key(text) != "cluster.ray_address"]
    content = {"overrides": kept, "config": dict(list_values(config))}
    write_atomically(run_dir / RUN_FILE, json.dumps(content, indent=1))


def load_run(run_dir: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no run."""
    path = run_dir / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"overrides": list(content["overrides"]), "config": dict(content["config"])}
    except FileNotFoundError:
        raise ConfigError([f"resume: {run_dir} holds no run: it has no {RUN_FILE}"]) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"resume: {path} is not what a run writes: {error!r}"]) from None


def check_changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """One message for each key that differs from the run's and may not."""
    if None in (config.checkpoint.save_every, before.get("checkpoint.save_every")):
        return ["checkpoint.save_every: null, now or in the run, which then has no checkpoint to resume from"]
    return [
        f"{key}: the run has {before[key]!r}, now {value!r}; it decides what is learned and may not change."
        f" What may: {', '.join(name + '*' if name.endswith('.') else name for name in MAY_CHANGE)}"
        for key, value in list_values(config)
        if key in before and before[key] != value and not key.startswith(MAY_CHANGE)
    ]


def list_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value) of every leaf, a dict or a list being one, and the class of every group."""
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            # Which option of a group it is: two rewards may have the same keys.
            yield f"{prefix}{field.name}", type(value).__name__
            yield from list_values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _to_plain(value)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    return dict(list_values(value)) if is_dataclass(value) else value


def _name_key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def quote(path: Path) -> str:
    """The path in quotes, as Hydra's grammar reads it back."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
