"""`megarl doctor [group=option] [key=value] ...`: can this configuration run on this machine?

Exit code 0: it can. 1: something is missing or wrong. 2: the configuration itself is wrong.

slurm/train.sh asks this of a job before Ray starts, with --command=NAME for what the job runs, if not train; problems
end it with code 2, and nothing of it imports torch or Ray. --node prints what this node has, as a line of JSON; --job
compares the configuration with the allocation, and the lines of all nodes in MEGARL_NODES, from stdin, and prints
settings for train.sh as NAME=VALUE.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.algo.objective import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.load import expand_sets, load_config, load_configs
from megarl.config.names import rewrite_overrides
from megarl.config.overrides import take_config_dirs
from megarl.config.placement import check_allocation, check_cluster, count_nodes, list_groups, place, read_allocation
from megarl.config.schema.algo import needs_reference
from megarl.config.schema.mix import name_in_source, split_config
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import LEAST_OF_KIND, ClusterConfig, Config
from megarl.config.schema.task import HuggingFaceDataConfig
from megarl.run.command import (
    check_machine,
    end_with_closed_pipe,
    end_with_config_error,
    load_complete,
    take_resume,
)
from megarl.task.sandbox import PROTECTIONS, find_protections

DESCRIBE_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps([torch.version.cuda, [(gpu.name, gpu.total_memory / 1e9) for gpu in gpus]]))
"""
READ_DATA = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from megarl.task.data import open_dataset
"""
CUDA_MODULES = ("megatron.core", "transformer_engine.pytorch", "sgl_kernel", "flashinfer", "apex")
FOR_CUDA = ("sglang-kernel", "flashinfer-python", "triton", "torchvision")
"""Packages that SGLang imports on a GPU; on a CPU there are stand-ins"""
IMPORTS_S, COMMAND_S = 90.0, 30.0
"""Deadlines: of all imports (from a cold network file system torch alone takes many seconds), and of a command"""
LEAST_TMP_GB = 2.0
"""For Ray's session and the servers' scratch folders"""
NOTE, MISSING, WRONG = "note", "missing", "wrong"


class Gpu(NamedTuple):
    name: str
    memory_gb: float


class Finding(NamedTuple):
    level: str
    """NOTE, which stops nothing, MISSING or WRONG"""
    text: str
    remedy: str | None = None
    """The command to run, or the key to set"""


@dataclass(frozen=True)
class Machine:
    versions: Mapping[str, str]
    """The version of every installed distribution, by canonical name"""
    problems: Mapping[str, str]
    """Why a module could not be imported, in one line; without those that are not installed"""
    torch_cuda: str | None
    """The CUDA version that torch was built for; None: a CPU build, or no torch"""
    gpus: Sequence[Gpu]
    driver: str | None
    compilers: Mapping[str, str | None]
    """The paths of cc, Python.h, ninja and nvcc; None where one is not found"""
    nvcc_cuda: str | None
    """CUDA version of nvcc, such as 13.0"""
    tmp_free_gb: float


def describe_machine() -> Machine:
    versions: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if name := each.metadata["Name"]:  # None where a folder is half removed
            # The first on sys.path is the one that is imported.
            versions.setdefault(canonicalize_name(name), each.version)
    printed, problems = run_programs({"torch": DESCRIBE_TORCH, "ray": "import ray"})
    cuda, gpus = json.loads(printed["torch"].splitlines()[-1]) if "torch" in printed else (None, [])
    if cuda:
        # torch first, which loads NCCL for Transformer Engine.
        names = [name for name in CUDA_MODULES if importlib.util.find_spec(name.split(".")[0])]
        programs = {name: f"import torch, {name}" for name in names}
        problems |= run_programs(programs)[1]
    # Where SGLang (kernels/jit/utils/compile/toolchain.py) and FlashInfer look.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(f"{home}/bin/nvcc" if home else "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    release = re.search(r"release (\d+\.\d+)", " ".join(ask(nvcc, "--version"))) if nvcc else None
    header = Path(sysconfig.get_path("include")) / "Python.h"
    own_first = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()])
    return Machine(
        versions,
        problems,
        torch_cuda=cuda,
        gpus=[Gpu(*each) for each in gpus],
        driver=next(iter(ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")), None),
        compilers={
            "cc": shutil.which("cc") or shutil.which("gcc"),
            "Python.h": str(header) if header.is_file() else None,
            "ninja": shutil.which("ninja", path=own_first),
            "nvcc": nvcc,
        },
        nvcc_cuda=release[1] if release else None,
        tmp_free_gb=shutil.disk_usage(tempfile.gettempdir()).free / 1e9,
    )


def run_programs(programs: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What each Python program printed, and why it failed, in one line; one that hangs or crashes affects no other."""
    running, printed, problems = {}, dict[str, str](), dict[str, str]()
    for name, program in programs.items():
        # A file, not a pipe, which a child of a killed process would hold open.
        said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-W", "ignore", "-c", program]
        running[name] = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT), said
    end = time.monotonic() + IMPORTS_S
    for name, (process, said) in running.items():
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # Not waited for: one that hangs in the kernel does not end.
            problems[name] = f"its import did not end within {IMPORTS_S:.0f} s"
            continue
        said.seek(0)
        text = said.read()
        if code == 0:
            printed[name] = text
            continue
        # What follows the frames of a traceback.
        last = " ".join(re.split(r"^  .*\n", text, flags=re.MULTILINE)[-1].split())[:160]
        problems[name] = last if code > 0 else f"its import ended the process with {code}: {last}"
    return printed, problems


def ask(*command: str) -> list[str]:
    """The lines that a command prints; none where it is not installed, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.strip().splitlines()]


def judge(machine: Machine, config: Config, overrides: Sequence[str]) -> Iterator[Finding]:
    """What keeps the configuration, composed from these overrides, from running on the machine, in the order in which
    to resolve it.
    """
    needs = list_cuda_needs(config, overrides)
    install = f"make install{' PLATFORM=cuda' if needs or machine.torch_cuda else ''}"
    for need in map(Requirement, importlib.metadata.requires("megarl") or []):
        version = machine.versions.get(canonicalize_name(need.name))
        if need.marker is not None and not need.marker.evaluate({"extra": "sglang"}):
            continue
        if version is None:
            yield Finding(MISSING, f"{need.name}{need.specifier} is not installed", install)
        elif not need.specifier.contains(version, prereleases=True):
            yield Finding(WRONG, f"{need.name}{need.specifier} is needed: found {version}", install)
    for module, problem in machine.problems.items():
        if re.search(r"libcuda\.so\.1|libnvidia-ml\.so\.1", problem) and not machine.gpus:
            yield Finding(NOTE, f"{module} was not tested; only NVIDIA's driver has what it loads: {problem}")
        else:
            # What is installed is not installed again without `clean`.
            yield Finding(WRONG, f"{module} is broken: {problem}", install.replace("make", "make clean"))
    if needs:
        yield from check_gpus(machine, config, ", ".join(needs))
    if needs or machine.gpus:
        yield from check_cuda_packages(machine)
    if machine.tmp_free_gb < LEAST_TMP_GB:
        found = f"the temporary folder has {machine.tmp_free_gb:.1f} GB free"
        yield Finding(WRONG, f"{found}; Ray and the servers need {LEAST_TMP_GB:.0f}", "free some, or TMPDIR")


def list_cuda_needs(config: Config, overrides: Sequence[str]) -> list[str]:
    """The settings that need a GPU, as key=value; empty: a CPU suffices."""
    gpu, clusters = config.cluster.hardware.gpu, [text for text in overrides if text.startswith("cluster=")]
    needs = [f"cluster.hardware.gpu={gpu}"] if gpu is not None else []
    if clusters and clusters[-1] not in ("cluster=laptop", "cluster=slurm"):
        needs = clusters[-1:]
    roles = {"policy": config.policy} | ({"critic": config.critic} if needs_critic(config.algo) else {})
    needs += [f"{name}.fp8={role.fp8.value}" for name, role in roles.items() if role.fp8]
    return needs + ["rollout.kv_cache_tokens=null"] * (config.has_servers and config.rollout.kv_cache_tokens is None)


def check_gpus(machine: Machine, config: Config, needs: str) -> Iterator[Finding]:
    """Check for as many GPUs as the job has on one node, and for a torch that can use them."""
    gpus, hardware, groups = machine.gpus, config.cluster.hardware, list_groups(config)
    slots = [slot for own in place(config.cluster, groups).values() for slot in own if slot.node == 0]
    number = len({gpu for slot in slots for gpu in slot.gpus}) or sum(group.num_gpus for group in groups)
    if "torch" in machine.versions and machine.torch_cuda is None:
        text = f"a torch for CUDA ({needs}): found {machine.versions['torch']}, a CPU build"
        yield Finding(MISSING, text, "make install PLATFORM=cuda, or the image of slurm/Dockerfile")
    if not gpus:
        seen, remedy = "no NVIDIA driver", "run it on a node with GPUs (sbatch slurm/train.sh); on a CPU cluster=laptop"
        if machine.driver:
            seen = f"driver {machine.driver}, which torch cannot use"
            remedy = f"a driver for CUDA {machine.torch_cuda} (of CUDA 13: 580 or newer), or GPUs that are visible"
        yield Finding(MISSING, f"{number} GPUs on one node ({needs}): found none, {seen}", remedy)
    elif len(gpus) < number:
        remedy = "more nodes or GPUs, fewer processes and servers, or cluster.placement=colocated"
        yield Finding(MISSING, f"{number} GPUs on one node: found {len(gpus)}", remedy)
    elif gpus[0].memory_gb < LEAST_OF_KIND * (planned := hardware.memory_gib * 2**30 / 1e9):
        text = f"{gpus[0].name} has {gpus[0].memory_gb:.0f} GB; the job is planned for {hardware.gpu}, {planned:.0f} GB"
        yield Finding(NOTE, text, "the cluster= of these GPUs, or cluster.hardware.gpu and .memory_gib")


def check_cuda_packages(machine: Machine) -> Iterator[Finding]:
    """Check what a GPU is used with, and what compiles kernels during a run."""
    install, cuda, nvcc = "make install PLATFORM=cuda", machine.torch_cuda, machine.compilers["nvcc"]
    if absent := [name for name in FOR_CUDA if name not in machine.versions]:
        yield Finding(MISSING, f"SGLang's needs on a GPU: {', '.join(absent)}", install)
    if "transformer-engine" not in machine.versions:
        yield Finding(NOTE, "without Transformer Engine policy and critic compute with slower layers", install)
    for name in ("cc", "Python.h", "ninja"):
        if machine.compilers[name] is None:
            remedy = install if name == "ninja" else "apt-get install gcc libc6-dev python3-dev"
            yield Finding(MISSING, f"{name}, with which kernels are compiled during a run, is not here", remedy)
    if cuda is not None and (nvcc is None or (machine.nvcc_cuda or "").split(".")[0] != cuda.split(".")[0]):
        text = f"nvcc of CUDA {cuda}, with which the servers compile kernels: found {nvcc} {machine.nvcc_cuda or ''}"
        yield Finding(MISSING, text.rstrip(), f"apt-get install cuda-toolkit-{cuda.replace('.', '-')}, or CUDA_HOME")


def check_models(config: Config, command: str = "train") -> Iterator[Finding]:
    """The models that the configuration starts from and that this machine does not have."""
    from megarl.models.checkpoint import find_checkpoint

    paths = {"model.path": config.model.path} if config.model.source is ModelSource.path else {}
    if needs_critic(config.algo) and config.critic.init is not None and command == "train":
        paths["critic.init"] = config.critic.init
    if needs_reference(config.algo) and config.reference.init is not None and command == "train":
        paths["reference.init"] = config.reference.init
    if needs_reference(config.algo) and command == "train":
        paths |= {f"reference.by_source.{name}": path for name, path in config.reference.by_source.items()}
    for key, path in paths.items():
        try:
            find_checkpoint(path, key, may_download=False)
        except ConfigError as error:
            yield Finding(MISSING, error.problems[0])


def check_dataset(config: Config) -> Iterator[Finding]:
    """A dataset of the Hugging Face hub that cannot be read here without a network."""
    for name, each in split_config(config).items():
        data = each.data
        if not isinstance(data, HuggingFaceDataConfig) or not data.path:
            continue
        words = (str(data.path), data.subset, data.split, "data.split")
        if "data" in run_programs({"data": f"{READ_DATA}open_dataset(*{words!r})"})[1]:
            found = f"data.path: {data.path} cannot be read here without a network"
            how = f"where there is a network, `hf download --repo-type dataset {data.path}`; HF_HOME names the cache"
            yield Finding(MISSING, name_in_source(name, found), how)


def check_tensors(config: Config) -> Iterator[Finding]:
    """What is wrong with the tensors of models that are there, by the headers of their files."""
    with contextlib.suppress(ImportError):  # The broken package has been named.
        from megarl.run.inputs import load_models

        try:
            load_models(config)
        except ConfigError as error:
            yield Finding(WRONG, error.problems[0], "download or convert it anew")


def render(machine: Machine, findings: Sequence[Finding]) -> Iterator[str]:
    """The lines of the report."""
    kinds = sorted({f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in machine.gpus})
    sandbox, build = find_protections(), f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "a CPU build"
    packages = ("torch", "megatron-core", "transformer-engine", "sglang", "ray")
    rows = {
        "packages": ", ".join(f"{name} {machine.versions.get(name, '-')}" for name in packages) + f"; torch is {build}",
        "system": f"{len(os.sched_getaffinity(0))} cores, {psutil.virtual_memory().total / 1e9:.0f} GB; {sys.prefix}",
        "GPUs": f"{len(machine.gpus)} x {', '.join(kinds)}; driver {machine.driver}" if kinds else "none",
        "compilers": ", ".join(f"{name} {path or '-'}" for name, path in machine.compilers.items()),
        "sandbox": ", ".join(name if name in sandbox else f"no {name}" for name in PROTECTIONS),
    }
    lines = [f"{name:<11}{text}" for name, text in rows.items()]
    for level, text, remedy in findings:
        lines.append(f"{level:<11}{text}{f' -> {remedy}' if remedy else ''}")
    for line in lines:
        yield from textwrap.wrap(line, 120, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    stopping = sum(finding.level != NOTE for finding in findings)
    yield f"it cannot run here: {stopping} missing or wrong" if stopping else "it can run here"


def check_job(config: Config, command: str) -> Iterator[str]:
    """The problems of the configuration in this allocation; where there are none, its settings and places are printed:
    the settings for train.sh to stdout, the places of the processes to stderr.
    """
    cluster, allocation = config.cluster, read_allocation(os.environ)
    problems = [*check_allocation(cluster, allocation), *check_cluster(config, command)]
    yield from problems
    if problems:
        return
    slots = place(cluster, list_groups(config, command))
    print(f"allocation: {allocation.num_nodes} nodes x {allocation.gpus_per_node} GPUs", file=sys.stderr)
    for name, own in slots.items():
        if own:
            nodes = sorted({1 + slot.node for slot in own})
            gpus = len({(slot.node, gpu) for slot in own for gpu in slot.gpus})
            print(f"{name}: {len(own)} processes on nodes {nodes[0]} to {nodes[-1]}, {gpus} GPUs", file=sys.stderr)
    if (idle := allocation.num_nodes - count_nodes(slots)) > 0:
        print(f"warning: {idle} of {allocation.num_nodes} nodes have nothing to do", file=sys.stderr)
    print(f"MEGARL_OBJECT_STORE_MB={cluster.object_store_mb}")


def describe_node(config: Config, command: str, environment: Mapping[str, str]) -> dict[str, object]:
    """This node's name, its GPUs as (name, MiB), and its problems, each in one line."""
    problems = [finding.text for finding in check_models(config, command)]
    if (folder := environment.get("MEGARL_JOB_DIR")) and not Path(folder).is_dir():
        problems.append(f"hydra.run.dir: {folder} does not exist; it must be on a file system that every node sees")
    lines = ask("nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
    found = {number: (name, int(mib) if mib.isdecimal() else 0) for number, name, mib in (x.split(", ") for x in lines)}
    # Where Slurm shows the job its own GPUs only, their numbers also start at 0.
    numbers = [number for number in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if number in found]
    gpus = [found[number] for number in numbers or found]
    return {"node": environment.get("SLURMD_NODENAME") or os.uname().nodename, "gpus": gpus, "problems": problems}


def compare_nodes(lines: Iterable[str], nodes: Sequence[str], cluster: ClusterConfig) -> Iterator[str]:
    """The problems of a job's nodes, each with the nodes that have it. lines: with those of `describe_node`."""
    found = {report["node"]: report for report in map(json.loads, (x for x in lines if x.startswith('{"node"')))}
    where, kinds = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    has_gpus = any(report["gpus"] for report in found.values())  # On a partition without GPUs no node has any.
    hardware = cluster.hardware
    for node in nodes:
        report = found.get(node, {"gpus": [], "problems": ["gave no answer"]})
        problems, gpus = list(report["problems"]), report["gpus"]
        if node in found and has_gpus and len(gpus) < cluster.gpus_per_node:
            problems.append(f"cluster.gpus_per_node: found {cluster.gpus_per_node}; nvidia-smi shows {len(gpus)}")
        for name, mib in {(name, mib) for name, mib in gpus}:
            if node not in kinds[name]:
                kinds[name].append(node)
            if 0 < mib < hardware.memory_gib * 1024 * LEAST_OF_KIND:
                planned = f"the job is planned for {hardware.gpu}, {hardware.memory_gib:g} GiB"
                problems.append(f"cluster.hardware: {planned}; found {name}, {mib} MiB; .gpu=null for no plan")
        for problem in problems:
            where[problem].append(node)
    yield from (f"{', '.join(names)}: {problem}" for problem, names in where.items())
    if len(kinds) > 1:
        parts = "; ".join(f"{name} on {', '.join(names)}" for name, names in kinds.items())
        yield f"the job has different GPUs, and the slowest would decide: {parts}; sbatch --constraint= chooses nodes"


def look_before_job(mode: str, arguments: Sequence[str]) -> None:
    """What slurm/train.sh asks. Raises ConfigError with the problems."""
    command = next((text.partition("=")[2] for text in arguments if text.startswith("--command=")), "train")
    overrides = [text for text in arguments if not text.startswith("--command=")]
    # The address is a placeholder: train.sh knows it once Ray runs.
    overrides = [*take_resume(take_config_dirs(overrides))[0], "cluster.ray_address=first-node:0"]
    if command == "evaluate":
        # Those of an evaluation differ in data and reward alone.
        config = next(iter(load_configs(expand_sets(rewrite_overrides(overrides).overrides)).values()))
    else:
        is_planned = (mode, command) == ("--job", "train")
        config = load_complete(overrides).config if is_planned else load_config(overrides, command)
    if mode == "--node":
        print(json.dumps(describe_node(config, command, os.environ)), flush=True)
        return
    problems = list(check_job(config, command))
    if nodes := os.environ.get("MEGARL_NODES"):
        problems += compare_nodes(sys.stdin, nodes.split(","), config.cluster)
    if problems:
        raise ConfigError(problems)


def main() -> None:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    try:
        if arguments[:1] in (["--job"], ["--node"]):
            look_before_job(arguments[0], arguments[1:])
            return
        arguments = take_config_dirs(arguments)
        if options := [text for text in arguments if text.startswith("-")]:
            raise ConfigError([f"{options[0]}: no such option; the doctor takes key=value, as megarl.train does"])
        loaded = load_complete(arguments)
    except ConfigError as error:
        if arguments[:1] == ["--node"]:
            return  # --job says it, once for all nodes.
        end_with_config_error(error)
    print("\n".join(loaded.lines), end="\n" if loaded.lines else "")
    machine, config = describe_machine(), loaded.config
    findings = [*judge(machine, config, arguments), *(Finding(WRONG, each) for each in check_machine(config))]
    findings += list(check_models(config)) or check_tensors(config)
    findings += check_dataset(config)
    print("\n".join(render(machine, findings)))
    sys.exit(any(finding.level != NOTE for finding in findings))


if __name__ == "__main__":
    end_with_closed_pipe()
    main()
