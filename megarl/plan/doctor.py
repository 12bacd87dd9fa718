"""`megarl doctor [group=option] [key=value] ...`: can this configuration run on this machine?

Exit code 0: it can. 1: something is missing or wrong. 2: the configuration itself is wrong.

The facts of the machine come from metadata, commands, and imports in processes of their own; they are judged by what
the configuration needs.
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
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.placement import list_groups, place
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import Config
from megarl.config.schema.run import LEAST_OF_KIND
from megarl.config.search_path import take_config_dirs
from megarl.run.command import end_with_closed_pipe, end_with_config_error
from megarl.task.sandbox import PROTECTIONS, find_protections

LOCKS = Path(__file__).resolve().parents[1] / "tools" / "install"
PLATFORMS = ("cpu", "cuda")
PROBED = (("torch",), ("ray",))
"""Modules to import, those of a tuple in one process; with a torch for CUDA, the CUDA packages are imported too"""
PROBE_DEADLINE_S = 90.0
"""Deadline of all imports; from a cold network file system torch alone takes many seconds"""
COMMAND_DEADLINE_S = 5.0
TRAIN = Path(__file__).resolve().parents[1] / "slurm" / "train.sh"
IN_A_JOB = "SLURM_JOB_NUM_NODES"
KEYS = {"nodes": "cluster.num_nodes", "gpus-per-node": "cluster.gpus_per_node"}
"""The key of conf/cluster/slurm.yaml that each option of sbatch sets"""
CLUSTERS_OF_ANY_NODES = ("laptop", "slurm")
"""Options of the cluster group that also run on nodes without GPUs"""
FOR_CUDA = ("sglang-kernel", "flashinfer-python", "triton", "torchvision")
"""Packages that SGLang imports on a GPU; on a CPU there are stand-ins"""
TRANSFORMER_ENGINE, ITS_MODULE = "transformer-engine", "transformer_engine.pytorch"
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""What only NVIDIA's driver installs"""
MANY_FILES = 65536
FEWEST_FILES = 4096
LEAST_TMP_GB = 2.0
"""For Ray's session and the servers' scratch folders"""
SHOWN = (
    *("torch", "megatron-core", "transformer-engine", "apex", "sglang", "sglang-kernel", "flashinfer-python"),
    *("flash-attn-4", "ray", "hydra-core", "transformers"),
)
MODULES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"} | {
    "sglang-kernel": "sgl_kernel", "flashinfer-python": "flashinfer",
}  # fmt: skip
"""The module of a distribution, where it has another name"""
WIDTH = 120
INDENT = 9
EXIT_MISSING = 1


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
class Checkpoint:
    """A model that the configuration starts from."""

    key: str
    asked: str
    problem: str | None
    """None: it exists, or the first run creates it here"""
    remedy: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is found on this machine."""

    versions: dict[str, str]
    """The version of every installed distribution, by canonical name"""
    requirements: tuple[str, ...]
    """Requirements in megarl's metadata, with the extra sglang; empty: megarl itself is not installed"""
    pins: dict[str, dict[str, str]]
    """The versions in tools/install/PLATFORM.lock, by platform (cpu, cuda) and distribution"""
    apex: ApexKind | None
    checkpoints: tuple[Checkpoint, ...]
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
    hub_cache: Path
    num_cached_models: int
    sandbox: tuple[str, ...] = ()
    """What keeps programs that a model wrote from the machine, of megarl.task.sandbox.PROTECTIONS"""
    torch_version: str | None = None
    """By its import; None: torch is not installed, or is broken"""
    torch_cuda: str | None = None
    """The CUDA version that torch was built for; None: a CPU build"""
    gpus: tuple[Gpu, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    """Why a module could not be imported, in one line, by module; without those that are not installed"""


@dataclass(frozen=True)
class Need:
    """The needs of the chosen configuration on one node."""

    cluster: str | None
    """The option of the cluster group, where the command line chooses one"""
    cuda: tuple[str, ...] = ()
    """Settings that need a GPU, as key=value; empty: a CPU suffices"""
    num_gpus: int = 0
    """GPUs that this machine must have; 0 without `cuda`"""
    fp8: tuple[tuple[str, str, str], ...] = ()
    """(role, format, recipe) of each role that computes in FP8"""
    object_store_gb: float = 0.0
    gpu: str | None = None
    """The GPU model that the job is planned for (cluster.hardware); None: not known"""
    gpu_memory_gb: float = 0.0
    """Memory of that GPU model"""
    assumed: tuple[str, ...] = ()
    """Settings, as key=value, assumed instead of those of a Slurm job, where there is no job yet"""


class Level(Enum):
    note = "note"
    missing = "missing"
    wrong = "wrong"


@dataclass(frozen=True)
class Finding:
    """A problem or a note. A note does not keep the configuration from running."""

    level: Level
    text: str
    remedy: str | None = None
    """The command to run, or the key to set"""


class Probe:
    """Imports in processes of their own, which run while other facts are gathered."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "megarl.plan.probe"]
        environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
        self._running, self._folder = [], tempfile.TemporaryDirectory(prefix="megarl-doctor-")
        for number, names in enumerate(PROBED):
            # Files, not pipes, which a child of a killed process would hold open.
            written = Path(self._folder.name, f"{number}.out"), Path(self._folder.name, f"{number}.err")
            with written[0].open("w") as output, written[1].open("w") as errors:
                process = subprocess.Popen([*command, *names], stdout=output, stderr=errors, env=environment)
            self._running.append((process, *written))
        self._end = time.monotonic() + PROBE_DEADLINE_S

    def collect(self) -> dict[str, Any]:
        """Wait for the imports; returns the fields of `Facts` that they tell. One that hangs or crashes becomes a
        problem like any other.
        """
        found: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for process, output, errors in self._running:
            module, reason = "python", None
            try:
                process.wait(max(0.0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                # Not waited for: one that hangs in the kernel does not end.
                process.kill()
                reason = f"its import did not end within {PROBE_DEADLINE_S:.0f} s"
            complete = output.read_text(errors="replace").rpartition("\n")[0].splitlines()
            lines = [json.loads(line) for line in complete if line.startswith("{")]
            last = (errors.read_text(errors="replace").strip().splitlines() or ["without a message"])[-1]
            for line in lines:
                module = line.get("begins", module)
                if line.get("problem"):
                    problems[line["module"]] = line["problem"]
                if "torch" in line:
                    gpus = tuple(Gpu(name, tuple(capability), memory) for name, capability, memory in line["gpus"])
                    found = {"torch_version": line["torch"], "torch_cuda": line["cuda"], "gpus": gpus}
            if reason or process.returncode:
                problems[module] = reason or f"its import ended the process with {process.returncode}: {last}"
        self._folder.cleanup()
        return found | {"problems": problems}


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
        from megarl.models.checkpoint import find_gguf

        yield Checkpoint("model.source", "smollm2", get_problem(find_gguf))
    else:
        yield Checkpoint("model.source", "random weights", None)
    if needs_critic(config.algo) and config.critic.init is not None:
        yield locate("critic.init", config.critic.init)


def locate(key: str, path: str | None) -> Checkpoint:
    from megarl.models.checkpoint import find_checkpoint

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


def gather(config: Config, probe: Probe) -> Facts:
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.system()
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except Exception:  # its absence is reported with the packages
        HF_HUB_CACHE = str(Path.home() / ".cache" / "huggingface" / "hub")
    header, nvcc = Path(sysconfig.get_path("include")) / "Python.h", find_nvcc()
    release = re.search(r"release (\d+\.\d+)", " ".join(ask_lines(nvcc, "--version") or ())) if nvcc else None
    return Facts(
        versions=find_versions(),
        requirements=find_requirements(),
        pins={name: read_pins(LOCKS / f"{name}.lock") for name in PLATFORMS},
        apex=find_apex(),
        checkpoints=find_damage(config, tuple(find_checkpoints(config))),
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
        hub_cache=Path(HF_HUB_CACHE),
        num_cached_models=len(list(Path(HF_HUB_CACHE).glob("models--*"))),
        sandbox=find_protections(),
        **probe.collect(),
    )


def find_nvcc() -> str | None:
    """Where SGLang (kernels/jit/utils/compile/toolchain.py) and FlashInfer look: CUDA_HOME, PATH, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


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


def find_need(config: Config, overrides: Sequence[str], assumed: Sequence[str] = ()) -> Need:
    """The needs of `config`, composed from these overrides and those assumed of a Slurm job."""
    cluster = find_choice(overrides, "cluster")
    roles = {"policy": config.policy, **({"critic": config.critic} if needs_critic(config.algo) else {})}
    fp8 = tuple((name, role.fp8.value, role.fp8_recipe.value) for name, role in roles.items() if role.fp8)
    hardware = config.cluster.hardware
    cuda = [f"cluster.hardware.gpu={hardware.gpu}"] if hardware.gpu is not None else []
    if cluster is not None and cluster not in CLUSTERS_OF_ANY_NODES:
        cuda = [f"cluster={cluster}"]
    cuda += [f"{name}.fp8={kind}" for name, kind, _ in fp8]
    if config.rollout.kv_cache_tokens is None and config.has_servers:
        cuda.append("rollout.kv_cache_tokens=null")
    return Need(
        cluster=cluster,
        cuda=tuple(cuda),
        num_gpus=count_gpus(config) if cuda else 0,
        fp8=fp8,
        gpu=hardware.gpu,
        gpu_memory_gb=hardware.memory_gib * 2**30 / 1e9,
        object_store_gb=config.cluster.object_store_mb * 2**20 / 1e9,
        assumed=tuple(assumed),
    )


def count_gpus(config: Config) -> int:
    """The largest number of GPUs that the job uses on one node; 0 where they are not counted."""
    placed = place(config.cluster, list_groups(config))
    used = {(slot.node, gpu) for slots in placed.values() for slot in slots for gpu in slot.gpus}
    nodes = [node for node, _ in used]
    return max((nodes.count(node) for node in set(nodes)), default=0)


def find_choice(overrides: Sequence[str], group: str) -> str | None:
    """The last option chosen of a group; None: none was."""
    chosen = [value for name, _, value in (text.partition("=") for text in overrides) if name == group]
    return chosen[-1] if chosen else None


def assume_allocation(overrides: Sequence[str], environment: Mapping[str, str], script: Path = TRAIN) -> list[str]:
    """The allocation that cluster=slurm is checked against outside of a job: the one that slurm/train.sh requests.

    Overrides from the script's #SBATCH lines, for keys that are not given; empty in a job and for other clusters.
    """
    if find_choice(overrides, "cluster") != "slurm" or environment.get(IN_A_JOB) or not script.is_file():
        return []
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", script.read_text(), flags=re.MULTILINE))
    return [f"{key}={options[name]}" for name, key in KEYS.items() if name in options and key not in given]


def judge(facts: Facts, need: Need) -> list[Finding]:
    """All findings, in the order in which to resolve them."""
    checks = (
        *(check_megarl, check_imports, check_cuda, check_cuda_packages, check_fp8, check_apex),
        *(check_checkpoints, check_memory, check_slurm),
    )
    return [finding for check in checks for finding in check(facts, need)]


def choose_platform(facts: Facts, need: Need) -> str:
    """The platform whose lock file applies: cuda where torch is built for it, or the configuration needs a GPU."""
    return "cuda" if need.cuda or facts.torch_cuda else "cpu"


def name_install(facts: Facts, need: Need) -> str:
    return "make install PLATFORM=cuda" if choose_platform(facts, need) == "cuda" else "make install"


def check_megarl(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check the installed versions against the requirements of pyproject.toml."""
    if not facts.requirements:
        yield Finding(Level.missing, "megarl itself is not installed", name_install(facts, need))
    absent, other = [], []
    for text in facts.requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # a newer metadata format than packaging supports
            continue
        version = facts.versions.get(canonicalize_name(requirement.name))
        if version is None:
            absent.append(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            other.append(f"{requirement} (found {version})")
    if absent:
        yield Finding(Level.missing, f"not installed: {join(absent)}", name_install(facts, need))
    if other:
        yield Finding(Level.wrong, f"other versions than megarl needs: {join(other)}", name_install(facts, need))


def check_imports(facts: Facts, need: Need) -> Iterator[Finding]:
    problems = facts.problems
    waiting = [module for module, problem in problems.items() if needs_driver(facts, problem)]
    for module, problem in problems.items():
        if module not in waiting:
            text = problem if len(problem) <= 160 else f"{problem[:157]}..."
            # What is installed is not installed again without `clean`.
            remedy = name_install(facts, need).replace("make install", "make clean install")
            yield Finding(Level.wrong, f"{module} is broken: {text}", remedy)
    if waiting:
        yield Finding(
            Level.note,
            f"not tested, as only NVIDIA's driver has what they load ({DRIVER_LIBRARIES[0]}): {join(waiting)}",
        )


def needs_driver(facts: Facts, problem: str) -> bool:
    """Whether an import failed for want of a driver alone, on a machine that has none."""
    return not facts.gpus and any(name in problem for name in DRIVER_LIBRARIES)


def check_cuda(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check for GPUs and a torch that can use them, where the configuration needs them."""
    if not need.cuda:
        return
    why = join(need.cuda)
    if facts.torch_version is not None and facts.torch_cuda is None:
        yield Finding(
            Level.missing,
            f"a torch for CUDA ({why}): found {facts.torch_version}, a CPU build",
            "make install PLATFORM=cuda, or the image of slurm/Dockerfile",
        )
    if not facts.gpus:
        driver = facts.driver
        seen = f"driver {driver}, which torch cannot use" if driver else "no NVIDIA driver"
        remedy = "run it on a node with GPUs (sbatch slurm/train.sh); on a CPU cluster=laptop and a small model"
        if driver and facts.torch_cuda:
            remedy = f"a driver for CUDA {facts.torch_cuda} (of CUDA 13: 580 or newer), or GPUs that are visible"
        yield Finding(Level.missing, f"{need.num_gpus} GPUs on one node ({why}): found none, {seen}", remedy)
    elif len(facts.gpus) < need.num_gpus:
        yield Finding(
            Level.missing,
            f"{need.num_gpus} GPUs on one node: found {len(facts.gpus)}",
            "more nodes or GPUs, fewer processes and servers, or cluster.placement=colocated",
        )
    elif len({gpu.name for gpu in facts.gpus}) > 1:
        names = join(sorted({gpu.name for gpu in facts.gpus}))
        yield Finding(Level.wrong, f"GPUs of several kinds: {names}", "CUDA_VISIBLE_DEVICES with those of one kind")
    elif facts.gpus[0].memory_gb < LEAST_OF_KIND * need.gpu_memory_gb:
        gpu = facts.gpus[0]
        yield Finding(
            Level.note,
            f"{gpu.name} has {gpu.memory_gb:.0f} GB; the job is planned for {need.gpu}, {need.gpu_memory_gb:.0f} GB",
            "the cluster= of these GPUs, or cluster.hardware.gpu and .memory_gib",
        )


def check_cuda_packages(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check the CUDA packages, also where the configuration does not need the GPU: one that is there is used."""
    if not need.cuda and not facts.gpus:
        return
    absent = [name for name in FOR_CUDA if name not in facts.versions]
    if absent:
        yield Finding(Level.missing, f"SGLang's needs on a GPU: {join(absent)}", "make install PLATFORM=cuda")
    if TRANSFORMER_ENGINE not in facts.versions and not need.fp8:
        yield Finding(
            Level.note,
            "without Transformer Engine policy and critic compute with plain torch layers, slower",
            "make install PLATFORM=cuda",
        )
    yield from check_compilers(facts)


def check_compilers(facts: Facts) -> Iterator[Finding]:
    """Check what compiles kernels during a run: Triton's C compiler, and nvcc and ninja of SGLang and FlashInfer."""
    tools = [] if facts.compiler else ["a C compiler (cc)"]
    tools += [] if facts.has_python_header else [str(facts.python_header)]
    if tools:
        version = ".".join(facts.python.split(".")[:2])
        yield Finding(
            Level.missing,
            f"{join(tools)}, with which Triton compiles kernels during a run",
            f"apt-get install gcc libc6-dev python{version}-dev",
        )
    if facts.ninja is None:
        yield Finding(Level.missing, "ninja, with which the servers compile kernels", "make install PLATFORM=cuda")
    wanted = facts.torch_cuda
    if wanted is None:
        return
    remedy = f"apt-get install cuda-toolkit-{wanted.replace('.', '-')}, or its module; CUDA_HOME where it is elsewhere"
    if facts.nvcc is None:
        yield Finding(Level.missing, f"nvcc of CUDA {wanted}, with which the servers compile kernels", remedy)
    elif facts.nvcc_cuda is None or facts.nvcc_cuda.split(".")[0] != wanted.split(".")[0]:
        found = f"is of CUDA {facts.nvcc_cuda}" if facts.nvcc_cuda else "says no version"
        yield Finding(Level.wrong, f"{facts.nvcc} {found}, and torch is built for CUDA {wanted}", remedy)


def check_fp8(facts: Facts, need: Need) -> Iterator[Finding]:
    if not need.fp8 or facts.torch_version is None:
        return
    # Imports torch, for which only these configurations pay again.
    from megarl.config.schema.roles import Fp8, Fp8Recipe
    from megarl.mcore.spec import find_fp8_problems

    if ITS_MODULE in facts.problems:
        return  # check_imports says so
    with_te = TRANSFORMER_ENGINE in facts.versions
    capability = min((gpu.capability for gpu in facts.gpus), default=None)
    for role, kind, recipe in need.fp8:
        for problem in find_fp8_problems(role, Fp8(kind), Fp8Recipe(recipe), with_te, capability):
            yield Finding(Level.missing, problem)


def check_apex(facts: Facts, need: Need) -> Iterator[Finding]:
    if facts.apex is ApexKind.other:
        yield Finding(
            Level.wrong,
            "apex is not NVIDIA's (PyPI's is another project), and Megatron takes it for that",
            "pip uninstall apex",
        )
    if choose_platform(facts, need) == "cuda" and facts.apex is ApexKind.python_only:
        yield Finding(
            Level.note,
            "NVIDIA's apex has no kernels, so that Megatron cannot use it",
            "build it where nvcc is (slurm/Dockerfile)",
        )


def check_checkpoints(facts: Facts, need: Need) -> Iterator[Finding]:
    for each in facts.checkpoints:
        if each.problem is not None:
            yield Finding(Level.missing, each.problem, each.remedy)


def check_memory(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check shared memory, the temporary folder and the limit of open files."""
    if facts.shm_free_gb < need.object_store_gb:
        yield Finding(
            Level.wrong,
            f"/dev/shm has {facts.shm_free_gb:.1f} GB free; Ray's object store takes {need.object_store_gb:.1f} GB"
            " (cluster.object_store_mb)",
            "a smaller cluster.object_store_mb; docker run --shm-size=64g or --ipc=host",
        )
    if facts.tmp_free_gb < LEAST_TMP_GB:
        yield Finding(
            Level.wrong,
            f"the temporary folder has {facts.tmp_free_gb:.1f} GB free; Ray and the servers need {LEAST_TMP_GB:.0f}",
            "free some, or TMPDIR on another disk",
        )
    soft, hard = facts.open_files
    if need.cuda and 0 <= soft < FEWEST_FILES:
        level = Level.wrong if 0 <= hard < FEWEST_FILES else Level.note
        text = f"{soft} open files are allowed (at most {hard}); Ray on a cluster wants {MANY_FILES}"
        yield Finding(level, text, f"ulimit -n {MANY_FILES if hard < 0 else min(hard, MANY_FILES)}")


def check_slurm(facts: Facts, need: Need) -> Iterator[Finding]:
    if need.assumed:
        yield Finding(
            Level.note,
            f"this is not a Slurm job; it is checked against the request of slurm/train.sh: {join(need.assumed)}",
            "set these keys if you request other numbers from sbatch",
        )
    if need.cluster == "slurm" and facts.slurm is None and facts.slurm_job is None:
        yield Finding(
            Level.missing,
            "cluster=slurm, and there are no Slurm commands here",
            "start it on a login node of the cluster; without Slurm another cluster=",
        )


def join(names: Sequence[str]) -> str:
    return ", ".join(names)


def render(title: str, facts: Facts, need: Need, findings: Sequence[Finding]) -> list[str]:
    """The lines of the text, of at most WIDTH characters where the machine's own names are not longer."""
    return [
        f"megarl doctor: {title}",
        "",
        *_render_packages(facts, choose_platform(facts, need)),
        "",
        *_render_machine(facts),
        "",
        *_render_findings(findings),
    ]


def _render_packages(facts: Facts, platform: str) -> Iterator[str]:
    pins = facts.pins.get(platform, {})
    yield f"{'package':<20}{'here':<16}{platform}.lock"
    for name in SHOWN:
        version, pin = facts.versions.get(name), pins.get(name)
        line = f"{name:<20}{version or '-':<16}{pin or '-':<16}{_remark(facts, name, version, pin)}"
        yield line.rstrip()


def _remark(facts: Facts, name: str, version: str | None, pin: str | None) -> str:
    problem = facts.problems.get(MODULES.get(name, name))
    if problem is not None:
        return "needs the driver" if needs_driver(facts, problem) else "broken"
    if name == "apex":
        return "optional: NVIDIA's, from source" if facts.apex is None else facts.apex.value
    if version is None:
        return "not there" if pin else "for CUDA alone"
    if name == "torch" and facts.torch_version is not None:
        build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
        return build if version.partition("+")[0] == pin else f"{build}, another version"
    return "" if version == pin or pin is None else "another version"


def _render_machine(facts: Facts) -> Iterator[str]:
    gpus = facts.gpus
    kinds = sorted({f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in gpus})
    job = f", in job {facts.slurm_job}" if facts.slurm_job else ""
    soft, hard = ("unlimited" if limit < 0 else str(limit) for limit in facts.open_files)
    models = [f"{each.key}: {each.asked}{'' if each.problem is None else ', NOT FOUND'}" for each in facts.checkpoints]
    lacking = [name for name in PROTECTIONS if name not in facts.sandbox]
    rows = {
        "system": f"{facts.system}, {facts.num_cores} cores, {facts.memory_gb:.0f} GB; Python {facts.python}",
        "GPUs": (f"{len(gpus)} x {', '.join(kinds)}" if gpus else "none")
        + (f"; driver {facts.driver}" if facts.driver else "; no NVIDIA driver"),
        "compiler": f"{facts.compiler or 'none'}; Python.h {'found' if facts.has_python_header else 'not found'};"
        f" nvcc {f'{facts.nvcc} ({facts.nvcc_cuda})' if facts.nvcc else 'none'}; ninja {facts.ninja or 'none'}",
        "Slurm": f"{facts.slurm or 'not found'}{job}",
        "limits": f"/dev/shm {facts.shm_free_gb:.1f} GB free, temporary folder {facts.tmp_free_gb:.1f} GB free,"
        f" open files {soft} (at most {hard})",
        "model": "; ".join(models),
        "HF cache": f"{facts.hub_cache}, {facts.num_cached_models} models",
        "sandbox": ", ".join(facts.sandbox or ["limits only"]) + f"; not here: {', '.join(lacking)}" * bool(lacking),
    }
    yield from (f"{name:<10}{text}" for name, text in rows.items())


def _render_findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        yield from textwrap.wrap(
            f"{finding.level.value:<{INDENT}}{finding.text}{remedy}",
            WIDTH,
            subsequent_indent=" " * INDENT,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
    stopping = count_stopping(findings)
    if stopping:
        yield f"it cannot run here: {stopping} {'thing is' if stopping == 1 else 'things are'} missing or wrong"
    else:
        yield "it can run here"


def count_stopping(findings: Sequence[Finding]) -> int:
    return sum(finding.level is not Level.note for finding in findings)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        arguments = take_config_dirs(sys.argv[1:])
        options = [text for text in arguments if text.startswith("-")]
        if options:
            raise ConfigError([f"{options[0]}: no such option; the doctor takes key=value, as megarl.train does"])
        assumed = assume_allocation(arguments, os.environ)
        loaded = load([*arguments, *assumed])
        for line in loaded.lines:
            print(line)
    except ConfigError as error:
        end_with_config_error(error)
    need = find_need(loaded.config, arguments, assumed)
    facts = gather(loaded.config, Probe())
    findings = judge(facts, need)
    print("\n".join(render(" ".join(arguments) or "the default configuration", facts, need, findings)))
    sys.exit(EXIT_MISSING if count_stopping(findings) else 0)


if __name__ == "__main__":
    end_with_closed_pipe()
    main()
