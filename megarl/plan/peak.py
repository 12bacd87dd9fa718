"""What the processors of policy and critic can do at most, which model FLOPs utilization is a share of."""

import os
import time

import torch

from megarl.config.placement import list_groups, place
from megarl.config.schema.root import Config

SIZE, NUM_TRIES = 512, 5


def find_peak_tflops(config: Config) -> float | None:
    """Matrix products in 1e12 operations a second: by the data sheet, in bfloat16, of the GPUs that policy and critic
    have; without a GPU, in policy.dtype, of all cores of this machine, measured. None where cluster.hardware is not
    known.
    """
    hardware = config.cluster.hardware
    if not torch.cuda.is_available() and config.cluster.gpus_per_node == 0:
        return measure_cpu_tflops(getattr(torch, config.policy.dtype.value))
    if hardware.gpu is None or config.cluster.gpus_per_node == 0:
        return None
    slots = place(config.cluster, list_groups(config))
    gpus = {(slot.node, gpu) for role in ("policy", "critic") for slot in slots.get(role, ()) for gpu in slot.gpus}
    return hardware.bf16_tflops * len(gpus)


def measure_cpu_tflops(dtype: torch.dtype) -> float:
    """The best of a few products that fit into the caches, on one core, times the number of cores; some milliseconds.

    In seconds of this thread's own, so that a busy machine has the same peak as an idle one.
    """
    before, matrix = torch.get_num_threads(), torch.ones(SIZE, SIZE, dtype=dtype)
    torch.set_num_threads(1)
    seconds = []
    try:
        for _ in range(NUM_TRIES):
            start = time.thread_time()
            matrix @ matrix
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(before)
    return float(2 * SIZE**3 * len(os.sched_getaffinity(0)) / min(seconds) / 1e12)
