"""The processes of a training run, and the components of the loop that use them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.opened import Cluster, open_ray
from megarl.cluster.servers import Servers, running_servers
from megarl.cluster.watch import Measured, Profiler, measure_peaks
from megarl.cluster.workers import Turns, WorkerGroup
from megarl.config.errors import ConfigError
from megarl.config.placement import (
    SERVERS,
    find_server_offload,
    is_restarted,
    is_sharing,
    list_groups,
    place,
    take_turns,
)
from megarl.config.schema.root import Config
from megarl.config.schema.run import Transport
from megarl.files import RUN_FILE, locking
from megarl.interfaces import UNPUBLISHED, Done, Pending, RolloutServers, TrainBackend, wait_all
from megarl.mcore.spec import Role
from megarl.report import token_file
from megarl.report.report import Report
from megarl.rollout.client import SGLangClient
from megarl.rollout.collector import Collector, build_collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.journal import Journal
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import FILE_NAME, RolloutWriter, SavedGroups
from megarl.rollout.source import NoSync
from megarl.rollout.token_records import TokenRecorder
from megarl.run.inputs import Inputs
from megarl.run.process import get_terminal
from megarl.run.resume import load_run
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync
from megarl.task.data import PromptSampler
from megarl.task.render import CriticPrompt
from megarl.task.scorer import build_scorer
from megarl.trainer import TrainerComponents
from megarl.types import Prompt

LOCK_PATIENCE_S = 150.0
"""How long a requeued job waits for the lock of its earlier start. The NFS server of Linux releases the locks of a lost
client after 90 s and Lustre's after 100 s, unless set otherwise"""


def lock_run_dir(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """As `locking`; outside a requeued job a second run in the folder is refused at once."""
    patience_s = LOCK_PATIENCE_S if is_restarted(os.environ) else 0.0
    return locking(run_dir, patience_s, lambda text: print(text, file=get_terminal(), flush=True))


def describe_processes_to_start(config: Config, log_dir: Path) -> str:
    """`starting Ray and its processes: policy 2, critic 1, servers 1; their output: RUN_DIR/logs`."""
    counts = ", ".join(f"{group.name} {group.num_processes}" for group in list_groups(config) if group.num_processes)
    return f"starting Ray and its processes: {counts}; their output: {log_dir}"


def describe_data(config: Config, inputs: Inputs) -> str:
    """What the run learns from, in a line or more; empty where `describe_start` says it."""
    if config.has_critic_alone:
        return ""
    if inputs.saved_groups is not None:
        lines = list(describe_saved(config, inputs.saved_groups))
        if inputs.critic_prompt is not None:
            first = inputs.saved_groups.prompts[0]
            lines.append(f"before the first prompt {_describe_critic_prompt(inputs.critic_prompt, first)}")
        return "\n".join(lines)
    data = inputs.data
    num_too_long = data.num_dropped - data.num_repeated
    dropped = f"; {num_too_long} dropped (longer than data.prompt_length)" if num_too_long else ""
    dropped += f"; {data.num_repeated} dropped (repeats of a held-out question)" if data.num_repeated else ""
    text = f"data: {len(data.train)} prompts to train on, {len(data.heldout)} held out{dropped}"
    if inputs.critic_prompt is not None:
        text += f"; before the first {_describe_critic_prompt(inputs.critic_prompt, data.train[0])}"
    lines = [text, f"data: {'; '.join(data.notes)}"]
    return "\n".join([*lines, *(f"train.eval_sets.{each.name}: {'; '.join(each.notes)}" for each in inputs.eval_sets)])


def _describe_critic_prompt(critic_prompt: CriticPrompt, prompt: Prompt) -> str:
    return f"the critic alone reads {critic_prompt.fill(prompt)!r} ({len(critic_prompt.encode(prompt))} tokens)"


def describe_saved(config: Config, saved: SavedGroups) -> Iterator[str]:
    """What rollout.file has and what of it is learned from, a line each."""
    per_pass = len(saved.groups) / config.train.num_prompts
    failed = f"; {saved.num_failed} have no reward and are not learned from" if saved.num_failed else ""
    yield (
        f"rollout.file: {saved.num_samples} responses in {len(saved.groups)} groups, of {saved.num_rollouts} rollouts"
        f" in {saved.path}; a pass over them takes {per_pass:g} iterations{failed}"
    )
    yield from (f"warning: {text}" for text in saved.dropped)
    here, there = config.rollout.temperature, _find_temperature(saved.path)
    if there is None:
        yield f"the responses' temperature is not recorded ({RUN_FILE} beside the file); {here:g} is assumed"
    elif there != here:
        yield (
            f"warning: the responses were sampled at temperature {there:g}; the policy that is trained is the one at"
            f" rollout.temperature={here:g}, and its ratios to them are of the two distributions"
        )


def _find_temperature(path: Path) -> float | None:
    """rollout.temperature of the run in whose folder the file is; None: it is not in one."""
    try:
        found = load_run(path.parent)["config"].get("rollout.temperature")
    except (ConfigError, OSError):
        return None
    return float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True)
class RunResources:
    """Ray and the servers in it; several attempts may use them one after the other."""

    start_servers: Callable[[], Pending[list[str]]]
    """Starts the servers that do not run; the result is their urls, once they are healthy"""
    check_servers: Callable[[], None]
    """Raises RuntimeError where a server is down"""
    cluster: Cluster
    api_key: str | None = None
    """Required of the servers' callers; None: there are no servers"""
    servers: RolloutServers | None = None
    """Restarts lost servers; None: they are not restarted"""


@contextlib.contextmanager
def open_resources(config: Config, inputs: Inputs, log_dir: Path) -> Iterator[RunResources]:
    """Ray, and the servers, started without waiting unless the roles come first; all is shut down on leaving."""
    stop_s = config.cluster.shutdown_deadline_s / 3
    groups = list_groups(config)
    if not config.has_servers:
        with open_ray(config.cluster, sum(group.num_processes for group in groups)) as cluster:
            yield RunResources(lambda: Done([]), lambda: None, cluster)
        return
    slots = place(config.cluster, groups)
    shares_gpus = is_sharing(slots)
    rollout = replace(config.rollout, offload=find_server_offload(config))
    with (
        open_ray(config.cluster, sum(group.num_processes for group in groups)) as cluster,
        running_servers(
            rollout,
            inputs.checkpoint,
            log_dir,
            config.seed,
            cluster,
            slots[SERVERS],
            stop_s,
            weight_version=UNPUBLISHED,
            shares_gpus=shares_gpus,
        ) as servers,
    ):
        if not shares_gpus:
            servers.start()
        yield RunResources(servers.start, servers.check_alive, cluster, servers.api_key, servers)


@contextlib.contextmanager
def open_components(
    config: Config,
    inputs: Inputs,
    resources: RunResources,
    run_dir: Path,
    report: Report,
    journal: Journal | None = None,
) -> Iterator[TrainerComponents]:
    """The components of the loop, shut down on leaving; workers are started in parallel with the servers.

    Where they share GPUs, the workers are started before the servers. journal: stores what is sampled, for a resumed
    run; None: nothing does.
    """
    with contextlib.ExitStack() as stack:
        turns = Turns(take_turns(config))
        groups = _start_groups(stack, config, inputs, resources, run_dir / "logs", report, turns)
        if inputs.saved_groups is not None:
            recorder = open_token_recorder(stack, config, inputs, groups.get(Role.policy), run_dir)
            yield build_saved_components(groups, inputs, report, recorder)
            return
        engine = stack.enter_context(contextlib.closing(_build_engine(config, inputs, resources)))
        scorer = stack.enter_context(contextlib.closing(build_scorer(config.reward)))
        offloader = _build_offloader(config, engine.clients, turns, resources, report)
        sync = build_sync(config, inputs, groups[Role.policy], engine.clients, resources, run_dir, offloader)
        stack.callback(sync.close)
        collector = build_collector(
            config, engine, scorer, inputs.conversation, journal=journal, eval_sets=inputs.eval_sets
        )
        report.show_processes(partial(describe_processes, groups, engine.num_servers, collector))
        yield TrainerComponents(
            policy=groups[Role.policy],
            critic=groups.get(Role.critic),
            reference=groups.get(Role.reference),
            engine=engine,
            collector=collector,
            sync=sync,
            sampler=PromptSampler(inputs.data.train, config.seed),
            heldout=inputs.data.heldout[: config.train.num_eval_prompts],
            report=report,
            rollout_file=open_rollout_file(stack, run_dir) if config.logger.save_rollouts else None,
            token_recorder=open_token_recorder(stack, config, inputs, groups[Role.policy], run_dir),
            servers=resources.servers,
            offloader=offloader,
            critic_prompt=inputs.critic_prompt,
        )


def describe_processes(groups: Mapping[Role, WorkerGroup], num_servers: int, collector: Collector) -> str:
    """`2 servers, 192 responses under way | policy 4 workers | critic 2 workers`, for the live display."""
    parts = [f"{num_servers} server{'s' * (num_servers != 1)}"]
    if collector.num_running:
        parts[0] += f", {collector.num_running} responses under way"
    for role, group in groups.items():
        parts.append(f"{role.value} {group.num_ranks} worker{'s' * (group.num_ranks != 1)}")
    return " | ".join(parts)


def build_saved_components(
    groups: Mapping[Role, TrainBackend], inputs: Inputs, report: Report, token_recorder: TokenRecorder
) -> TrainerComponents:
    """The components of a loop over saved responses: the roles, and nothing that generates."""
    return TrainerComponents(
        policy=groups.get(Role.policy),
        critic=groups.get(Role.critic),
        reference=groups.get(Role.reference),
        engine=None,
        collector=None,
        sync=NoSync(),
        sampler=None,
        heldout=(),
        report=report,
        saved=inputs.saved_groups,
        token_recorder=token_recorder,
        critic_prompt=inputs.critic_prompt,
    )


def _start_groups(
    stack: contextlib.ExitStack,
    config: Config,
    inputs: Inputs,
    resources: RunResources,
    log_dir: Path,
    report: Report,
    turns: Turns,
) -> dict[Role, WorkerGroup]:
    """Start the workers of every role; waits for them and for the servers."""
    slots = place(config.cluster, list_groups(config))
    groups: dict[Role, WorkerGroup] = {}
    with report.phase("start"):
        for role, spec in inputs.specs.items():
            start_s = config.cluster.worker_start_deadline_s
            groups[role] = WorkerGroup(spec, log_dir, resources.cluster, slots[role.value], start_s, turns)
            stack.callback(groups[role].close)
        starting = {role: group.start() for role, group in groups.items()}
        wait_started(list(starting.values()), resources.start_servers, roles_first=is_sharing(slots))
        for role, started in starting.items():
            for line in started.result().splitlines():
                report.message(f"{role.value}: {line}")
    profiler = Profiler(config.train.profile, groups.values(), log_dir.parent, report.message)
    report.after_log = stack.enter_context(contextlib.closing(profiler)).after_log
    for name, taken in slots.items():
        if where := resources.cluster.describe(taken):
            report.message(f"{name}: on {where}")
    measured: dict[str, Measured] = {role.value: group for role, group in groups.items()}
    if isinstance(resources.servers, Servers):
        measured[SERVERS] = resources.servers
    report.measure = partial(measure_peaks, measured)
    return groups


def wait_started(
    roles: Sequence[Pending[Any]], start_servers: Callable[[], Pending[list[str]]], *, roles_first: bool
) -> None:
    """Wait for the started roles and for the servers.

    roles_first: the servers are started once the roles hold their models. SGLang measures the free memory of its GPUs
    at its start and takes most of it for its cache.
    """
    if roles_first:
        wait_all(roles)
    wait_all([start_servers(), *roles])


def _build_engine(config: Config, inputs: Inputs, resources: RunResources) -> SGLangEngine:
    """Waits for the servers."""
    return SGLangEngine(
        resources.start_servers().result(),
        inputs.checkpoint,
        replace(config.rollout, stop_token_ids=list(inputs.stop_token_ids)),
        seed=config.seed,
        check_processes=resources.check_servers,
        api_key=resources.api_key,
    )


def _build_offloader(
    config: Config, clients: Sequence[SGLangClient], turns: Turns, resources: RunResources, report: Report
) -> ServerOffloader:
    """From here on the servers give their memory back before each call of a role, with rollout.offload."""
    servers = resources.servers
    measure = servers.measure_gpus if isinstance(servers, Servers) else list
    offloader = ServerOffloader(clients, find_server_offload(config), measure, report.message)
    turns.free_servers = offloader.release
    return offloader


def build_sync(
    config: Config,
    inputs: Inputs,
    policy: WorkerGroup,
    clients: Sequence[SGLangClient],
    resources: RunResources,
    run_dir: Path,
    offloader: ServerOffloader,
) -> DiskSync | ShardSync:
    """The weight sync that rollout.transport selects."""
    rollout, host = config.rollout, resources.cluster.host
    ranks = Ranks(policy, clients, rollout, inputs.architecture, host, run_dir / "sync_plan.md")
    common: dict[str, Any] = {"policy_dtype": config.policy.dtype, "check_processes": resources.check_servers}
    common["offloader"] = offloader
    if rollout.transport is Transport.disk:
        return DiskSync(policy, clients, rollout, run_dir / "sync", inputs.probe_tokens, ranks=ranks, **common)
    common |= {"scratch": resources.cluster.scratch, "host": host}
    return ShardSync(policy, clients, rollout, ranks, inputs.probe_tokens, **common)


def open_rollout_file(stack: contextlib.ExitStack, run_dir: Path) -> RolloutWriter:
    return stack.enter_context(contextlib.closing(RolloutWriter(run_dir / FILE_NAME)))


def open_token_recorder(
    stack: contextlib.ExitStack, config: Config, inputs: Inputs, policy: TrainBackend | None, run_dir: Path
) -> TokenRecorder:
    """What writes RUN_DIR/tokens.jsonl, closed with the stack; with logger.num_token_records=0 nothing is written."""
    logger = config.logger
    if logger.num_token_records == 0 or policy is None:
        return TokenRecorder()
    path, max_bytes = run_dir / token_file.FILE_NAME, 1000 * logger.token_record_kb
    file = token_file.TokenFile(path, logger.num_token_records, max_bytes, inputs.tokenizer.decode)
    stack.callback(file.close)
    return TokenRecorder(file, policy if logger.token_passes else None, config.rollout.temperature)
