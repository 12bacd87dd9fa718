"""The checks of a Slurm job before Ray starts: `python -m megarl.plan.preflight job|node|compare [key=value] ...`.

job      checks the configuration against the allocation; prints settings for train.sh as NAME=VALUE
node     prints what this node has, as one line of JSON; the first one, where the run itself will be, also reads the
         data and tries the reward
compare  checks the lines of all nodes, from stdin
--command=NAME says what the job runs, if not train. Problems end it with code 2, each in one line. Nothing here imports
torch or Ray.
"""

import contextlib
import json
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from megarl.config.errors import ConfigError
from megarl.config.evaluation_sets import expand_sets, load_configs
from megarl.config.load import load_config
from megarl.config.placement import (
    DeviceSlot,
    check_allocation,
    check_cluster,
    count_nodes,
    list_groups,
    place,
    read_allocation,
)
from megarl.config.roll import rewrite_overrides
from megarl.config.schema.root import Config
from megarl.config.schema.run import LEAST_OF_KIND, HardwareConfig
from megarl.config.search_path import take_config_dirs
from megarl.plan.doctor import ask_lines, find_checkpoints
from megarl.run.command import end_with_config_error
from megarl.run.machine import check_object_store
from megarl.run.resume import take_resume

ADDRESS_LATER = "cluster.ray_address=first-node:0"
"""A placeholder for the address that train.sh knows once Ray runs"""
COMMAND = "--command="
ASK_S = 30.0
"""How long nvidia-smi and squeue may take"""
FOLDER_VARIABLE = "MEGARL_JOB_DIR"
RAY_NAMES = ("raylet", "gcs_server")


@dataclass(frozen=True)
class NodeReport:
    """The GPUs, checkpoints and problems of one node."""

    node: str
    gpus: list[str] = field(default_factory=list)
    """The name of each GPU that the job sees there; empty where there is no nvidia-smi"""
    problems: list[str] = field(default_factory=list)


def main() -> None:
    commands = {"job": print_job, "node": print_node, "compare": compare}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        end_with_config_error(
            ConfigError([f"found {' '.join(sys.argv[1:2]) or 'nothing'}; one of {', '.join(commands)}"])
        )
    given = [text.removeprefix(COMMAND) for text in sys.argv[2:] if text.startswith(COMMAND)]
    command = given[-1] if given else "train"
    try:
        if sys.argv[1] == "job":
            read_allocation(os.environ)  # cluster=slurm could not be composed without
        overrides = [text for text in sys.argv[2:] if not text.startswith(COMMAND)]
        arguments, _ = take_resume(take_config_dirs(overrides))
        commands[sys.argv[1]](load_job_configs([*arguments, ADDRESS_LATER], command), command)
    except ConfigError as error:
        end_with_config_error(error)


def print_job(configs: Mapping[str, Config], command: str) -> None:
    """Print the settings for train.sh to stdout, and the placement of the processes to stderr.

    Raises ConfigError where the configuration needs more than the allocation has.
    """
    allocation, config = read_allocation(os.environ), get_first(configs)
    problems = [*check_allocation(config.cluster, allocation), *check_cluster(config, command)]
    if problems:
        raise ConfigError(problems)
    cluster = config.cluster
    slots = place(cluster, list_groups(config, command))
    print(f"allocation: {allocation.num_nodes} nodes x {allocation.gpus_per_node} GPUs", file=sys.stderr)
    for line in describe_seats(slots):
        print(line, file=sys.stderr)
    used = count_nodes(slots)
    if used < allocation.num_nodes:
        print(
            f"warning: {allocation.num_nodes - used} of {allocation.num_nodes} nodes have nothing to do",
            file=sys.stderr,
        )
    print(f"MEGARL_OBJECT_STORE_MB={cluster.object_store_mb}")


def describe_seats(slots: Mapping[str, Sequence[DeviceSlot]]) -> Iterator[str]:
    """`policy: 16 processes on nodes 1 to 2, 16 GPUs`, a line for each group."""
    for name, group in slots.items():
        if group:
            first, last = 1 + min(slot.node for slot in group), 1 + max(slot.node for slot in group)
            nodes = f"node {first}" if first == last else f"nodes {first} to {last}"
            gpus = len({(slot.node, gpu) for slot in group for gpu in slot.gpus})
            counted = f", {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""
            yield f"{name}: {len(group)} process{'es' if len(group) > 1 else ''} on {nodes}{counted}"


def get_first(configs: Mapping[str, Config]) -> Config:
    """Those of an evaluation differ in data and reward alone."""
    return next(iter(configs.values()))


def print_node(configs: Mapping[str, Config], command: str) -> None:
    config = get_first(configs)
    problems = [
        *find_unseen(config, command),
        *find_unseen_folder(os.environ.get(FOLDER_VARIABLE)),
        *find_stale_ray(os.environ.get("SLURM_CLUSTER_NAME")),
        *check_object_store(config.cluster),
        *find_job_memory_problem(config.cluster.object_store_mb, os.environ),
        *find_missing_interface(os.environ.get("MEGARL_INTERFACE")),
        *(find_input_problems(configs) if name_node() == list_nodes()[0] else ()),
    ]
    print(json.dumps(asdict(NodeReport(name_node(), list_gpus(), problems))), flush=True)


def list_nodes() -> list[str]:
    """The nodes of the job, in the order in which they are filled."""
    return os.environ.get("MEGARL_NODES", "").split(",")


def name_node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def find_job_memory_problem(object_store_mb: int, environment: Mapping[str, str]) -> Iterator[str]:
    """A problem where the job has less memory on a node than Ray's object store takes (sbatch --mem=0: all of it)."""
    text = environment.get("SLURM_MEM_PER_NODE", "")
    if text.isdecimal() and 0 < int(text) < object_store_mb:
        yield f"cluster.object_store_mb: found {object_store_mb}; the job has {text} MiB on a node: sbatch --mem=0"


def find_missing_interface(name: str | None) -> Iterator[str]:
    """A problem where this node has no IPv4 address on the interface of the site's settings."""
    interfaces = psutil.net_if_addrs()
    own = sorted(each for each, many in interfaces.items() if any(one.family == socket.AF_INET for one in many))
    if name and name not in own:
        yield f"MEGARL_INTERFACE: found {name}, on which this node has no IPv4 address; it has them on {', '.join(own)}"


def load_job_configs(overrides: Sequence[str], command: str) -> Mapping[str, Config]:
    """The configuration of `python -m megarl.COMMAND`, by its set of problems (evaluate); else one.

    Raises ConfigError.
    """
    if command == "evaluate":
        return load_configs(expand_sets(rewrite_overrides(overrides).overrides))
    return {"": load_config(overrides, command)}


def find_input_problems(configs: Mapping[str, Config]) -> Iterator[str]:
    """Problems with the data and with the reward, read and tried as the run will; no tokenizer is needed for these."""
    for name, config in configs.items():
        if not config.has_servers:
            key, file = "algo.value_pretrain.rollouts", config.algo.value_pretrain.rollouts
            if not config.has_critic_alone:
                key, file = "rollout.file", config.rollout.file
            if file is not None and not Path(file).expanduser().is_file():
                yield f"{key}: {file} is no file"
            continue
        try:
            check_first_problems(config, name)
        except ConfigError as error:
            yield from (f"data={name}: {problem}" if name else problem for problem in error.problems)


def check_first_problems(config: Config, name: str) -> None:
    """Read the data, and score an empty response to the first problem of each split. Raises ConfigError.

    name: of the set in an evaluation, which may have a path of its own.
    """
    # Imported here: these import torch, for which the checks of the other nodes need not wait.
    from megarl.task.data import load_problems, use_local_path
    from megarl.task.scorer import build_scorer
    from megarl.types import Prompt

    data, path = config.data, config.evaluate.paths.get(name)
    if path is not None:
        data = use_local_path(data, path, f"evaluate.paths.{name}")
    splits = load_problems(data, config.seed)
    prompts = [
        Prompt("first", each.messages[-1].content, (), each.answer, each.metadata, each.messages)
        for each in (*splits.train[:1], *(splits.heldout or ())[:1])
    ]
    with contextlib.closing(build_scorer(config.reward)) as scorer:
        scorer.check(prompts, config.reward.wrong)


def find_unseen(config: Config, command: str = "train") -> Iterator[str]:
    """Problems with checkpoints that this node does not see, by their keys."""
    wanted = ("model.path",) if command == "evaluate" else ("model.path", "critic.init")
    yield from (each.problem for each in find_checkpoints(config) if each.key in wanted and each.problem is not None)


def find_unseen_folder(folder: str | None) -> Iterator[str]:
    """A problem where this node does not see the job's folder, which train.sh created in the run's."""
    if folder is not None and not os.path.isdir(folder):
        yield f"hydra.run.dir: {folder} does not exist; the run's folder must be on a file system that every node sees"


def list_gpus() -> list[str]:
    """`NVIDIA H100 80GB HBM3, 81559 MiB`, for each GPU that the job has on this node."""
    query = ("--query-gpu=index,name,memory.total", "--format=csv,noheader")
    lines = ask_lines("nvidia-smi", *query, deadline_s=ASK_S) or []
    found = dict(line.split(", ", 1) for line in lines if ", " in line)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Where Slurm shows the job its own GPUs only, their numbers also start at 0.
    numbers = [number for number in chosen.split(",") if number in found] if chosen else list(found)
    return [found[number] for number in numbers or found]


def find_stale_ray(cluster_name: str | None) -> Iterator[str]:
    """Problems with this user's Ray processes of jobs that have ended: they hold memory, GPUs and ports."""
    everyone = psutil.process_iter(["name", "ppid", "uids"])
    rays = (process for process in everyone if process.info["name"] in RAY_NAMES and process.info["uids"] is not None)
    stale = [process for process in rays if process.info["uids"].real == os.getuid()]
    living = list_living_jobs() if stale else set()
    for process in stale:
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        job = environment.get("SLURM_JOB_ID")
        if job is not None and environment.get("SLURM_CLUSTER_NAME") != cluster_name:
            continue
        # One that was started by hand is in use as long as the process that started it lives.
        if (job is None and process.info["ppid"] == 1) or (
            job is not None and living is not None and job not in living
        ):
            owner = f"of job {job}, which has ended" if job else "of no job"
            yield f"a Ray {owner} is left: {process.info['name']}, process {process.pid}; `kill {process.pid}` ends it"


def list_living_jobs() -> set[str] | None:
    """Ids of this user's jobs that run or are about to end; None where Slurm does not answer."""
    states = "RUNNING,COMPLETING,SUSPENDED,CONFIGURING,STOPPED"
    query = ("--noheader", "--format=%A", f"--states={states}", f"--user={os.getuid()}")
    lines = ask_lines("squeue", *query, deadline_s=ASK_S)
    return None if lines is None else set(lines)


def compare(configs: Mapping[str, Config], _command: str) -> None:
    """Check the reports of all nodes from stdin. Raises ConfigError with their problems."""
    names, cluster = list_nodes(), get_first(configs).cluster
    reports = read_reports(sys.stdin)
    problems = [*find_problems(reports, names, cluster.gpus_per_node), *find_small_gpus(reports, cluster.hardware)]
    if problems:
        raise ConfigError(problems)


def read_reports(lines: TextIO) -> list[NodeReport]:
    """Read the reports; other lines, such as those of a container's start, are skipped."""
    return [NodeReport(**json.loads(line)) for line in lines if line.startswith('{"node"')]


def find_problems(reports: Sequence[NodeReport], names: Sequence[str], gpus_per_node: int) -> Iterator[str]:
    """One message for each problem, with the nodes that have it.

    names: the nodes of the job. gpus_per_node: how many the job uses.
    """
    reports = sorted(reports, key=lambda report: (*names, report.node).index(report.node))
    missing = sorted(set(names) - {report.node for report in reports})
    if missing:
        yield f"{', '.join(missing)}: gave no answer"
    where = defaultdict(list)
    for report in reports:
        for problem in report.problems:
            where[problem].append(report.node)
        # On a partition without GPUs no node has any.
        if any(each.gpus for each in reports) and len(report.gpus) < gpus_per_node:
            where[f"cluster.gpus_per_node: found {gpus_per_node}; nvidia-smi shows {len(report.gpus)}"].append(
                report.node
            )
    for problem, nodes in where.items():
        yield f"{', '.join(nodes)}: {problem}"
    kind_of = find_kinds(gpu for report in reports for gpu in report.gpus)
    kinds = defaultdict(list)
    for report in reports:
        for kind in sorted({kind_of[gpu] for gpu in report.gpus}):
            kinds[kind].append(report.node)
    if len(kinds) > 1:
        parts = "; ".join(f"{kind} on {', '.join(nodes)}" for kind, nodes in kinds.items())
        yield f"the job has different GPUs, and the slowest would decide: {parts}; sbatch --constraint= chooses nodes"


def find_kinds(gpus: Iterable[str]) -> dict[str, str]:
    """For each GPU the largest one of the same name and about the same memory."""
    kinds: dict[str, str] = {}
    for gpu in sorted(set(gpus), key=lambda each: (-read_mib(each), each)):
        name = gpu.rpartition(", ")[0]
        same = (
            kind
            for kind in kinds.values()
            if kind.rpartition(", ")[0] == name and read_mib(gpu) >= LEAST_OF_KIND * read_mib(kind)
        )
        kinds[gpu] = next(same, gpu)
    return kinds


def read_mib(gpu: str) -> int:
    """The memory in MiB, 81559 for `NVIDIA H100 80GB HBM3, 81559 MiB`; 0 where nvidia-smi did not report it."""
    size = re.search(r"(\d+) MiB$", gpu)
    return int(size[1]) if size else 0


def find_small_gpus(reports: Sequence[NodeReport], hardware: HardwareConfig) -> Iterator[str]:
    """Problems with GPUs that have less memory than the job is planned for."""
    for kind in sorted({gpu for report in reports for gpu in report.gpus}):
        if hardware.gpu is not None and 0 < read_mib(kind) < LEAST_OF_KIND * 1024 * hardware.memory_gib:
            yield (
                f"cluster.hardware: the job is planned for {hardware.gpu}, {hardware.memory_gib:g} GiB; the nodes have"
                f" {kind}: give cluster.hardware.gpu and .memory_gib, or cluster.hardware.gpu=null for no plan"
            )


if __name__ == "__main__":
    main()
