"""The processes of a training run, and the components of the loop that use them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.actors import Servers, Turns, WorkerGroup
from megarl.cluster.opened import Cluster, open_ray
from megarl.cluster.process import Profiler, measure_peaks
from megarl.config.errors import ConfigError
from megarl.config.placement import find_server_offload, is_sharing, list_groups, place, take_turns
from megarl.config.schema.root import Config
from megarl.config.schema.run import SERVERS, Transport
from megarl.files import RUN_FILE
from megarl.interfaces import UNPUBLISHED, Done, Pending, RolloutServers, TrainBackend, WeightSync, wait_all
from megarl.mcore.spec import Role
from megarl.report import tokens as token_file
from megarl.report.report import Report
from megarl.rollout.collector import build_collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.journal import Journal
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import FILE_NAME, RolloutWriter, SavedGroups
from megarl.run.fleet import TrainerComponents
from megarl.run.inputs import Inputs
from megarl.run.resume import load_run
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync
from megarl.task.data import PromptSampler
from megarl.task.scorer import Scorer, build_scorer


def describe_data(config: Config, inputs: Inputs) -> str:
    """What the run learns from, in a line or more; empty where `describe_start` says it."""
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
    groups = list_groups(config)
    with open_ray(config.cluster, sum(group.num_processes for group in groups)) as cluster:
        if not config.has_servers:
            yield RunResources(lambda: Done([]), lambda: None, cluster)
            return
        slots, rollout = place(config.cluster, groups), replace(config.rollout, offload=find_server_offload(config))
        stop_s, shares_gpus = config.cluster.shutdown_deadline_s / 3, is_sharing(slots)
        given = rollout, inputs.checkpoint, log_dir, config.seed, cluster, slots[SERVERS], stop_s
        servers = Servers(*given, weight_version=UNPUBLISHED, shares_gpus=shares_gpus)
        with contextlib.closing(servers):
            if not shares_gpus:
                servers.start()
            yield RunResources(servers.start, servers.check_alive, cluster, servers.api_key, servers)


@dataclass(frozen=True)
class Generation:
    """What answers prompts and scores the answers."""

    engine: SGLangEngine
    scorer: Scorer
    sync: WeightSync
    offloader: ServerOffloader
    servers: RolloutServers | None


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
        opened = _Opened(config, inputs, resources, run_dir, report, stack, Turns(take_turns(config)))
        groups = opened.start_groups()
        generation = opened.open_generation(groups[Role.policy]) if inputs.saved_groups is None else None
        components = build_components(stack, config, inputs, run_dir, report, groups, generation, journal)
        if (collector := components.collector) is not None:
            report.show_processes(lambda: f"{collector.num_running} responses under way")
        yield components


def build_components(
    stack: contextlib.ExitStack,
    config: Config,
    inputs: Inputs,
    run_dir: Path,
    report: Report,
    roles: Mapping[Role, TrainBackend],
    generation: Generation | None,
    journal: Journal | None = None,
) -> TrainerComponents:
    """The components of the loop over these roles; their files are closed with the stack.

    generation: None where the roles learn from saved responses.
    """
    policy, logger, token_records = roles.get(Role.policy), config.logger, None
    if logger.num_token_records > 0 and policy is not None:
        path = run_dir / token_file.FILE_NAME
        token_records = token_file.TokenFile(path, logger.num_token_records, inputs.tokenizer.decode)
        stack.callback(token_records.close)
    components = TrainerComponents(
        policy=policy,
        critic=roles.get(Role.critic),
        reference=roles.get(Role.reference),
        report=report,
        saved=inputs.saved_groups,
        token_file=token_records,
        critic_prompt=inputs.critic_prompt,
    )
    if (it := generation) is None:
        return components
    writer = RolloutWriter(run_dir / FILE_NAME) if logger.save_rollouts else None
    if writer is not None:
        stack.callback(writer.close)
    options = {"journal": journal, "eval_sets": inputs.eval_sets}
    return replace(
        components,
        engine=it.engine,
        collector=build_collector(config, it.engine, it.scorer, inputs.conversation, **options),
        sync=it.sync,
        sampler=PromptSampler(inputs.data.train, config.seed),
        heldout=inputs.data.heldout[: config.train.num_eval_prompts],
        rollout_file=writer,
        servers=it.servers,
        offloader=it.offloader,
    )


@dataclass(frozen=True)
class _Opened:
    """What the processes of one attempt are started with; `stack` ends them."""

    config: Config
    inputs: Inputs
    resources: RunResources
    run_dir: Path
    report: Report
    stack: contextlib.ExitStack
    turns: Turns

    def start_groups(self) -> dict[Role, WorkerGroup]:
        """Start the workers of every role; waits for them and for the servers."""
        config, resources, report, log_dir = self.config, self.resources, self.report, self.run_dir / "logs"
        slots, start_s = place(config.cluster, list_groups(config)), config.cluster.worker_start_deadline_s
        groups: dict[Role, WorkerGroup] = {}
        with report.phase("start"):
            for role, spec in self.inputs.specs.items():
                given = spec, log_dir, resources.cluster, slots[role.value], start_s, self.turns
                groups[role] = WorkerGroup(*given)
                self.stack.callback(groups[role].close)
            starting = {role: group.start() for role, group in groups.items()}
            wait_started(list(starting.values()), resources.start_servers, roles_first=is_sharing(slots))
            for role, started in starting.items():
                for line in started.result().splitlines():
                    report.message(f"{role.value}: {line}")
        profiler = Profiler(config.train.profile, groups.values(), self.run_dir, report.message)
        report.after_log = self.stack.enter_context(contextlib.closing(profiler)).after_log
        for name, taken in slots.items():
            if where := resources.cluster.describe(taken):
                report.message(f"{name}: on {where}")
        measured: dict[str, Any] = {role.value: group for role, group in groups.items()}
        if isinstance(resources.servers, Servers):
            measured[SERVERS] = resources.servers
        report.measure = partial(measure_peaks, measured)
        return groups

    def open_generation(self, policy: WorkerGroup) -> Generation:
        """Waits for the servers; with rollout.offload they give memory back before each call of a role from here on."""
        config, inputs, resources, rollout = self.config, self.inputs, self.resources, self.config.rollout
        check, servers = resources.check_servers, resources.servers
        engine = SGLangEngine(
            resources.start_servers().result(),
            inputs.checkpoint,
            replace(rollout, stop_token_ids=list(inputs.stop_token_ids)),
            seed=config.seed,
            check_processes=check,
            api_key=resources.api_key,
        )
        self.stack.callback(engine.close)
        scorer = self.stack.enter_context(contextlib.closing(build_scorer(config.reward)))
        offloader = ServerOffloader(engine.clients, find_server_offload(config))
        self.turns.free_servers = offloader.release
        host, given = resources.cluster.host, (policy, engine.clients, rollout)
        ranks = Ranks(*given, inputs.architecture, host)
        common: dict[str, Any] = {"policy_dtype": config.policy.dtype, "check_processes": check, "offloader": offloader}
        sync: DiskSync | ShardSync
        if rollout.transport is Transport.disk:
            sync = DiskSync(*given, ranks, inputs.probe_tokens, directory=self.run_dir / "sync", **common)
        else:
            common |= {"scratch": resources.cluster.scratch, "host": host}
            sync = ShardSync(*given, ranks, inputs.probe_tokens, **common)
        self.stack.callback(sync.close)
        return Generation(engine, scorer, sync, offloader, servers)


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
