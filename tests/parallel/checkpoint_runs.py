"""What the processes of the checkpoint tests run: saves and loads with one or another Adam."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lazy_adam
import torch
from layout_runs import build_spec, working
from tiny_checkpoints import build_samples

from megarl.mcore.spec import Role, WorkerSpec

ROWS = [torch.arange(12)]


def find_storages(worker: Any) -> set[int]:
    """Addresses of the optimizer's tensors, without torch's step counts."""
    from megarl.mcore.offload import list_optimizer_tensors

    return {tensor.data_ptr() for tensor in list_optimizer_tensors(worker.optimizer) if tensor.ndim}


def save_and_load(rank: int, world_size: int, spec: WorkerSpec, is_lazy: bool, root: Path) -> dict[str, Any]:
    """A save before the first step and one after the second; what a new worker makes of each, as checksums of the
    weights after one more step. Files of the runs before in `root` are continued too, under "other".
    """
    if is_lazy:
        lazy_adam.install()
    name = "lazy" if is_lazy else "torch"
    others = [folder for folder in root.glob("*-stepped") if folder.name != f"{name}-stepped"]
    states = {key: root / f"{name}-{key}" for key in ("fresh", "stepped")}
    result: dict[str, Any] = {"other": {}}
    with working(spec, rank, world_size, root / name) as worker:
        for key, num_steps in (("fresh", 0), ("stepped", 2)):
            worker.update(build_samples(), ROWS * num_steps)
            saved = worker.checksum()
            worker.save(states[key])
            metrics = worker.update(build_samples(), ROWS)
            result[key] = {"saved": saved, "stepped": worker.checksum(), "metrics": metrics}
            worker.load(states[key])
            result[key]["again"] = worker.checksum()
        result["kind"] = type(worker.optimizer.chained_optimizers[0].optimizer).__name__
    for key, folder in [*states.items(), *[("other", folder) for folder in others]]:
        with working(spec, rank, world_size, root / f"{name}-{key}") as worker:
            places = find_storages(worker)
            worker.load(folder)
            loaded, kept = worker.checksum(), places == find_storages(worker)
            metrics = worker.update(build_samples(), ROWS)
            result[key] |= {"loaded": loaded, "kept": kept, "continued": worker.checksum(), "after": metrics}
    return result


def save_in_buckets(rank: int, world_size: int, checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """All tensors of a checkpoint after two steps whose gradients are reduced in one bucket or in many."""
    from megatron.core import dist_checkpointing

    from megarl.config.schema.roles import OptimizerConfig
    from megarl.mcore import model

    results = {}
    for name, size in (("one", None), ("many", 1000)):
        # Without a clip: its norm is summed in another order.
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.0, overlap_grad_reduce=size is not None)
        spec = build_spec(Role.policy, checkpoint, "dp2", optimizer=optimizer)
        config = partial(model.DistributedDataParallelConfig, bucket_size=size)
        patched = mock.patch.object(model, "DistributedDataParallelConfig", config)
        with patched, working(spec, rank, world_size, scratch / name) as worker:
            worker.update(build_samples(), ROWS * 2)
            worker.save(scratch / name)
            num_buckets = sum(len(buffer.buckets) for buffer in worker.model[0].buffers)
        if rank == 0:
            torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/.{name}", rank=0, world_size=1)
            plain = dist_checkpointing.load_plain_tensors(f"{scratch}/{name}")
            torch.distributed.destroy_process_group()
            tensors = {key: value for key, value in plain.items() if isinstance(value, torch.Tensor)}
            results[name] = {"num_buckets": num_buckets, "tensors": tensors}
    return results
