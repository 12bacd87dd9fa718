"""What the machine is, found in a process of its own: asking CUDA keeps memory of the GPU until the process ends."""

import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder

PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers", "safetensors", "numpy")
DEADLINE_S = 180.0


@dataclass(frozen=True)
class Machine:
    gpu: str | None
    """None: torch sees no GPU"""
    capability: tuple[int, int] | None
    driver: str | None
    cuda: str | None
    """The CUDA version that torch was built for"""
    python: str
    versions: dict[str, str | None]
    """By package; None: not installed"""
    problems: dict[str, str]
    """Why an optional package cannot be used, by its module"""
    num_gpus: int = 0


def find_machine(environment: dict[str, str]) -> Machine:
    """Raises RuntimeError where torch or Megatron cannot be imported, with the reason."""
    command = [sys.executable, "-m", "megarl.tools.gpu.machine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["without a message"])[-1]
        raise RuntimeError(f"looking at the machine ended with {done.returncode}: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Machine(**{**found, "capability": found["capability"] and tuple(found["capability"])})


def describe_here() -> Machine:
    """Of this process, which keeps a CUDA context afterwards."""
    import torch

    import megarl.mcore.device  # noqa: F401  # It prepares Megatron where there is no GPU.

    importlib.import_module("megatron.core")
    has_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
        driver=find_driver(),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        versions={name: find_version(name) for name in PACKAGES},
        problems=find_problems(has_gpu),
        num_gpus=torch.cuda.device_count(),
    )


def find_problems(has_gpu: bool) -> dict[str, str]:
    """Transformer Engine is imported: half of an installation is found by find_spec. SGLang's servers import theirs."""
    reasons = {
        "transformer_engine": explain_import("transformer_engine.pytorch", "Transformer Engine", imports=has_gpu),
        "sglang": explain_import("sglang", "SGLang", imports=False),
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def explain_import(module: str, name: str, *, imports: bool) -> str | None:
    # Not importlib.util.find_spec: without CUDA megarl's import hook finds Transformer Engine nowhere.
    if PathFinder.find_spec(module.split(".")[0]) is None:
        return f"{name} is not installed"
    try:
        if imports:
            importlib.import_module(module)
    except Exception as error:
        return f"{name} is installed and cannot be imported: {type(error).__name__}: {error}"
    return None


def find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    print(json.dumps(asdict(describe_here())))
