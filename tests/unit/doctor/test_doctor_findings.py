"""What the doctor makes of facts: each is made by hand here, so that a GPU machine is judged on a laptop."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.doctor.facts import ApexKind, Checkpoint, Facts, Gpu, Imports, Machine
from megarl.doctor.judge import (
    FOR_CUDA,
    TRANSFORMER_ENGINE,
    WIDTH,
    Level,
    Need,
    count_stopping,
    find_need,
    judge,
    render,
)

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85.0)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85.0)
LAPTOP = Need("laptop", object_store_gb=0.3)
EIGHT = Need("h100x8", ("cluster=h100x8",), num_gpus=8, object_store_gb=34.4, gpu="H100 SXM5 80 GB", gpu_memory_gb=84.9)
FP8 = replace(EIGHT, fp8=(("policy", "hybrid", "blockwise"),))
MACHINE = Machine(
    system="Debian GNU/Linux 12, x86_64",
    python="3.11.2 (/opt/megarl/.venv)",
    num_cores=96,
    memory_gb=2000.0,
    driver="580.95.05",
    compiler="/usr/bin/cc",
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_cuda="13.0",
    ninja="/opt/megarl/.venv/bin/ninja",
    python_header=Path("/usr/include/python3.11/Python.h"),
    has_python_header=True,
    shm_free_gb=900.0,
    tmp_free_gb=500.0,
    open_files=(65536, 1048576),
    slurm="slurm 25.05.3",
    slurm_job=None,
    containers=("enroot",),
    hub_cache=Path("/home/user/.cache/huggingface/hub"),
    num_cached_models=3,
)
BASE = {"torch": "2.14.1", "megatron-core": "0.16.1", "sglang": "0.5.23", "ray": "2.60.0"}
CUDA = dict.fromkeys((*FOR_CUDA, TRANSFORMER_ENGINE), "1")
NODE = Facts(
    versions=BASE | CUDA,
    requirements=("torch>=2.13", "megatron-core==0.16.1", "sglang==0.5.23", "ray<3,>=2.60"),
    pins={"cpu": {"torch": "2.13.0"}, "cuda": BASE},
    apex=ApexKind.nvidia,
    imports=Imports("2.14.1+cu130", "13.0", (H100,) * 8, {}),
    machine=MACHINE,
    checkpoints=(Checkpoint("model.path", "Qwen/Qwen2.5-32B", None),),
)
NOTEBOOK = replace(
    NODE,
    versions=BASE | {"torch": "2.13.0+cpu"},
    apex=None,
    imports=Imports("2.13.0+cpu", None, (), {}),
    machine=replace(MACHINE, driver=None, slurm=None, containers=(), shm_free_gb=12.0, memory_gb=25.0),
)


def without(facts: Facts, *names: str) -> Facts:
    return replace(facts, versions={name: each for name, each in facts.versions.items() if name not in names})


def on(facts: Facts, **changes: object) -> Facts:
    """The same on another machine."""
    return replace(facts, machine=replace(facts.machine, **changes))


def importing(facts: Facts, **changes: object) -> Facts:
    return replace(facts, imports=replace(facts.imports, **changes))


@pytest.mark.parametrize(("facts", "need"), [(NODE, EIGHT), (NODE, FP8), (NODE, LAPTOP), (NOTEBOOK, LAPTOP)])
def test_a_machine_that_has_everything_is_found_fit(facts: Facts, need: Need) -> None:
    assert judge(facts, need) == []


CASES = {
    "no GPU": (NOTEBOOK, EIGHT, "8 GPUs on one node (cluster=h100x8): found none, no NVIDIA driver", "cluster=laptop"),
    "a CPU torch": (NOTEBOOK, EIGHT, "found 2.13.0+cpu, a CPU build", "make install PLATFORM=cuda"),
    "a driver too old": (
        on(importing(NODE, gpus=()), driver="470.1"),
        EIGHT,
        "driver 470.1, which torch cannot use",
        "a driver for CUDA 13.0",
    ),
    "fewer GPUs": (importing(NODE, gpus=(H100,) * 4), EIGHT, "8 GPUs on one node: found 4", "placement=colocated"),
    "mixed GPUs": (importing(NODE, gpus=(H100,) * 7 + (A100,)), EIGHT, "GPUs of several kinds", "CUDA_VISIBLE_DEVICES"),
    "no kernels": (without(NODE, "sglang-kernel"), EIGHT, "SGLang's needs on a GPU: sglang-kernel", "PLATFORM=cuda"),
    "kernels for an idle GPU": (without(NODE, "triton"), LAPTOP, "SGLang's needs on a GPU: triton", "PLATFORM=cuda"),
    "FP8 without TE": (
        without(NODE, "transformer-engine"),
        FP8,
        "policy.fp8: found hybrid; it needs Transformer Engine, which is not installed",
        None,
    ),
    "FP8 on an A100": (
        importing(NODE, gpus=(A100,) * 8),
        FP8,
        "policy.fp8_recipe: found blockwise; it needs a GPU of compute capability 9.0 or more",
        None,
    ),
    "another apex": (replace(NODE, apex=ApexKind.other), EIGHT, "apex is not NVIDIA's", "pip uninstall apex"),
    "a broken package": (
        importing(NODE, problems={"sgl_kernel": "ImportError: libnuma.so.1: cannot open"}),
        EIGHT,
        "sgl_kernel is broken: ImportError: libnuma.so.1: cannot open",
        "PLATFORM=cuda",
    ),
    "a memory saver without CUDA's runtime": (
        importing(NODE, problems={"torch_memory_saver": "error while loading shared libraries: libcudart.so.13"}),
        EIGHT,
        "torch_memory_saver is broken: error while loading shared libraries: libcudart.so.13",
        "PLATFORM=cuda",
    ),
    "half of Transformer Engine": (
        importing(
            NODE, problems={"transformer_engine.pytorch": "FileNotFoundError: Could not find shared object file"}
        ),
        FP8,
        "transformer_engine.pytorch is broken: FileNotFoundError",
        "PLATFORM=cuda",
    ),
    "a library of the driver, with a driver": (
        importing(NODE, problems={"sgl_kernel": "ImportError: libcuda.so.1: cannot open"}),
        EIGHT,
        "sgl_kernel is broken: ImportError: libcuda.so.1",
        "PLATFORM=cuda",
    ),
    "a package of megarl's": (without(NOTEBOOK, "ray"), LAPTOP, "not installed: ray<3,>=2.60", "make install"),
    "another version": (
        replace(NODE, versions=NODE.versions | {"megatron-core": "0.17.0"}),
        EIGHT,
        "megatron-core==0.16.1 (found 0.17.0)",
        "PLATFORM=cuda",
    ),
    "no megarl": (replace(NOTEBOOK, requirements=()), LAPTOP, "megarl itself is not installed", "make install"),
    "no model": (
        replace(
            NODE, checkpoints=(Checkpoint("model.path", "a/b", "model.path: 'a/b' found, but", "hf download a/b"),)
        ),
        EIGHT,
        "model.path: 'a/b' found, but",
        "hf download a/b",
    ),
    "no compiler": (on(NODE, compiler=None), EIGHT, "a C compiler (cc), with which Triton", "python3.11-dev"),
    "no header": (on(NODE, has_python_header=False), EIGHT, "/usr/include/python3.11/Python.h", "python3.11-dev"),
    "no ninja": (on(NODE, ninja=None), EIGHT, "ninja, with which the servers compile kernels", "PLATFORM=cuda"),
    "no nvcc": (on(NODE, nvcc=None, nvcc_cuda=None), EIGHT, "nvcc of CUDA 13.0, with which", "cuda-toolkit-13-0"),
    "another nvcc": (
        on(NODE, nvcc_cuda="12.8"),
        EIGHT,
        "/usr/local/cuda/bin/nvcc is of CUDA 12.8, and torch is built for CUDA 13.0",
        "cuda-toolkit-13-0",
    ),
    "small shared memory": (on(NODE, shm_free_gb=0.06), EIGHT, "/dev/shm has 0.1 GB free", "--shm-size"),
    "full disk": (on(NODE, tmp_free_gb=0.5), LAPTOP, "the temporary folder has 0.5 GB free", "TMPDIR"),
    "few open files": (on(NODE, open_files=(1024, 1024)), EIGHT, "1024 open files are allowed", "ulimit -n 1024"),
    "no Slurm": (NOTEBOOK, replace(LAPTOP, cluster="slurm"), "there are no Slurm commands", "login node"),
}


@pytest.mark.parametrize(("facts", "need", "text", "remedy"), CASES.values(), ids=CASES)
def test_what_is_missing_is_named_with_how_to_get_it(facts: Facts, need: Need, text: str, remedy: str | None) -> None:
    found = [each for each in judge(facts, need) if text in each.text]
    assert len(found) == 1
    assert found[0].level is not Level.note
    assert (found[0].remedy is None) if remedy is None else (remedy in (found[0].remedy or ""))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (without(NODE, "transformer-engine"), "without Transformer Engine"),
        (replace(NODE, apex=ApexKind.python_only), "no kernels"),
        (on(NODE, open_files=(1024, 1048576)), "1024 open files"),
        (importing(NODE, gpus=(replace(A100, memory_gb=42.3),) * 8), "planned for H100 SXM5 80 GB, 85 GB"),
    ],
)
def test_what_a_run_can_do_without_is_a_note_and_stops_nothing(facts: Facts, text: str) -> None:
    (finding,) = judge(facts, EIGHT)
    assert text in finding.text
    assert count_stopping([finding]) == 0


def test_a_run_on_a_cpu_needs_no_cuda_package_compiler_or_slurm() -> None:
    bare = on(NOTEBOOK, compiler=None, has_python_header=False, nvcc=None, nvcc_cuda=None, ninja=None)
    assert judge(bare, LAPTOP) == []


def test_a_toolkit_may_be_of_another_minor_version_than_torchs() -> None:
    assert judge(on(NODE, nvcc_cuda="13.4"), EIGHT) == []


def test_what_only_a_driver_has_is_no_fault_of_a_login_node() -> None:
    problems = {"sgl_kernel": "ImportError: libcuda.so.1: cannot open shared object file"}
    login = on(importing(NODE, gpus=(), problems=problems), driver=None)
    (finding,) = judge(login, LAPTOP)
    assert finding.level is Level.note
    assert "only NVIDIA's driver has what they load (libcuda.so.1): sgl_kernel" in finding.text
    row = next(line for line in render("", login, EIGHT, []) if line.startswith("sglang-kernel"))
    assert row.endswith("needs the driver")


@pytest.mark.parametrize(
    ("overrides", "cuda"),
    [
        (["model=tiny"], ()),
        (["model=tiny", "policy.dtype=bfloat16", "critic.fp8=e4m3", "critic.dtype=bfloat16"], ("critic.fp8=e4m3",)),
        (["algo=grpo", "model=tiny", "rollout.kv_cache_tokens=null"], ("rollout.kv_cache_tokens=null",)),
        (["model=tiny", "cluster=gpu"], ("cluster=gpu",)),
        (["model=tiny", "cluster=laptop"], ()),
        (["model=qwen32b", "rollout.kv_cache_tokens=20000"], ("cluster.hardware.gpu=H100 SXM5 80 GB",)),
    ],
)
def test_the_settings_that_need_a_gpu_are_found(overrides: list[str], cuda: tuple[str, ...]) -> None:
    need = find_need(load_config(overrides), overrides)
    assert need.cuda == cuda
    assert (need.num_gpus > 0) == bool(cuda)


def test_the_gpus_of_a_node_are_those_that_the_placement_puts_on_it() -> None:
    overrides = ["model=tiny", "rollout.kv_cache_tokens=null", "rollout.num_servers=2", "rollout.tp=2"]
    assert find_need(load_config(overrides), overrides).num_gpus == 1 + 1 + 4
    colocated = [*overrides, "cluster.gpus_per_node=8", "cluster.placement=colocated"]
    assert find_need(load_config(colocated), colocated).num_gpus == 4


def test_all_of_it_fits_on_one_screen() -> None:
    bare = replace(
        NOTEBOOK, versions={}, apex=ApexKind.other, checkpoints=(Checkpoint("model.path", "a/b", "no" * 60),)
    )
    findings = judge(on(bare, compiler=None, shm_free_gb=0.0), FP8)
    lines = render("algo=vapo model=qwen32b cluster=gpu", bare, FP8, findings)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH + 10
    assert lines[-1] == f"it cannot run here: {len(findings)} things are missing or wrong"


def test_the_screen_shows_each_version_beside_the_pinned_one() -> None:
    lines = render("", NODE, EIGHT, [])
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["torch"] == ["torch", "2.14.1", "2.14.1", "CUDA", "13.0"]
    assert rows["apex"][1:] == ["-", "-", "NVIDIA's,", "with", "its", "kernels"]
    assert rows["GPUs"] == ["GPUs", "8", "x", "NVIDIA", "H100", "80GB", "HBM3", "(85", "GB);", "driver", "580.95.05"]
    assert lines[-1] == "it can run here"
    older = {line.split()[0]: line for line in render("", NOTEBOOK, EIGHT, []) if line}
    assert older["torch"].endswith("CPU build, another version")
    assert older["sglang-kernel"].split()[1:] == ["-", "-", "for", "CUDA", "alone"]


def test_the_machine_says_what_keeps_programs_from_it():
    rows = [
        next(line for line in render("", on(NODE, sandbox=found), EIGHT, []) if line.startswith("sandbox"))
        for found in ((), ("landlock", "seccomp"), ("namespaces", "landlock", "seccomp"))
    ]
    assert rows == [
        "sandbox   limits only; not here: namespaces, landlock, seccomp",
        "sandbox   landlock, seccomp; not here: namespaces",
        "sandbox   namespaces, landlock, seccomp",
    ]
