"""Checks of the update: on this device against a CPU, and FP8 against bfloat16, also saved and loaded."""

import gc
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.schema.roles import Dtype, Fp8, LoraConfig, LoraLayers
from megarl.mcore.spec import Role, WorkerSpec
from megarl.tools.gpu.lines import Line, fail, judge, skip
from megarl.tools.gpu.setting import Setting, build_small_spec, make_small_samples, write_checkpoint

CASES: dict[str, tuple[Role, dict[str, Any]]] = {
    "policy": (Role.policy, {}),
    "critic": (Role.critic, {}),
    "critic with adapters": (Role.critic, {"lora": LoraConfig(rank=8, layers=[LoraLayers.attention])}),
}
NUM_STEPS = 3
OF_NORM = "share of its norm"


@dataclass(frozen=True)
class Bounds:
    before: float
    """Largest |difference| of a log-prob or value before the first step"""
    gradient: float
    """Norm of the difference as a share of its norm"""
    change: float
    """The same of what three steps changed of the log-probs or values"""


# On a CPU the engine in bfloat16 differs from itself in float32 by 0.05 in a log-prob, by 6 % in the gradient. The
# bounds of FP8 are not measured: its numbers have 3 bits of mantissa, those of gradients 2, where bfloat16 has 7.
BOUNDS = {"float32": Bounds(1e-4, 1e-3, 1e-2), "bfloat16": Bounds(0.1, 0.15, 0.15), "fp8": Bounds(0.5, 0.5, 0.7)}

Results = dict[str, dict[str, Any]]
"""By case: before and after (float32 [B, T]), gradient (tensors by their Hugging Face names)"""


@contextmanager
def open_worker(spec: WorkerSpec, scratch: Path, name: str) -> Iterator[Any]:
    """The worker of `spec` alone in this process."""
    from megarl.mcore.worker import MegatronWorker

    # Megatron's models are cyclic: the one before leaves its memory only now.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    worker = MegatronWorker(spec, 0, 1, f"file://{scratch}/{name}.init")
    try:
        yield worker
    finally:
        worker.close()


def find_small_checkpoint(setting: Setting) -> Path:
    """Random weights, written once for all checks: on the CPU, so that they do not depend on the GPU."""
    directory = setting.scratch / "small"
    if not directory.exists():
        building = setting.scratch / f"small-{os.getpid()}"
        write_checkpoint(setting.small, building, torch.float32, torch.device("cpu")).rename(directory)
    return directory


def run_updates(spec: WorkerSpec, scratch: Path, name: str) -> dict[str, Any]:
    """What the model says, three steps, the gradient after the first of them, what the model says then."""
    from safetensors.torch import load_file

    samples = make_small_samples()
    rows = [torch.arange(samples.sequences.num_samples)]
    with open_worker(spec, scratch, name) as worker:

        def evaluate() -> Tensor:
            critic = spec.role is Role.critic
            result = worker.values(samples.sequences) if critic else worker.logprobs(samples.sequences, 1.0)
            values: Tensor = result.values
            return values

        before = evaluate()
        worker.update(samples, rows)
        # A critic's first gradient is in its new head alone.
        worker.export_gradient(samples, scratch / f"{name}-gradient")
        worker.update(samples, rows * (NUM_STEPS - 1))
        gradient = load_file(scratch / f"{name}-gradient" / "model.safetensors")
        return {
            "before": before,
            "after": evaluate(),
            "gradient": gradient,
            "computes": worker.describe().splitlines()[0],
        }


def run_cases(
    setting: Setting, name: str, dtype: Dtype, cases: Sequence[str] = tuple(CASES), **changes: Any
) -> Results:
    checkpoint = find_small_checkpoint(setting)

    def run(number: int, role: Role, own: dict[str, Any]) -> dict[str, Any]:
        spec = build_small_spec(setting, role, checkpoint, dtype, **own, **changes)
        return run_updates(spec, setting.scratch, f"{name}-{number}")

    return {case: run(number, *CASES[case]) for number, case in enumerate(cases)}


def save_reference(setting: Setting) -> None:
    """The results in float32 of this process, which must see no GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("the reference is computed on the CPU, and this process sees a GPU")
    results = run_cases(setting, "reference", Dtype.float32)
    torch.save(results, setting.scratch / "reference.partial")
    (setting.scratch / "reference.partial").rename(setting.scratch / "reference.pt")


def find_reference(setting: Setting) -> Results:
    """Computed once for all checks, in a process that sees no GPU. Raises CalledProcessError where that fails."""
    file = setting.scratch / "reference.pt"
    if not file.exists():
        code = "import sys, pathlib; from megarl.tools.gpu.setting import Setting"
        code += "; from megarl.tools.gpu.training import save_reference"
        code += "; save_reference(Setting(sys.argv[1], tuple(sys.argv[3:]), pathlib.Path(sys.argv[2])))"
        command = [sys.executable, "-c", code, setting.device, str(setting.scratch), *setting.overrides]
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    results: Results = torch.load(file, weights_only=True)
    return results


def find_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference over all tensors, as a share of the expected ones' norm."""
    if set(found) != set(expected):
        return math.inf
    difference = sum(float((found[name].double() - x.double()).square().sum()) for name, x in expected.items())
    size = sum(float(x.double().square().sum()) for x in expected.values())
    return math.sqrt(difference / size) if size else math.inf


def compare_results(check: str, found: Results, expected: Results) -> Iterator[Line]:
    bounds = BOUNDS[check]
    for case, reference in expected.items():
        own, is_critic = found[case], CASES[case][0] is Role.critic
        output = "values" if is_critic else "log-probs"
        if not is_critic:  # A new value head says 0, whatever is below it.
            gap = float((own["before"] - reference["before"]).abs().max())
            what = f"{case}: {output} before the first step"
            yield judge(check, what, gap, most=bounds.before, unit="largest difference")
        share = find_difference(own["gradient"], reference["gradient"])
        yield judge(check, f"{case}: gradient", share, most=bounds.gradient, unit=OF_NORM, reason=own["computes"])
        changes = [{"": result["after"] - result["before"]} for result in (own, reference)]
        what = f"{case}: change of {output} in {NUM_STEPS} steps"
        yield judge(check, what, find_difference(*changes), most=bounds.change, unit=OF_NORM)


def check_float32(setting: Setting) -> Iterator[Line]:
    """The update on this device against the CPU's, both in float32."""
    yield from compare_results("float32", run_cases(setting, "float32", Dtype.float32), find_reference(setting))


def check_bfloat16(setting: Setting) -> Iterator[Line]:
    """The update on this device in bfloat16 against the CPU's in float32."""
    if "experts" in str(setting.large) or "moe" in str(setting.large["model_type"]):
        yield skip("bfloat16", "update", "a token near a tie of the router goes to other experts in another precision")
        return
    yield from compare_results("bfloat16", run_cases(setting, "bfloat16", Dtype.bfloat16), find_reference(setting))


def check_fp8(setting: Setting) -> Iterator[Line]:
    """The update with FP8 products against bfloat16, both on this device."""
    cases = ("policy", "critic")  # Adapters have no FP8.
    plain = run_cases(setting, "fp8-bfloat16", Dtype.bfloat16, cases)
    found = run_cases(setting, "fp8", Dtype.bfloat16, cases, fp8=Fp8.hybrid)
    if all(torch.equal(found[case]["before"], plain[case]["before"]) for case in plain):
        yield fail("fp8", "FP8 products", "the same bits as in bfloat16: no product was computed in FP8")
        return
    yield from compare_results("fp8", found, plain)
    from megarl.tools.gpu.ranks import find_experts, save_and_load

    yield from save_and_load(setting, "fp8", fp8=Fp8.hybrid)
    yield from save_and_load(setting, "fp8", "experts", fp8=Fp8.hybrid, checkpoint=find_experts(setting))
