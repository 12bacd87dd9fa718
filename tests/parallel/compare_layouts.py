"""The same training under several layouts, each beside a reference: losses, gradients and updates.

A layout changes who computes what, and nothing of the result but rounding. The bounds are of float32.
"""

import gc
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.entries import VALUE_HEAD
from megarl.mcore.hf import INDEX, SINGLE, CheckpointReader
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import Metrics, TrainingSamples


@dataclass(frozen=True)
class LayoutRun:
    """What one role computed in one layout."""

    role: Role
    metrics: list[Metrics]
    """of each optimizer step"""
    directory: Path
    """DIRECTORY/before, /gradient (of the first step) and /after: Hugging Face checkpoints"""

    @property
    def losses(self) -> list[float]:
        return [step[f"{self.role.value}/loss"] for step in self.metrics]

    @property
    def loss_sizes(self) -> list[float]:
        """Mean |L_t|: terms of either sign cancel in a loss, not in this. A critic's terms are never negative."""
        return [step.get(f"{self.role.value}/loss_size", step[f"{self.role.value}/loss"]) for step in self.metrics]

    @property
    def grad_norms(self) -> list[float]:
        """Before clipping."""
        return [step[f"{self.role.value}/grad_norm"] for step in self.metrics]


@dataclass(frozen=True)
class Bounds:
    """Up to which a difference is rounding; by default that of float32."""

    loss: float = 1e-6
    gradient: float = 1e-5
    update: float = 1e-3


FLOAT32 = Bounds()


@dataclass(frozen=True)
class LayoutDifference:
    """One layout against the reference."""

    loss: float
    """of the last step"""
    grad_norm: float
    """of the first step"""
    loss_difference: float
    """largest of the steps, relative to the reference's mean |L_t|"""
    grad_norm_difference: float
    """largest of the steps, relative"""
    gradient_difference: float
    """largest of the tensors, ||difference|| / ||reference||; of the first step"""
    gradient_tensor: str
    """Hugging Face name of that tensor"""
    update_difference: float
    """||difference|| / ||reference|| of what all steps together changed, over all weights"""
    parameter_difference: float
    """largest absolute difference of a weight after all steps"""

    def find_problems(self, bounds: Bounds = FLOAT32) -> list[str]:
        """What is beyond its bound; empty: the layout computes the same."""
        checks = {
            "loss": (self.loss_difference, bounds.loss, "of mean |L_t|"),
            "gradient norm": (self.grad_norm_difference, bounds.gradient, "of it"),
            f"gradient of {self.gradient_tensor}": (self.gradient_difference, bounds.gradient, "of its norm"),
            "update": (self.update_difference, bounds.update, "of its norm"),
        }
        # Written so that a NaN is beyond every bound.
        return [
            f"{what}: differs by {found:.2g} {of}; the bound is {bound:.2g}"
            for what, (found, bound, of) in checks.items()
            if not found <= bound
        ]


def describe_layout(parallel: ParallelConfig) -> str:
    """A short name: tp2-sp-pp2, one."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    parts = ["sp" if name == "sp" else f"{name}{size}" for name, size in sizes.items() if size is True or size > 1]
    return "-".join(parts) or "one"


def run_layouts(
    specs: Mapping[str, WorkerSpec], samples: TrainingSamples, num_steps: int, scratch: Path, deadline_s: float
) -> dict[str, LayoutRun]:
    """Run the same `num_steps` optimizer steps over all samples under each spec; results under `scratch`.

    A critic whose checkpoint has no value head gets a random one: its own head of zeros would leave all other gradients
    at zero. Layouts of as many processes run one after the other in one group of processes, started with spawn: the
    caller's main module is imported again. Raises torch's ProcessRaisedException with the trace of a failed process,
    TimeoutError where a group has not ended after deadline_s for each of its layouts.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    specs = {name: _start_with_value_head(spec, scratch) for name, spec in specs.items()}
    results: dict[str, list[Metrics]] = {}
    for size in sorted({spec.parallel.num_processes for spec in specs.values()}):
        group = {name: spec for name, spec in specs.items() if spec.parallel.num_processes == size}
        out = scratch / f"metrics-{size}.pt"
        processes = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, (size, group, samples, num_steps, scratch, out), nprocs=size, join=False, start_method="spawn"
        )
        _wait(processes, size, deadline_s * len(group))
        results |= torch.load(out, weights_only=True)
    return {name: LayoutRun(spec.role, results[name], scratch / name) for name, spec in specs.items()}


def _start_with_value_head(spec: WorkerSpec, scratch: Path) -> WorkerSpec:
    """The spec; of a critic without a value head, with a copy of its checkpoint that has one."""
    source = Path(spec.checkpoint).resolve()
    if spec.role is not Role.critic:
        return spec
    with CheckpointReader(source) as reader:
        if VALUE_HEAD in reader:
            return spec
        names = reader.names
    directory = scratch / f"critic-{hashlib.sha256(str(source).encode()).hexdigest()[:16]}"
    if not directory.exists():
        directory.mkdir(parents=True)
        for file in source.iterdir():
            (directory / file.name).symlink_to(file)
        index = directory / INDEX
        weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(names, SINGLE)
        index.unlink(missing_ok=True)
        index.write_text(json.dumps({"weight_map": {**weight_map, VALUE_HEAD: "value-head.safetensors"}}))
        size = read_architecture(source).hidden_size
        head = torch.randn(1, size, generator=torch.Generator().manual_seed(spec.seed)) / size**0.5
        save_file({VALUE_HEAD: head}, directory / "value-head.safetensors")
    return replace(spec, checkpoint=str(directory))


def _wait(processes: Any, size: int, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    try:
        while not processes.join(timeout=5.0):
            if time.monotonic() > end:
                raise TimeoutError(f"{size} processes have not ended after {deadline_s:.0f} s")
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()


def _run_rank(
    rank: int,
    world_size: int,
    specs: dict[str, WorkerSpec],
    samples: TrainingSamples,
    num_steps: int,
    scratch: Path,
    out: Path,
) -> None:
    # Megatron is loaded in the processes that need it, and not where the comparison is read.
    from megarl.mcore.worker import MegatronWorker

    metrics: dict[str, list[Metrics]] = {}
    everything = torch.arange(samples.sequences.num_samples)
    for name, spec in specs.items():
        directory = scratch / name
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            worker.export_weights(directory / "before")
            worker.export_gradient(samples, directory / "gradient")
            metrics[name] = worker.update(samples, [everything] * num_steps)
            worker.export_weights(directory / "after")
        finally:
            worker.close()
        # Each of gloo's groups has threads, which end with the last reference to it; Megatron's models are cyclic.
        del worker
        # Twice: the gradients' hooks are cycles through autograd's own nodes, which the first pass only cuts.
        gc.collect()
        gc.collect()
        # What stays, modules mostly, need not be looked through after the next layout: that would take half a second.
        gc.freeze()
    if rank == 0:
        torch.save(metrics, out)


def compare_runs(run: LayoutRun, reference: LayoutRun) -> LayoutDifference:
    """Raises ValueError where the runs are of different models or steps."""
    if len(run.metrics) != len(reference.metrics):
        raise ValueError(f"{len(run.metrics)} steps against the reference's {len(reference.metrics)}")
    losses = zip(run.losses, reference.losses, reference.loss_sizes, strict=True)
    norms = zip(run.grad_norms, reference.grad_norms, strict=True)
    gradients = {
        name: _relative((found - expected).norm(), expected.norm())
        for name, found, expected in _read_pairs(run, reference, "gradient")
    }
    worst = max(gradients, key=lambda name: _nan_to_inf(gradients[name]))
    update_difference, largest = _compare_updates(run, reference)
    return LayoutDifference(
        loss=run.losses[-1],
        grad_norm=run.grad_norms[0],
        loss_difference=max(_nan_to_inf(abs(a - b) / size) for a, b, size in losses),
        grad_norm_difference=max(_nan_to_inf(abs(a - b) / b) for a, b in norms),
        gradient_difference=gradients[worst],
        gradient_tensor=worst,
        update_difference=update_difference,
        parameter_difference=largest,
    )


def _compare_updates(run: LayoutRun, reference: LayoutRun) -> tuple[float, float]:
    square = expected_square = torch.zeros((), dtype=torch.float64)
    largest = 0.0
    with CheckpointReader(run.directory / "before") as own, CheckpointReader(reference.directory / "before") as other:
        for name, found, expected in _read_pairs(run, reference, "after"):
            start, expected_start = own.read(name).double(), other.read(name).double()
            change = expected - expected_start
            square = square + (found - start - change).square().sum()
            expected_square = expected_square + change.square().sum()
            largest = max(largest, _nan_to_inf((found - expected).abs().max().item()))
    return _relative(square.sqrt(), expected_square.sqrt()), largest


def _read_pairs(run: LayoutRun, reference: LayoutRun, kind: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name and both runs' tensors, float64, one at a time."""
    with CheckpointReader(run.directory / kind) as own, CheckpointReader(reference.directory / kind) as other:
        if set(own.names) != set(other.names):
            raise ValueError(f"{run.directory}: other tensors than in {reference.directory}")
        for name in sorted(other.names):
            yield name, own.read(name).double(), other.read(name).double()


def _relative(difference: Tensor, size: Tensor) -> float:
    """difference / size; 0 where both are 0."""
    return 0.0 if difference == 0 and size == 0 else (difference / size).item()


def _nan_to_inf(number: float) -> float:
    return number if number == number else float("inf")
