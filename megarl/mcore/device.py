"""Where the training engine computes: CUDA where it is present, otherwise the CPU through an import hook.

Megatron-Core names its device in its source ("cuda", torch.cuda.current_device(), x.cuda() ...). Where CUDA
is absent, `install` puts a finder on sys.meta_path that rewrites those names while megatron.core loads. The
files on disk and torch itself stay as they are. Where CUDA is present nothing is installed.
"""

import logging
import sys
import warnings

import torch

from megarl.mcore.cpu.hook import CpuFinder


def install() -> bool:
    """Prepare this process for Megatron; call before the first megatron import. May be called again.

    Returns True where the hook is in place (no CUDA), False where Megatron runs as it is.
    Raises RuntimeError where megatron.core was imported before without the hook.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, CpuFinder) for finder in sys.meta_path):
        return True
    loaded = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if loaded:
        raise RuntimeError(
            f"{loaded[0]} was imported before megarl.mcore on a machine without CUDA: "
            "import megarl.mcore first, so that Megatron can be rewritten for the CPU"
        )
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed.*", category=UserWarning)
    # What torch says of every nvcc on the PATH, as that of a login node.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in str(record.msg))
    sys.meta_path.insert(0, CpuFinder())
    return True


def device() -> torch.device:
    """The device of parameters and batches in this process."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def process_group_backend() -> str:
    """torch.distributed backend for the training ranks: "nccl" or "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"
