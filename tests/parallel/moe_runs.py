"""What the processes of the tests of mixtures of experts run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from layout_runs import evaluate
from tiny_checkpoints import build_samples, build_sequences
from torch.nn import functional as F

from megarl.mcore.spec import WorkerSpec
from megarl.types import Sequences


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


def give_experts(sequences: Sequences, num_layers: int, num_experts: int = 4, top_k: int = 2) -> Sequences:
    """The same with random experts for all tokens but the last of each row and all of row 2, where routers choose."""
    generator = torch.Generator().manual_seed(11)
    scores = torch.rand(len(sequences.tokens), num_layers, num_experts, generator=generator)
    experts = 1 + scores.argsort(-1)[..., :top_k].to(torch.uint8)
    rows = experts.split(sequences.lengths.tolist())
    for number, row in enumerate(rows):
        row[slice(None) if number == 2 else -1] = 0
    return replace(sequences, routed_experts=experts)


def replay_layouts(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """For each layout, with given experts: log-probs of fixed sequences, then the gradient of fixed samples and the
    metrics of two steps on them.
    """
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            samples, experts = build_samples(), worker.arch.experts
            sizes = (worker.arch.num_layers, experts.num_experts, experts.top_k)
            samples = replace(samples, sequences=give_experts(samples.sequences, *sizes))
            logprobs = evaluate(worker, give_experts(build_sequences(seed=5), *sizes))[0]
            worker.export_gradient(samples, Path(scratch) / name)
            metrics = worker.update(samples, [torch.arange(12)] * 2)
            gradient = load_file(Path(scratch) / name / "model.safetensors") if rank == 0 else {}
            results[name] = {"logprobs": logprobs, "gradient": gradient, "metrics": metrics}
        finally:
            worker.close()
    return results


def replay_own_routes(rank: int, world_size: int, spec: WorkerSpec, scratch: str) -> dict[str, Any]:
    """Log-probs and the metrics of two steps, with the routers' own choice and with that choice given."""
    from megarl.mcore.router import find_routers
    from megarl.mcore.worker import MegatronWorker

    results: dict[str, Any] = {}
    maps: list[torch.Tensor] = []
    samples, experts = build_samples(), None
    for name in ("chosen", "given"):
        given = replace(spec, router_replay=name == "given")
        worker = MegatronWorker(given, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            sequences = replace(samples.sequences, routed_experts=experts)
            hooks = [r.register_forward_hook(lambda *x: maps.append(x[2][1])) for r in find_routers(worker.chunks)]
            logprobs = evaluate(worker, sequences)[0]
            for hook in hooks:
                hook.remove()
            metrics = worker.update(replace(samples, sequences=sequences), [torch.arange(12)] * 2)
            results[name] = {"logprobs": logprobs, "metrics": metrics}
            if name == "chosen":
                # One micro-batch, longest row first.
                rows = worker._batches(sequences)[0].rows
                packed = 1 + torch.stack([m.nonzero()[:, 1].view(len(m), -1) for m in maps], 1).to(torch.uint8)
                # None are given for the dense layers before them.
                packed = F.pad(packed, (0, 0, worker.arch.num_layers - len(maps), 0))
                pieces = dict(zip(rows.tolist(), packed.split(sequences.lengths[rows].tolist()), strict=True))
                experts = torch.cat([pieces[row] for row in range(12)])
        finally:
            worker.close()
    return results
