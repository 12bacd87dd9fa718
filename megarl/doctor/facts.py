"""The facts found on this machine, before they are judged."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


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
    problems: dict[str, str] | None = None
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


@dataclass(frozen=True)
class Need:
    """The needs of the chosen configuration on one node."""

    cluster: str | None
    """The option of the cluster group, where the command line chooses one"""
    cuda: tuple[str, ...] = ()
    """Settings that need a GPU, as key=value; empty: a CPU suffices"""
    num_gpus: int = 0
    """GPUs that this machine must have; 0 without `cuda`"""
    num_nodes: int = 1
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
