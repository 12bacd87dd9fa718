"""What the processes of the tests of converted checkpoints run."""

from pathlib import Path
from typing import Any

import torch
from layout_runs import within_vocabulary
from tiny_checkpoints import build_samples

from megarl.files import CheckpointError, write_manifest
from megarl.mcore.checkpoint_format import describe_role
from megarl.mcore.spec import WorkerSpec


def step(worker: Any) -> None:
    samples = build_samples()
    samples.sequences.tokens.copy_(within_vocabulary(samples.sequences, worker).tokens)
    worker.update(samples, [torch.arange(12)])


def train_and_save_all(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> None:
    """For each: one step, then SCRATCH/name/state as a training checkpoint has it, and SCRATCH/name/export."""
    from megarl.mcore.worker import MegatronWorker

    for name, spec in specs.items():
        root = Path(scratch) / name
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            step(worker)
            worker.export_weights(root / "export")
            worker.save(root / "state")
            if rank == 0:
                write_manifest(root / "state", describe_role(spec.role, spec.dtype, spec.parallel, 7))
        finally:
            worker.close()


def load_all(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """For each: checksums before and after a step, of a worker that loads SCRATCH/name/converted and of one that starts
    from SCRATCH/name/export.
    """
    from dataclasses import replace

    from megarl.mcore.worker import MegatronWorker

    results: dict[str, Any] = {}
    for name, spec in specs.items():
        root, found = Path(scratch) / name, {}
        for kind in ("converted", "export"):
            start = spec if kind == "converted" else replace(spec, checkpoint=str(root / "export"))
            worker = MegatronWorker(start, rank, world_size, f"file://{scratch}/{name}-{kind}.init")
            try:
                sums = [worker.checksum()]
                if kind == "converted":
                    try:
                        worker.load(root / "converted")
                    except CheckpointError as error:
                        found["refusal"] = str(error)
                    worker.load_weights(root / "converted")
                sums.append(worker.checksum())
                step(worker)
                found[kind] = [*sums, worker.checksum()]
            finally:
                worker.close()
        results[name] = found
    return results
