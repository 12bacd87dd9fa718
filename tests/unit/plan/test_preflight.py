"""What a job asks of its nodes before Ray starts."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.run import HardwareConfig
from megarl.plan.preflight import (
    NodeReport,
    find_input_problems,
    find_job_memory_problem,
    find_missing_interface,
    find_problems,
    find_small_gpus,
    find_stale_ray,
    find_unseen,
    find_unseen_folder,
    list_gpus,
    load_job_configs,
    read_reports,
)

H100, A100 = "NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA A100-SXM4-80GB, 81920 MiB"
ENDED_JOB = "987654321"


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs come before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process of that name, of a job of this Slurm."""
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    environment = os.environ | {"SLURM_JOB_ID": ENDED_JOB, "SLURM_CLUSTER_NAME": "mine"}
    process = subprocess.Popen([str(program), "60"], env=environment)
    yield process
    process.kill()
    process.wait()


def test_problems_are_told_once_with_the_nodes_that_have_them() -> None:
    reports = [NodeReport("b", [H100], ["model.path: gone"]), NodeReport("a", [H100] * 2, ["model.path: gone"])]
    assert list(find_problems(reports, ["a", "b", "c"], 2)) == [
        "c: gave no answer",
        "a, b: model.path: gone",
        "b: cluster.gpus_per_node: found 2; nvidia-smi shows 1",
    ]


def test_a_mixed_allocation_is_named_with_the_nodes_of_each_kind() -> None:
    (problem,) = find_problems([NodeReport("a", [H100]), NodeReport("b", [A100])], ["a", "b"], 1)
    assert f"{H100} on a" in problem
    assert f"{A100} on b" in problem


def test_gpus_of_one_name_are_one_kind_where_their_memory_differs_by_less_than_a_twentieth() -> None:
    def list_problems(*sizes: str) -> list[str]:
        reports = [NodeReport(f"n{i}", [f"NVIDIA H100 80GB HBM3, {size}"]) for i, size in enumerate(sizes)]
        return list(find_problems(reports, [], 1))

    # Another driver, ECC on and off; 0.95 of 81559 is 77481.05.
    assert list_problems("81079 MiB", "81559 MiB", "77482 MiB") == []
    assert list_problems("[N/A]", "[N/A]") == []
    (problem,) = list_problems("81559 MiB", "77481 MiB", "81079 MiB")
    assert "81559 MiB on n0, n2; " in problem
    assert "77481 MiB on n1; " in problem


def test_equal_nodes_without_problems_are_fine() -> None:
    assert not list(find_problems([NodeReport("a", [H100]), NodeReport("b", [H100])], ["a", "b"], 1))
    assert not list(find_problems([NodeReport("a"), NodeReport("b")], ["a", "b"], 2))


def test_a_node_that_shows_none_of_its_gpus_is_named() -> None:
    (problem,) = find_problems([NodeReport("a", [H100]), NodeReport("b")], ["a", "b"], 1)
    assert problem == "b: cluster.gpus_per_node: found 1; nvidia-smi shows 0"


def test_gpus_that_are_smaller_than_planned_are_named() -> None:
    reports = [NodeReport("a", ["NVIDIA A100-SXM4-40GB, 40960 MiB"])]
    (problem,) = find_small_gpus(reports, HardwareConfig(gpu="H100", memory_gib=79.1))
    assert problem.startswith("cluster.hardware: the job is planned for H100, 79.1 GiB; the nodes have NVIDIA A100")
    assert not list(find_small_gpus([NodeReport("a", [H100])], HardwareConfig(gpu="H100", memory_gib=79.1)))
    assert not list(find_small_gpus(reports, HardwareConfig()))


def test_a_folder_that_a_node_does_not_see_is_named_by_its_key(tmp_path: Path) -> None:
    assert not list(find_unseen_folder(str(tmp_path)))
    (problem,) = find_unseen_folder(str(tmp_path / "gone"))
    assert problem.startswith(f"hydra.run.dir: {tmp_path / 'gone'} does not exist; ")


def test_reports_are_found_among_other_lines() -> None:
    lines = io.StringIO("pyxis: imported\n" + json.dumps({"node": "a", "gpus": [H100], "problems": []}) + "\n")
    assert read_reports(lines) == [NodeReport("a", [H100])]


def test_the_gpus_are_those_of_the_job(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(programs / "nvidia-smi", f"echo '0, {H100}'; echo '1, {A100}'")
    assert list_gpus() == [H100, A100]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert list_gpus() == [A100]


def test_a_model_that_the_node_does_not_see_is_named_by_its_key(tmp_path: Path) -> None:
    config = load_config(["model=checkpoint", f"model.path={tmp_path}/none", f"critic.init={tmp_path}/critic"])
    model, critic = find_unseen(config)
    assert model.startswith("model.path: ")
    assert f"{tmp_path}/none" in model
    assert critic.startswith("critic.init: ")


def test_an_object_store_larger_than_the_jobs_memory_on_a_node_is_named() -> None:
    (problem,) = find_job_memory_problem(2000, {"SLURM_MEM_PER_NODE": "1000"})
    assert problem == "cluster.object_store_mb: found 2000; the job has 1000 MiB on a node: sbatch --mem=0"
    for memory in ({"SLURM_MEM_PER_NODE": "2000"}, {"SLURM_MEM_PER_NODE": "0"}, {}):
        assert not list(find_job_memory_problem(2000, memory))


def test_an_interface_without_an_address_is_named_with_those_that_have_one() -> None:
    (problem,) = find_missing_interface("fabric0")
    assert problem.startswith("MEGARL_INTERFACE: found fabric0, on which this node has no IPv4 address")
    assert "lo" in problem
    assert not [*find_missing_interface("lo"), *find_missing_interface(""), *find_missing_interface(None)]


def test_data_and_rewards_that_cannot_be_used_are_named_before_ray_starts(tmp_path: Path) -> None:
    (problem,) = find_input_problems(
        load_job_configs(["data=jsonl", f"data.path={tmp_path}/none", "reward=math"], "train")
    )
    assert problem.startswith("data.path: ")
    assert f"{tmp_path}/none" in problem
    (tmp_path / "set.jsonl").write_text('{"prompt": "1 + 1?", "answer": ""}\n')
    sets = load_job_configs(["data=gsm8k", f"evaluate.paths.gsm8k={tmp_path}/none.jsonl"], "evaluate")
    (problem,) = find_input_problems(sets)
    assert problem.startswith("data=gsm8k: evaluate.paths.gsm8k: ")
    assert not list(find_input_problems(load_job_configs([], "train")))


@pytest.mark.parametrize(("command", "key"), [("evaluate", "algo.gamma=0.5"), ("train", "policy.lr=1e-6")])
def test_each_command_is_checked_by_its_own_rules(command: str, key: str) -> None:
    overrides = ["data=gsm8k", key] if command == "evaluate" else [key]
    with pytest.raises(ConfigError, match=key.split("=")[0]):
        load_job_configs(overrides, command)


@pytest.mark.usefixtures("programs")
def test_a_ray_of_a_job_that_has_ended_is_stale(programs: Path, raylet: subprocess.Popen) -> None:
    write_program(programs / "squeue", "echo 5")
    (problem,) = (text for text in find_stale_ray("mine") if str(raylet.pid) in text)
    assert f"job {ENDED_JOB}, which has ended" in problem


def test_a_ray_of_a_living_job_or_of_another_slurm_is_not(programs: Path, raylet: subprocess.Popen) -> None:
    write_program(programs / "squeue", f"echo {ENDED_JOB}")
    assert not [text for text in find_stale_ray("mine") if str(raylet.pid) in text]
    write_program(programs / "squeue", "echo 5")
    assert not [text for text in find_stale_ray("another") if str(raylet.pid) in text]


def test_a_job_is_refused_in_a_second_without_torch_or_ray(tmp_path: Path) -> None:
    heavy = "{'torch', 'ray', 'megatron'}"
    code = f"import sys; from megarl.plan import preflight; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    command = [sys.executable, "-m", "megarl.plan.preflight", "job", "cluster=slurm", "rollout.transport=split"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "need 3 nodes of 1 GPUs" in done.stderr
    assert "there are 2 (cluster.num_nodes) with 2 in all" in done.stderr
