"""One training run: recorded in its folder, attempts from the newest checkpoint, until one succeeds."""

import contextlib
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.algo.objective import format_critic, format_objective
from megarl.algo.registry import needs_critic
from megarl.cluster.calls import WorkerError
from megarl.config.brought import MODEL_FILE
from megarl.config.checks.config import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.placement import find_server_offload
from megarl.config.schema.root import Config
from megarl.config.schema.run import CheckpointConfig
from megarl.config.schema.task import MultiTurnEnvironmentConfig
from megarl.config.values import list_values
from megarl.cpu.threads import describe_threads, settle_threads
from megarl.files import CHECKPOINTS, RECORD, RUN_FILE, CheckpointError, Folder, check_space, name_checkpoint
from megarl.interfaces import DeadlineError, TrainBackend, wait_all
from megarl.mcore.spec import Role, read_architecture
from megarl.plan.job import PlannedModels
from megarl.plan.search import check_plan
from megarl.plan.seconds import find_peak_tflops
from megarl.report.metrics import FILE_NAME as METRICS_NAME
from megarl.report.metrics import load_metrics
from megarl.report.record import Outcome, State, clear_outcome, record_start, write_outcome
from megarl.report.report import Report, build_report
from megarl.report.terminal import LOG_NAME, append_log
from megarl.report.text import format_heldout
from megarl.rollout.journal import JOURNAL, Journal
from megarl.rollout.rollout_file import SavedGroups
from megarl.run.checkpoint import (
    TRACKED,
    CheckpointSaver,
    CheckpointWriter,
    LoopSaver,
    TrainerState,
    count_taken_groups,
    cut_files,
    estimate_bytes,
    load_trainer_state,
)
from megarl.run.command import format_results
from megarl.run.inputs import Inputs, describe_start, load_inputs
from megarl.run.job import (
    RunResources,
    describe_data,
    describe_processes_to_start,
    lock_run_dir,
    open_components,
    open_resources,
)
from megarl.run.limits import format_limit, format_places, format_resume
from megarl.run.machine import describe_slow_dtypes
from megarl.run.process import Stopped, get_terminal, show_warnings
from megarl.run.resume import check_changes, load_run, save_run
from megarl.trainer import Summary, Trainer, TrainerComponents


def run_job(
    config: Config, run_dir: Path, *, is_new: bool = False, note_start: Callable[[], None] = lambda: None
) -> Summary:
    """Train as configured, resuming from the newest checkpoint in `run_dir`, if there is one.

    Everything the run writes is under `run_dir`, the trained policy in `policy/`, the critic, where there is one, in
    `critic/`. is_new: `run_dir` may not have files of another run. note_start: called once all inputs are checked.

    Raises ConfigError, before any process is started, for problems of the inputs; CheckpointError where there is no
    disk space for a checkpoint, where another process uses `run_dir`, and for problems of its checkpoints.
    """
    folder = open_folder(run_dir, config.checkpoint)
    folder.check_kept()
    inputs = load_inputs(config)
    critic = inputs.specs.get(Role.critic)
    own = read_architecture(Path(critic.checkpoint)) if critic else inputs.architecture
    problems = [] if config.has_critic_alone else check_plan(config, PlannedModels(inputs.architecture, own))
    if problems:
        raise ConfigError(problems)
    if config.checkpoint.save_every is not None:
        check_space(run_dir, estimate_bytes(spec for role, spec in inputs.specs.items() if role is not Role.reference))
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_run_dir(run_dir))
        held = [name for name in (RUN_FILE, *TRACKED) if (run_dir / name).is_file()] if is_new else []
        if held:
            raise ConfigError(
                [
                    f"hydra.run.dir: {run_dir} has {', '.join(held)} of another run; each run needs a folder of its own"
                    f" (resume={run_dir} resumes that run)"
                ]
            )
        note_start()
        started = time.monotonic()
        report = stack.enter_context(contextlib.closing(_open_report(config, run_dir, inputs)))
        stack.enter_context(show_warnings(report.message))
        _describe_run(config, inputs, run_dir, report)
        stack.enter_context(_saying_nothing_is_saved(folder, run_dir, report))
        with report.phase("start"):
            resources = stack.enter_context(open_resources(config, inputs, run_dir / "logs"))
        return _Attempts(config, inputs, resources, run_dir, report, started).run()


@contextlib.contextmanager
def _saying_nothing_is_saved(folder: Folder, run_dir: Path, report: Report) -> Iterator[None]:
    """Where the block is stopped by a signal before the first checkpoint."""
    try:
        yield
    except Stopped:
        if not folder.list_complete():
            report.message("there is no checkpoint yet, so there is nothing to resume")
        raise


def open_folder(run_dir: Path, keep: CheckpointConfig) -> Folder:
    """The folder of a run's checkpoints."""
    record = run_dir / RECORD
    return Folder(run_dir / CHECKPOINTS, keep_last=keep.keep_last, keep_best=keep.keep_best, record=record)


def _open_report(config: Config, run_dir: Path, inputs: Inputs) -> Report:
    settings = dict(list_values(config))
    decode = inputs.tokenizer.decode
    return build_report(config.logger, run_dir, config.train.num_iterations, get_terminal(), decode, settings)


def _describe_run(config: Config, inputs: Inputs, run_dir: Path, report: Report) -> None:
    """Print what the run is, and record it with versions and hardware."""
    sizes, objective = describe_sizes(config), describe_objective(config, inputs.saved_groups)
    data = describe_data(config, inputs)
    start = describe_processes_to_start(config, run_dir / "logs")
    for text in filter(None, (sizes, objective, data, describe_threads(config), describe_slow_dtypes(config), start)):
        report.message(text)
    record_start(run_dir, sizes=sizes, objective=objective, data=data, peak_tflops=find_peak_tflops(config))


def describe_objective(config: Config, saved: SavedGroups | None) -> str:
    """The objective as formulas. saved: what rollout.file has."""
    has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig) if saved is None else saved.has_turns
    algo = config.algo
    text = format_objective(algo, config.train.responses_per_prompt, config.reward.wrong, has_turns=has_turns)
    critic = format_critic(config.policy, config.critic) if needs_critic(algo) else None
    return text if critic is None else f"{text}\n{critic}"


class _Attempts:
    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        resources: RunResources,
        run_dir: Path,
        report: Report,
        started: float,
    ):
        """started: of the run, on time.monotonic's clock; each attempt's train.max_minutes counts from it."""
        self.config, self.inputs, self.resources, self.run_dir, self.report = config, inputs, resources, run_dir, report
        self.started = started
        self.folder = open_folder(run_dir, config.checkpoint)
        self.journal = Journal(run_dir / JOURNAL)
        self.is_saving = config.checkpoint.save_every is not None

    def run(self) -> Summary:
        """Repeat attempts until one succeeds; a lost process starts the next, at most max_restarts in a row."""
        num_restarts, newest = 0, self.folder.list_complete()[-1:]
        while True:
            try:
                return self.attempt()
            except RuntimeError as error:
                before, newest = newest, self.folder.list_complete()[-1:]
                num_restarts = 1 if newest > before else num_restarts + 1
                if not self.is_saving:
                    raise
                # It also resets the servers that are not lost.
                lost = self.resources.servers.find_lost() if self.resources.servers is not None else {}
                if not (lost or is_loss(error)):
                    raise
                if num_restarts > self.config.checkpoint.max_restarts:
                    error.add_note(
                        f"checkpoint.max_restarts={num_restarts - 1} have been made without a new checkpoint"
                    )
                    raise
                self.say_restart(error, num_restarts)
            if self.resources.servers is not None:
                # The next attempt starts them: after the roles, where they share GPUs. Servers that give memory back
                # begin anew: the roles are built beside them, and nobody knows what this attempt has left them.
                gives_back = find_server_offload(self.config) is not None
                self.resources.servers.end(self.resources.servers.names if gives_back else lost)

    def attempt(self) -> Summary:
        """Train from the newest checkpoint, or from the start where there is none."""
        found = self.find_state()
        with open_components(
            self.config,
            self.inputs,
            self.resources,
            self.run_dir,
            self.report,
            self.journal if self.is_saving else None,
        ) as components:
            roles = list_roles(components)
            with contextlib.closing(self.build_saver(roles)) as saver:
                trainer = Trainer(self.config, replace(components, saver=saver), self.started)
                if found is not None:
                    state, directory = found
                    with self.report.phase("load"):
                        wait_all([role.load(directory / name) for name, role in roles.items()])
                    trainer.restore(state)
                elif Role.critic in self.inputs.specs:
                    critic = self.inputs.specs[Role.critic]
                    self.report.message(describe_start(self.config, critic, self.inputs.saved_rollouts))
                summary = trainer.run()
            wait_all([role.export_weights(self.run_dir / name) for name, role in roles.items()])
        if (self.run_dir / RUN_FILE).is_file() and components.policy is not None:
            shutil.copyfile(self.run_dir / RUN_FILE, self.run_dir / Role.policy.value / MODEL_FILE)
        self.say_end(summary)
        return summary

    def say_end(self, summary: Summary) -> None:
        """Say what ended the run early, how it did, and where its model is."""
        if (limit := summary.limit) is not None:
            go_on = f"; {format_resume(limit, self.run_dir)}" if self.is_saving else ""
            ended = format_limit(limit, summary.num_iterations, self.config.train.num_iterations)
            self.report.message(ended + go_on)
        lines = load_metrics(self.run_dir / METRICS_NAME)
        if rewards := [(int(line["iteration"]), line["reward/heldout"]) for line in lines if "reward/heldout" in line]:
            self.report.message(format_heldout(rewards))
        self.report.message(format_places(self.run_dir, has_critic_alone=self.config.train.num_iterations == 0))

    def find_state(self) -> tuple[TrainerState, Path] | None:
        """The newest checkpoint; the run's files are truncated to it, or emptied where there is none."""
        if not self.is_saving:
            return None
        self.folder.clean()
        found = self.folder.find_newest(self.report.message)
        if found is None:
            cut_files(self.run_dir, {})
            self.report.rewind(-self.config.algo.value_pretrain.num_steps)
            return None
        state = load_trainer_state(found[1])
        if Role.policy in self.inputs.specs and not (found[1] / Role.policy.value).is_dir():
            raise CheckpointError(
                f"{found[1]}: has no policy, since the critic learned from saved rollouts alone; a new run starts from"
                f" that critic with critic.init={self.run_dir}/critic algo.value_pretrain.enabled=false"
            )
        self.check_prompts(state)
        cut_files(self.run_dir, state.sizes)
        self.report.rewind(state.iteration)
        self.report.message(f"resuming from {found[1]}")
        return state, found[1]

    def check_prompts(self, state: TrainerState) -> None:
        try:
            self.inputs.build_sampler(self.config.seed).restore(state.source.sampler)
        except ValueError as error:
            raise CheckpointError(f"{self.run_dir}: the data have changed: {error}") from error

    def build_saver(self, roles: Mapping[str, TrainBackend]) -> LoopSaver:
        if not self.is_saving:
            return LoopSaver()

        def forget(through: int) -> None:
            num_groups = count_taken_groups(self.folder.path / name_checkpoint(through))
            self.journal.forget(through, num_groups, self.config.algo.value_pretrain.count_step(through))

        writer = CheckpointWriter(self.run_dir, self.folder, roles, self.inputs.specs, forget, say=self.report.message)
        return CheckpointSaver(self.config.checkpoint, writer, self.report, f"resume={self.run_dir}")

    def say_restart(self, error: RuntimeError, number: int) -> None:
        maximum = self.config.checkpoint.max_restarts
        self.report.message(f"{error}\nrestart {number} of at most {maximum} (checkpoint.max_restarts)")


def is_loss(error: BaseException | None) -> bool:
    """Whether a training process died, or a call was not answered, so that another attempt may succeed."""
    while error is not None:
        if isinstance(error, DeadlineError) or (isinstance(error, WorkerError) and error.lost):
            return True
        error = error.__cause__
    return False


def list_roles(components: TrainerComponents) -> Mapping[str, TrainBackend]:
    """The trained roles, by name."""
    roles = {Role.policy.value: components.policy, Role.critic.value: components.critic}
    return {name: role for name, role in roles.items() if role is not None}


HELDOUT = "reward/heldout"


def run_recorded(
    config: Config, run_dir: Path, overrides: Sequence[str] = (), *, is_resumed: bool | None = None
) -> Summary:
    """Train as `run_job` does, and raise what it raises.

    overrides: what resume=`run_dir` is to repeat. is_resumed: whether `run_dir` holds the run that goes on; None: it
    does if it has a run.json. Raises ConfigError where the configuration differs from that run's in what is learned.
    """
    if is_resumed is None:
        is_resumed = (run_dir / RUN_FILE).is_file()
    before = load_run(run_dir)["config"] if is_resumed else {}
    problems = check_changes(before, config) if is_resumed else []
    if problems:
        raise ConfigError(problems)
    # run.json has the numbers themselves.
    config = settle_threads(config, recorded=before)
    is_begun = False

    def note_start() -> None:
        nonlocal is_begun
        save_run(run_dir, config, overrides)
        clear_outcome(run_dir)
        is_begun = True

    try:
        summary = run_job(config, run_dir, is_new=not is_resumed, note_start=note_start)
    except BaseException as error:
        # Before its start the folder may be another run's, and a refused configuration is no run.
        if is_begun or not (isinstance(error, ConfigError) or (run_dir / RUN_FILE).exists()):
            plain = isinstance(error, Stopped | ConfigError | CheckpointError)
            why = str(error) if plain else f"{type(error).__name__}: {error}"
            # Of a stop and of bad input the code's place says nothing.
            lines = traceback.format_exception_only(error) if plain else traceback.format_exception(error)
            append_log(run_dir / LOG_NAME, "".join(lines).rstrip())
            write_outcome(run_dir, Outcome(State.stopped if isinstance(error, Stopped) else State.failed, why))
        raise
    results = {"iterations": summary.num_iterations, HELDOUT: summary.heldout_reward}
    limit, total = summary.limit, config.train.num_iterations
    why = "" if limit is None else format_limit(limit, summary.num_iterations, total)
    write_outcome(run_dir, Outcome(State.done, why, results))
    append_log(run_dir / LOG_NAME, f"done: {format_results(results)}")
    return summary
