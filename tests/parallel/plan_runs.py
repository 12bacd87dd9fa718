"""What the processes of the memory plan's tests run: a role from its start over two updates and an evaluation, and the
most that its tensors took.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import megarl.mcore  # noqa: F401
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples


def build_full_samples(num_samples: int, prompt: int, response: int) -> TrainingSamples:
    """All as long as they may be."""
    ones = torch.ones(num_samples, response)
    lengths = torch.full((num_samples,), prompt + response)
    return TrainingSamples(
        sequences=Sequences(
            torch.ones(int(lengths.sum()), dtype=torch.int64), lengths, torch.full_like(lengths, prompt)
        ),
        mask=ones.bool(),
        loss_mask=ones.bool(),
        positive=torch.ones(num_samples, dtype=torch.bool),
        advantages=ones,
        rollout_logprobs=-ones,
        old_logprobs=-ones,
        sampling_logprobs=None,
        ref_logprobs=-ones,
        old_values=ones,
        returns=ones,
    )


class Peak:
    """Bytes of tensors, above those at the start."""

    num_bytes = 0


@contextmanager
def measuring_peak() -> Iterator[Peak]:
    """Of this process's GPU, or of torch's allocator on a CPU, whose allocations the profiler records."""
    found = Peak()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.num_bytes = torch.cuda.max_memory_allocated() - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    found.num_bytes = find_peak(profile)


def find_peak(profile: torch.profiler.profile) -> int:
    """Most bytes that were held at once. What gloo's threads free is not recorded: such a tensor counts until its
    place in memory is taken again.
    """
    pending, allocations = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    held: dict[int, int] = {}
    total = peak = 0
    for _, place, size in sorted(allocations, key=lambda allocation: allocation[0]):
        total -= held.pop(place, 0)
        if size > 0:
            held[place] = size
            total += size
            peak = max(peak, total)
    return peak


def measure_role(rank: int, world_size: int, spec: WorkerSpec, samples: TrainingSamples, init_method: str) -> int:
    """Bytes of the peak on this rank."""
    from megarl.mcore.worker import MegatronWorker

    with measuring_peak() as peak:
        worker = MegatronWorker(spec, rank, world_size, init_method)
        try:
            rows = [torch.arange(samples.sequences.num_samples)] * 2
            worker.update(samples, rows)
            if spec.role is Role.critic:
                worker.values(samples.sequences)
            else:
                worker.logprobs(samples.sequences, 1.0)
        finally:
            worker.close()
        del worker
    return peak.num_bytes


def measure_roles(
    rank: int, world_size: int, runs: dict[str, tuple[WorkerSpec, int, int, int]], scratch: str
) -> dict[str, list[int]]:
    """Bytes of the peak of every rank, by the run's name. runs: with samples, tokens of prompt and of response."""
    results = {}
    for name, (spec, *sizes) in runs.items():
        init_method = f"file://{scratch}/{name}.init"
        found = measure_role(rank, world_size, spec, build_full_samples(*sizes), init_method)
        results[name] = found
    return share(results, rank, world_size, scratch)


def share(results: dict[str, int], rank: int, world_size: int, scratch: str) -> dict[str, Any]:
    """What every rank found, on all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{scratch}/share.init", rank=rank, world_size=world_size)
    try:
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, results)
        return {name: [part[name] for part in parts] for name in results}
    finally:
        dist.destroy_process_group()
