"""What the processes of the parallel tests run: the same training in one layout after the other."""

import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from tiny_checkpoints import build_samples, build_sequences

import megarl.mcore  # noqa: F401
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.mcore.spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples

NUM_STEPS = 3
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(num_processes=2, tp=2),
    "tp2_sp": ParallelConfig(num_processes=2, tp=2, sp=True),
    "pp2": ParallelConfig(num_processes=2, pp=2),
    "vpp2": ParallelConfig(num_processes=2, pp=2, vpp=2),
    "dp2": ParallelConfig(num_processes=2),
    "cp2": ParallelConfig(num_processes=2, cp=2),
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


def within_vocabulary(sequences: Sequences, worker: Any) -> Sequences:
    return replace(sequences, tokens=sequences.tokens % worker.arch.vocab_size)


def evaluate(worker: Any, sequences: Sequences) -> tuple[torch.Tensor, int]:
    """Log-probs at temperature 0.8, or values, of all rows [B, T]; and how many ranks reported rows."""
    critic = worker.spec.role is Role.critic
    return gather(worker.values(sequences) if critic else worker.logprobs(sequences, 0.8), sequences)


def gather(result: Any, sequences: Sequences) -> tuple[torch.Tensor, int]:
    """All rows [B, T] of what each rank computed, and how many ranks reported rows."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, result)
    padded = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
    for part in parts:
        if part is not None:
            padded[part.rows] = part.values
    return padded, sum(part is not None for part in parts)


def describe(worker: Any, directory: Path) -> dict[str, Any]:
    """What the model says of fixed sequences, and its exported weights."""
    from safetensors.torch import load_file

    sequences = within_vocabulary(build_sequences(seed=5), worker)
    padded, num_reports = evaluate(worker, sequences)
    is_critic = worker.spec.role is Role.critic
    entropies = {} if is_critic else {"entropies": gather(worker.entropies(sequences, 0.8), sequences)[0]}
    kl = {} if worker.reference is None else {"reference_kl": gather(worker.reference_kl(sequences, 0.8), sequences)[0]}
    worker.export_weights(directory)
    return {
        "evaluation": padded,
        "num_reports": num_reports,
        "weights": load_file(directory / "model.safetensors"),
        **kl,
        **entropies,
    }


def train(rank: int, world_size: int, spec: WorkerSpec, scratch: Path, name: str, rows: list[int]) -> dict[str, Any]:
    """Describe the model, train it for three steps on these rows in this order, describe it again."""
    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
    try:
        before = describe(worker, scratch / f"{name}-before")
        samples = build_samples()
        samples = replace(samples, sequences=within_vocabulary(samples.sequences, worker))
        metrics = worker.update(samples, [torch.tensor(rows)] * NUM_STEPS)
        return {"before": before, "metrics": metrics, "after": describe(worker, scratch / f"{name}-after")}
    finally:
        worker.close()


def train_reusing(
    rank: int, world_size: int, spec: WorkerSpec, scratch: Path, name: str, rows: list[int], reuses: bool
) -> dict[str, Any]:
    """One step on these rows in this order: with old_logprobs of a pass before it, or the update's own (reuses).

    The log-probs of the pass, those of the update (None without reuse), the gradient and the metrics.
    """
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
    try:
        samples = build_samples()
        samples = replace(samples, sequences=within_vocabulary(samples.sequences, worker))
        before, _ = gather(worker.logprobs(samples.sequences, spec.temperature), samples.sequences)
        samples = replace(samples, old_logprobs=None if reuses else before)
        worker.export_gradient(samples, scratch / name)
        (metrics,) = worker.update(samples, [torch.tensor(rows)])
        own = gather(worker.updated_logprobs(), samples.sequences)[0] if reuses else None
        assert worker.updated_logprobs() is None
        gradient = load_file(scratch / name / "model.safetensors")
        return {"before": before, "own": own, "gradient": gradient, "metrics": metrics}
    finally:
        worker.close()


def train_all_reusing(
    rank: int, world_size: int, runs: dict[str, tuple[WorkerSpec, list[int]]], scratch: str
) -> dict[str, Any]:
    """`train_reusing` of each run, without and with reuse."""
    root = Path(scratch)
    return {
        name: [train_reusing(rank, world_size, spec, root, f"{name}-{own}", rows, own) for own in (False, True)]
        for name, (spec, rows) in runs.items()
    }


def train_all(
    rank: int, world_size: int, runs: dict[str, tuple[WorkerSpec, list[int]]], scratch: str
) -> dict[str, Any]:
    return {name: train(rank, world_size, spec, Path(scratch), name, rows) for name, (spec, rows) in runs.items()}


def build_conversations(seed: int = 3) -> TrainingSamples:
    """Samples whose responses alternate between three tokens of the policy and two of the environment, which hold
    poison wherever a number is kept per token. Odd rows begin with the environment; row 5 has failed.
    """
    samples = build_samples(seed=seed)
    rows, places = torch.arange(len(samples.mask))[:, None], torch.arange(samples.mask.shape[1])
    own = ((places + 3 * (rows % 2)) % 5 < 3) & (rows != 5)
    exists = places < samples.sequences.response_lengths[:, None]
    mask = exists & own
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values", "returns")
    poisoned = {
        name: torch.where(exists & ~own, torch.nan, getattr(samples, name)) for name in (*names, "sampling_logprobs")
    }
    return replace(samples, mask=mask, loss_mask=mask & samples.loss_mask.any(1)[:, None], **poisoned)


def find_gradients(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """After one step on the conversations: the weights, and the metrics and gradient of the next, by the names of a
    Hugging Face checkpoint; and the metrics of a step on a minibatch in which all samples have failed.
    """
    from safetensors.torch import load_file

    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker, root = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init"), Path(scratch)
        try:
            samples, rows = build_conversations(), [torch.arange(12)]
            worker.update(samples, rows)
            worker.export_weights(root / f"{name}-weights")
            worker.export_gradient(samples, root / f"{name}-gradient")
            (metrics,) = worker.update(samples, rows)
            nothing = torch.zeros_like(samples.mask)
            (empty,) = worker.update(replace(samples, mask=nothing, loss_mask=nothing), rows)
            tensors = {key: load_file(root / f"{name}-{key}" / "model.safetensors") for key in ("weights", "gradient")}
            results[name] = {"metrics": metrics, "empty": empty, **tensors}
        finally:
            worker.close()
    return results


def train_and_save(rank: int, world_size: int, spec: WorkerSpec, scratch: str) -> dict[str, Any]:
    """Two steps, save, one more step while the files are being written."""
    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/save.init")
    try:
        samples = build_samples()
        worker.update(samples, [torch.arange(12)] * 2)
        checksum = worker.checksum()
        worker.begin_save(Path(scratch) / "state")
        metrics = worker.update(samples, [torch.arange(12)])
        worker.finish_save()
        return {"checksum": checksum, "metrics": metrics, "after": describe(worker, Path(scratch) / "saved")}
    finally:
        worker.close()


def load_and_train(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """Under each layout: load what `train_and_save` saved, one more step."""
    from megarl.mcore.worker import MegatronWorker

    results = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/load-{name}.init")
        try:
            fresh = worker.checksum()
            worker.load(Path(scratch) / "state")
            checksum = worker.checksum()
            metrics = worker.update(build_samples(), [torch.arange(12)])
            after = describe(worker, Path(scratch) / f"loaded-{name}")
            results[name] = {"fresh": fresh, "checksum": checksum, "metrics": metrics, "after": after}
        finally:
            worker.close()
    return results


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
    """Run function(rank, world_size, *arguments, scratch directory) in `world_size` processes; rank 0's result."""
    with tempfile.TemporaryDirectory() as scratch:
        return launch_in(scratch, world_size, function, *arguments)


def launch_in(scratch: str, world_size: int, function: Any, *arguments: Any) -> Any:
    out = f"{scratch}/{function.__name__}.pt"
    torch.multiprocessing.spawn(run_rank, (world_size, function, (*arguments, scratch), out), nprocs=world_size)
    return torch.load(out, weights_only=True)


def round_probe(
    rank: int, world_size: int, specs: dict[str, WorkerSpec], texts: dict[str, tuple[int, ...]], scratch: str
) -> dict[str, Any]:
    """By spec and text: the log-probs [1, T], those of copies with random errors of 2^-8, and the former again."""
    from megarl.mcore.worker import MegatronWorker
    from megarl.sync.probe import NUM_ESTIMATES

    found: dict[str, Any] = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            found[name] = {}
            for text, tokens in texts.items():
                one, copies = (
                    Sequences(torch.tensor(tokens * num), torch.tensor([len(tokens)] * num), torch.tensor([1] * num))
                    for num in (1, NUM_ESTIMATES)
                )
                before, _ = gather(worker.logprobs(one, 1.0), one)
                rounded, _ = gather(worker.rounded_logprobs(copies, 1.0, 2.0**-8), copies)
                found[name][text] = before, rounded, gather(worker.logprobs(one, 1.0), one)[0]
        finally:
            worker.close()
    return found
