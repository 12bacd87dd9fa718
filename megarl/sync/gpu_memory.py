"""GPU memory that a process of another GPU context maps: CUDA's legacy interprocess handles.

The memory is a plain allocation of its own (cuMemAlloc): handles reach neither torch's expandable segments nor what
torch_memory_saver allocates. A handle is 64 bytes, which the driver checks; nothing is unpickled. Imported only where
a GPU is used.
"""

import ctypes
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

HANDLE_BYTES = 64


class GpuMemoryError(RuntimeError):
    """CUDA refused to allocate, share or map memory; the message has CUDA's word for it."""


class SharedBuffer:
    """GPU memory of this process, with the handle by which processes of the same machine map it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises GpuMemoryError."""
        _enter(device)
        if torch.cuda.mem_get_info(device)[0] < num_bytes:
            torch.cuda.empty_cache()
        self._pointer = _check(
            driver.cuMemAlloc(num_bytes), f"allocate {num_bytes} bytes (a smaller rollout.sync_bucket_mb needs less)"
        )
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (int(self._pointer), False),
            "version": 3,
        }
        self.bytes: Tensor = torch.as_tensor(self, device=device)
        """uint8 [num_bytes]"""
        handle = _check(driver.cuIpcGetMemHandle(self._pointer), "share memory with other processes")
        self.handle = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def finish(self) -> None:
        """Wait until what was written is visible to other processes."""
        torch.cuda.current_stream(self.bytes.device).synchronize()

    def close(self) -> None:
        """Free the memory; whoever mapped it must have closed it."""
        torch.cuda.synchronize(self.bytes.device)
        _check(driver.cuMemFree(self._pointer), "free memory")


class MappedBuffer:
    """Another process's `SharedBuffer`.

    Its GPU may be one that CUDA_VISIBLE_DEVICES hides here, which torch could not name as a tensor's device: bytes are
    copied out of it by their address alone.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """device: of this process. Raises GpuMemoryError."""
        if len(handle) != HANDLE_BYTES:
            raise GpuMemoryError(f"a handle of {len(handle)} bytes; it has {HANDLE_BYTES}")
        _enter(device)
        copied = driver.CUipcMemHandle()
        ctypes.memmove(copied.getPtr(), handle, HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._pointer = _check(driver.cuIpcOpenMemHandle(copied, int(flags)), "map another process's memory")
        self._device = device

    def copy_to(self, out: Tensor, start: int) -> None:
        """Copy the bytes from `start` on to `out`, uint8 on this process's GPU; returns when they are there."""
        stream = torch.cuda.current_stream(self._device)
        source = driver.CUdeviceptr(int(self._pointer) + start)
        target = driver.CUdeviceptr(out.data_ptr())
        _check(driver.cuMemcpyAsync(target, source, out.numel(), driver.CUstream(stream.cuda_stream)), "copy memory")
        stream.synchronize()

    def close(self) -> None:
        _check(driver.cuIpcCloseMemHandle(self._pointer), "unmap memory")


def _enter(device: torch.device) -> None:
    """Make the GPU's primary context, torch's own, this thread's."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def _check(answer: tuple[Any, ...], what: str) -> Any:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise GpuMemoryError(f"CUDA refuses to {what}: {error.name}")
    return values[0] if values else None
