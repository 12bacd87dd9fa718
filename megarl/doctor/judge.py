"""Findings from facts: what is missing or wrong for the chosen configuration, and the remedy. Pure functions."""

from collections.abc import Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.config.schema.hardware import LEAST_OF_KIND
from megarl.doctor.facts import ApexKind, Facts, Finding, Level, Need

FOR_CUDA = ("sglang-kernel", "flashinfer-python", "triton", "torchvision")
"""Packages that SGLang imports on a GPU; on a CPU there are stand-ins"""
TRANSFORMER_ENGINE, ITS_MODULE = "transformer-engine", "transformer_engine.pytorch"
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""What only NVIDIA's driver installs"""
MANY_FILES = 65536
FEWEST_FILES = 4096
LEAST_TMP_GB = 2.0
"""For Ray's session and the servers' scratch folders"""


def judge(facts: Facts, need: Need) -> list[Finding]:
    """All findings, in the order in which to resolve them."""
    checks = (check_megarl, check_imports, check_cuda, check_cuda_packages, check_fp8, check_apex)
    found = [finding for check in checks for finding in check(facts, need)]
    found += check_checkpoints(facts)
    found += check_memory(facts, need)
    found += check_slurm(facts, need)
    return found


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
    for requirement in filter(None, map(parse, facts.requirements)):
        version = facts.versions.get(canonicalize_name(requirement.name))
        if version is None:
            absent.append(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            other.append(f"{requirement} (found {version})")
    if absent:
        yield Finding(Level.missing, f"not installed: {join(absent)}", name_install(facts, need))
    if other:
        yield Finding(Level.wrong, f"other versions than megarl needs: {join(other)}", name_install(facts, need))


def parse(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:  # a newer metadata format than packaging supports
        return None


def check_imports(facts: Facts, need: Need) -> Iterator[Finding]:
    problems = facts.imports.problems or {}
    waiting = [module for module, problem in problems.items() if needs_driver(facts, problem)]
    for module, problem in problems.items():
        if module not in waiting:
            # What is installed is not installed again without `clean`.
            remedy = name_install(facts, need).replace("make install", "make clean install")
            yield Finding(Level.wrong, f"{module} is broken: {shorten(problem)}", remedy)
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

    if ITS_MODULE in (facts.imports.problems or {}):
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


def check_checkpoints(facts: Facts) -> Iterator[Finding]:
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


def shorten(text: str, length: int = 160) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
