"""slurm/Dockerfile: it installs what the locks say, and holds no version of its own but the base image's."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "slurm" / "Dockerfile"
BASE = re.compile(r"^FROM nvidia/cuda:(?P<cuda>\d+\.\d+)\.\d+-cudnn-devel-ubuntu24\.04$", re.MULTILINE)
UBUNTU_PYTHON = "3.12"
"""Of Ubuntu 24.04, without another source of packages."""
PINS = re.compile(r"[\w\]-]+ *[=~<>]=+ *\d|@[0-9a-f]{7,}")


def read_instructions() -> str:
    """Without comments; a continued instruction is one line."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    return re.sub(r"\\\n\s*", " ", "\n".join(lines))


def read_pin(name: str) -> str:
    lock = (ROOT / "tools" / "install" / "cuda.lock").read_text()
    found = re.search(rf"^{re.escape(name)}==(\S+)", lock, re.MULTILINE)
    assert found, name
    return found.group(1)


def test_the_base_image_has_the_cuda_of_the_locked_torch() -> None:
    """Extensions are compiled against torch by the image's nvcc, and torch asks for the same minor version."""
    base = BASE.search(read_instructions())
    assert base, "a FROM, as BASE describes it"
    assert read_pin("cuda-toolkit").startswith(f"{base['cuda']}.")
    major = base["cuda"].split(".")[0]
    assert read_pin(f"nvidia-cudnn-cu{major}")
    assert read_pin(f"transformer-engine-cu{major}") == read_pin("transformer-engine-torch")


def test_every_package_comes_by_the_installer_and_its_lock() -> None:
    text = read_instructions()
    assert "tools/install/install.sh cuda" in text
    assert not PINS.search(text), "versions stand in tools/install/cuda.lock"
    # Only wheels that whoever builds the image brings, such as one of NVIDIA's apex.
    assert re.findall(r"pip install \S+ \S+", text) == ["pip install --no-deps --no-index"]
    assert "--mount=type=bind,from=wheels" in text
    for name in ("torch", "megatron-core", "transformer-engine-torch", "sglang", "sglang-kernel", "ray", "hydra-core"):
        assert read_pin(name)


@pytest.mark.parametrize("text", ["RUN pip install torch==2.14.1", "RUN git clone a@6424da3b", "ARG X='ray>=2'"])
def test_the_search_for_versions_finds_them(text: str) -> None:
    assert PINS.search(text)


def test_the_images_python_is_one_that_megarl_and_the_lock_allow() -> None:
    text = read_instructions()
    assert {f"python{UBUNTU_PYTHON}", f"python{UBUNTU_PYTHON}-dev", f"python{UBUNTU_PYTHON}-venv"} <= set(text.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lower, upper = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert int(lower) <= int(UBUNTU_PYTHON.split(".")[1]) < int(upper)
    assert UBUNTU_PYTHON in (ROOT / "tools" / "install" / "cuda.lock").read_text().splitlines()[0]


def test_everything_that_is_copied_is_there() -> None:
    sources = [line.split()[1] for line in read_instructions().splitlines() if line.startswith("COPY ")]
    assert "megarl" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
