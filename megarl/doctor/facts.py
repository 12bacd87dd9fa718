"""The facts of this machine, before they are judged: from metadata, commands, and imports in processes of their own.

Nothing here raises.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from packaging.utils import canonicalize_name

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.schema.model import ModelSource
from megarl.config.schema.root import Config
from megarl.sandbox.program import find_protections

LOCKS = Path(__file__).resolve().parents[1] / "tools" / "install"
PLATFORMS = ("cpu", "cuda")
PROBED = (("torch",), ("ray",))
"""Modules to import, those of a tuple in one process; with a torch for CUDA, the CUDA packages are imported too"""
PROBE_DEADLINE_S = 90.0
"""Deadline of all imports; from a cold network file system torch alone takes many seconds"""
KILL_DEADLINE_S = 3.0
"""Deadline of killing a process: one that hangs in the kernel does not end, nor does a pipe that its child holds"""
COMMAND_DEADLINE_S = 5.0
CONTAINER_TOOLS = ("docker", "podman", "apptainer", "singularity", "enroot")


class ApexKind(Enum):
    """The two projects named apex."""

    nvidia = "NVIDIA's, with its kernels"
    python_only = "NVIDIA's, without its kernels"
    other = "not NVIDIA's"


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_gb: float


@dataclass(frozen=True)
class Imports:
    """The results of importing packages in a process of its own."""

    torch_version: str | None = None
    """None: torch is not installed, or is broken"""
    torch_cuda: str | None = None
    """The CUDA version that torch was built for; None: a CPU build"""
    gpus: tuple[Gpu, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    """Why a module could not be imported, in one line, by module; without those that are not installed"""


@dataclass(frozen=True)
class Checkpoint:
    """A model that the configuration starts from."""

    key: str
    asked: str
    problem: str | None
    """None: it exists, or the first run creates it here"""
    remedy: str | None = None


@dataclass(frozen=True)
class Machine:
    system: str
    python: str
    num_cores: int
    memory_gb: float
    driver: str | None
    """Version of NVIDIA's driver by nvidia-smi; None: there is none"""
    compiler: str | None
    nvcc: str | None
    """CUDA's compiler, where SGLang looks for it; None: there is none"""
    nvcc_cuda: str | None
    """Its CUDA version, such as 13.0; None: it does not say"""
    ninja: str | None
    """On the PATH of the servers, which has the folder of this Python first"""
    python_header: Path
    has_python_header: bool
    shm_free_gb: float
    tmp_free_gb: float
    open_files: tuple[int, int]
    """Soft and hard limit"""
    slurm: str | None
    """Output of `sbatch --version`"""
    slurm_job: str | None
    containers: tuple[str, ...]
    hub_cache: Path
    num_cached_models: int
    sandbox: tuple[str, ...] = ()
    """What keeps programs that a model wrote from the machine, of megarl.sandbox.program.PROTECTIONS"""


@dataclass(frozen=True)
class Facts:
    versions: dict[str, str]
    """The version of every installed distribution, by canonical name"""
    requirements: tuple[str, ...]
    """Requirements in megarl's metadata, with the extra sglang; empty: megarl itself is not installed"""
    pins: dict[str, dict[str, str]]
    """The versions in tools/install/PLATFORM.lock, by platform (cpu, cuda) and distribution"""
    apex: ApexKind | None
    imports: Imports
    machine: Machine
    checkpoints: tuple[Checkpoint, ...]


class Probe:
    """Imports that run in parallel with gathering other facts."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "megarl.doctor.probe"]
        environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
        self._processes = [
            subprocess.Popen(
                [*command, *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            for names in PROBED
        ]
        self._end = time.monotonic() + PROBE_DEADLINE_S

    def collect(self) -> Imports:
        """Wait for the imports. One that hangs or crashes becomes a problem like any other."""
        lines: list[dict[str, Any]] = []
        problems: dict[str, str] = {}
        for process in self._processes:
            reason = None
            try:
                output, errors = process.communicate(timeout=max(0.0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                output, errors = end_process(process)
                reason = f"its import did not end within {PROBE_DEADLINE_S:.0f} s"
            found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            if process.returncode != 0:
                last = (errors.strip().splitlines() or ["without a message"])[-1]
                module = next((line["begins"] for line in reversed(found) if "begins" in line), "python")
                problems[module] = reason or f"its import ended the process with {process.returncode}: {last}"
            lines += found
        return read_imports(lines, problems)


def end_process(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill the process; returns what it wrote to stdout and stderr, as far as that can be read in time."""
    process.kill()
    try:
        return process.communicate(timeout=KILL_DEADLINE_S)
    except subprocess.TimeoutExpired as late:
        # Bytes, whatever the pipe's mode.
        out, err = (text.decode(errors="replace") if text else "" for text in (late.output, late.stderr))
        return out, err


def read_imports(lines: list[dict[str, Any]], problems: dict[str, str]) -> Imports:
    """Build the result from the lines of probe.py and the problems of modules whose import ended its process."""
    problems = problems | {line["module"]: line["problem"] for line in lines if line.get("problem")}
    torch = next((line for line in lines if "torch" in line), None)
    if torch is None:
        return Imports(problems=problems)
    gpus = tuple(Gpu(name, tuple(capability), memory) for name, capability, memory in torch["gpus"])
    return Imports(torch["torch"], torch["cuda"], gpus, problems)


def gather(config: Config, probe: Probe) -> Facts:
    return Facts(
        versions=find_versions(),
        requirements=find_requirements(),
        pins={name: read_pins(LOCKS / f"{name}.lock") for name in PLATFORMS},
        apex=find_apex(),
        machine=find_machine(),
        checkpoints=find_damage(config, tuple(find_checkpoints(config))),
        imports=probe.collect(),
    )


def find_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]  # None where a folder is half removed
        if name:
            # The first on sys.path is the one that is imported.
            found.setdefault(canonicalize_name(name), each.version)
    return found


def find_requirements() -> tuple[str, ...]:
    """megarl's requirements without their markers and without those of extras other than sglang."""
    try:
        lines = importlib.metadata.requires("megarl") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    split = [line.partition(";") for line in lines]
    return tuple(need.strip() for need, _, marker in split if "extra" not in marker or "sglang" in marker)


def read_pins(lock: Path) -> dict[str, str]:
    """The versions in a lock file; empty where the file is missing."""
    if not lock.is_file():
        return {}
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {
        canonicalize_name(name): version for name, mark, version in (line.partition("==") for line in lines) if mark
    }


def find_apex() -> ApexKind | None:
    """Which of the two projects `import apex` would find, by its folders: its code is not run."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return ApexKind.other
    return ApexKind.nvidia if importlib.util.find_spec("amp_C") else ApexKind.python_only


def find_checkpoints(config: Config) -> Iterator[Checkpoint]:
    model = config.model
    if model.source is ModelSource.path:
        yield locate("model.path", model.path)
    elif model.source is ModelSource.smollm2:
        from megarl.hf.smollm2 import find_gguf

        yield Checkpoint("model.source", "smollm2", get_problem(find_gguf))
    else:
        yield Checkpoint("model.source", "random weights", None)
    if needs_critic(config.algo) and config.critic.init is not None:
        yield locate("critic.init", config.critic.init)


def locate(key: str, path: str | None) -> Checkpoint:
    from megarl.hf.checkpoint import find_checkpoint

    problem = get_problem(lambda: find_checkpoint(path, key, may_download=False))
    is_name = path is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
    remedy = f"hf download {path}, with HF_HOME where every node sees it; or {key}=DIRECTORY"
    return Checkpoint(key, str(path), problem, remedy if is_name else f"{key}=DIRECTORY, or a name in that cache")


def find_damage(config: Config, checkpoints: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
    """These checkpoints, which are all there, with what is wrong with their tensors, read from the files' headers.

    A package that cannot be imported is said of the package.
    """
    if any(checkpoint.problem is not None for checkpoint in checkpoints):
        return checkpoints
    try:
        from megarl.run.inputs import load_models
    except Exception:
        return checkpoints
    damage = get_problem(lambda: load_models(config)) or ""
    return tuple(
        replace(found, problem=damage, remedy="download or convert it anew") if damage.startswith(found.key) else found
        for found in checkpoints
    )


def get_problem(find: Callable[[], object]) -> str | None:
    """The error that `find` raises, in one line; None where it raises none."""
    try:
        find()
    except ConfigError as error:
        return error.problems[0]
    except Exception as error:  # for example of a broken package that it imports
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def find_machine() -> Machine:
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.system()
    header = Path(sysconfig.get_path("include")) / "Python.h"
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except Exception:  # its absence is reported with the packages
        HF_HUB_CACHE = str(Path.home() / ".cache" / "huggingface" / "hub")
    cache = Path(HF_HUB_CACHE)
    nvcc = find_nvcc()
    release = re.search(r"release (\d+\.\d+)", " ".join(ask_lines(nvcc, "--version") or ())) if nvcc else None
    return Machine(
        system=f"{system}, {platform.machine()}",
        python=f"{platform.python_version()} ({sys.prefix})",
        num_cores=len(os.sched_getaffinity(0)),
        memory_gb=psutil.virtual_memory().total / 1e9,
        driver=ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        compiler=shutil.which("cc") or shutil.which("gcc"),
        nvcc=nvcc,
        nvcc_cuda=release[1] if release else None,
        ninja=shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()])),
        python_header=header,
        has_python_header=header.is_file(),
        shm_free_gb=find_free_gb("/dev/shm"),
        tmp_free_gb=find_free_gb(tempfile.gettempdir()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        slurm=ask("sbatch", "--version"),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        containers=tuple(find_container_tools()),
        hub_cache=cache,
        num_cached_models=len(list(cache.glob("models--*"))),
        sandbox=find_protections(),
    )


def find_nvcc() -> str | None:
    """Where SGLang (kernels/jit/utils/compile/toolchain.py) and FlashInfer look: CUDA_HOME, PATH, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def find_container_tools() -> Iterator[str]:
    for tool in filter(shutil.which, CONTAINER_TOOLS):
        answers = tool != "docker" or ask("docker", "version", "--format", "{{.Server.Version}}")
        yield tool if answers else f"{tool} (no daemon answers)"


def find_free_gb(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return 0.0


def ask(*command: str) -> str | None:
    """The first line that a command prints; None where there is none."""
    return next(iter(ask_lines(*command) or ()), None)


def ask_lines(*command: str, deadline_s: float = COMMAND_DEADLINE_S) -> list[str] | None:
    """The lines that a command prints; None where it is not installed, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.strip().splitlines()]
