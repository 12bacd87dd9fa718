"""What the processes of the tests of resharding run."""

from dataclasses import astuple
from typing import Any

import torch

from megarl.mcore.spec import WorkerSpec
from megarl.sync.plan import Piece, TensorSlice

Held = list[tuple[tuple[Any, ...], torch.Tensor]]
"""(tensor, row, column, whole tensor, its rectangle) of each piece, and the numbers that lie there"""


def flatten(piece: Piece) -> tuple[Any, ...]:
    return piece.tensor, piece.row, piece.col, piece.whole, astuple(piece.region)


def describe_layouts(
    rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str
) -> dict[str, dict[int, Held]]:
    """For each layout: rank -> the pieces that it says it holds."""
    from megarl.mcore.worker import MegatronWorker
    from megarl.sync.sender import WeightSender

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            tensors = worker.shards()
            held = []
            for piece in WeightSender(worker).describe():
                at = TensorSlice(piece.row, piece.col, piece.region.num_rows, piece.region.num_cols)
                held.append((flatten(piece), at.of(tensors[piece.tensor]).clone()))
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, held)
            results[name] = dict(enumerate(parts))
        finally:
            worker.close()
    return results
