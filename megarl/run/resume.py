"""`resume=RUN_DIR`: the command line that a run was started with, and the keys that may change on resuming."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.overrides import is_search_path
from megarl.config.schema.root import Config
from megarl.config.schema.run import AUTO
from megarl.config.values import list_values
from megarl.files import RUN_FILE, load_json_object, write_atomically

PREFIX = "resume="

MAY_CHANGE = (
    *("train.num_iterations", "train.max_minutes", "train.max_samples", "train.stop_at_heldout_reward"),
    *("train.eval_every", "train.num_eval_prompts", "train.eval_sets", "train.tokens_per_microbatch"),
    *("train.deterministic", "train.profile", "data.critic_prompt_length"),
    *("checkpoint.", "cluster.", "evaluate.", "logger.", "reference.parallel.", "reference.offload"),
    *(
        f"{role}.{name}"
        for role in ("policy", "critic")
        for name in (
            *("parallel.", "recompute", "recompute_method", "recompute_num_layers", "offload"),
            *("optimizer.overlap_grad_reduce", "optimizer.overlap_param_gather"),
        )
    ),
    *("rollout.num_servers", "rollout.tp", "rollout.transport", "rollout.sync_bucket_mb", "rollout.kv_cache_tokens"),
    *("rollout.max_running_requests", "rollout.num_threads", "rollout.offload", "rollout.max_server_restarts"),
    *("rollout.startup_deadline_s", "rollout.request_deadline_s", "rollout.sync_deadline_s"),
    "rollout.max_probe_logprob_gap",
    *("reward.num_workers", "reward.url", "reward.api_key_env", "reward.max_retries", "reward.max_concurrency"),
)
"""The keys that may change when a run is resumed: how long it trains, on which processes it computes, when it is
evaluated, judged and given up, what is saved and shown; all others determine what is learned. A name that ends in a
dot stands for all keys below it."""


def take_resume(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The command line with resume=RUN_DIR replaced by the overrides that the run was started with.

    A key that is given again replaces the run's. Raises ConfigError where RUN_DIR has no run, and for a sweep, whose
    runs are resumed by its own command.
    """
    directories = [text.removeprefix(PREFIX) for text in arguments if text.startswith(PREFIX)]
    own = [text for text in arguments if not text.startswith(PREFIX)]
    if not directories:
        return own, None
    if len(directories) > 1 or not directories[0]:
        raise ConfigError([f"resume: found {', '.join(directories) or 'nothing'}; one run directory is needed"])
    if any(text in ("-m", "--multirun") for text in own):
        how = "by its own command with hydra.sweep.dir=SWEEP_DIR; resume=SWEEP_DIR/RUN is for one run"
        raise ConfigError([f"resume: a sweep is resumed {how}"])
    run_dir = Path(directories[0]).expanduser().resolve()
    given = {_name_key(text) for text in own}
    before = [text for text in load_run(run_dir)["overrides"] if _name_key(text) not in given]
    return [*before, *own, f"hydra.run.dir={quote(run_dir)}"], run_dir


def save_run(run_dir: Path, config: Config, overrides: Sequence[str]) -> None:
    """Write what `resume=RUN_DIR` and whoever uses the run's model need; how an earlier start ended is forgotten.

    {"overrides": [...], "config": {dotted key: value}, "directory": where relative paths count from}
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # An address is that of one start; what auto stands for is that of each.
    kept = [text for text in overrides if _name_key(text) != "cluster.ray_address" or text.endswith(f"={AUTO}")]
    content = {"overrides": kept, "config": dict(list_values(config)), "directory": str(Path.cwd())}
    path = run_dir / RUN_FILE
    before = load_json_object(path) if path.exists() else {}
    write_atomically(path, json.dumps(before | content | {"status": None, "outcome": None}, indent=1))


def load_run(run_dir: Path) -> dict[str, Any]:
    """Read what `save_run` wrote. Raises ConfigError where there is no run."""
    path = run_dir / RUN_FILE
    if not path.is_file():
        raise ConfigError([f"resume: {run_dir} is not a run directory: it has no {RUN_FILE}"])
    try:
        content = load_json_object(path)
        overrides = [_check_override(text) for text in content["overrides"]]
        return {"overrides": overrides, "config": dict(content["config"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"resume: {path} is not what a run writes: {error!r}"]) from None


def _check_override(text: object) -> str:
    """Raises ValueError for what `save_run` does not write: Hydra's options and keys, which could start a sweep."""
    if not isinstance(text, str) or text.startswith("-") or not (text.startswith("~") or "=" in text):
        raise ValueError(f"{text!r} among its overrides is none")
    key = _name_key(text)
    if key == "resume" or (key.startswith("hydra") and not is_search_path(text)):
        raise ValueError(f"{text!r} among its overrides is for one start alone")
    return text


def may_change(key: str) -> bool:
    """Whether the key may change when a run is resumed."""
    return any(f"{key}.".startswith(name) if name.endswith(".") else key == name for name in MAY_CHANGE)


def check_changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """One message for each key that differs from the run's and may not."""
    if None in (config.checkpoint.save_every, before.get("checkpoint.save_every")):
        return ["checkpoint.save_every: null, now or in the run, which then has no checkpoint to resume from"]
    return [
        f"{key}: the run has {before[key]!r}, now {value!r}; it determines what is learned and may not change."
        f" These may: {', '.join(name + '*' if name.endswith('.') else name for name in MAY_CHANGE)}"
        for key, value in list_values(config)
        if key in before and before[key] != value and not may_change(key)
    ]


def _name_key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def quote(path: Path) -> str:
    """The path as Hydra's grammar reads it back."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
