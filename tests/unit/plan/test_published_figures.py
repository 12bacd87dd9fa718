"""The planned seconds beside published ones, from which no constant was fitted exactly (docs/results/planner.md)."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from plan_jobs import ARCH_235B, CLUSTER, build_role

from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.spec import StageParameters
from megarl.models.architecture import Architecture
from megarl.models.families import parse_architecture
from megarl.plan.job import PUBLISHED, JobPlan, build_plan, find_models
from megarl.plan.memory import MicroBatch, estimate_stages
from megarl.plan.seconds import Work, compute_update

DOCS = Path(__file__).resolve().parents[3] / "docs" / "results" / "planner.md"


def describe(layers: int, hidden: int, ffn: int, heads: int) -> Architecture:
    llama = parse_architecture(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"], Path("llama"))
    return replace(llama, num_layers=layers, hidden_size=hidden, ffn_size=ffn, num_heads=heads)


LLAMA_8B, LLAMA_70B = describe(32, 4096, 14336, 32), describe(80, 8192, 28672, 64)
LLAMA_405B = describe(126, 16384, 53248, 128)
assert ARCH_235B.experts is not None
QWEN_30B = replace(
    ARCH_235B, num_layers=48, hidden_size=2048, num_heads=32, experts=replace(ARCH_235B.experts, ffn_size=768)
)
OSS_120B = replace(
    ARCH_235B,
    num_layers=36,
    hidden_size=2880,
    num_kv_heads=8,
    head_size=64,
    vocab_size=201088,
    qk_norm=False,
    experts=replace(ARCH_235B.experts, ffn_size=2880, top_k=4),
)


@dataclass(frozen=True)
class Row:
    """Pre-training on H100s, without recomputation, of sequences of the same length."""

    name: str
    arch: Architecture
    parallel: ParallelConfig
    samples: int
    length: int
    seconds: float
    """Published, of one step"""
    fp8: bool = False


def layout(num_processes: int, tp: int, pp: int, vpp: int = 1, cp: int = 1, ep: int = 1) -> ParallelConfig:
    return ParallelConfig(num_processes, tp, tp > 1, pp, vpp, cp, ep)


ROWS = (
    Row("Llama 3.1 70B", LLAMA_70B, layout(64, 4, 4, 5, cp=2), 128, 8192, 14.72),
    Row("Llama 3.1 70B, FP8", LLAMA_70B, layout(64, 4, 4, 5, cp=2), 128, 8192, 11.01, True),
    Row("Llama 3 70B, SFT", LLAMA_70B, layout(32, 4, 4, 5), 32, 4096, 3.36),
    Row("Llama 3 8B, FP8", LLAMA_8B, layout(8, 1, 1), 128, 8192, 128 * 8192 / 8 / 14451, True),
    Row("Llama 3.1 405B, FP8", LLAMA_405B, layout(1024, 8, 8, 8, 2), 1536, 8192, 12582912 / 1024 / 311, True),
    Row("GPT-OSS 120B", OSS_120B, layout(64, 1, 4, ep=8), 1280, 4096, 1280 * 4096 / 64 / 5993),
    Row("Qwen3 30B-A3B, FP8", QWEN_30B, layout(16, 1, 2, 12, ep=8), 1024, 4096, 4194304 / 16 / 5113, True),
    Row("Qwen3 235B-A22B", ARCH_235B, layout(256, 2, 8, 4, ep=32), 2048, 4096, 25.53),
)


def plan_row(row: Row) -> float:
    arch, parallel, length = row.arch, row.parallel, row.length
    tokens = length // parallel.cp
    job = build_role(arch, parallel, batch=MicroBatch(tokens, tokens, length), fp8=row.fp8)
    layers, h = arch.num_layers / parallel.pp, arch.hidden_size
    projections = 2 * h * arch.head_size * (arch.num_heads + arch.num_kv_heads)
    dense = layers * (projections + (0 if arch.experts else 3 * h * arch.ffn_size)) / parallel.tp
    experts = layers * 3 * h * arch.experts.ffn_size * arch.experts.num_experts / parallel.ep if arch.experts else 0
    stages = (StageParameters(layers, int(dense), int(experts), 0, 0),) * parallel.pp  # type: ignore[arg-type]
    work = Work(row.samples, row.samples, 0, length, tokens)
    return compute_update(job, estimate_stages(job, stages), work, CLUSTER)


def find_line(name: str) -> str:
    return next((line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |")), "")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_planned_steps_are_as_far_from_published_ones_as_the_docs_say(row: Row) -> None:
    planned = plan_row(row)
    shown = f"| {row.seconds:.2f} | {planned:.2f} | {planned / row.seconds:.2f} |"
    assert find_line(row.name).endswith(shown), f"{row.name}: {shown}"


NEMO = (
    *("algo=grpo", "data.prompt_length=128", "train.samples_per_minibatch=512", "train.responses_per_prompt=32"),
    # NeMo-RL computes the policy's log-probs before each update.
    *("train.tokens_per_microbatch=4096", "train.reuse_logprobs=false"),
)
LAYOUT_32B = "{num_processes: 32, tp: 4, sp: true, pp: 4, cp: 1}"
QWEN3_32B = (
    *("model=qwen32b", "model.path=Qwen/Qwen3-32B", "cluster=h100x64", "train.samples_per_iteration=2048"),
    *("rollout.response_length=3968", "rollout.num_servers=8", "rollout.tp=4", "policy.recompute=none"),
    *(f"policy.parallel={LAYOUT_32B}", f"reference.parallel={LAYOUT_32B}"),
)
LAYOUT_235B = "{num_processes: 256, tp: 2, sp: true, pp: 8, cp: 2, ep: 16}"
QWEN3_235B = (
    *("model=qwen3_235b_a22b", "cluster=h100x256", "train.samples_per_iteration=512", "rollout.response_length=8064"),
    *("rollout.num_servers=32", "rollout.tp=8", "policy.recompute=full"),
    *(f"policy.parallel={LAYOUT_235B}", f"reference.parallel={LAYOUT_235B}"),
    *("model.megatron.num_layers_in_first_pipeline_stage=11", "model.megatron.num_layers_in_last_pipeline_stage=11"),
)
TURNS = ("policy.offload=all", "reference.offload=all")
COLOCATED = (*TURNS, "cluster.placement=colocated", "rollout.offload=all", "rollout.transport=colocated")


def plan_nemo(mean: int, *overrides: str) -> JobPlan:
    """mean: tokens of a sequence, as published."""
    config = load_config([*NEMO, *overrides])
    return build_plan(config, find_models(config), mean_response=mean - 128)


@pytest.mark.parametrize(
    ("name", "published", "mean", "overrides"),
    [
        (
            "Qwen3-32B, 64 GPUs, one step off-policy", 200, 3252,
            (*QWEN3_32B, *TURNS, "cluster.placement=split", "rollout.max_staleness=1", "algo.mismatch.correction=tis"),
        ),
        (
            "Qwen3-32B, 32 GPUs, on-policy", 376, 3251,
            (*QWEN3_32B, *COLOCATED, "cluster.num_nodes=4", "rollout.sglang.mem_fraction_static=0.6"),
        ),
        ("Qwen3-235B-A22B, 256 GPUs, on-policy", 312, 5713, (*QWEN3_235B, *COLOCATED)),
    ],
)  # fmt: skip
def test_the_totals_for_nemo_rls_tables_are_those_of_the_docs(
    name: str, published: int, mean: int, overrides: tuple[str, ...]
) -> None:
    seconds = plan_nemo(mean, *overrides).seconds
    parts = (seconds.generation, seconds.scoring, seconds.update, seconds.offload, seconds.sync)
    total = seconds.iteration
    numbers = [*(f"{part:,.0f}" for part in parts), f"{total:,.0f}", f"{published}", f"{total / published:.2f}"]
    shown = " | ".join(numbers)
    assert find_line(name) == f"| {name} | {mean:,} | {shown} |"
