"""What the machine is, found in a process of its own: asking CUDA keeps memory of the GPU until the process ends."""

import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from typing import Any

PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers", "safetensors", "numpy")
DEADLINE_S = 180.0


@dataclass(frozen=True)
class Machine:
    gpu: str | None
    """None: torch sees no GPU"""
    capability: tuple[int, int] | None
    memory_gib: float | None
    driver: str | None
    cuda: str | None
    """The CUDA version that torch was built for"""
    python: str
    versions: dict[str, str | None]
    """By package; None: not installed"""
    problems: dict[str, str]
    """Why an optional package cannot be used, by its module"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_machine(content: dict[str, Any]) -> Machine:
    capability = content["capability"]
    return Machine(**{**content, "capability": tuple(capability) if capability else None})


def find_machine(environment: dict[str, str]) -> Machine:
    """Raises RuntimeError where torch or Megatron cannot be imported, with the reason."""
    command = [sys.executable, "-m", "megarl.tools.gpu.machine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["without a message"])[-1]
        raise RuntimeError(f"looking at the machine ended with {done.returncode}: {last}")
    return read_machine(json.loads(done.stdout.strip().splitlines()[-1]))


def describe_here() -> Machine:
    """Of this process, which keeps a CUDA context afterwards."""
    import torch

    import megarl.mcore.device  # noqa: F401  # It prepares Megatron where there is no GPU.

    importlib.import_module("megatron.core")
    has_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if has_gpu else None,
        driver=_find_driver(),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        versions={name: _find_version(name) for name in PACKAGES},
        problems=find_problems(has_gpu),
    )


def find_problems(has_gpu: bool) -> dict[str, str]:
    """Transformer Engine is imported: half of an installation is found by find_spec. SGLang's servers import theirs."""
    problems = {}
    if (reason := _explain_import("transformer_engine.pytorch", "Transformer Engine", imports=has_gpu)) is not None:
        problems["transformer_engine"] = reason
    if (reason := _explain_import("sglang", "SGLang", imports=False)) is not None:
        problems["sglang"] = reason
    return problems


def _explain_import(module: str, name: str, *, imports: bool) -> str | None:
    # Not importlib.util.find_spec: without CUDA megarl's import hook finds Transformer Engine nowhere.
    if PathFinder.find_spec(module.split(".")[0]) is None:
        return f"{name} is not installed"
    if not imports:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{name} is installed and cannot be imported: {type(error).__name__}: {error}"
    return None


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    print(json.dumps(describe_here().to_json()))
