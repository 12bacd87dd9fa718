"""Seconds of passes, generation, offloading, syncs, value pretraining, by hand and beside published ones, from which no
constant was fitted exactly (docs/results.md); when Slurm must signal a job.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_jobs import ARCH_32B, ARCH_235B, CLUSTER, PRESET, build_role
from plan_jobs import QWEN32B as JOB

from megarl.config.load import load_config
from megarl.config.schema.roles import (
    CriticConfig,
    Fp8,
    LoraConfig,
    Offload,
    ParallelConfig,
    Recompute,
    RecomputeMethod,
)
from megarl.config.schema.root import Config
from megarl.mcore.model import count_stages
from megarl.mcore.spec import StageParameters
from megarl.models.architecture import Architecture
from megarl.models.families import parse_architecture
from megarl.plan.job import FIRST, LAST, PUBLISHED, JobPlan, build_plan, count_job, find_models
from megarl.plan.memory import DEFAULT_MODULES, MicroBatch, RoleJob, StageMemory, estimate_stages
from megarl.plan.seconds import (
    Seconds,
    Work,
    compute_forward,
    compute_layer_seconds,
    compute_offload,
    compute_update,
    count_microbatches,
    describe_work,
    find_peak_tflops,
)
from megarl.plan.tables import REQUEUE_S, SIGNAL_S, describe_pretraining, find_costs, find_signal


def build_job(arch: Architecture = ARCH_32B, **layout: int) -> RoleJob:
    parallel = ParallelConfig(**{"num_processes": 64, "sp": layout.get("tp", 1) > 1, **layout})  # type: ignore[arg-type]
    return build_role(arch, parallel)


def plan(*overrides: str) -> tuple[Config, JobPlan]:
    config = load_config([*JOB, *overrides])
    return config, build_plan(config, find_models(config))


def build_stages(job: RoleJob, *layers: int) -> tuple[StageMemory, ...]:
    return estimate_stages(job, tuple(StageParameters(number, 0, 0, 0, 0) for number in layers))


def test_a_layers_products_and_collectives_are_its_operations_and_bytes_over_the_peaks() -> None:
    layer = compute_layer_seconds(build_job(tp=8), CLUSTER, tokens=8192, length=4096)
    h, queries, keys, f = 5120, 40 * 128, 8 * 128, 27648
    multiply_adds = 8192 * (2 * h * (queries + keys) + 3 * h * f) / 8
    assert layer.products == pytest.approx(2 * multiply_adds / (0.72 * 989e12))
    assert layer.attention == pytest.approx(2 * 8192 * 4096 * queries / 8 / (0.5 * 989e12))
    # Two gathers and two scatters, each of 7/8 of [tokens, h] in bfloat16; half of them hidden in the backward pass.
    sent = 4 * 8192 * h * 2 * 7 / 8 / (0.8 * 450e9)
    assert layer.tensor_parallel == pytest.approx(sent)
    twice = layer.products + layer.attention + layer.memory + layer.fixed
    assert layer.backward == pytest.approx(2 * twice + sent / 2)
    alone = compute_layer_seconds(build_job(), CLUSTER, 8192, 4096)
    assert (alone.tensor_parallel, alone.context_parallel, alone.experts) == (0, 0, 0)


def test_the_ring_of_context_parallelism_hides_behind_long_sequences_only() -> None:
    job = build_job(tp=8, cp=8)
    assert compute_layer_seconds(job, CLUSTER, 2048, 65536).context_parallel == 0
    assert compute_layer_seconds(job, CLUSTER, 2048, 512).context_parallel > 0


def test_tokens_reach_experts_of_their_node_over_nvlink_and_others_over_the_network() -> None:
    near = compute_layer_seconds(build_job(ARCH_235B, ep=8), CLUSTER, 4096, 4096).experts
    far = compute_layer_seconds(build_job(ARCH_235B, ep=16), CLUSTER, 4096, 4096).experts
    routed = 2 * 4096 * 8 * 4096 * 2  # to the experts and back, 8 of them, 4,096 numbers of 2 bytes
    assert near == pytest.approx(routed * 7 / 8 / (0.8 * 450e9))
    assert far == pytest.approx(routed * 15 / 16 * 8 / 15 / (0.8 * 50e9))


WORK = Work(num_samples=512, minibatch=512, prompt=1024, response=3072, budget=8192)


def test_a_pipeline_waits_for_its_other_stages_once_a_minibatch_and_interleaving_shortens_it() -> None:
    def update(vpp: int, pp: int = 4) -> float:
        job = build_job(tp=4, pp=pp, vpp=vpp)
        return compute_update(job, build_stages(job, *(64 // pp,) * pp), WORK, CLUSTER)

    # 4 replicas of 128 samples, two in a micro-batch: 64 of them, and 3 that wait; interleaved in halves, 1.5.
    assert count_microbatches(build_job(tp=4, pp=4), WORK, 128) == (64, 8192)
    assert update(1) / update(2) == pytest.approx((64 + 3) / (64 + 1.5))


def test_the_slowest_stage_decides() -> None:
    job = build_job(tp=8, pp=4)
    even, uneven = build_stages(job, 16, 16, 16, 16), build_stages(job, 24, 16, 16, 8)
    assert compute_forward(job, uneven, WORK, CLUSTER) > 1.3 * compute_forward(job, even, WORK, CLUSTER)


def test_recomputation_adds_the_forward_pass_of_the_layers_that_it_recomputes() -> None:
    def update(recompute: Recompute, modules: Sequence[str] = DEFAULT_MODULES, **keys: Any) -> float:
        job = build_job(tp=8)
        job = replace(job, node=replace(job.node, recompute=recompute, **keys), modules=modules)
        return compute_update(job, build_stages(job, 64), WORK, CLUSTER)

    none, full = update(Recompute.none), update(Recompute.full)
    layer = compute_layer_seconds(build_job(tp=8), CLUSTER, 8192, 4096)
    # 8 replicas of 64 samples, two in a micro-batch.
    assert full - none == pytest.approx(32 * 64 * layer.forward)
    quarter = update(Recompute.full, recompute_method=RecomputeMethod.block, recompute_num_layers=16)
    assert quarter - none == pytest.approx((full - none) / 4)
    attention = update(Recompute.selective)
    assert attention - none == pytest.approx(32 * 64 * layer.attention)
    mlp = update(Recompute.selective, ("mlp",))
    assert attention < mlp < full


def test_micro_batches_that_are_too_small_cost_the_time_between_them() -> None:
    job = build_job(tp=8)
    stages = build_stages(job, 64)
    small, large = (compute_update(job, stages, replace(WORK, budget=size), CLUSTER) for size in (4096, 16384))
    # 64 micro-batches instead of 16, of 64 layers each: forward once, backward twice.
    assert small - large == pytest.approx((64 - 16) * 64 * 3 * 0.0003)


def test_what_moves_instead_of_being_computed_takes_its_bytes_over_the_link() -> None:
    config, found = plan()
    job, stages, speed = found.jobs["policy"], found.stages["policy"], 0.8 * 64e9
    # Log-probs, update and sync; there and back.
    moved = {None: 0, Offload.optimizer: stages[0].optimizer, Offload.all: 3 * stages[0].weights + stages[0].optimizer}
    for offload, size in moved.items():
        job = replace(job, node=replace(job.node, offload=offload))
        assert compute_offload(config, job, stages) == pytest.approx(2 * size / speed)
    # Over disk the policy's two nodes write the model once, and each node with a server reads it once.
    config, disk = plan("rollout.transport=disk", "cluster.hardware.disk_gb_s=2")
    size = disk.transfer.total / config.rollout.num_servers
    assert disk.seconds.sync == pytest.approx((size / 2 + size) / 2e9)
    _, half = plan("rollout.sglang.kv_cache_dtype=fp8_e4m3")
    assert 2 * half.server.bytes_per_token == found.server.bytes_per_token
    assert half.server.kv_tokens == pytest.approx(2 * found.server.kv_tokens, abs=1)
    assert half.seconds.generation < found.seconds.generation


def test_what_a_part_costs_is_what_a_part_without_end_would_save_and_the_phases_add_up() -> None:
    config, found = plan("cluster.hardware.disk_gb_s=1", "rollout.transport=disk", "critic.offload=all")
    costs, all_of_it = find_costs(config, found), found.seconds.iteration
    # Nothing is computed while weights move: their seconds are the disk's and PCIe's alone.
    assert costs["disk", "sync"] == pytest.approx(found.seconds.sync / all_of_it)
    assert costs["PCIe", "offload"] == pytest.approx(found.seconds.offload / all_of_it)
    assert costs["network", "generation"] == costs["disk", "update"] == 0.0
    _, faster = plan("cluster.hardware.disk_gb_s=2", "rollout.transport=disk", "critic.offload=all")
    assert costs["disk", "iteration"] == pytest.approx(2 * (all_of_it - faster.seconds.iteration) / all_of_it)
    phases = ("generation", "scoring", "update", "offload", "sync")
    for part in {part for part, _ in costs}:
        assert sum(costs[part, phase] for phase in phases) == pytest.approx(costs[part, "iteration"])
    assert 0.7 < sum(share for (_, phase), share in costs.items() if phase == "iteration") <= 1.0


def test_with_staleness_the_slower_of_generation_and_training_decides() -> None:
    """rollout/source.py: responses are generated while the roles compute; a sync pauses both."""
    parts, ahead = (
        plan(*keys)[1].seconds for keys in ((), ("rollout.max_staleness=1", "algo.mismatch.correction=tis"))
    )
    assert parts.iteration == pytest.approx(parts.generation + parts.scoring + parts.update + parts.sync)
    assert ahead.iteration == pytest.approx(max(parts.generation, parts.scoring + parts.update) + parts.sync)


@pytest.mark.parametrize(
    ("arch", "layout", "megatron"),
    [
        (replace(ARCH_32B, num_layers=8), {"tp": 4, "pp": 4, "vpp": 2}, {}),
        (replace(ARCH_32B, num_layers=6, tied=True), {"tp": 2, "pp": 2, "cp": 2}, {}),
        (replace(ARCH_235B, num_layers=10), {"tp": 2, "pp": 4, "ep": 8}, {FIRST: 2, LAST: 2}),
        (replace(ARCH_235B, num_layers=4), {"pp": 2, "ep": 16}, {}),
    ],
)
@pytest.mark.parametrize("is_critic", [False, True])
def test_parameters_counted_from_two_small_models_are_those_of_the_whole_one(
    arch: Architecture, layout: dict[str, int], megatron: dict[str, int], is_critic: bool
) -> None:
    config = load_config(JOB)
    config.model.megatron = dict(megatron)
    job = build_job(arch, **layout)
    job = replace(job, node=CriticConfig(parallel=job.parallel)) if is_critic else job
    assert count_job(config, job) == count_stages(arch, job.parallel, job.dtype, dict(megatron), is_critic)


ROOT = Path(__file__).resolve().parents[3]


def test_a_step_of_value_pretraining_is_generation_values_and_the_critics_update() -> None:
    config, found = plan()
    step = found.seconds.pretraining
    arguments = (found.jobs["critic"], found.stages["critic"], describe_work(config), config.cluster)
    parts = (found.seconds.generation, compute_forward(*arguments), compute_update(*arguments))
    assert (step.generation, step.scoring, step.update) == pytest.approx(parts)
    assert step.iteration == pytest.approx(sum(parts))
    (line,) = describe_pretraining(config, found.seconds)
    generation, values, _ = (f"{part:,.1f}" for part in parts)
    start = f"Value pretraining: up to 50 steps of {step.iteration:,.1f} s (generation {generation}, values {values},"
    assert line.startswith(start)
    assert (
        f"{50 * step.iteration / 3600:.1f} hours in all; it may end earlier (algo.value_pretrain: patience=20)" in line
    )


def test_what_the_critic_does_more_counts_in_pretraining_too() -> None:
    (_, before), (_, thrice) = plan(), plan("critic.updates_per_policy_update=3")
    (_, own) = plan("data.critic_prompt='{answer}'", "data.critic_prompt_length=2048")
    steps = [found.seconds.pretraining for found in (before, thrice, own)]
    assert steps[1].update == pytest.approx(3 * steps[0].update)
    assert steps[1].scoring == steps[0].scoring
    # The critic's own text is the critic's alone.
    assert own.jobs["policy"] == before.jobs["policy"]
    assert own.jobs["critic"].batch.longest == before.jobs["critic"].batch.longest + 2048
    assert steps[2].scoring > steps[0].scoring
    assert steps[2].update > steps[0].update
    assert own.seconds.generation == before.seconds.generation
    assert own.host_bytes > before.host_bytes


def test_policy_and_reference_score_where_a_kl_in_the_reward_needs_them() -> None:
    for key, scores_all in (("in_reward", True), ("in_loss", False)):
        config, found = plan(f"algo.kl.{key}=true", "rollout.num_servers=6")
        assert (found.seconds.pretraining.scoring == found.seconds.scoring) == scores_all
        assert ("log-probs and values" in next(describe_pretraining(config, found.seconds))) == scores_all


def test_saved_rollouts_are_not_generated() -> None:
    keys = ("rollouts=rollouts.jsonl", "steps=1", "patience=null")
    config, found = plan(*(f"algo.value_pretrain.{key}" for key in keys))
    assert found.seconds.pretraining.generation == 0
    (line,) = describe_pretraining(config, found.seconds)
    assert line.startswith("Value pretraining: 1 step of ")
    assert "generation" not in line
    assert "saved rollouts are taken to be like those of an iteration" in line


@pytest.mark.parametrize("override", ["algo.value_pretrain.steps=0", "algo.value_pretrain.enabled=false", "algo=dapo"])
def test_without_a_critic_or_steps_of_its_own_nothing_is_pretrained(override: str) -> None:
    config = load_config([*PRESET, override])
    seconds = build_plan(config, find_models(config)).seconds
    assert (seconds.pretraining, list(describe_pretraining(config, seconds))) == (None, [])


def test_an_update_that_outlasts_slurms_signal_asks_for_an_earlier_one() -> None:
    config = load_config(JOB)
    assert config.checkpoint.stop_deadline_s == 1800
    # 60 s to queue the job again; 541 + 1800 + 60 = 2401; 5192; more than sbatch takes.
    for update, signal in ((540.0, None), (541.0, 2500), (3332.0, 5200), (64000.0, 65535)):
        assert find_signal(config, Seconds(1.0, 1.0, update)) == signal


def test_the_seconds_before_the_time_limit_are_those_of_the_script() -> None:
    script = (ROOT / "slurm" / "train.sh").read_text()
    assert f"#SBATCH --signal=B:USR1@{SIGNAL_S}\n" in script
    assert re.search(rf"^MARGIN_S={REQUEUE_S}\b", script, re.MULTILINE)


def test_a_policy_whose_logprobs_nothing_reads_has_no_pass_before_its_update() -> None:
    (config, found), (_, other) = plan(), plan("algo.surrogate=dis", "algo.clip_high=5")
    clipped, of_rollout = found.seconds, other.seconds
    passes = {
        name: compute_forward(job, found.stages[name], describe_work(config), config.cluster)
        for name, job in found.jobs.items()
    }
    assert clipped.scoring == pytest.approx(max(passes.values())) == pytest.approx(passes["policy"])
    assert of_rollout.scoring == pytest.approx(passes["critic"])
    assert of_rollout.training < clipped.training


@pytest.mark.parametrize(("placement", "num_gpus"), [("apart", 3), ("split", 2), ("colocated", 2)])
def test_the_peak_of_gpus_is_that_of_the_data_sheet_for_each_that_policy_or_critic_has(placement, num_gpus):
    keys = ["policy.parallel.num_processes=2", "model=qwen3_0_6b", "cluster=h100x8", f"cluster.placement={placement}"]
    config = load_config(["algo=vapo", *keys])
    peak = find_peak_tflops(config)
    assert peak == pytest.approx(num_gpus * config.cluster.hardware.bf16_tflops)
    unknown = replace(config.cluster, hardware=replace(config.cluster.hardware, gpu=None))
    assert find_peak_tflops(replace(config, cluster=unknown)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_peak_is_measured_with_the_threads_as_they_were():
    before = torch.get_num_threads()
    assert find_peak_tflops(load_config([])) > 0
    assert torch.get_num_threads() == before


RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


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
    job = build_role(arch, parallel, batch=MicroBatch(tokens, tokens, length), fp8=Fp8.hybrid if row.fp8 else None)
    layers, h = arch.num_layers / parallel.pp, arch.hidden_size
    projections = 2 * h * arch.head_size * (arch.num_heads + arch.num_kv_heads)
    dense = layers * (projections + (0 if arch.experts else 3 * h * arch.ffn_size)) / parallel.tp
    experts = layers * 3 * h * arch.experts.ffn_size * arch.experts.num_experts / parallel.ep if arch.experts else 0
    stages = (StageParameters(layers, int(dense), int(experts), 0, 0),) * parallel.pp  # type: ignore[arg-type]
    work = Work(row.samples, row.samples, 0, length, tokens)
    return compute_update(job, estimate_stages(job, stages), work, CLUSTER)


def find_row(file: str, name: str) -> list[str]:
    with (RESULTS / file).open() as rows:
        return next((row for row in csv.reader(rows) if row[0] == name), [])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_planned_steps_are_as_far_from_published_ones_as_the_docs_say(row: Row) -> None:
    planned = plan_row(row)
    shown = [f"{number:.2f}" for number in (row.seconds, planned, planned / row.seconds)]
    assert find_row("planner-steps.csv", row.name)[2:5] == shown


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
    numbers = [*(f"{part:.0f}" for part in parts), f"{total:.0f}", f"{published}", f"{total / published:.2f}"]
    assert find_row("planner-iterations.csv", name) == [name, str(mean), *numbers]


def test_beside_adapters_a_backward_pass_computes_the_gradients_of_activations_alone() -> None:
    whole, adapted = (
        compute_layer_seconds(
            build_role(ARCH_32B, ParallelConfig(1), CriticConfig, lora=LoraConfig(rank)), CLUSTER, 1e4, 1e3
        )
        for rank in (0, 8)
    )
    assert whole.forward == adapted.forward
    assert whole.backward - adapted.backward == pytest.approx(whole.products)
