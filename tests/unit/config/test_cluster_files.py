"""The files of examples/clusters: their jobs compose, are planned to fit, and get the nodes and folders they ask for.

That they are what KubeRay's and SkyPilot's own schemas allow is checked by hand (docs/ray-clusters.md).
"""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from tool_loading import load_tool

from megarl.config.load import check_overrides, load_config
from megarl.config.placement import check_cluster
from megarl.config.schema.root import Config

ROOT = Path(__file__).resolve().parents[3]
KUBERAY, SKYPILOT = (
    yaml.safe_load((ROOT / "examples" / "clusters" / name).read_text()) for name in ("kuberay.yaml", "skypilot.yaml")
)
CLUSTER = KUBERAY["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def list_overrides(command: str) -> list[str]:
    """What stands behind `python -m megarl.train`, the shell's variables as they are."""
    [line] = re.findall(r"python -m megarl\.train (.*)", command.replace("\\\n", " "))
    return shlex.split(line)


JOBS = {"kuberay": list_overrides(KUBERAY["spec"]["entrypoint"]), "skypilot": list_overrides(SKYPILOT["run"])}
JOBS["skypilot"] = [text.replace("$head:$PORT", f"head:{SKYPILOT['envs']['PORT']}") for text in JOBS["skypilot"]]


def find_config(name: str) -> Config:
    return load_config([text for text in JOBS[name] if not text.startswith("hydra.")])


@pytest.mark.parametrize("name", JOBS)
def test_the_job_composes_fits_and_joins_a_ray(name: str) -> None:
    check_overrides(JOBS[name])
    config = find_config(name)
    assert list(check_cluster(config)) == []
    assert config.cluster.ray_address is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert load_tool("plan.py").main([text for text in JOBS[name] if not text.startswith("hydra.")]) == 0
    assert f"fits: {config.cluster.num_nodes * config.cluster.gpus_per_node} GPUs" in printed.getvalue()


def test_kuberay_has_the_nodes_the_object_store_and_the_volume_that_the_job_asks_for() -> None:
    config = find_config("kuberay")
    assert 1 + sum(group["replicas"] for group in CLUSTER["workerGroupSpecs"]) == config.cluster.num_nodes
    [run_dir] = [text.partition("=")[2] for text in JOBS["kuberay"] if text.startswith("hydra.run.dir=")]
    for group in GROUPS:
        [container], [volume] = (group["template"]["spec"][key] for key in ("containers", "volumes"))
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.cluster.gpus_per_node
        assert int(group["rayStartParams"]["object-store-memory"]) == config.cluster.object_store_mb * 2**20
        # `ray job stop` would kill the driver before its checkpoint is written.
        assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > config.checkpoint.stop_deadline_s
        assert container["image"] == GROUPS[0]["template"]["spec"]["containers"][0]["image"]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert all(path.startswith(f"{mount['mountPath']}/") for path in (run_dir, variables["HF_HOME"]))


def test_skypilot_has_the_nodes_the_object_store_and_the_volume_that_the_job_asks_for() -> None:
    config, run = find_config("skypilot"), SKYPILOT["run"]
    assert SKYPILOT["num_nodes"] == config.cluster.num_nodes
    assert SKYPILOT["resources"]["accelerators"] == f"H100:{config.cluster.gpus_per_node}"
    stores = re.findall(r"--object-store-memory=(\d+)", run)
    assert [int(each) for each in stores] == [config.cluster.object_store_mb * 2**20] * 2
    [folder] = SKYPILOT["volumes"]
    assert f"hydra.run.dir={folder}/" in run
    assert SKYPILOT["envs"]["HF_HOME"].startswith(f"{folder}/")
    subprocess.run(["bash", "-n", "-c", run], check=True)


def test_the_version_of_ray_is_the_locked_one() -> None:
    lock = (ROOT / "tools" / "install" / "cuda.lock").read_text()
    [locked] = re.findall(r"^ray==(\S+)", lock, re.MULTILINE)
    assert str(CLUSTER["rayVersion"]) == locked
    named = re.findall(r"ray\[default\]==([\w.]+)", (ROOT / "docs" / "ray-clusters.md").read_text())
    assert named
    assert set(named) == {locked}
