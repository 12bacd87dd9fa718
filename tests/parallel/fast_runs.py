"""What the processes of the tests of Megatron's faster ways run: the same training in one way after the other."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import evaluate
from tiny_checkpoints import build_samples, build_sequences

import megarl.mcore  # noqa: F401
from megarl.mcore.spec import WorkerSpec

BUCKET_SIZE = 4000
"""Parameters of a bucket where a name ends in -buckets; Megatron's default of 40 million holds each of these models"""


def run_ways(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    return {name: _run_way(rank, world_size, spec, Path(scratch), name) for name, spec in specs.items()}


def _run_way(rank: int, world_size: int, spec: WorkerSpec, scratch: Path, name: str) -> dict[str, Any]:
    """Evaluation, two updates of two steps, the gradient and an evaluation between them, save and load, an update."""
    from megarl.mcore import model
    from megarl.mcore.worker import MegatronWorker

    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("-buckets"):
            config = functools.partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
            patch.setattr(model, "DistributedDataParallelConfig", config)
        if name.endswith("-te"):
            # A machine that has Transformer Engine and no Apex, as far as the choice of fields goes.
            kernels = replace(model.find_kernels(), gpu=True, te=True, apex=False)
            patch.setattr(model, "find_kernels", lambda: kernels)
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
    try:
        samples, sequences, rows = build_samples(), build_sequences(seed=5), [torch.arange(6), torch.arange(6, 12)]
        before, _ = evaluate(worker, sequences)
        metrics = worker.update(samples, rows)
        worker.export_gradient(samples, scratch / f"{name}-gradient")
        between, _ = evaluate(worker, sequences)
        metrics += worker.update(samples, rows)
        worker.save(scratch / f"{name}-state")
        worker.load(scratch / f"{name}-state")
        metrics += worker.update(samples, rows)
        return {
            "evaluations": [before, between, evaluate(worker, sequences)[0]],
            "metrics": metrics,
            "checksum": worker.checksum(),
            "num_buckets": len(worker.model[0].bucket_groups),
            "fuses": [worker.config.gradient_accumulation_fusion, _fuses_output_layer(worker)],
            "swiglu": worker.config.bias_activation_fusion,
            "description": worker.describe(),
        }
    finally:
        worker.close()


def _fuses_output_layer(worker: Any) -> bool | None:
    return getattr(worker.chunks[0].output_layer, "gradient_accumulation_fusion", None)
