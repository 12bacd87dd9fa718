"""A command from its line to its exit code: options, `resume=RUN_DIR` with the keys that may change on resuming, checks
of this machine and the run's directory, the last line.

    python -m megarl.run.command RUN_DIR WHY

writes that a run has failed whose own process could not, as one killed. A run that another process holds, that has not
begun or whose outcome is known is left as it is.
"""

import contextlib
import json
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NoReturn

import hydra
import psutil
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.config.checks import describe_iteration_size
from megarl.config.errors import ConfigError
from megarl.config.load import Loaded, check_overrides, expand_sets, list_left_out, load, load_configs, to_config
from megarl.config.names import rewrite_overrides
from megarl.config.overrides import CONF_DIR, check_words, is_search_path, list_values, open_overrides, take_config_dirs
from megarl.config.placement import check_cluster
from megarl.config.schema.roles import ModelPlan, ModelSource
from megarl.config.schema.root import AUTO, Config, register
from megarl.files import RUN_FILE, CheckpointError, load_json_object, locking, write_atomically
from megarl.report.record import Outcome, State, check_sinks, clear_outcome, load_outcome, write_outcome
from megarl.signals import DRIVER_LOG, Stopped, capturing_output, stopping_on_signals

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LEAST_OPEN_FILES = 4096
"""Ray's processes and a server have some hundred connections and files each"""
BYTES_PER_TOKEN = 88
"""Memory of a response's token in the trainer: id and log-prob (Python objects, with their pointers), mask, version"""


def check_machine(config: Config, command: str = "train") -> Iterator[str]:
    """One message for each key that this machine cannot fulfil; command: as in megarl COMMAND.

    The soft limit of open files is raised to LEAST_OPEN_FILES first, where the hard one allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        yield f"ulimit -n: found {hard} open files; Ray and the servers need {LEAST_OPEN_FILES}"
    elif soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
    train, rollout, memory = config.train, config.rollout, find_memory()
    samples = train.num_samples * (1 + rollout.max_staleness)
    needed = samples * rollout.response_length * BYTES_PER_TOKEN
    if command == "train" and needed > memory:
        yield (
            f"{describe_iteration_size(train)}; {samples} responses of up to"
            f" rollout.response_length={rollout.response_length} tokens take {needed // 2**30} GiB in the trainer, and"
            f" this machine has {memory // 2**30} GiB"
        )


def find_memory() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return total


COMPLETION = ("--shell-completion", "-sc")
PRINTING = (*COMPLETION, "--info", "-i", "--help", "-h", "--hydra-help", "--version", "--cfg", "-c")
"""Hydra's options that print something and run nothing"""
OF_A_START = {".hydra", "logs"}
"""What Hydra and the log of the driver leave in the directory of a run before it begins"""
EXIT_BAD_CONFIG = 2
Results = Mapping[str, float]
"""A run's results by name, in the order of the line `done: ...`"""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Hydra's options with their values, all other words). A word of the latter may be no override."""
    words = get_args_parser().parse_intermixed_args(list(arguments)).overrides
    options = list(arguments)
    for text in words:
        options.remove(text)
    return options, words


def is_printing(options: Sequence[str]) -> bool:
    """Whether Hydra only prints something and runs nothing."""
    return any(text.split("=", 1)[0] in PRINTING for text in options)


def is_sweep(arguments: Sequence[str]) -> bool:
    return any(text in ("-m", "--multirun") for text in arguments)


def end_with_closed_pipe() -> None:
    """A write to a pipe that nobody reads ends this process silently: not for one that ends or writes to others."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def check_command_line(check: Callable[[list[str], list[str]], tuple[Sequence[str], Sequence[str]]]) -> None:
    """Have sys.argv checked, print what is to be said of it, and leave in it what Hydra is to read. A ConfigError ends
    the process.

    check: gets Hydra's options and the overrides; returns lines to print and the overrides for Hydra.
    """
    try:
        options, overrides = split_arguments(take_config_dirs(sys.argv[1:]))
        if is_printing(options):
            end_with_closed_pipe()
        # The words of Hydra's shell completion (`-sc install=bash`) are no overrides.
        if any(text in COMPLETION for text in options):
            return
        check_words(overrides)
        lines, completed = check(options, overrides)
    except ConfigError as error:
        end_with_config_error(error)
    for line in dict.fromkeys(lines):
        print(line, flush=True)
    # Hydra reads sys.argv itself, so it must also contain what makes the keys of open fields acceptable to Hydra.
    sys.argv[1:] = [*options, *open_overrides(completed)]


def load_complete(overrides: Sequence[str]) -> Loaded:
    """What `load` gives, with model.plan=fastest completed as `megarl.plan.job.complete` does it."""
    loaded = load(overrides)
    if loaded.config.model.plan is ModelPlan.none:
        return loaded
    from megarl.plan.job import complete  # imports torch and Megatron

    return complete(loaded)


def check_training(options: Sequence[str], overrides: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Check every run of these overrides; ROLL's names are replaced by our keys, what a run's model brings is added."""
    check_overrides(overrides)
    if is_sweep(options):
        # A run of it is a command of its own, to which its own model brings settings.
        rewritten = rewrite_overrides(overrides)
        return rewritten.lines, rewritten.overrides
    if is_printing(options):
        loaded = load(overrides)
        return loaded.lines, loaded.overrides
    loaded = load_complete(overrides)
    check_start(loaded.config)
    return [*loaded.lines, *list_left_out(overrides, loaded.config)], loaded.overrides


def evaluate() -> None:
    """`megarl evaluate model=... data=gsm8k,aime24 [key=value] ...`: evaluate a checkpoint on problem sets."""
    configs: dict[str, Config] = {}
    named = ["hydra.job.name=evaluate"]  # else it is that of this file, which --help shows

    def check(options: Sequence[str], overrides: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        if options and not overrides:
            return (), named  # such as --help, which Hydra handles
        if is_sweep(options):
            raise ConfigError(["--multirun: data=a,b is one evaluation of several sets; nothing else is swept"])
        rewritten = rewrite_overrides(overrides)
        runs = expand_sets(rewritten.overrides)
        configs.update(load_configs(runs))
        if not is_printing(options):
            check_start(next(iter(configs.values())), "evaluate")
        loaded = [load(run, "evaluate") for run in runs.values()]
        # Hydra creates the run's folder and records the configuration of the first set in it.
        lines = [*rewritten.lines, *(line for each in loaded for line in each.lines)]
        return lines, [*named, *choose_run_dir(overrides, configs), *loaded[0].overrides]

    def run(_first: Config, run_dir: Path) -> Results:
        # Imported here: torch and Ray take seconds, for which `--help` need not wait.
        from megarl.run.job import run_evaluation

        found: dict[str, float] = {}
        for result in run_evaluation(configs, run_dir):
            key, estimate = next(iter(result.estimates.items()))
            found |= {f"{result.name}/{key}": float(estimate.value), f"{result.name}/reward": result.mean_reward}
        return found

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def start(composed: DictConfig) -> None:
        run_composed(composed, run, "evaluate")

    register()
    check_command_line(check)
    start()


def choose_run_dir(overrides: Sequence[str], configs: Mapping[str, Config]) -> list[str]:
    """The override of Hydra's run folder, named after the model; none where one is given."""
    if any(text.startswith("hydra.run.dir=") for text in overrides):
        return []
    model = next(iter(configs.values())).model
    name = Path(model.path).name if model.source is ModelSource.path and model.path else model.name
    return [f"hydra.run.dir=runs/${{now:%Y-%m-%d_%H-%M-%S}}_evaluate_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"]


def check_start(config: Config, command: str = "train") -> None:
    """Raises ConfigError for what the cluster of the configuration or this machine cannot fulfil."""
    problems = list(check_cluster(config, command)) or list(check_machine(config, command))
    problems += check_sinks(config.logger) if command == "train" else ()
    if problems:
        raise ConfigError(problems)


def run_composed(composed: DictConfig, run: Callable[[Config, Path], Results], command: str = "train") -> Results:
    """Run one composed configuration in its run directory and print `done: ... run_dir=DIR`.

    run: returns the results in that line. A ConfigError ends the process with code 2, a signal with its own code.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with stopping_on_signals(), contextlib.ExitStack() as stack:
            config = to_config(composed, list_overrides())
            if problems := list(check_cluster(config, command)):
                raise ConfigError(problems)
            if config.logger.capture_output:
                stack.enter_context(capturing_output(run_dir / "logs" / DRIVER_LOG))
            results = run(config, run_dir)
    except ConfigError as error:
        _remove_unused(run_dir)
        end_with_config_error(error)
    except Stopped as stopped:
        print(f"{stopped}; every process was ended. run_dir={run_dir}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(f"done: {format_results(results)} run_dir={run_dir}", flush=True)
    return results


def _remove_unused(run_dir: Path) -> None:
    """Remove the directory of a run that was refused before it began, and its parent, where they hold nothing else."""
    if not run_dir.is_symlink() and {path.name for path in run_dir.glob("*")} <= OF_A_START:
        shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            run_dir.parent.rmdir()


def list_overrides() -> list[str]:
    """The overrides of the run that Hydra has composed, as another process can be given them: where Hydra found files
    (--config-dir) included, its other keys left out.
    """
    given = HydraConfig.get().overrides
    return [*filter(is_search_path, given.hydra), *given.task]


def format_results(results: Results) -> str:
    """`iterations=80 reward/heldout=0.9812`; none stands for what was not measured (NaN)."""

    def show(value: float) -> str:
        return str(value) if isinstance(value, int) else "none" if isnan(value) else f"{value:.4f}"

    return " ".join(f"{name}={show(value)}" for name, value in results.items())


def end_with_config_error(error: ConfigError) -> NoReturn:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(EXIT_BAD_CONFIG)


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
    if is_sweep(own):
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
        f"{key}: the run has {before[key]!r}, now {value!r}; it affects training and may not change on resume."
        f" These may: {', '.join(name + '*' if name.endswith('.') else name for name in MAY_CHANGE)}"
        for key, value in list_values(config)
        if key in before and before[key] != value and not may_change(key)
    ]


def _name_key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def quote(path: Path) -> str:
    """The path as Hydra's grammar reads it back."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def write_if_ours(run_dir: Path, outcome: Outcome | None) -> bool:
    """Write the outcome (None: remove it), unless another process uses the folder; returns whether none does.

    It belongs to the process that holds the lock of the run.
    """
    try:
        with locking(run_dir):
            if outcome is None:
                clear_outcome(run_dir)
            else:
                write_outcome(run_dir, outcome)
            return True
    except CheckpointError:
        return False


def main() -> None:
    run_dir, why = Path(sys.argv[1]), sys.argv[2]
    if (run_dir / RUN_FILE).is_file() and load_outcome(run_dir) is None:
        write_if_ours(run_dir, Outcome(State.failed, why))


if __name__ == "__main__":
    main()
