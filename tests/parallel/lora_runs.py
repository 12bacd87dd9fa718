"""What the processes of the tests of adapters run."""

from pathlib import Path
from typing import Any

import torch
from layout_runs import describe, within_vocabulary
from tiny_checkpoints import build_samples

from megarl.files import write_manifest
from megarl.mcore.checkpoint_format import describe_role
from megarl.mcore.spec import WorkerSpec


def train_layouts(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """For each: what it says and exports before and after two steps; the state that it saves, SCRATCH/name-state."""
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        root = Path(scratch) / name
        try:
            before = describe(worker, root / "before")
            samples = build_samples()
            samples.sequences.tokens.copy_(within_vocabulary(samples.sequences, worker).tokens)
            metrics = worker.update(samples, [torch.arange(12)] * 2)
            after = describe(worker, root / "after")
            worker.export_gradient(samples, root / "gradient")
            worker.save(root / "state")
            if rank == 0:
                write_manifest(root / "state", describe_role(spec.role, spec.dtype, spec.parallel, 7))
            (after_save,) = worker.update(samples, [torch.arange(12)])
            results[name] = {
                "before": before,
                "after": after,
                "metrics": [*metrics, after_save],
                "gradient": load_file(root / "gradient" / "model.safetensors"),
                "adapter": load_file(root / "after" / "adapter" / "adapter_model.safetensors"),
                "checksum": worker.checksum(),
            }
        finally:
            worker.close()
    return results


def load_states(rank: int, world_size: int, specs: dict[str, WorkerSpec], saved: str, scratch: str) -> dict[str, Any]:
    """For each: load SAVED/state and make one step."""
    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/load-{name}.init")
        try:
            worker.load(Path(saved) / "state")
            loaded = describe(worker, Path(scratch) / f"loaded-{name}")
            samples = build_samples()
            samples.sequences.tokens.copy_(within_vocabulary(samples.sequences, worker).tokens)
            (metrics,) = worker.update(samples, [torch.arange(12)])
            results[name] = {"loaded": loaded, "metrics": metrics, "checksum": worker.checksum()}
        finally:
            worker.close()
    return results


def find_gradient(rank: int, world_size: int, spec: WorkerSpec, scratch: str) -> dict[str, torch.Tensor]:
    """The gradient of all weights for the samples of `train_layouts`."""
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/gradient.init")
    try:
        samples = build_samples()
        samples.sequences.tokens.copy_(within_vocabulary(samples.sequences, worker).tokens)
        worker.export_gradient(samples, Path(scratch) / "gradient")
        return load_file(Path(scratch) / "gradient" / "model.safetensors")
    finally:
        worker.close()
