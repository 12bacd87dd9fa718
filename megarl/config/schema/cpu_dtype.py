"""`${cpu_dtype:${cluster.gpus_per_node}}`: the faster dtype of this machine, for presets of small models."""

import re
from pathlib import Path

from omegaconf import OmegaConf

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16 = re.compile(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)


def choose_dtype(gpus_per_node: int) -> str:
    """`bfloat16` on GPUs and on CPUs that compute with it, else `float32`."""
    return "bfloat16" if gpus_per_node > 0 or computes_bfloat16() else "float32"


def computes_bfloat16() -> bool:
    """Whether this CPU has instructions for it: without them a product of matrices takes several times as long."""
    try:
        return BFLOAT16.search(CPU_INFO.read_text()) is not None
    except OSError:  # not Linux
        return False


def register() -> None:
    """Make `${cpu_dtype:...}` known to OmegaConf; calling it again changes nothing."""
    OmegaConf.register_new_resolver("cpu_dtype", choose_dtype, replace=True)


# A launcher may have sent a run to another process, in which nobody else calls it.
register()
