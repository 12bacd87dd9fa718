"""What the processes of the tests of mixtures of experts run."""

from typing import Any

from layout_runs import evaluate
from tiny_checkpoints import build_sequences

from megarl.mcore.worker_spec import WorkerSpec


def evaluate_layouts(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """For each layout: log-probs at temperature 0.8 of fixed sequences [B, T]."""
    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            results[name] = evaluate(worker, build_sequences(seed=5))[0]
        finally:
            worker.close()
    return results
