"""What the chosen configuration needs on this machine, what of it is missing or wrong, and the screen that says so.

Pure functions of the configuration and of the facts.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.algo.registry import needs_critic
from megarl.config.placement import list_groups, place
from megarl.config.schema.hardware import LEAST_OF_KIND
from megarl.config.schema.root import Config
from megarl.doctor.facts import ApexKind, Facts
from megarl.sandbox.program import PROTECTIONS

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
    if config.rollout.kv_cache_tokens is None and config.rollout.file is None:
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
    """The largest number of GPUs that the job uses on one node; all, on one node, where they are not counted."""
    groups = list_groups(config)
    if config.cluster.gpus_per_node == 0:
        return sum(group.num_gpus for group in groups)
    used = {(slot.node, gpu) for slots in place(config.cluster, groups).values() for slot in slots for gpu in slot.gpus}
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
    return "cuda" if need.cuda or facts.imports.torch_cuda else "cpu"


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
    problems = facts.imports.problems
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
    return not facts.imports.gpus and any(name in problem for name in DRIVER_LIBRARIES)


def check_cuda(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check for GPUs and a torch that can use them, where the configuration needs them."""
    if not need.cuda:
        return
    why, found = join(need.cuda), facts.imports
    if found.torch_version is not None and found.torch_cuda is None:
        yield Finding(
            Level.missing,
            f"a torch for CUDA ({why}): found {found.torch_version}, a CPU build",
            "make install PLATFORM=cuda, or the image of slurm/Dockerfile",
        )
    if not found.gpus:
        driver = facts.machine.driver
        seen = f"driver {driver}, which torch cannot use" if driver else "no NVIDIA driver"
        remedy = "run it on a node with GPUs (sbatch slurm/train.sh); on a CPU cluster=laptop and a small model"
        if driver and found.torch_cuda:
            remedy = f"a driver for CUDA {found.torch_cuda} (of CUDA 13: 580 or newer), or GPUs that are visible"
        yield Finding(Level.missing, f"{need.num_gpus} GPUs on one node ({why}): found none, {seen}", remedy)
    elif len(found.gpus) < need.num_gpus:
        yield Finding(
            Level.missing,
            f"{need.num_gpus} GPUs on one node: found {len(found.gpus)}",
            "more nodes or GPUs, fewer processes and servers, or cluster.placement=colocated",
        )
    elif len({gpu.name for gpu in found.gpus}) > 1:
        names = join(sorted({gpu.name for gpu in found.gpus}))
        yield Finding(Level.wrong, f"GPUs of several kinds: {names}", "CUDA_VISIBLE_DEVICES with those of one kind")
    elif found.gpus[0].memory_gb < LEAST_OF_KIND * need.gpu_memory_gb:
        gpu = found.gpus[0]
        yield Finding(
            Level.note,
            f"{gpu.name} has {gpu.memory_gb:.0f} GB; the job is planned for {need.gpu}, {need.gpu_memory_gb:.0f} GB",
            "the cluster= of these GPUs, or cluster.hardware.gpu and .memory_gib",
        )


def check_cuda_packages(facts: Facts, need: Need) -> Iterator[Finding]:
    """Check the CUDA packages, also where the configuration does not need the GPU: one that is there is used."""
    if not need.cuda and not facts.imports.gpus:
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
    machine = facts.machine
    tools = [] if machine.compiler else ["a C compiler (cc)"]
    tools += [] if machine.has_python_header else [str(machine.python_header)]
    if tools:
        version = ".".join(machine.python.split(".")[:2])
        yield Finding(
            Level.missing,
            f"{join(tools)}, with which Triton compiles kernels during a run",
            f"apt-get install gcc libc6-dev python{version}-dev",
        )
    if machine.ninja is None:
        yield Finding(Level.missing, "ninja, with which the servers compile kernels", "make install PLATFORM=cuda")
    wanted = facts.imports.torch_cuda
    if wanted is None:
        return
    remedy = f"apt-get install cuda-toolkit-{wanted.replace('.', '-')}, or its module; CUDA_HOME where it is elsewhere"
    if machine.nvcc is None:
        yield Finding(Level.missing, f"nvcc of CUDA {wanted}, with which the servers compile kernels", remedy)
    elif machine.nvcc_cuda is None or machine.nvcc_cuda.split(".")[0] != wanted.split(".")[0]:
        found = f"is of CUDA {machine.nvcc_cuda}" if machine.nvcc_cuda else "says no version"
        yield Finding(Level.wrong, f"{machine.nvcc} {found}, and torch is built for CUDA {wanted}", remedy)


def check_fp8(facts: Facts, need: Need) -> Iterator[Finding]:
    if not need.fp8 or facts.imports.torch_version is None:
        return
    # Imports torch, for which only these configurations pay again.
    from megarl.config.schema.roles import Fp8, Fp8Recipe
    from megarl.mcore.role_fields import find_fp8_problems

    if ITS_MODULE in facts.imports.problems:
        return  # check_imports says so
    with_te = TRANSFORMER_ENGINE in facts.versions
    capability = min((gpu.capability for gpu in facts.imports.gpus), default=None)
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
    machine = facts.machine
    if machine.shm_free_gb < need.object_store_gb:
        yield Finding(
            Level.wrong,
            f"/dev/shm has {machine.shm_free_gb:.1f} GB free; Ray's object store takes {need.object_store_gb:.1f} GB"
            " (cluster.object_store_mb)",
            "a smaller cluster.object_store_mb; docker run --shm-size=64g or --ipc=host",
        )
    if machine.tmp_free_gb < LEAST_TMP_GB:
        yield Finding(
            Level.wrong,
            f"the temporary folder has {machine.tmp_free_gb:.1f} GB free; Ray and the servers need {LEAST_TMP_GB:.0f}",
            "free some, or TMPDIR on another disk",
        )
    soft, hard = machine.open_files
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
    if need.cluster == "slurm" and facts.machine.slurm is None and facts.machine.slurm_job is None:
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
    problem = facts.imports.problems.get(MODULES.get(name, name))
    if problem is not None:
        return "needs the driver" if needs_driver(facts, problem) else "broken"
    if name == "apex":
        return "optional: NVIDIA's, from source" if facts.apex is None else facts.apex.value
    if version is None:
        return "not there" if pin else "for CUDA alone"
    if name == "torch" and facts.imports.torch_version is not None:
        build = f"CUDA {facts.imports.torch_cuda}" if facts.imports.torch_cuda else "CPU build"
        return build if version.partition("+")[0] == pin else f"{build}, another version"
    return "" if version == pin or pin is None else "another version"


def _render_machine(facts: Facts) -> Iterator[str]:
    machine, gpus = facts.machine, facts.imports.gpus
    kinds = sorted({f"{gpu.name} ({gpu.memory_gb:.0f} GB)" for gpu in gpus})
    job = f", in job {machine.slurm_job}" if machine.slurm_job else ""
    soft, hard = ("unlimited" if limit < 0 else str(limit) for limit in machine.open_files)
    containers = ", ".join(machine.containers) or "none of docker, podman, apptainer, enroot"
    models = [f"{each.key}: {each.asked}{'' if each.problem is None else ', NOT FOUND'}" for each in facts.checkpoints]
    lacking = [name for name in PROTECTIONS if name not in machine.sandbox]
    rows = {
        "system": f"{machine.system}, {machine.num_cores} cores, {machine.memory_gb:.0f} GB; Python {machine.python}",
        "GPUs": (f"{len(gpus)} x {', '.join(kinds)}" if gpus else "none")
        + (f"; driver {machine.driver}" if machine.driver else "; no NVIDIA driver"),
        "compiler": f"{machine.compiler or 'none'}; Python.h {'found' if machine.has_python_header else 'not found'};"
        f" nvcc {f'{machine.nvcc} ({machine.nvcc_cuda})' if machine.nvcc else 'none'}; ninja {machine.ninja or 'none'}",
        "Slurm": f"{machine.slurm or 'not found'}{job}; containers: {containers}",
        "limits": f"/dev/shm {machine.shm_free_gb:.1f} GB free, temporary folder {machine.tmp_free_gb:.1f} GB free,"
        f" open files {soft} (at most {hard})",
        "model": "; ".join(models),
        "HF cache": f"{machine.hub_cache}, {machine.num_cached_models} models",
        "sandbox": ", ".join(machine.sandbox or ["limits only"]) + f"; not here: {', '.join(lacking)}" * bool(lacking),
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
