"""The doctor: how it imports packages, what it makes of a machine, what it asks of a job's nodes, and its command.

What it makes of a machine is tested on machines made by hand, so that one with GPUs is judged on a laptop.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name
from safetensors.torch import load_file, save_file

from megarl.config.load import load_config
from megarl.config.schema.roles import RandomModelConfig
from megarl.config.schema.root import ClusterConfig, HardwareConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.plan import doctor
from megarl.plan.doctor import FOR_CUDA, NOTE, Gpu, Machine, compare_nodes, describe_node, judge, render

HOLDING = "import subprocess, time; subprocess.Popen(['sleep', '30']); time.sleep(30)"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot\\n open')", "ImportError: libcudart.so.13: cannot open"),
        ("import sys\nsys.exit('no license')", "no license"),
        ("import os\nos.abort()", "its import ended the process with -6: "),
        (HOLDING, "its import did not end within 3 s"),
    ],
)
def test_a_package_that_breaks_crashes_or_hangs_is_one_line(
    monkeypatch: pytest.MonkeyPatch, program: str, problem: str
) -> None:
    monkeypatch.setattr(doctor, "IMPORTS_S", 3.0)
    assert doctor.run_programs({"fine": "print(1)", "broken": program}) == ({"fine": "1\n"}, {"broken": problem})


def test_a_dataset_is_there_once_hf_download_has_put_it_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["algo=grpo", "model=qwen3_0_6b"])
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (absent,) = doctor.check_dataset(config)
    assert absent.text == "data.path: openai/gsm8k cannot be read here without a network"
    assert "`hf download --repo-type dataset openai/gsm8k`" in str(absent.remedy)
    folder = tmp_path / "hub" / "datasets--openai--gsm8k"
    (main := folder / "snapshots" / "abc" / "main").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (main / "train.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    files = "[{split: train, path: main/train.jsonl}]"
    (main.parent / "README.md").write_text(f"---\nconfigs: [{{config_name: main, data_files: {files}}}]\n---\n")
    assert list(doctor.check_dataset(config)) == []


def test_a_model_is_found_where_a_run_would_find_it_and_its_tensors_by_their_headers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    config = load_config(["model=checkpoint", f"model.path={model}", "algo=grpo"])
    (absent,) = doctor.check_models(config)
    assert absent.text.startswith("model.path: ")
    shutil.copytree(build_random_checkpoint(RandomModelConfig(), tmp_path), model)
    assert [*doctor.check_models(config), *doctor.check_tensors(config)] == []
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, weights)
    (lacking,) = doctor.check_tensors(config)
    os.truncate(weights, 100_000)
    (cut,) = doctor.check_tensors(config)
    assert "missing: model.norm.weight" in lacking.text
    assert cut.text.startswith("model.path: ")
    assert "file not fully covered" in cut.text


H100 = Gpu("NVIDIA H100 80GB HBM3", 85.0)
INSTALLED = {canonicalize_name(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
PATHS = {"cc": "/bin/cc", "Python.h": "/usr/include/Python.h", "ninja": "/bin/ninja", "nvcc": "/cuda/bin/nvcc"}
NODE = Machine(
    INSTALLED | dict.fromkeys((*FOR_CUDA, "transformer-engine"), "1"),
    {}, "13.0", (H100,) * 8, "580.95.05", compilers=PATHS, nvcc_cuda="13.4", tmp_free_gb=500.0,
)  # fmt: skip
NOTEBOOK = replace(NODE, versions=INSTALLED, torch_cuda=None, gpus=(), driver=None, nvcc_cuda=None)
LAPTOP, EIGHT = ["model=tiny"], ["algo=vapo", "model=qwen3_8b", "cluster=h100x8"]


def judge_job(machine: Machine, overrides: list[str]) -> list[doctor.Finding]:
    return list(judge(machine, load_config(overrides), overrides))


def without(*names: str) -> Machine:
    return replace(NODE, versions={name: each for name, each in NODE.versions.items() if name not in names})


@pytest.mark.parametrize(("machine", "overrides"), [(NODE, EIGHT), (NODE, LAPTOP), (NOTEBOOK, LAPTOP)])
def test_a_machine_that_has_everything_is_found_fit(machine: Machine, overrides: list[str]) -> None:
    assert judge_job(machine, overrides) == []


DRIVER_IS_MISSING = {"sgl_kernel": "ImportError: libcuda.so.1: cannot open shared object file"}
OLD = replace(NODE, versions=NODE.versions | {"megatron-core": "0.17.0"})
CASES = {
    "no GPU": (NOTEBOOK, "8 GPUs on one node (cluster=h100x8, ", "found none, no NVIDIA driver -> run it on a node"),
    "a CPU torch": (NOTEBOOK, "a CPU build", "make install PLATFORM=cuda"),
    "an old driver": (replace(NODE, gpus=(), driver="470.1"), "470.1, which torch", "a driver for CUDA 13.0"),
    "fewer GPUs": (replace(NODE, gpus=(H100,) * 4), "8 GPUs on one node: found 4", "placement=colocated"),
    "no kernels": (without("sglang-kernel"), "SGLang's needs on a GPU: sglang-kernel", "PLATFORM=cuda"),
    "a broken package": (replace(NODE, problems=DRIVER_IS_MISSING), "sgl_kernel is broken: ImportError", "make clean"),
    "a package of megarl's": (without("ray"), "ray<3,>=2.60 is not installed", "make install"),
    "another version": (OLD, "megatron-core==0.16.1", "found 0.17.0"),
    "no compiler": (replace(NODE, compilers=PATHS | {"cc": None}), "cc, with which kernels", "apt-get install gcc"),
    "no nvcc": (replace(NODE, compilers=PATHS | {"nvcc": None}), "nvcc of CUDA 13.0", "found None"),
    "another nvcc": (replace(NODE, nvcc_cuda="12.8"), "nvcc of CUDA 13.0", "found /cuda/bin/nvcc 12.8"),
    "full disk": (replace(NODE, tmp_free_gb=0.5), "the temporary folder has 0.5 GB free", "TMPDIR"),
}


@pytest.mark.parametrize(("machine", "text", "remedy"), CASES.values(), ids=CASES)
def test_what_is_missing_is_named_with_how_to_get_it(machine: Machine, text: str, remedy: str) -> None:
    lines = [f"{each.text} -> {each.remedy}" for each in judge_job(machine, EIGHT) if each.level != NOTE]
    assert len([line for line in lines if text in line and remedy in line]) == 1
    assert list(render(machine, judge_job(machine, EIGHT)))[-1] == f"it cannot run here: {len(lines)} missing or wrong"


@pytest.mark.parametrize(
    ("machine", "overrides", "text"),
    [
        (without("transformer-engine"), EIGHT, "without Transformer Engine"),
        (replace(NODE, gpus=(Gpu("NVIDIA A100", 42.3),) * 8), EIGHT, "planned for H100 SXM5 80 GB, 85 GB"),
        # What only a driver has is no fault of a login node.
        (replace(NODE, gpus=(), problems=DRIVER_IS_MISSING, driver=None), LAPTOP, "sgl_kernel was not tested;"),
    ],
)
def test_what_a_run_can_do_without_is_a_note_and_stops_nothing(
    machine: Machine, overrides: list[str], text: str
) -> None:
    (finding,) = judge_job(machine, overrides)
    assert text in finding.text
    assert list(render(machine, [finding]))[-1] == "it can run here"


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        (["model=tiny", "cluster=laptop"], []),
        (["model=tiny", "critic.fp8=e4m3", "critic.dtype=bfloat16"], ["critic.fp8=e4m3"]),
        (["algo=grpo", "model=tiny", "rollout.kv_cache_tokens=null"], ["rollout.kv_cache_tokens=null"]),
        (["model=tiny", "cluster=gpu"], ["cluster=gpu"]),
        (["model=qwen32b", "rollout.kv_cache_tokens=20000"], ["cluster.hardware.gpu=H100 SXM5 80 GB"]),
    ],
)
def test_the_settings_that_need_a_gpu_are_found(overrides: list[str], needs: list[str]) -> None:
    assert doctor.list_cuda_needs(load_config(overrides), overrides) == needs


def test_the_gpus_of_a_node_are_those_that_the_placement_puts_on_it() -> None:
    overrides = ["model=tiny", "rollout.kv_cache_tokens=null", "rollout.num_servers=2", "rollout.tp=2"]
    for more, number in ((), 1 + 1 + 4), (("cluster.gpus_per_node=8", "cluster.placement=colocated"), 4):
        found = judge_job(replace(NODE, gpus=()), [*overrides, *more])
        assert any(each.text.startswith(f"{number} GPUs on one node") for each in found)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Outside of a Slurm job, where `variables` do not say otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "megarl.plan.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment | variables)


def test_the_default_job_can_run_where_the_tests_run() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "it can run here"
    assert f"torch {torch.__version__}" in done.stdout


IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["algo.clip=3"], {}, "algo.clip: no such key; did you mean algo.clip_low?"),
        (["--gpus"], {}, "--gpus: no such option"),
        (["--job", "cluster=slurm", "rollout.transport=split"], IN_A_JOB, "need 3 nodes of 1 GPUs"),
        # Each command is checked by its own rules.
        (["--job", "cluster=slurm", "policy.lr=1e-6"], IN_A_JOB, "policy.lr"),
        (["--job", "--command=evaluate", "cluster=slurm", "data=gsm8k", "algo.gamma=0.5"], IN_A_JOB, "algo.gamma"),
    ],
)
def test_a_bad_configuration_is_told_and_nothing_else(arguments: list[str], variables: dict, message: str) -> None:
    done = run(*arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_job_is_checked_without_torch_or_ray() -> None:
    code = "import sys; from megarl.plan import doctor; sys.exit(bool({'torch', 'ray', 'megatron'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def report(node: str, *gpus: tuple[str, int], problem: str | None = None) -> str:
    return json.dumps({"node": node, "gpus": gpus, "problems": [problem] * bool(problem)})


BIG, SMALL = ("NVIDIA H100 80GB HBM3", 81559), ("NVIDIA A100-SXM4-40GB", 40960)
PLANNED = "b: cluster.hardware: the job is planned for H100, 79.1 GiB; found NVIDIA A100-SXM4-40GB, 40960 MiB;"
DIFFERENT = "the job has different GPUs, and the slowest would decide: NVIDIA H100 80GB HBM3 on a; NVIDIA A100"


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (["pyxis: imported", report("a", BIG), report("b", BIG)], []),
        ([report("a"), report("b")], []),  # a partition without GPUs
        ([report("b", BIG)], ["a: gave no answer"]),
        ([report("b", BIG, problem="p: gone"), report("a", BIG, problem="p: gone")], ["a, b: p: gone"]),
        ([report("a", BIG), report("b")], ["b: cluster.gpus_per_node: found 1; nvidia-smi shows 0"]),
        ([report("a", BIG), report("b", SMALL)], [PLANNED, DIFFERENT]),
    ],
)
def test_the_nodes_of_a_job_are_compared_and_each_problem_is_told_once(lines: list[str], problems: list[str]) -> None:
    cluster = ClusterConfig(gpus_per_node=1, hardware=HardwareConfig(gpu="H100", memory_gib=79.1))
    found = list(compare_nodes(lines, ["a", "b"], cluster))
    assert [text[: len(start)] for text, start in zip(found, problems, strict=True)] == problems


@pytest.mark.parametrize(
    ("overrides", "folder", "problem"),
    [
        ([], "/", ""),
        ([], "/gone", "hydra.run.dir: /gone does not exist"),
        (["model=checkpoint", "model.path=/gone"], "/", "model.path: "),
        (["critic.init=/gone"], "/", "critic.init: "),
    ],
)
def test_a_node_says_what_it_lacks(overrides: list[str], folder: str, problem: str) -> None:
    found = describe_node(load_config(overrides), "train", {"MEGARL_JOB_DIR": folder})
    assert [text[: len(problem)] for text in found["problems"]] == [problem] * bool(problem)


def test_the_gpus_of_a_node_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100, 81559'; echo '1, GB10, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    h100, unknown = ("NVIDIA H100", 81559), ("GB10", 0)
    for chosen, gpus in {"": [h100, unknown], "1": [unknown], "5": [h100, unknown]}.items():
        assert describe_node(load_config([]), "train", {"CUDA_VISIBLE_DEVICES": chosen})["gpus"] == gpus
