"""A wheel, unpacked elsewhere and run without the checkout: conf/, slurm/ and tools/ come with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that megarl was installed into, as `pip install .` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    # The build leaves files beside pyproject.toml: it gets a copy of what git would.
    source = tmp_path_factory.mktemp("source")
    names = ["megarl", "conf", "examples", "tools", "slurm", "pyproject.toml", "README.md"]
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in names), str(source)], check=True)
    subprocess.run([*command, "--target", str(folder), str(source)], check=True, cwd=source, capture_output=True)
    return folder


def run(site, folder, *arguments, code=0):
    """Of a Python that sees the installed package and not the checkout."""
    # An editable install of the checkout is imported by a hook of site-packages, which comes after PYTHONPATH.
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_installed_megarl_has_its_configuration_jobs_and_tools_with_it(site, tmp_path):
    found = run(site, tmp_path, "-c", "import megarl; print(megarl.__path__[0])").strip()
    assert found == str(site / "megarl")
    for name in ("conf/config.yaml", "conf/algo/vapo.yaml", "slurm/train.sh", "tools/install/cpu.lock"):
        assert (site / "megarl" / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(site / "megarl/slurm/train.sh", os.R_OK)
    assert (site / "megarl/rollout/models/sglang_classes.py").is_file()
    assert not (site / "megarl/tools/bench").exists()


def test_the_commands_of_an_installed_megarl_find_the_configuration(site, tmp_path):
    assert "algo: bpco, cispo" in run(site, tmp_path, "-m", "megarl.train", "--help")
    assert "name: qwen3_8b" in run(site, tmp_path, "-m", "megarl.train", "model=qwen3_8b", "--cfg", "job")
    assert "megarl plan" in run(site, tmp_path, "-m", "megarl.tools.plan", "--help")
    assert "usage: import_roll" in run(site, tmp_path, "-m", "megarl.tools.import_roll", "--help")
    plan = run(site, tmp_path, "-m", "megarl.tools.plan", "cluster=slurm", code=2)
    assert "SLURM_JOB_NUM_NODES" in plan


def test_the_toys_of_an_installed_megarl_make_their_problems(site, tmp_path):
    source = """
from megarl.config.load import load_config
from megarl.task.data import load_problems

for words in ([], ["experiment=guess"], ["experiment=calculator"]):
    print(load_problems(load_config(words).data, 1).train[0].messages[-1].content)
"""
    assert "1-7" in run(site, tmp_path, "-c", source)


def test_the_console_script_of_an_installed_megarl_makes_a_task(site, tmp_path):
    script = site / "bin" / "megarl"
    assert run(site, tmp_path, str(script), "--version").startswith("megarl 0.")
    run(site, tmp_path, str(script), "new", "mine")
    assert (tmp_path / "mine/prompts.jsonl").read_bytes() == (ROOT / "examples/own_task/prompts.jsonl").read_bytes()
    assert "RUN_DIR" in run(site, tmp_path, str(script), "report", "--help")
