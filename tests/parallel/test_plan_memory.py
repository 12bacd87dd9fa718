"""What a plan says of a role's memory, against the peak of tensor memory in a run of it.

Nothing in megarl/plan was fitted to a measurement: its formulas count what Megatron's operations keep.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import collect, launch, launch_each, working

from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.mcore.spec import Role, WorkerSpec
from megarl.models.checkpoint import resolve_checkpoint
from megarl.plan.job import build_jobs, count_job, find_models
from megarl.plan.memory import StageMemory, compute_saved, estimate_stages
from megarl.run.inputs import build_specs
from megarl.tools.gpu.measured import measuring_peaks
from megarl.types import Sequences, TrainingSamples

pytestmark = pytest.mark.slow

WITHIN = 0.10
PROMPT = 4

SIZES: dict[str, tuple[Role, int, int, list[str]]] = {
    "one": (
        *(Role.policy, 1, 2400),
        [
            "model.random={num_layers: 5, hidden_size: 160, ffn_size: 560, num_heads: 5, num_kv_heads: 5}",
            *("policy.dtype=float32", "rollout.response_length=156", "train.tokens_per_microbatch=640"),
        ],
    ),
    "recomputed": (
        *(Role.policy, 1, 700),
        [
            "model.random={family: llama, num_layers: 6, hidden_size: 224, ffn_size: 700, num_heads: 7}",
            "model.random.num_kv_heads=1",
            *("policy.dtype=bfloat16", "policy.recompute=full", "policy.recompute_num_layers=2"),
            *("rollout.response_length=332", "train.tokens_per_microbatch=1344"),
        ],
    ),
    "tensor_parallel_critic": (
        *(Role.critic, 2, 900),
        [
            "model.random={family: qwen2, num_layers: 9, hidden_size: 144, ffn_size: 640, num_heads: 6}",
            *("critic.parallel={num_processes: 2, tp: 2, sp: true}", "critic.dtype=float32"),
            *("rollout.response_length=96", "train.tokens_per_microbatch=800"),
        ],
    ),
    "pipeline": (
        *(Role.policy, 2, 1600),
        [
            "model.random={num_layers: 6, hidden_size: 128, ffn_size: 448, num_heads: 4, num_kv_heads: 2}",
            *("policy.parallel={num_processes: 2, pp: 2}", "policy.dtype=float32"),
            *("rollout.response_length=124", "train.tokens_per_microbatch=512"),
        ],
    ),
}
"""Role, processes, words of the vocabulary, and the rest of the job. Rows of full length fill micro-batches exactly:
planned is the fullest that packing may make.
"""


def build_config(name: str) -> Config:
    _, _, vocabulary, overrides = SIZES[name]
    job = ("algo=ppo", "model=tiny", "train.samples_per_minibatch=16", "train.prompts_per_iteration=16")
    sizes = ("model.random.max_length=512", "rollout.kv_cache_tokens=4096", f"data.prompt_length={PROMPT}")
    config = load_config([*job, *sizes, *overrides])
    config.model.random.alphabet = "".join(chr(0x4E00 + number) for number in range(vocabulary))
    return config


def predict(name: str) -> tuple[StageMemory, ...]:
    role, config = SIZES[name][0].value, build_config(name)
    job = build_jobs(config, find_models(config), on_gpu=torch.cuda.is_available())[role]
    return estimate_stages(job, count_job(config, job))


def build_full_samples(num_samples: int, prompt: int, response: int) -> TrainingSamples:
    """All as long as they may be."""
    ones, lengths = torch.ones(num_samples, response), torch.full((num_samples,), prompt + response)
    tokens = torch.ones(int(lengths.sum()), dtype=torch.int64)
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values", "returns")
    return TrainingSamples(
        sequences=Sequences(tokens, lengths, torch.full_like(lengths, prompt)),
        mask=ones.bool(),
        loss_mask=ones.bool(),
        positive=torch.ones(num_samples, dtype=torch.bool),
        sampling_logprobs=None,
        **dict.fromkeys(names, -ones),
    )


def measure_roles(rank: int, world_size: int, runs: dict[str, tuple[WorkerSpec, Any]], scratch: Path) -> dict[str, Any]:
    """Bytes of each rank's peak over the start, two updates and an evaluation."""
    found = {}
    for name, (spec, sizes) in runs.items():
        samples = build_full_samples(*sizes)
        with ExitStack() as stack:
            with measuring_peaks() as meter, meter.phase("all"):
                worker = stack.enter_context(working(spec, rank, world_size, scratch / name))
                worker.update(samples, [torch.arange(samples.sequences.num_samples)] * 2)
                is_critic = spec.role is Role.critic
                worker.values(samples.sequences) if is_critic else worker.logprobs(samples.sequences, 1.0)
            found[name] = collect(meter.peaks["all"])
        del worker
    return found


def measure_save(worker: Any, directory: Path) -> int:
    """Bytes at the peak of a save, beside those that are there before it."""
    with measuring_peaks() as meter, meter.phase("save"):
        worker.begin_save(directory)
    worker.finish_save()
    return meter.peaks["save"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Bytes of the peak of each rank."""
    cache = tmp_path_factory.mktemp("plan")
    runs: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for name, (role, world_size, _, _) in SIZES.items():
        config = build_config(name)
        spec = build_specs(config, Path(resolve_checkpoint(config.model, cache)))[role]
        runs[world_size][name] = (spec, (config.train.num_samples, PROMPT, config.rollout.response_length))
    return launch(1, measure_roles, runs[1]) | launch(2, measure_roles, runs[2])


@pytest.mark.parametrize("name", SIZES)
def test_the_planned_peak_is_within_a_tenth_of_the_measured_one(name: str, measured: dict[str, list[int]]) -> None:
    stages = predict(name)
    ranks_per_stage = len(measured[name]) // len(stages)
    planned = [stage.peak for stage in stages for _ in range(ranks_per_stage)]
    ratios = [round(plan / found, 3) for plan, found in zip(planned, measured[name], strict=True)]
    print(f"{name}: planned / measured {ratios}, measured MB {[found // 10**6 for found in measured[name]]}")
    assert all(abs(ratio - 1) <= WITHIN for ratio in ratios), ratios
    parts = stages[0]
    # Neither the parameters alone nor the activations alone make the peak.
    assert 0.1 * parts.peak < parts.activations + parts.head + parts.work < 0.9 * parts.peak


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_planned_memory_of_a_save_is_within_a_tenth_of_the_measured_one(dtype: str, tmp_path: Path) -> None:
    sizes = "model.random={num_layers: 4, hidden_size: 256}"
    config = load_config(["algo=grpo", "model=tiny", f"policy.dtype={dtype}", sizes])
    job = build_jobs(config, find_models(config), on_gpu=False)["policy"]
    (stage,) = estimate_stages(job, count_job(config, job))
    planned = compute_saved(job, stage.parameters, 0)
    spec = build_specs(config, Path(resolve_checkpoint(config.model, tmp_path)))[Role.policy]
    found = launch_each(measure_save, {dtype: spec})[dtype]
    print(f"{dtype}: planned / measured {planned / found}, measured {found}")
    assert abs(planned / found - 1) <= WITHIN
