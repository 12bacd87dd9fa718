"""The processes of a training run, and the components of the loop that use them."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.checkpoint.lock import locking
from megarl.cluster.nodes import Cluster
from megarl.cluster.opened import open_ray
from megarl.cluster.servers import running_servers
from megarl.cluster.turns import Turns
from megarl.cluster.workers import WorkerGroup
from megarl.config.allocation import is_restarted
from megarl.config.placement import SERVERS, find_server_offload, is_sharing, list_groups, place, take_turns
from megarl.config.schema.rollout import Transport
from megarl.config.schema.root import Config
from megarl.data.sampler import PromptSampler
from megarl.interfaces import UNPUBLISHED, Pending, RolloutServers, wait_all
from megarl.mcore.worker_spec import Role
from megarl.report.report import Report
from megarl.reward.scorer import build_scorer
from megarl.rollout.client import SGLangClient
from megarl.rollout.collector import build_collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.journal import Journal
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import FILE_NAME, RolloutWriter
from megarl.run.inputs import Inputs
from megarl.sync.disk import DiskSync
from megarl.sync.ranks import Ranks
from megarl.sync.reshard import ShardSync
from megarl.trainer import TrainerComponents

LOCK_PATIENCE_S = 150.0
"""How long a requeued job waits for the lock of its earlier start. The NFS server of Linux releases the locks of a lost
client after 90 s and Lustre's after 100 s, unless set otherwise"""


def lock_run_dir(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """As `locking`; outside a requeued job a second run in the folder is refused at once."""
    patience_s = LOCK_PATIENCE_S if is_restarted(os.environ) else 0.0
    return locking(run_dir, patience_s, lambda text: print(text, flush=True))


@contextlib.contextmanager
def show_warnings(report: Report) -> Iterator[None]:
    """Shows Python warnings within the block as lines of the report, each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: report.message(f"warning: {message}")
        yield


def describe_data(inputs: Inputs) -> str:
    data = inputs.data
    dropped = f"; {data.num_dropped} dropped (longer than data.prompt_length, or repeated)" if data.num_dropped else ""
    return f"data: {len(data.train)} prompts to train on, {len(data.heldout)} held out{dropped}"


@dataclass(frozen=True)
class RunResources:
    """Ray and the servers in it; several attempts may use them one after the other."""

    start_servers: Callable[[], Pending[list[str]]]
    """Starts the servers that do not run; the result is their urls, once they are healthy"""
    check_servers: Callable[[], None]
    """Raises RuntimeError where a server is down"""
    cluster: Cluster
    api_key: str | None = None
    """Required of the servers' callers; None: nothing is"""
    servers: RolloutServers | None = None
    """Restarts lost servers; None: they are not restarted"""


@contextlib.contextmanager
def open_resources(config: Config, inputs: Inputs, log_dir: Path) -> Iterator[RunResources]:
    """Ray, and the servers, started without waiting unless the roles come first; all is shut down on leaving."""
    stop_s = config.cluster.shutdown_deadline_s / 3
    groups = list_groups(config)
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
        engine = stack.enter_context(contextlib.closing(_build_engine(config, inputs, resources)))
        scorer = stack.enter_context(contextlib.closing(build_scorer(config.reward)))
        # Clients of its own: cancelling prefetched responses must not break the calls of a sync.
        clients = [stack.enter_context(contextlib.closing(client.copy())) for client in engine.clients]
        offloader = _build_offloader(config, clients, turns)
        sync = build_sync(config, inputs, groups[Role.policy], clients, resources, run_dir, offloader)
        stack.callback(sync.close)
        yield TrainerComponents(
            policy=groups[Role.policy],
            critic=groups.get(Role.critic),
            reference=groups.get(Role.reference),
            engine=engine,
            collector=build_collector(config, engine, scorer, inputs.conversation, journal),
            sync=sync,
            sampler=PromptSampler(inputs.data.train, config.seed),
            heldout=inputs.data.heldout[: config.train.num_eval_prompts],
            report=report,
            rollout_file=_open_rollout_file(stack, run_dir) if config.logger.save_rollouts else None,
            servers=resources.servers,
            offloader=offloader,
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
    for name, taken in slots.items():
        if where := resources.cluster.describe(taken):
            report.message(f"{name}: on {where}")
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
        config.rollout,
        seed=config.seed,
        check_processes=resources.check_servers,
        api_key=resources.api_key,
    )


def _build_offloader(config: Config, clients: Sequence[SGLangClient], turns: Turns) -> ServerOffloader:
    """From here on the servers give their memory back before each call of a role, with rollout.offload."""
    offloader = ServerOffloader(clients, find_server_offload(config))
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


def _open_rollout_file(stack: contextlib.ExitStack, run_dir: Path) -> RolloutWriter:
    return stack.enter_context(contextlib.closing(RolloutWriter(run_dir / FILE_NAME)))
