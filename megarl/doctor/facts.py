"""What was found on this machine, before anything is judged."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class ApexKind(Enum):
    """Two projects are called apex."""

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
    """What came of importing packages in a process of its own."""

    torch_version: str | None = None
    """None: torch is not there, or is broken"""
    torch_cuda: str | None = None
    """version of CUDA that torch was built for; None: a CPU build"""
    gpus: tuple[Gpu, ...] = ()
    problems: dict[str, str] | None = None
    """module -> why it could not be imported, one line; modules that are not installed are not among them"""


@dataclass(frozen=True)
class Checkpoint:
    """A model that the configuration starts from."""

    key: str
    asked: str
    problem: str | None
    """None: it is there, or is made here at the first run"""
    remedy: str | None = None


@dataclass(frozen=True)
class Machine:
    system: str
    python: str
    num_cores: int
    memory_gb: float
    driver: str | None
    """NVIDIA's, of nvidia-smi; None: there is none"""
    compiler: str | None
    python_header: Path
    has_python_header: bool
    shm_free_gb: float
    tmp_free_gb: float
    open_files: tuple[int, int]
    """soft and hard limit"""
    slurm: str | None
    """what `sbatch --version` says"""
    slurm_job: str | None
    containers: tuple[str, ...]
    hub_cache: Path
    num_cached_models: int


@dataclass(frozen=True)
class Facts:
    versions: dict[str, str]
    """distribution (canonical name) -> version, of everything that is installed"""
    requirements: tuple[str, ...]
    """of megarl's own metadata, the extra sglang included; none: megarl itself is not installed"""
    pins: dict[str, dict[str, str]]
    """platform (cpu, cuda) -> distribution -> version of tools/install/PLATFORM.lock"""
    apex: ApexKind | None
    imports: Imports
    machine: Machine
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class Need:
    """What the chosen configuration asks of one node."""

    cluster: str | None
    """the option of the cluster group, where the command line chooses one"""
    cuda: tuple[str, ...] = ()
    """settings that need a GPU, as key=value; none: a CPU will do"""
    num_gpus: int = 0
    """GPUs that this machine has to have; 0 without `cuda`"""
    num_nodes: int = 1
    fp8: tuple[tuple[str, str, str], ...] = ()
    """(role, format, recipe) of each role with FP8 products"""
    object_store_gb: float = 0.0
    gpu: str | None = None
    """the kind of GPU that the job is planned for (cluster.hardware); None: not known"""
    gpu_memory_gb: float = 0.0
    """of it"""
    assumed: tuple[str, ...] = ()
    """settings, as key=value, in place of those of a Slurm job that there is not yet"""


class Level(Enum):
    note = "note"
    missing = "missing"
    wrong = "wrong"


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. A note keeps nothing from running."""

    level: Level
    text: str
    remedy: str | None = None
    """the command, or the key to set"""
