"""Memory of the update by phase beside the plan's, and the share of the peak that its products reach."""

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from megarl.config.load import load_config
from megarl.config.schema.roles import Dtype, ParallelConfig, Recompute
from megarl.config.schema.root import ClusterConfig, HardwareConfig
from megarl.mcore.microbatches import compute_row_costs
from megarl.mcore.spec import Role, WorkerSpec
from megarl.models.architecture import Architecture
from megarl.models.families import parse_architecture
from megarl.plan.job import PlannedModels, build_jobs, count_job
from megarl.plan.memory import ALLOCATOR_SHARE, GIB, PROCESS_GIB, RoleJob, StageMemory, compute_saved, estimate_stages
from megarl.plan.seconds import Work, compute_update
from megarl.tools.gpu.lines import Line, judge, skip
from megarl.tools.gpu.measured import measuring_peaks
from megarl.tools.gpu.setting import CUDA, Setting, build_spec, make_large_samples, write_checkpoint
from megarl.tools.gpu.training import open_worker
from megarl.types import TrainingSamples

MIB = 1 << 20
LEAST_MEMORY, MOST_MEMORY = 0.75, 1.10
"""Of the planned bytes, that a phase takes: with more a job that fits by its plan ends out of memory, with less it is
given GPUs that it does not need
"""
NUM_UPDATES = 3
"""Timed ones, of one optimizer step each, after one that is not"""
LEAST_OF_MFU = 0.5
"""Share of the planned MFU: below it the planned seconds are too few by more than twice"""
PEAKS = {"NVIDIA H100 80GB HBM3": "h100x8", "NVIDIA H200": "h200x8"}
"""The cluster whose hardware a GPU is, by the name that its driver tells. Of the same chip there are slower boards"""


def check_update(setting: Setting) -> Iterator[Line]:
    """The update of the large model with all activations recomputed."""
    yield from _check_sizes(setting, "update", Recompute.full)


def check_update_kept(setting: Setting) -> Iterator[Line]:
    """The update of the large model with all activations kept."""
    yield from _check_sizes(setting, "update_kept", Recompute.none)


def _check_sizes(setting: Setting, check: str, recompute: Recompute) -> Iterator[Line]:
    config, arch = setting.config, parse_architecture(setting.large, Path("model"))
    policy = replace(config.policy, recompute=recompute, parallel=ParallelConfig(), offload=None, fp8=None)
    config = replace(config, policy=policy)
    job = build_jobs(config, PlannedModels(arch, arch, arch), on_gpu=setting.device == CUDA)["policy"]
    (planned,) = estimate_stages(job, count_job(config, job))
    if setting.device == CUDA and planned.peak > (free := torch.cuda.mem_get_info()[0]):
        yield skip(
            check,
            "update",
            f"planned {planned.peak / GIB:.1f} GiB, and the GPU has {free / GIB:.1f} GiB of free memory",
        )
        return
    dtype = torch.float32 if policy.dtype is Dtype.float32 else torch.bfloat16
    checkpoint = setting.scratch / "large"
    if not checkpoint.exists():
        write_checkpoint(setting.large, checkpoint, dtype, setting.torch_device)
        if setting.device == CUDA:
            torch.cuda.empty_cache()
    spec = build_spec(setting, Role.policy, checkpoint, recompute=recompute)
    samples = make_large_samples(setting)
    saves = has_room(setting.scratch, planned.weights + planned.optimizer)
    measured = measure_phases(spec, samples, setting.scratch, check, saves=saves)
    yield from compare_memory(check, measured, planned, plan_saving(job, planned))
    yield _check_process(setting, check, measured, planned)
    yield from _check_speed(setting, check, spec, samples, job, planned)


def has_room(directory: Path, num_bytes: int) -> bool:
    return shutil.disk_usage(directory).free > 1.2 * num_bytes


def measure_phases(
    spec: WorkerSpec, samples: TrainingSamples, scratch: Path, name: str, *, saves: bool
) -> dict[str, int]:
    """Peak bytes of tensors while the model is built, in two updates, between the calls, in log-probs and, where it
    saves, while its state is copied to the host.
    """
    rows = [torch.arange(samples.sequences.num_samples)]
    with measuring_peaks() as meter, ExitStack() as stack:
        with meter.phase("building"):
            worker = stack.enter_context(open_worker(spec, scratch, f"{name}-memory"))
        with meter.phase("update"):
            worker.update(samples, rows * 2)
        with meter.phase("resident"):
            pass
        with meter.phase("forward"):
            worker.logprobs(samples.sequences, spec.temperature)
        if saves:
            with meter.phase("saving"):
                worker.begin_save(scratch / f"{name}-state")
            worker.finish_save()
            shutil.rmtree(scratch / f"{name}-state")
    return meter.peaks


def compare_memory(check: str, measured: dict[str, int], planned: StageMemory, saving: int) -> Iterator[Line]:
    """saving: planned bytes while a state is saved, on this kind of device."""
    phases = {
        "building": ("building the model", planned.building),
        "update": ("the update", planned.update),
        "resident": ("between the calls", planned.resident),
        "forward": ("log-probs", planned.forward),
        "saving": ("saving", saving),
    }
    for phase, (what, plan) in phases.items():
        if phase not in measured:
            reason = f"no room for a state of {_format_bytes(planned.weights + planned.optimizer)} (TMPDIR)"
            yield skip(check, f"memory, {what}", reason)
            continue
        ratio = measured[phase] / plan
        note = f"{_format_bytes(measured[phase])} of {_format_bytes(plan)}"
        bounds = {"least": LEAST_MEMORY, "most": MOST_MEMORY}
        yield judge(check, f"memory, {what}", ratio, **bounds, unit="of the plan", reason=note)


def plan_saving(job: RoleJob, planned: StageMemory) -> int:
    """The peak of a save; on a CPU what is copied to the host for the disk are tensors like the others."""
    return planned.checkpoint if job.on_gpu else planned.resident + compute_saved(job, planned.parameters, 0)


def _format_bytes(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.1f} MiB"


def _check_process(setting: Setting, check: str, measured: dict[str, int], planned: StageMemory) -> Line:
    """What the GPU holds of this process besides tensors: CUDA's context, kernels, workspaces, and what torch's
    allocator, which has returned nothing since the peak, holds beyond it.
    """
    what = "memory besides tensors"
    if setting.device != CUDA:
        return skip(check, what, "needs a GPU")
    free, total = torch.cuda.mem_get_info()
    besides = total - free - max(measured.values())
    most = PROCESS_GIB + ALLOCATOR_SHARE * planned.peak / GIB
    return judge(check, what, besides / GIB, most=most, unit="GiB", reason="with that of other processes on the GPU")


def _check_speed(
    setting: Setting, check: str, spec: WorkerSpec, samples: TrainingSamples, job: RoleJob, planned: StageMemory
) -> Iterator[Line]:
    flops = count_update_flops(job.arch, samples)
    with open_worker(spec, setting.scratch, f"{check}-speed") as worker:
        rows = [torch.arange(samples.sequences.num_samples)]
        seconds = []
        for _ in range(NUM_UPDATES + 1):
            _synchronize()
            start = time.perf_counter()
            worker.update(samples, rows)
            _synchronize()
            seconds.append(time.perf_counter() - start)
        computes = worker.describe().splitlines()[0]
    median = statistics.median(seconds[1:])
    tokens = int(samples.sequences.lengths.sum())
    longest = int(samples.sequences.lengths.max())
    note = f"{tokens / median:.0f} tokens/s, sequences of {longest}; {computes}"
    hardware = find_hardware(setting)
    expected = plan_seconds(job, planned, spec, samples, hardware) if hardware else 0.0
    yield judge_speed(check, flops, median, expected, hardware, note)


def plan_seconds(
    job: RoleJob, planned: StageMemory, spec: WorkerSpec, samples: TrainingSamples, hardware: HardwareConfig
) -> float:
    """The planner's seconds of one update of the samples, all of which are as long as the first."""
    sequences = samples.sequences
    prompt, response = int(sequences.prompt_lengths[0]), int(sequences.response_lengths[0])
    work = Work(sequences.num_samples, sequences.num_samples, prompt, response, spec.tokens_per_microbatch)
    return compute_update(job, (planned,), work, ClusterConfig(gpus_per_node=1, hardware=hardware))


def judge_speed(
    check: str, flops: float, seconds: float, planned_s: float, hardware: HardwareConfig | None, note: str
) -> Line:
    """The MFU of an update beside that of its planned seconds, or TFLOP/s where the peak is not known."""
    if hardware is None:
        reason = f"unknown peak (cluster.hardware.bf16_tflops): TFLOP/s only; {note}"
        return skip(check, "speed of the update", reason, flops / seconds / 1e12, "TFLOP/s")
    peak = hardware.bf16_tflops * 1e12
    planned = flops / planned_s / peak
    note = f"planned {planned:.2f}; {flops / seconds / 1e12:.0f} of {hardware.bf16_tflops:g} TFLOP/s; {note}"
    mfu = flops / seconds / peak
    return judge(check, "MFU of the update", mfu, least=LEAST_OF_MFU * planned, unit="of the peak", reason=note)


def count_update_flops(arch: Architecture, samples: TrainingSamples) -> float:
    """Model FLOPs of a forward pass and of a backward pass, which is twice that; without what is recomputed."""
    return 3 * 2 * sum(compute_row_costs(arch, samples.sequences))


def find_hardware(setting: Setting) -> HardwareConfig | None:
    """The configured hardware or, on a GPU whose name is known, its; None: the peak is not known."""
    hardware = setting.config.cluster.hardware
    if hardware.gpu is not None or setting.device != CUDA:
        return hardware if hardware.gpu is not None else None
    cluster = PEAKS.get(torch.cuda.get_device_name())
    return load_config([f"cluster={cluster}"]).cluster.hardware if cluster else None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
