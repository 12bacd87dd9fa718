"""What a command runs. A training run: the processes of each attempt, and the components of the loop that use them;
attempts from the newest checkpoint until one succeeds, recorded in the run's folder. An evaluation: servers on a
checkpoint generate responses to the prompts of each set, which are scored.
"""

import contextlib
import math
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.algo.objective import format_critic, format_objective, needs_critic
from megarl.cluster.actors import Servers, Turns, WorkerGroup
from megarl.cluster.calls import WorkerError
from megarl.cluster.opened import Cluster, open_ray
from megarl.cluster.process import Profiler, measure_peaks
from megarl.config import placement
from megarl.config.checks import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.load import MODEL_FILE
from megarl.config.overrides import list_values
from megarl.config.schema.mix import has_turns
from megarl.config.schema.root import SERVERS, Config, Transport, get_temperature, list_ks
from megarl.cpu.process import describe_threads, settle_threads
from megarl.files import CHECKPOINTS, RUN_FILE, CheckpointError, Folder, check_space, locking, name_checkpoint
from megarl.interfaces import UNPUBLISHED, DeadlineError, Pending, RolloutServers, TrainBackend, wait_all
from megarl.mcore.spec import Role, read_architecture
from megarl.plan.job import PlannedModels, check_plan
from megarl.plan.seconds import find_peak_tflops
from megarl.report import evaluation
from megarl.report.record import HELDOUT, METRICS_FILE, Outcome, State, load_metrics, record_start, write_outcome
from megarl.report.report import Report, build_report
from megarl.report.text import LOG_NAME, Decode, Progress, append_log, format_heldout, format_seconds
from megarl.report.tokens import TOKENS_FILE, TokenFile
from megarl.rollout.client import ServerOffloader
from megarl.rollout.collector import Collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.episodes import build_episode_runner, build_runner
from megarl.rollout.rollout_file import JOURNAL, ROLLOUTS_FILE, Journal, RolloutWriter, SavedGroups
from megarl.run.checkpoint import (
    TRACKED,
    LoopSaver,
    TrainerState,
    count_taken_groups,
    cut_files,
    estimate_bytes,
    load_trainer_state,
)
from megarl.run.command import check_changes, format_results, load_run, save_run
from megarl.run.components import Recovery, TrainerComponents
from megarl.run.inputs import (
    EvaluationInputs,
    EvaluationSet,
    Inputs,
    describe_start,
    load_evaluation_inputs,
    load_inputs,
)
from megarl.signals import Stopped, get_terminal, is_stopping, show_warnings
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync
from megarl.task.data import PromptSampler
from megarl.task.mix import build_run_scorer, build_sampler
from megarl.task.scorer import Scorer, build_scorer, reads_answers
from megarl.trainer import Summary, Trainer, format_limit
from megarl.types import Sample

LOCK_PATIENCE_S = 150.0
"""How long a requeued job waits for the lock of its earlier start. The NFS server of Linux releases the locks of a lost
client after 90 s and Lustre's after 100 s, unless set otherwise"""


def describe_data(config: Config, inputs: Inputs) -> str:
    """What the run learns from, in a line or more; empty where `describe_start` says it."""
    if (given := inputs.pairs or inputs.demonstrations) is not None:
        what = "pairs" if inputs.pairs else "demonstrations"
        return f"data: {len(given.train)} {what} to train on, {len(given.heldout)} held out; {'; '.join(given.notes)}"
    if config.has_critic_alone:
        return ""
    if (saved := inputs.saved_groups) is not None:
        lines, first = list(describe_saved(config, saved)), saved.prompts[0] if saved.prompts else None
    else:
        data = inputs.data
        too_long, first = data.num_dropped - data.num_repeated, data.train[0]
        text = f"data: {len(data.train)} prompts to train on, {len(data.heldout)} held out"
        text += f"; {too_long} dropped (longer than data.prompt_length)" if too_long else ""
        text += f"; {data.num_repeated} dropped (repeats of a held-out question)" if data.num_repeated else ""
        lines = [text, f"data: {'; '.join(data.notes)}"]
        lines += [f"train.eval_sets.{each.name}: {'; '.join(each.notes)}" for each in inputs.eval_sets]
    if (own := inputs.critic_prompt) is not None and first is not None:
        text = f"before the first prompt the critic alone reads {own.fill(first)!r} ({len(own.encode(first))} tokens)"
        lines.append(text)
    return "\n".join(lines)


def describe_saved(config: Config, saved: SavedGroups) -> Iterator[str]:
    """What rollout.file has and what of it is learned from, a line each."""
    per_pass = len(saved.groups) / config.train.num_prompts
    failed = f"; {saved.num_failed} have no reward and are not learned from" if saved.num_failed else ""
    yield (
        f"rollout.file: {saved.num_samples} responses in {len(saved.groups)} groups, of {saved.num_rollouts} rollouts"
        f" in {saved.path}; a pass over them takes {per_pass:g} iterations{failed}"
    )
    yield from (f"warning: {text}" for text in saved.dropped)
    here, there = config.rollout.temperature, None
    with contextlib.suppress(ConfigError, OSError):
        there = load_run(saved.path.parent)["config"].get("rollout.temperature")
    if there is None:
        yield f"the responses' temperature is not recorded ({RUN_FILE} beside the file); {here:g} is assumed"
    elif there != here:
        text = f"the responses were sampled at temperature {there:g}, not rollout.temperature={here:g}"
        yield f"warning: {text}: the policy's ratios to them are of two distributions"


Resources = tuple[Cluster, RolloutServers | None]
"""Ray and the servers in it; several attempts may use them one after the other"""


@contextlib.contextmanager
def open_resources(config: Config, checkpoint: Path, log_dir: Path, command: str = "train") -> Iterator[Resources]:
    """Ray, and the servers, started without waiting unless the roles come first; all is shut down on leaving.

    checkpoint: that the servers start from. command: as in megarl COMMAND.
    """
    groups, is_trained = placement.list_groups(config, command), command == "train"
    slots = placement.place(config.cluster, groups)
    with open_ray(config.cluster, sum(group.num_processes for group in groups)) as opened:
        is_split = config.rollout.transport is Transport.split
        cluster = replace(opened, joins_servers=is_split or len(opened.nodes) > 1)
        if not slots[SERVERS]:
            yield cluster, None
            return
        rollout = replace(config.rollout, offload=placement.find_server_offload(config) if is_trained else None)
        stop_s, shares_gpus = config.cluster.shutdown_deadline_s / 3, placement.is_sharing(slots)
        given = rollout, checkpoint, log_dir, config.seed, cluster, slots[SERVERS], stop_s
        servers = Servers(*given, weight_version=UNPUBLISHED if is_trained else 0, shares_gpus=shares_gpus)
        with contextlib.closing(servers):
            if not shares_gpus:
                servers.start()
            yield cluster, servers


@contextlib.contextmanager
def open_components(
    config: Config,
    inputs: Inputs,
    resources: Resources,
    run_dir: Path,
    report: Report,
    journal: Journal | None = None,
) -> Iterator[TrainerComponents]:
    """The components of the loop, shut down on leaving; workers are started in parallel with the servers.

    Where they share GPUs, the workers are started before the servers. journal: stores what is sampled, for a resumed
    run; None: nothing does.
    """
    slots = placement.place(config.cluster, placement.list_groups(config))
    log_dir, turns = run_dir / "logs", Turns(placement.take_turns(config))
    groups: dict[Role, WorkerGroup] = {}
    cluster, servers = resources
    with contextlib.ExitStack() as stack:
        with report.phase("start"):
            for role, spec in inputs.specs.items():
                given = spec, log_dir, cluster, slots[role.value], config.cluster.worker_start_deadline_s
                groups[role] = WorkerGroup(*given, turns)
                stack.callback(groups[role].close)
            starting = {role: group.start() for role, group in groups.items()}
            wait_started(list(starting.values()), servers, roles_first=placement.is_sharing(slots))
            for role, started in starting.items():
                for line in started.result().splitlines():
                    report.message(f"{role.value}: {line}")
        profiler = Profiler(config.train.profile, groups.values(), run_dir, report.message)
        report.after_log = stack.enter_context(contextlib.closing(profiler)).after_log
        for name, taken in slots.items():
            if where := cluster.describe(taken):
                report.message(f"{name}: on {where}")
        measured: dict[str, Any] = {role.value: group for role, group in groups.items()}
        if isinstance(servers, Servers):
            measured[SERVERS] = servers
        report.measure = partial(measure_peaks, measured)
        components = build_components(stack, config, inputs, run_dir, report, groups)
        if servers is None:
            yield components
            return
        engine = _open_engine(stack, config, inputs.checkpoint, servers, inputs.stop_token_ids)
        scorer = stack.enter_context(contextlib.closing(build_run_scorer(config)))
        collector = build_collector(config, inputs, engine, scorer, journal)
        stack.callback(collector.close)
        report.show_processes(lambda: f"{collector.num_running} responses under way")
        # With rollout.offload the servers give memory back before each call of a role from here on.
        offloader = ServerOffloader(engine.clients, placement.find_server_offload(config))
        turns.free_servers, offloader.measure = offloader.release, groups[Role.policy].measure_free
        sent = groups[Role.policy], engine.clients, config.rollout
        ranks = Ranks(*sent, inputs.architecture, cluster.host)
        common: dict[str, Any] = {"policy_dtype": config.policy.dtype, "offloader": offloader}
        common["check_processes"] = servers.check_alive
        sync: DiskSync | ShardSync
        if config.rollout.transport is Transport.disk:
            sync = DiskSync(*sent, ranks, inputs.probe_tokens, directory=run_dir / "sync", **common)
        else:
            common |= {"scratch": cluster.scratch, "host": cluster.host}
            sync = ShardSync(*sent, ranks, inputs.probe_tokens, **common)
        stack.callback(sync.close)
        parts: dict[str, Any] = {"servers": servers, "offloader": offloader}
        yield replace(components, engine=engine, collector=collector, sync=sync, **parts)


def wait_started(roles: Sequence[Pending[Any]], servers: RolloutServers | None, *, roles_first: bool) -> None:
    """Wait for the started roles and for the servers.

    roles_first: the servers are started once the roles hold their models. SGLang measures the free memory of its GPUs
    at its start and takes most of it for its cache.
    """
    if roles_first:
        wait_all(roles)
    wait_all([*([servers.start()] if servers else ()), *roles])


def _open_engine(
    stack: contextlib.ExitStack,
    config: Config,
    checkpoint: Path,
    servers: RolloutServers,
    stop_token_ids: Sequence[int],
    **truncation: Any,
) -> SGLangEngine:
    """Waits for the servers."""
    engine = SGLangEngine(
        servers.start().result(),
        checkpoint,
        replace(config.rollout, stop_token_ids=list(stop_token_ids)),
        seed=config.seed,
        check_processes=servers.check_alive,
        api_key=servers.api_key,
        **truncation,
    )
    stack.callback(engine.close)
    return engine


def build_components(
    stack: contextlib.ExitStack,
    config: Config,
    inputs: Inputs,
    run_dir: Path,
    report: Report,
    roles: Mapping[Role, TrainBackend],
) -> TrainerComponents:
    """The components of the loop over these roles, without those that generate; files are closed with the stack."""
    logger, token_records, writer = config.logger, None, None
    if logger.num_token_records > 0 and Role.policy in roles:
        token_records = TokenFile(run_dir / TOKENS_FILE, logger.num_token_records, inputs.tokenizer.decode)
        stack.callback(token_records.close)
    if logger.save_rollouts and inputs.saved_groups is None:
        writer = RolloutWriter(run_dir / ROLLOUTS_FILE)
        stack.callback(writer.close)
    return TrainerComponents(inputs, report, roles, token_records, writer)


def build_collector(
    config: Config, inputs: Inputs, engine: SGLangEngine, scorer: Scorer, journal: Journal | None = None
) -> Collector:
    return Collector(
        *(engine, scorer, build_runner(config, inputs.conversations)),
        seed=config.seed,
        temperature=config.rollout.temperature,
        in_lockstep=config.rollout.max_staleness == 0,
        journal=journal,
        eval_sets=inputs.eval_sets,
    )


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
    config = settle_threads(config, placement.count_gpus(config), recorded=before)
    inputs = load_inputs(config)
    own = {role: read_architecture(Path(spec.checkpoint)) for role, spec in inputs.specs.items()}
    models = PlannedModels(*(own.get(role, inputs.architecture) for role in (Role.policy, Role.critic, Role.reference)))
    if problems := [] if config.has_critic_alone else check_plan(config, models):
        raise ConfigError(problems)
    if config.checkpoint.save_every is not None:
        check_space(run_dir, estimate_bytes(spec for role, spec in inputs.specs.items() if role is not Role.reference))
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    patience_s = LOCK_PATIENCE_S if is_requeued else 0.0
    with locking(run_dir, patience_s, partial(print, file=get_terminal(), flush=True)):
        if held := [name for name in (RUN_FILE, *TRACKED) if not is_resumed and (run_dir / name).is_file()]:
            text = f"{run_dir} has {', '.join(held)} of another run; each run needs a folder of its own"
            raise ConfigError([f"hydra.run.dir: {text} (resume={run_dir} resumes that run)"])
        save_run(run_dir, config, overrides)
        try:
            summary = _run(config, inputs, run_dir)
        except BaseException as error:
            plain = isinstance(error, Stopped | ConfigError | CheckpointError)
            # Of a stop and of bad input the code's place says nothing.
            lines = traceback.format_exception_only(error) if plain else traceback.format_exception(error)
            append_log(run_dir / LOG_NAME, "".join(lines).rstrip())
            why = str(error) if plain else f"{type(error).__name__}: {error}"
            write_outcome(run_dir, Outcome(State.stopped if isinstance(error, Stopped) else State.failed, why))
            raise
        results = summary.results
        limit, total = summary.limit, config.train.num_iterations
        why = "" if limit is None else format_limit(limit, summary.num_iterations, total)
        write_outcome(run_dir, Outcome(State.done, why, results))
        append_log(run_dir / LOG_NAME, f"done: {format_results(results)}")
    return summary


def _run(config: Config, inputs: Inputs, run_dir: Path) -> Summary:
    started, settings, keep = time.monotonic(), dict(list_values(config)), config.checkpoint
    with contextlib.ExitStack() as stack:
        given = config.logger, run_dir, config.train.num_iterations, get_terminal(), inputs.tokenizer.decode, settings
        deadline = started + 60 * (config.train.max_minutes or math.inf)
        report = stack.enter_context(contextlib.closing(build_report(*given, deadline)))
        stack.enter_context(show_warnings(report.message))
        _describe_run(config, inputs, run_dir, report)
        folder = Folder(run_dir / CHECKPOINTS, keep_last=keep.keep_last, keep_best=keep.keep_best)
        try:
            with report.phase("start"):
                resources = stack.enter_context(open_resources(config, inputs.checkpoint, run_dir / "logs"))
            return _Attempts(config, inputs, resources, run_dir, folder, report, started).run()
        except Stopped:
            if not folder.list_complete():
                report.message("there is no checkpoint yet, so there is nothing to resume")
            raise


def _describe_run(config: Config, inputs: Inputs, run_dir: Path, report: Report) -> None:
    """Print what the run is, and record it with versions and hardware."""
    saved, algo = inputs.saved_groups, config.algo
    with_turns = has_turns(config) if saved is None else saved.has_turns
    sizes, data = describe_sizes(config), describe_data(config, inputs)
    objective = format_objective(algo, config.train.responses_per_prompt, config.reward.wrong, has_turns=with_turns)
    if needs_critic(algo) and (critic := format_critic(config.policy, config.critic, algo)) is not None:
        objective += f"\n{critic}"
    groups = [group for group in placement.list_groups(config) if group.num_processes]
    counts = ", ".join(f"{group.name} {group.num_processes}" for group in groups)
    start = f"starting Ray and its processes: {counts}; their output: {run_dir / 'logs'}"
    for text in filter(None, (sizes, objective, data, describe_threads(config, placement.count_gpus(config)), start)):
        report.message(text)
    record_start(run_dir, sizes=sizes, objective=objective, data=data, peak_tflops=find_peak_tflops(config))


@dataclass(frozen=True)
class _Attempts:
    config: Config
    inputs: Inputs
    resources: Resources
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
        servers, maximum = self.resources[1], self.config.checkpoint.max_restarts
        num_restarts, newest = 0, self.folder.list_complete()[-1:]
        while True:
            try:
                return self.attempt()
            except RuntimeError as error:
                before, newest = newest, self.folder.list_complete()[-1:]
                num_restarts = 1 if newest > before else num_restarts + 1
                # A signal during the save that follows a failure leaves the failure to be raised.
                if not self.is_saving or is_stopping():
                    raise
                # It also resets the servers that are not lost.
                lost = servers.find_lost() if servers is not None else {}
                if not (lost or is_loss(error)):
                    raise
                if num_restarts > maximum:
                    error.add_note(f"checkpoint.max_restarts={maximum} have been made without a new checkpoint")
                    raise
                text = f"restart {num_restarts} of at most {maximum} (checkpoint.max_restarts)"
                self.report.message("\n".join([str(error), *getattr(error, "__notes__", ()), text]))
            if servers is not None:
                # The next attempt starts them: after the roles, where they share GPUs. Servers that give memory back
                # begin anew: the roles are built beside them, and nobody knows what this attempt has left them.
                gives_back = placement.find_server_offload(self.config) is not None
                servers.end(servers.names if gives_back else lost)

    def attempt(self) -> Summary:
        """Train from the newest checkpoint, or from the start where there is none."""
        found, report, run_dir = self.find_state(), self.report, self.run_dir
        journal = Journal(run_dir / JOURNAL) if self.is_saving else None
        given = self.config, self.inputs, self.resources, run_dir, report, journal
        with open_components(*given) as components:
            roles = {role.value: each for role, each in components.roles.items() if role is not Role.reference}
            saved = self.config.checkpoint, self.folder, roles, self.inputs.specs, report, self.forget
            with contextlib.closing(LoopSaver(*saved) if self.is_saving else LoopSaver()) as saver:
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
        if (run_dir / RUN_FILE).is_file() and Role.policy in components.roles:
            shutil.copyfile(run_dir / RUN_FILE, run_dir / Role.policy.value / MODEL_FILE)
        total, limit = self.config.train.num_iterations, summary.limit
        if limit is not None:
            go_on = f"; go on with megarl train resume={run_dir} {limit.key}=null" if self.is_saving else ""
            report.message(format_limit(limit, summary.num_iterations, total) + go_on)
        lines = load_metrics(run_dir / METRICS_FILE)
        if rewards := [(int(line["iteration"]), line[HELDOUT]) for line in lines if HELDOUT in line]:
            report.message(format_heldout(rewards))
        where = run_dir / Role.policy.value
        use = f"trained model: {where} (megarl evaluate model=checkpoint model.path={where})"
        if self.inputs.pairs is not None:
            where = run_dir / Role.critic.value
            use = f"reward model: {where} (megarl serve {where}; or critic.init={where})"
        elif total == 0:
            where = run_dir / Role.critic.value
            use = f"trained critic: {where} (megarl train critic.init={where} algo.value_pretrain.enabled=false)"
        report.message(f"{use}; report: megarl report {run_dir}")
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
            saved, given = self.inputs.saved_groups, self.inputs.pairs or self.inputs.demonstrations
            if given is not None:
                PromptSampler(given.train, self.config.seed).restore(state.source.sampler)
            elif saved is not None:
                PromptSampler(saved.groups, self.config.seed).restore(state.source.sampler)
            else:
                build_sampler(self.config, self.inputs.data.train).restore(state.source.sampler)
        except ValueError as error:
            raise CheckpointError(f"{self.run_dir}: the data have changed: {error}") from error
        cut_files(self.run_dir, state.sizes)
        self.report.rewind(state.iteration)
        self.report.message(f"resuming from {directory}")
        return state, directory

    def forget(self, through: int) -> None:
        """Have the journal forget what the checkpoint of this iteration has learned from."""
        num_groups = count_taken_groups(self.folder.path / name_checkpoint(through))
        step = self.config.algo.value_pretrain.count_step(through)
        Journal(self.run_dir / JOURNAL).forget(through, num_groups, step)


def is_loss(error: BaseException | None) -> bool:
    """Whether a training process died, or a call was not answered, so that another attempt may succeed."""
    while error is not None:
        if isinstance(error, DeadlineError) or (isinstance(error, WorkerError) and error.lost):
            return True
        error = error.__cause__
    return False


def run_evaluation(configs: Mapping[str, Config], run_dir: Path) -> list[evaluation.SetResult]:
    """Evaluate one checkpoint on the sets of `configs`, which differ in data and reward only.

    Writes responses.jsonl, evaluation.json and logs/ under `run_dir`, prints progress and the table. Raises
    ConfigError, before any process is started, for problems that only the inputs reveal.
    """
    configs = {name: settle_threads(each, placement.count_gpus(each, "evaluate")) for name, each in configs.items()}
    config = next(iter(configs.values()))
    inputs, evaluate = load_evaluation_inputs(configs), config.evaluate
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(contextlib.closing(Progress(get_terminal())))
        progress.line(describe_evaluation(inputs, config))
        for each in inputs.sets:
            progress.line(f"{each.name}: {'; '.join((*each.notes, inputs.ends))}")
        started = time.monotonic()
        progress.enter("start")
        _, servers = stack.enter_context(open_resources(config, inputs.checkpoint, run_dir / "logs", "evaluate"))
        assert servers
        truncation = {"top_p": evaluate.top_p, "top_k": evaluate.top_k}
        engine = _open_engine(stack, config, inputs.checkpoint, servers, inputs.stop_token_ids, **truncation)
        progress.leave()
        progress.line(f"servers ready after {format_seconds(time.monotonic() - started)}")
        recovery = Recovery(servers, progress.line, config.rollout.max_server_restarts)
        decode = inputs.tokenizer.decode
        results = evaluate_sets(engine, inputs.sets, run_dir, progress, recovery=recovery, decode=decode)
        evaluation.write_evaluation(run_dir / evaluation.EVALUATION_FILE, results, list_settings(inputs))
        progress.line(evaluation.format_table(results))
    return results


def evaluate_sets(
    engine: SGLangEngine,
    sets: Sequence[EvaluationSet],
    run_dir: Path,
    progress: Progress,
    *,
    weight_version: int = 0,
    recovery: Recovery | None = None,
    decode: Decode | None = None,
) -> list[evaluation.SetResult]:
    """The result of each set; every response is written to RUN_DIR/responses.jsonl as soon as it has been scored.

    weight_version: of the servers, 0 after their start. recovery: None where a lost server is not restarted. decode:
    reads the observations in responses.jsonl. Raises TooManyFailuresError where more of a set's responses than
    reward.max_failed_frac have no reward.
    """
    recovery = recovery or Recovery(None, progress.line, 0)
    results = []
    with (run_dir / evaluation.RESPONSES_FILE).open("w", encoding="utf-8") as file:
        for each in sets:
            samples: list[Sample] = []
            reward, evaluate, number = each.config.reward, each.config.evaluate, each.config.evaluate.num_samples
            # Small calls, since rollout.request_deadline_s is for each.
            step = max(1, engine.num_slots // number)
            started, temperature = time.monotonic(), get_temperature(evaluate)
            progress.enter(each.name)
            with contextlib.ExitStack() as stack:
                scorer = stack.enter_context(contextlib.closing(build_scorer(reward)))
                runner = build_episode_runner(each.conversation, each.config.rollout.response_length)
                collector = Collector(engine, scorer, runner, seed=each.config.seed, temperature=temperature)
                stack.callback(collector.close)
                for start in range(0, len(each.prompts), step):
                    recovery.run(engine.check_health)
                    batch, key = each.prompts[start : start + step], f"{each.name}/{start}"
                    collect = partial(collector.sample, batch, number, weight_version=weight_version, key=key)
                    try:
                        found = recovery.run(collect)  # Restarted servers hold the same checkpoint.
                    except DeadlineError as error:
                        raise DeadlineError(
                            f"{error}; rollout.request_deadline_s is for {len(batch) * number} responses here: raise"
                            " it, or lower rollout.max_running_requests"
                        ) from error
                    file.writelines(
                        evaluation.format_response(each.name, i % number, one, decode) for i, one in enumerate(found)
                    )
                    file.flush()
                    samples += found
                    correct = sum(one.score.correct for one in samples)
                    progress.line(
                        f"{each.name}: {start + len(batch)} of {len(each.prompts)} problems, {correct} of"
                        f" {len(samples)} responses correct | {format_seconds(time.monotonic() - started)}"
                    )
            progress.leave()
            evaluation.check_failures(samples, reward.max_failed_frac)
            if text := evaluation.describe_failures(samples):
                progress.line(f"warning: {each.name}: {text}; they count as wrong, with a reward of 0")
            # A user's own function reads answers where it says so.
            reads = reads_answers(reward) or any(sample.score.answer is not None for sample in samples)
            results.append(evaluation.summarize_set(each.name, samples, list_ks(evaluate), reads_answers=reads))
    return results


def describe_evaluation(inputs: EvaluationInputs, config: Config) -> str:
    sets = ", ".join(f"{each.name} ({len(each.prompts)} problems)" for each in inputs.sets)
    evaluate, temperature = config.evaluate, get_temperature(config.evaluate)
    how = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
    how += f", top_p {evaluate.top_p:g}" if evaluate.top_p < 1 else ""
    how += f", top_k {evaluate.top_k}" if evaluate.top_k > 0 else ""
    each = "1 response" if evaluate.num_samples == 1 else f"{evaluate.num_samples} responses"
    length = config.rollout.response_length
    return f"evaluating {inputs.checkpoint} on {sets}: {each} per problem, {how}, of up to {length} tokens"


def list_settings(inputs: EvaluationInputs) -> dict[str, Any]:
    """The settings of the evaluation, as JSON values."""

    def to_plain(node: object) -> Any:
        return OmegaConf.to_container(OmegaConf.structured(node), enum_to_str=True)

    config = inputs.sets[0].config
    values = {name: to_plain(getattr(config, name)) for name in ("model", "rollout", "evaluate")}
    for group in ("data", "reward"):
        values[group] = {each.name: to_plain(getattr(each.config, group)) for each in inputs.sets}
    return {
        "checkpoint": str(inputs.checkpoint),
        "seed": config.seed,
        "temperature": get_temperature(config.evaluate),
        "config": values,
    }
