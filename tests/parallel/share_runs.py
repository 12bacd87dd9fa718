"""What the processes of the shares' tests run: workers that are given all rows, and workers given their share."""

from pathlib import Path
from typing import Any

import torch
from layout_runs import evaluate

from megarl.cluster.workers import Sharer, count_minibatches
from megarl.mcore.spec import WorkerSpec
from megarl.types import TrainingSamples


def train_both(
    rank: int, world_size: int, specs: dict[str, WorkerSpec], samples: TrainingSamples, minibatches: Any, scratch: str
) -> dict[str, Any]:
    """Of each layout: log-probs or values, the updates' metrics, and checksums of the weights after them."""
    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        sharer = Sharer(spec)
        kind = sharer.find_kind(rank)
        for is_share in (False, True):
            worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}-{is_share}.init")
            try:
                given, sequences, counts = samples, samples.sequences, []
                if is_share:
                    given = sharer.share_samples(samples, minibatches)[kind].unfold()
                    sequences = sharer.share_sequences(samples.sequences)[kind[0]].unfold()
                    counts = count_minibatches(samples, minibatches)
                found = {"evaluation": evaluate(worker, sequences)[0]}
                found["metrics"] = worker.update(given, minibatches, counts)
                sums: list[Any] = [None] * world_size
                torch.distributed.all_gather_object(sums, worker.checksum())
                results[f"{name}-{'share' if is_share else 'all'}"] = {**found, "checksums": sums}
            finally:
                worker.close()
    return results


def build_specs(build: Any, checkpoint: Path, role: Any, layouts: list[str]) -> dict[str, WorkerSpec]:
    return {layout: build(role, checkpoint, layout, tokens_per_microbatch=40) for layout in layouts}
