"""What the processes of the parallel tests run: the same training in one layout after the other, results to a file."""

import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from tiny_checkpoints import build_samples, build_sequences

import megarl.mcore  # noqa: F401
from megarl.config.algo import AlgoConfig
from megarl.config.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.mcore.spec import Role, WorkerSpec

NUM_STEPS = 3
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(num_processes=2, tp=2),
    "tp2_sp": ParallelConfig(num_processes=2, tp=2, sp=True),
    "pp2": ParallelConfig(num_processes=2, pp=2),
    "dp2": ParallelConfig(num_processes=2),
    "tp2_pp2_sp": ParallelConfig(num_processes=4, tp=2, pp=2, sp=True),
}


def build_spec(role: Role, checkpoint: Path, layout: str = "one", **changes: Any) -> WorkerSpec:
    trained = role is not Role.reference
    fields = {
        "role": role,
        "checkpoint": str(checkpoint),
        "parallel": LAYOUTS[layout],
        # A large epsilon: Adam's first steps would otherwise turn rounding in tiny gradients into whole steps.
        "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=1.0) if trained else None,
        "dtype": Dtype.float32,
        "algo": AlgoConfig(entropy_coef=0.01, positive_lm_coef=0.1),
        "temperature": 0.8,
        "response_length": 32,
        "tokens_per_microbatch": 10_000,
        "deadline_s": 60.0,
        **changes,
    }
    return WorkerSpec(**fields)


def train_and_describe(spec: WorkerSpec, name: str, rank: int, world_size: int, scratch: Path) -> dict[str, Any]:
    """Three steps; metrics of each, log-probs or values after them, the exported weights."""
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
    try:
        samples = build_samples()
        metrics = worker.update(samples, [torch.arange(12)] * NUM_STEPS)
        sequences = build_sequences(seed=5)
        evaluate = worker.values if spec.role is Role.critic else lambda s: worker.logprobs(s, 0.8)
        result = evaluate(sequences)
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, result)
        padded = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
        for part in parts:
            if part is not None:
                padded[part.rows] = part.values
        worker.export_weights(scratch / name)
        return {
            "metrics": metrics,
            "evaluation": padded,
            "reported": sum(part is not None for part in parts),
            "weights": load_file(scratch / name / "model.safetensors"),
        }
    finally:
        worker.close()


def run_rank(rank: int, world_size: int, function: Any, arguments: tuple[Any, ...], out: str) -> None:
    torch.set_num_threads(1)
    try:
        result = function(rank, world_size, *arguments)
    except BaseException:
        Path(f"{out}.{rank}.error").write_text(traceback.format_exc())
        raise
    if rank == 0:
        torch.save(result, out)


def launch(world_size: int, function: Any, *arguments: Any) -> Any:
    """Run function(rank, world_size, *arguments) in `world_size` processes; rank 0's result."""
    with tempfile.TemporaryDirectory() as scratch:
        out = f"{scratch}/result.pt"
        torch.multiprocessing.spawn(run_rank, (world_size, function, arguments, out), nprocs=world_size)
        return torch.load(out, weights_only=True)


def run_layouts(rank: int, world_size: int, runs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    return {name: train_and_describe(spec, name, rank, world_size, Path(scratch)) for name, spec in runs.items()}
