"""What the processes of the memory tests run: the same role under one way of saving memory after the other."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from layout_runs import evaluate
from tiny_checkpoints import build_samples, build_sequences

import megarl.mcore  # noqa: F401
from megarl.config.schema.roles import Recompute
from megarl.mcore.spec import WorkerSpec


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measure(worker: Any) -> dict[str, int]:
    """Bytes that weights, gradients and optimizer hold on the device between two calls."""
    from megarl.mcore.offload import list_gradient_buffers, list_optimizer_tensors

    weights = [param for chunk in worker.chunks for param in chunk.parameters()]
    own = {x.untyped_storage()._cdata for x in weights}
    training = [x for x in list_optimizer_tensors(worker.optimizer) if x.untyped_storage()._cdata not in own]
    return {
        "weights": count_bytes(weights),
        "gradients": count_bytes(list_gradient_buffers(worker.model)),
        "optimizer": count_bytes(training),
        "freed": measure_freed(worker),
    }


def measure_freed(worker: Any) -> int:
    """Bytes of the GPU's memory by which more is allocated during an update than between the calls."""
    if not torch.cuda.is_available():
        return 0
    between = torch.cuda.memory_allocated()
    with worker.offload.during(training=True):
        return torch.cuda.memory_allocated() - between


def run_role(rank: int, world_size: int, spec: WorkerSpec, scratch: Path, name: str) -> dict[str, Any]:
    """Evaluation, an update, the gradient then, an update, save and load, an update, evaluation; what was held between
    the calls. Saving takes seconds and is left out where activations are recomputed.
    """
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
    try:
        samples, sequences, rows = build_samples(), build_sequences(seed=5), [torch.arange(12)]
        held = [measure(worker)]
        before, _ = evaluate(worker, sequences)
        metrics = worker.update(samples, rows)
        # A critic's first gradient is in its new head alone.
        worker.export_gradient(samples, scratch / f"{name}-gradient")
        metrics += worker.update(samples, rows)
        held.append(measure(worker))
        if spec.recompute is Recompute.none:
            worker.save(scratch / f"{name}-state")
            worker.load(scratch / f"{name}-state")
        metrics += worker.update(samples, rows)
        after, _ = evaluate(worker, sequences)
        held.append(measure(worker))
        return {
            "before": before,
            "gradient": load_file(scratch / f"{name}-gradient" / "model.safetensors"),
            "metrics": metrics,
            "after": after,
            "checksum": worker.checksum(),
            "held": held,
            "description": worker.describe(),
        }
    finally:
        worker.close()


def run_roles(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    return {name: run_role(rank, world_size, spec, Path(scratch), name) for name, spec in specs.items()}
