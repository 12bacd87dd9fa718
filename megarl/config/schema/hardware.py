"""`cluster.hardware`: what one GPU and one node of the cluster can do, from which a job is planned."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite

LEAST_OF_KIND = 0.95
"""Least share of memory_gib that a GPU of the kind has: it differs a little, by driver and ECC."""


@dataclass
class HardwareConfig:
    """One kind of GPU, the same on every node. Peaks are those of the data sheet, without sparsity."""

    gpu: str | None = None
    """Name of the GPU; null: the hardware is not known, and nothing is planned."""
    memory_gib: float = 0.0
    """Memory of a GPU in GiB, as torch.cuda.get_device_properties tells it."""
    bf16_tflops: float = 0.0
    """Peak of a GPU's matrix products in bfloat16, in 1e12 operations a second."""
    fp8_tflops: float = 0.0
    """Peak of a GPU's matrix products in FP8, in 1e12 operations a second."""
    hbm_gb_s: float = 0.0
    """Bandwidth between a GPU and its memory, in 1e9 bytes a second."""
    nvlink_gb_s: float = 0.0
    """Bandwidth out of a GPU to others of its node, in one direction, in 1e9 bytes a second."""
    network_gb_s: float = 0.0
    """Bandwidth out of a GPU to other nodes, in one direction, in 1e9 bytes a second."""
    pcie_gb_s: float = 64.0
    """Bandwidth between a GPU and its host, in one direction, in 1e9 bytes a second; of PCIe 5.0 with 16 lanes."""
    disk_gb_s: float = 5.0
    """What a node reads from or writes to the shared file system, in 1e9 bytes a second; as measured, not a peak."""
    host_memory_gib: float = 0.0
    """Memory of a node in GiB."""


def check_hardware(hardware: HardwareConfig) -> Iterator[str]:
    """One message per number of a known GPU that is not above 0."""
    for field in fields(hardware) if hardware.gpu is not None else ():
        value = getattr(hardware, field.name)
        if field.name != "gpu" and not (isfinite(value) and value > 0):
            yield f"cluster.hardware.{field.name}: found {value}; it must be above 0"
