"""Whether server ranks can map GPU memory of training ranks, found by trying.

CUDA refuses it to other users' processes and in containers that share no process ids; and the GPUs must reach each
other.
"""

import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NUM_BYTES = 1 << 21
PATTERN_BYTES = 64


class Trial:
    """A training rank's part: GPU memory with a random pattern at its beginning."""

    def __init__(self, device: torch.device, gpu: Any = None) -> None:
        """gpu: in place of `megarl.sync.gpu_memory`. Raises its GpuMemoryError."""
        self._buffer: Any = load_gpu(gpu).SharedBuffer(NUM_BYTES, device)
        self._pattern = secrets.token_bytes(PATTERN_BYTES)
        self._buffer.bytes[:PATTERN_BYTES].copy_(to_tensor(self._pattern))
        self._buffer.finish()

    @property
    def offer(self) -> dict[str, str]:
        """What a server rank needs, in JSON."""
        return {"handle": self._buffer.handle.hex(), "pattern": self._pattern.hex()}

    def close(self) -> None:
        self._buffer.close()


def find_refusal(offers: Mapping[int, Mapping[str, str]], device: torch.device, gpu: Any = None) -> str | None:
    """A server rank's part: why it cannot read the memory that training ranks offer; None: it can. gpu: as above."""
    gpu = load_gpu(gpu)
    for source, offer in offers.items():
        try:
            buffer = gpu.MappedBuffer(bytes.fromhex(offer["handle"]), device)
            found = torch.empty(PATTERN_BYTES, dtype=torch.uint8, device=device)
            try:
                buffer.copy_to(found, 0)
            finally:
                buffer.close()
        except (gpu.GpuMemoryError, ValueError) as error:
            return f"training rank {source}'s memory: {error}"
        if not torch.equal(found.cpu(), to_tensor(bytes.fromhex(offer["pattern"]))):
            return f"training rank {source}'s memory has other contents here"
    return None


def to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load_gpu(gpu: Any) -> Any:
    """`megarl.sync.gpu_memory`, unless another is given; it needs CUDA's driver."""
    if gpu is None:
        from megarl.sync import gpu_memory as gpu
    return gpu
