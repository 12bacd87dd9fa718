"""What the processes of the privileged critic's tests run: gradient, update and values on given samples."""

from pathlib import Path
from typing import Any

import torch
from layout_runs import evaluate

from megarl.mcore.spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples

Run = tuple[WorkerSpec, TrainingSamples, dict[str, Sequences]]


def train_on(rank: int, world_size: int, runs: dict[str, Run], scratch: str) -> dict[str, Any]:
    """Of each run the log-probs of a policy; the gradient, two steps and the weights after them; then log-probs or
    values of the given sequences.
    """
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, (spec, samples, sequences) in runs.items():
        worker, root = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init"), Path(scratch)
        try:
            before = evaluate(worker, samples.sequences)[0] if spec.role is Role.policy else None
            worker.export_gradient(samples, root / f"{name}-gradient")
            metrics = worker.update(samples, [torch.arange(samples.sequences.num_samples)] * 2)
            worker.export_weights(root / f"{name}-weights")
            found = {key: load_file(root / f"{name}-{key}" / "model.safetensors") for key in ("gradient", "weights")}
            evaluations = {key: evaluate(worker, given)[0] for key, given in sequences.items()}
            config = (root / f"{name}-weights" / "config.json").read_text()
            results[name] = {"before": before, "metrics": metrics, **found, "values": evaluations, "config": config}
        finally:
            worker.close()
    return results
