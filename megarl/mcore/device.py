"""Where the training engine computes: the GPU of this process, or without CUDA the CPU."""

import importlib
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema.roles import Dtype
from megarl.cpu.process import Cpu

DETERMINISTIC_ENVIRONMENT = {
    # Transformer Engine's attention, whose backward pass otherwise adds up in the order in which blocks finish.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # One of the algorithms that Megatron's own --deterministic-mode asks for: NCCL does not choose by itself.
    "NCCL_ALGO": "Ring",
    # What torch.use_deterministic_algorithms asks of cuBLAS.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What libraries read of the environment to compute the same again on a GPU"""


def use_deterministic_kernels() -> None:
    """Have this process compute the same from the same on a GPU (train.deterministic); before the model and the process
    groups are made. An operation that torch has no deterministic kernel for raises RuntimeError with its name.
    """
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # Filling memory that is written before it is read changes nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Gpu:
    """What a training process does on its GPU; without one `megarl.cpu.process.Cpu` does it."""

    backend = "nccl"
    """Of torch.distributed, for the training ranks"""
    repeats = False
    """It computes the same from the same where it is asked to alone"""
    pins_memory = True
    """Host memory that is page-locked is copied faster"""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's; None without a GPU"""
        return torch.cuda.get_device_capability()

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def prepare(self, dtype: Dtype, *, deterministic: bool, num_threads: int) -> None:
        """Settle how this process computes; call it before CUDA's first product."""
        settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        if "expandable_segments" not in settings:
            # Of this process alone: in servers torch_memory_saver cannot give such memory back. Micro-batches differ in
            # length, and storages come and go with every call.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        if dtype is Dtype.float32:
            # torch keeps the 23 bits of fraction in float32 products. Transformer Engine asks cuBLAS for TF32, which
            # has 10, without a switch (common/gemm/cublaslt_gemm.cu, CUBLAS_COMPUTE_32F_FAST_TF32); cuBLAS reads this.
            os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
        if deterministic:
            use_deterministic_kernels()

    def take(self, rank: int, uuid: str | None) -> str | None:
        """Have this process compute on its GPU: the only one that it sees, or the one of its rank. Returns its UUID.

        uuid: of the GPU that it was started for; None: not known. Raises RuntimeError where it is another one.
        """
        torch.cuda.set_device(rank % torch.cuda.device_count())
        found = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        if uuid is not None and found != uuid:
            raise RuntimeError(
                f"{socket.gethostname()}: this process was started for GPU {uuid} and CUDA gives it {found}, with"
                f" CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}: CUDA was used before that was set"
            )
        return found

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, of the CPU, on the device, without waiting for what the GPU does before: from pinned memory."""
        return x.pin_memory().to(self.device(), non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        """Give unused memory back, for the other processes on the GPU."""
        torch.cuda.empty_cache()

    def count_free(self) -> int:
        """Bytes of the GPU that no process has."""
        return int(torch.cuda.mem_get_info()[0])

    def import_engine(self) -> None:
        """Transformer Engine, which is installed: a half-installed package is found like a whole one. Raises
        RuntimeError where that fails: Megatron would go on without it, or end with an error that does not name it.
        """
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:
            raise RuntimeError(
                f"Transformer Engine is installed and broken ({type(error).__name__}: {error}); make clean install"
                " PLATFORM=cuda installs all of it, and without it megarl computes with plain torch layers"
            ) from error

    def measure_tflops(self, dtype: torch.dtype) -> float | None:
        """Not measured: a GPU's peak is that of its data sheet."""
        return None

    def take_random_state(self) -> dict[str, Any]:
        return {"cuda": torch.cuda.get_rng_state()}

    def put_random_state(self, state: dict[str, Any]) -> bool:
        """Whether what Megatron tracks in this state is of this kind of device: a GPU's generator or the CPU's."""
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        return "cuda" in state


def find_processor() -> Gpu | Cpu:
    return Gpu() if torch.cuda.is_available() else Cpu()


def device() -> torch.device:
    """The device of parameters and batches in this process."""
    return find_processor().device()


def send(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU on the device of this process; of use on its current stream from now on."""
    return find_processor().send(x)


def claim_gpu(store: dist.Store, rank: int, uuid: str) -> None:
    """Note in the role's store whose GPU it is. Raises RuntimeError where another rank of the role has it too."""
    owner = store.compare_set(f"megarl/{uuid}", "", str(rank)).decode()
    if owner != str(rank):
        raise RuntimeError(
            f"ranks {owner} and {rank} of one role are both on GPU {uuid} of {socket.gethostname()}, and NCCL joins no"
            " two processes of one GPU: parallel.num_processes may be at most the number of GPUs, and"
            " cluster.gpus_per_node gives each rank its own"
        )
