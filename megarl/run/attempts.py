"""One training run: recorded in its folder, attempts from the newest checkpoint, until one succeeds."""

import contextlib
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.algo.objective import format_critic, format_objective
from megarl.algo.registry import needs_critic
from megarl.cluster.calls import WorkerError
from megarl.config.brought import MODEL_FILE
from megarl.config.checks import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.placement import count_gpus, find_server_offload, is_restarted, list_groups
from megarl.config.schema.root import Config
from megarl.config.schema.task import MultiTurnEnvironmentConfig
from megarl.config.values import list_values
from megarl.cpu.process import describe_threads, settle_threads
from megarl.files import CHECKPOINTS, RUN_FILE, CheckpointError, Folder, check_space, locking, name_checkpoint
from megarl.interfaces import DeadlineError, TrainBackend, wait_all
from megarl.mcore.spec import Role, read_architecture
from megarl.plan.job import PlannedModels
from megarl.plan.search import check_plan
from megarl.plan.seconds import find_peak_tflops
from megarl.report.metrics import FILE_NAME as METRICS_NAME
from megarl.report.metrics import load_metrics
from megarl.report.record import Outcome, State, record_start, write_outcome
from megarl.report.report import Report, build_report
from megarl.report.terminal import LOG_NAME, append_log
from megarl.report.text import format_heldout
from megarl.rollout.journal import JOURNAL, Journal
from megarl.run.checkpoint import (
    TRACKED,
    LoopSaver,
    TrainerState,
    count_taken_groups,
    cut_files,
    estimate_bytes,
    load_trainer_state,
)
from megarl.run.command import format_results
from megarl.run.inputs import Inputs, describe_start, load_inputs
from megarl.run.job import RunResources, describe_data, open_components, open_resources
from megarl.run.limits import format_limit, format_places
from megarl.run.resume import check_changes, load_run, save_run
from megarl.signals import Stopped, get_terminal, show_warnings
from megarl.trainer import Summary, Trainer

HELDOUT = "reward/heldout"
LOCK_PATIENCE_S = 150.0
"""How long a requeued job waits for the lock of its earlier start. The NFS server of Linux releases the locks of a lost
client after 90 s and Lustre's after 100 s, unless set otherwise"""


def run_job(config: Config, run_dir: Path, overrides: Sequence[str] = (), *, is_resumed: bool | None = None) -> Summary:
    """Train as configured, resuming from the newest checkpoint in `run_dir`, if there is one.

    Everything the run writes is under `run_dir`, the trained policy in `policy/`, the critic, where there is one, in
    `critic/`. overrides: what resume=`run_dir` is to repeat. is_resumed: whether `run_dir` holds the run that goes on;
    None: it does if it has a run.json.

    Raises ConfigError, before any process is started, for problems of the inputs, and where the configuration differs
    from that run's in what is learned; CheckpointError where there is no disk space for a checkpoint, where another
    process uses `run_dir`, and for problems of its checkpoints.
    """
    is_resumed = (run_dir / RUN_FILE).is_file() if is_resumed is None else is_resumed
    before = load_run(run_dir)["config"] if is_resumed else {}
    if problems := check_changes(before, config) if is_resumed else []:
        raise ConfigError(problems)
    # run.json has the numbers themselves.
    config = settle_threads(config, count_gpus(config), recorded=before)
    inputs = load_inputs(config)
    critic = inputs.specs.get(Role.critic)
    own = read_architecture(Path(critic.checkpoint)) if critic else inputs.architecture
    if problems := [] if config.has_critic_alone else check_plan(config, PlannedModels(inputs.architecture, own)):
        raise ConfigError(problems)
    if config.checkpoint.save_every is not None:
        check_space(run_dir, estimate_bytes(spec for role, spec in inputs.specs.items() if role is not Role.reference))
    patience_s = LOCK_PATIENCE_S if is_restarted(os.environ) else 0.0
    with locking(run_dir, patience_s, partial(print, file=get_terminal(), flush=True)):
        if held := [name for name in (RUN_FILE, *TRACKED) if not is_resumed and (run_dir / name).is_file()]:
            text = f"{run_dir} has {', '.join(held)} of another run; each run needs a folder of its own"
            raise ConfigError([f"hydra.run.dir: {text} (resume={run_dir} resumes that run)"])
        save_run(run_dir, config, overrides)
        with _recording_failure(run_dir):
            summary = _run(config, inputs, run_dir)
        results = {"iterations": summary.num_iterations, HELDOUT: summary.heldout_reward}
        limit, total = summary.limit, config.train.num_iterations
        why = "" if limit is None else format_limit(limit, summary.num_iterations, total)
        write_outcome(run_dir, Outcome(State.done, why, results))
        append_log(run_dir / LOG_NAME, f"done: {format_results(results)}")
    return summary


@contextlib.contextmanager
def _recording_failure(run_dir: Path) -> Iterator[None]:
    """What ends the block is the run's outcome, and in its log."""
    try:
        yield
    except BaseException as error:
        plain = isinstance(error, Stopped | ConfigError | CheckpointError)
        # Of a stop and of bad input the code's place says nothing.
        lines = traceback.format_exception_only(error) if plain else traceback.format_exception(error)
        append_log(run_dir / LOG_NAME, "".join(lines).rstrip())
        why = str(error) if plain else f"{type(error).__name__}: {error}"
        write_outcome(run_dir, Outcome(State.stopped if isinstance(error, Stopped) else State.failed, why))
        raise


def _run(config: Config, inputs: Inputs, run_dir: Path) -> Summary:
    started, settings, keep = time.monotonic(), dict(list_values(config)), config.checkpoint
    with contextlib.ExitStack() as stack:
        given = config.logger, run_dir, config.train.num_iterations, get_terminal(), inputs.tokenizer.decode, settings
        report = stack.enter_context(contextlib.closing(build_report(*given)))
        stack.enter_context(show_warnings(report.message))
        _describe_run(config, inputs, run_dir, report)
        folder = Folder(run_dir / CHECKPOINTS, keep_last=keep.keep_last, keep_best=keep.keep_best)
        try:
            with report.phase("start"):
                resources = stack.enter_context(open_resources(config, inputs, run_dir / "logs"))
            return _Attempts(config, inputs, resources, run_dir, folder, report, started).run()
        except Stopped:
            if not folder.list_complete():
                report.message("there is no checkpoint yet, so there is nothing to resume")
            raise


def _describe_run(config: Config, inputs: Inputs, run_dir: Path, report: Report) -> None:
    """Print what the run is, and record it with versions and hardware."""
    saved, algo = inputs.saved_groups, config.algo
    has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig) if saved is None else saved.has_turns
    sizes, data = describe_sizes(config), describe_data(config, inputs)
    objective = format_objective(algo, config.train.responses_per_prompt, config.reward.wrong, has_turns=has_turns)
    objective += f"\n{format_critic(config.policy, config.critic)}" if needs_critic(algo) else ""
    counts = ", ".join(f"{group.name} {group.num_processes}" for group in list_groups(config) if group.num_processes)
    start = f"starting Ray and its processes: {counts}; their output: {run_dir / 'logs'}"
    for text in filter(None, (sizes, objective, data, describe_threads(config, count_gpus(config)), start)):
        report.message(text)
    record_start(run_dir, sizes=sizes, objective=objective, data=data, peak_tflops=find_peak_tflops(config))


@dataclass(frozen=True)
class _Attempts:
    config: Config
    inputs: Inputs
    resources: RunResources
    run_dir: Path
    folder: Folder
    report: Report
    started: float
    """Of the run, on time.monotonic's clock; each attempt's train.max_minutes counts from it"""

    @property
    def is_saving(self) -> bool:
        return self.config.checkpoint.save_every is not None

    def run(self) -> Summary:
        """Repeat attempts until one succeeds; a lost process starts the next, at most max_restarts in a row."""
        servers, maximum = self.resources.servers, self.config.checkpoint.max_restarts
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
                lost = servers.find_lost() if servers is not None else {}
                if not (lost or is_loss(error)):
                    raise
                if num_restarts > maximum:
                    error.add_note(f"checkpoint.max_restarts={maximum} have been made without a new checkpoint")
                    raise
                text = f"restart {num_restarts} of at most {maximum} (checkpoint.max_restarts)"
                self.report.message(f"{error}\n{text}")
            if servers is not None:
                # The next attempt starts them: after the roles, where they share GPUs. Servers that give memory back
                # begin anew: the roles are built beside them, and nobody knows what this attempt has left them.
                gives_back = find_server_offload(self.config) is not None
                servers.end(servers.names if gives_back else lost)

    def attempt(self) -> Summary:
        """Train from the newest checkpoint, or from the start where there is none."""
        found, report, run_dir = self.find_state(), self.report, self.run_dir
        journal = Journal(run_dir / JOURNAL)
        given = self.config, self.inputs, self.resources, run_dir, report, journal if self.is_saving else None
        with open_components(*given) as components:
            named = {Role.policy.value: components.policy, Role.critic.value: components.critic}
            roles = {name: role for name, role in named.items() if role is not None}
            with contextlib.closing(self.build_saver(roles, journal)) as saver:
                trainer = Trainer(self.config, components, saver, self.started)
                if found is not None:
                    state, directory = found
                    with report.phase("load"):
                        wait_all([role.load(directory / name) for name, role in roles.items()])
                    trainer.restore(state)
                elif Role.critic in self.inputs.specs:
                    critic = self.inputs.specs[Role.critic]
                    report.message(describe_start(self.config, critic, self.inputs.saved_rollouts))
                summary = trainer.run()
            wait_all([role.export_weights(run_dir / name) for name, role in roles.items()])
        if (run_dir / RUN_FILE).is_file() and components.policy is not None:
            shutil.copyfile(run_dir / RUN_FILE, run_dir / Role.policy.value / MODEL_FILE)
        total, limit = self.config.train.num_iterations, summary.limit
        if limit is not None:
            go_on = f"; go on with megarl train resume={run_dir} {limit.go_on}" if self.is_saving else ""
            report.message(format_limit(limit, summary.num_iterations, total) + go_on)
        lines = load_metrics(run_dir / METRICS_NAME)
        if rewards := [(int(line["iteration"]), line[HELDOUT]) for line in lines if HELDOUT in line]:
            report.message(format_heldout(rewards))
        report.message(format_places(run_dir, has_critic_alone=total == 0))
        return summary

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
        directory = found[1]
        state = load_trainer_state(directory)
        if Role.policy in self.inputs.specs and not (directory / Role.policy.value).is_dir():
            raise CheckpointError(
                f"{directory}: has no policy, since the critic learned from saved rollouts alone; a new run starts from"
                f" that critic with critic.init={self.run_dir}/critic algo.value_pretrain.enabled=false"
            )
        try:
            self.inputs.build_sampler(self.config.seed).restore(state.source.sampler)
        except ValueError as error:
            raise CheckpointError(f"{self.run_dir}: the data have changed: {error}") from error
        cut_files(self.run_dir, state.sizes)
        self.report.rewind(state.iteration)
        self.report.message(f"resuming from {directory}")
        return state, directory

    def build_saver(self, roles: Mapping[str, TrainBackend], journal: Journal) -> LoopSaver:
        def forget(through: int) -> None:
            num_groups = count_taken_groups(self.folder.path / name_checkpoint(through))
            journal.forget(through, num_groups, self.config.algo.value_pretrain.count_step(through))

        if not self.is_saving:
            return LoopSaver()
        return LoopSaver(self.config.checkpoint, self.folder, roles, self.inputs.specs, self.report, forget)


def is_loss(error: BaseException | None) -> bool:
    """Whether a training process died, or a call was not answered, so that another attempt may succeed."""
    while error is not None:
        if isinstance(error, DeadlineError) or (isinstance(error, WorkerError) and error.lost):
            return True
        error = error.__cause__
    return False
