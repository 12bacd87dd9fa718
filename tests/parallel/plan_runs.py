"""What the processes of the memory plan's tests run: a role from its start over two updates and an evaluation, and the
most that its tensors took.
"""

from typing import Any

import torch

import megarl.mcore  # noqa: F401
from megarl.mcore.spec import Role, WorkerSpec
from megarl.tools.gpu.measured import measuring_peaks
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


def measure_role(rank: int, world_size: int, spec: WorkerSpec, samples: TrainingSamples, init_method: str) -> int:
    """Bytes of the peak on this rank."""
    from megarl.mcore.worker import MegatronWorker

    with measuring_peaks() as meter, meter.phase("all"):
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
    return meter.peaks["all"]


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
