"""slurm/Dockerfile: it installs what the locks say, and holds no version of its own but the base image's."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "slurm" / "Dockerfile"
BASE = re.compile(r"^FROM nvidia/cuda:(?P<cuda>\d+\.\d+)\.\d+-cudnn-devel-ubuntu24\.04$", re.MULTILINE)

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
