"""Bytes of activations, optimizer, KV cache and weight sync, computed by hand; parameters per rank, counted in
Megatron's own model on the meta device.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from plan_jobs import ARCH_32B, build_role
from tool_loading import load_tool
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.schema.roles import (
    CriticConfig,
    Dtype,
    LoraConfig,
    Offload,
    ParallelConfig,
    PolicyConfig,
    RandomModelConfig,
    Recompute,
    RecomputeMethod,
    Trainable,
)
from megarl.config.schema.root import RolloutConfig
from megarl.mcore.checkpoints import compute_megatron_shape, list_entries
from megarl.mcore.model import _playing, count_stages
from megarl.mcore.spec import StageParameters
from megarl.models.architecture import Architecture, Experts
from megarl.models.families import FAMILIES, parse_architecture
from megarl.models.rope import Rope
from megarl.plan.job import PUBLISHED, describe_random
from megarl.plan.memory import (
    MicroBatch,
    compute_layer,
    compute_saved,
    compute_server_weights,
    count_in_flight,
    estimate_server,
    estimate_stages,
    sum_layers,
)
from megarl.plan.seconds import estimate_transfer
from megarl.sync.pieces import predict_server_rank
from megarl.sync.plan import build_plan

policy_pieces = load_tool("bench/policy_pieces.py")
predict_ranks, count_bytes = policy_pieces.predict_ranks, policy_pieces.count_bytes

GIB = 1 << 30
BLOCK = {"recompute_method": RecomputeMethod.block}
SMALL = Architecture("qwen2", 4, 64, 96, 4, 2, 16, 128, 512, 1e-6, Rope(1e4), qkv_bias=True, qk_norm=False, tied=False)
MOE = replace(SMALL, family="qwen3_moe", qkv_bias=False, experts=Experts(4, 2, 48, normalized=True))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_layer_of_qwen32b_keeps_what_its_operations_need(on_gpu: bool, qk_norm: bool) -> None:
    """Of each token: what each operation saves, in bfloat16 but for the norms' scales and the logsumexp."""
    arch, one = replace(ARCH_32B, qk_norm=qk_norm), MicroBatch(1, 1, 1)
    layer = compute_layer(arch, ParallelConfig(), Dtype.bfloat16, one, on_gpu)
    h, queries, keys, f = 5120, 40 * 128, 8 * 128, 27648
    norms = 2 * (2 * h + 4 + 2 * h)  # input, scale and output, twice
    # Queries, keys and values that attention takes, its output and logsumexp.
    attention = 2 * (queries + 2 * keys) + 2 * queries + 4 * 40
    if not on_gpu:
        # Values are a view of what linear_qkv made; sine and cosine, of queries and of keys.
        attention += 2 * (queries + keys) + 4 * 2 * 128
    if qk_norm:
        # On a CPU the keys before their norm are in that view too.
        attention += 2 * queries + (2 * keys if on_gpu else 0) + 4 * 48
    # linear_fc1's output, linear_fc2's input; on a CPU silu of the gates.
    mlp = 2 * (2 + 1) * f if on_gpu else 2 * (2 + 1 + 1) * f
    assert layer.total == norms + attention + mlp
    assert (layer.input, layer.core_attention, layer.mlp) == (2 * h, 4 * 40, mlp)


def test_other_activations_are_not_fused_and_keep_their_parts() -> None:
    """Both halves, one of them activated, the other plus 0, their product; gpt-oss clamps, and has a sigmoid."""
    for each, changes in ((5, {"activation": "gelu_tanh"}), (7, {"activation": "quick_gelu", "clamp": 7.0})):
        for on_gpu in (True, False):
            arch = replace(ARCH_32B, **changes)
            layer = compute_layer(arch, ParallelConfig(), Dtype.bfloat16, MicroBatch(1, 1, 1), on_gpu)
            assert layer.mlp == 2 * each * 27648


def test_tensor_and_sequence_parallel_ranks_divide_it() -> None:
    """2205.05198, table 2: tensor parallelism divides the matrices' part by t, sequence parallelism the rest too."""
    batch = MicroBatch(4096, 4096, 4096)

    def total(parallel: ParallelConfig) -> int:
        return compute_layer(ARCH_32B, parallel, Dtype.bfloat16, batch, on_gpu=True).total

    one, four = total(ParallelConfig()), total(ParallelConfig(num_processes=4, tp=4))
    norms = 2 * 4096 * (2 * 5120 + 4 + 2 * 5120)
    assert four == norms + (one - norms) // 4
    assert total(ParallelConfig(num_processes=4, tp=4, sp=True)) == one // 4


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    """2205.05198, section 5: 2 s b h a layer."""
    layer = compute_layer(ARCH_32B, ParallelConfig(), Dtype.bfloat16, MicroBatch(1024, 1, 1024), on_gpu=True)
    one = 2 * 1024 * 5120
    assert sum_layers(layer, 64, PolicyConfig(recompute=Recompute.full))[0] == 64 * one
    pairs = sum_layers(layer, 64, PolicyConfig(recompute=Recompute.full, recompute_num_layers=2))
    assert pairs == (32 * one, 2 * layer.total - one)
    block = PolicyConfig(recompute=Recompute.full, **BLOCK, recompute_num_layers=10)
    assert sum_layers(layer, 64, block)[0] == 10 * one + 54 * layer.total
    selective = PolicyConfig(recompute=Recompute.selective)
    assert sum_layers(layer, 64, selective)[0] == 64 * (layer.total - 4 * 1024 * 40)
    both = sum_layers(layer, 64, selective, ("core_attn", "mlp"))
    assert both[0] == 64 * (layer.total - layer.mlp - layer.core_attention)


def test_each_virtual_stage_is_cut_into_blocks_of_its_own() -> None:
    """Megatron recomputes recompute_num_layers of each piece of a stage (transformer_block.py)."""
    layer = compute_layer(ARCH_32B, ParallelConfig(), Dtype.bfloat16, MicroBatch(1024, 1, 1024), on_gpu=True)
    one = 2 * 1024 * 5120
    three = PolicyConfig(recompute=Recompute.full, **BLOCK, recompute_num_layers=3)
    # 16 layers in 2 pieces of 8, 3 of each recomputed; in 4 of 4; in 8 of 2, where no piece keeps a layer.
    assert sum_layers(layer, 16, three, num_pieces=2) == (6 * one + 10 * layer.total, 0)
    assert sum_layers(layer, 16, three, num_pieces=4) == (12 * one + 4 * layer.total, 0)
    assert sum_layers(layer, 16, three, num_pieces=8) == (16 * one, layer.total - one)
    # Two blocks, of 3 and 1, in each piece of 4.
    assert sum_layers(layer, 16, replace(three, recompute_method=RecomputeMethod.uniform), num_pieces=4)[0] == 8 * one


def test_experts_keep_the_tokens_that_are_routed_to_them() -> None:
    """On a CPU with silu of the gates, and the product before the router has weighted it."""
    batch, one, two = MicroBatch(100, 1, 50), ParallelConfig(), ParallelConfig(num_processes=2, etp=2)
    routed, routes = 100 * 2, 100 * (4 * 5 + 2 * 24)
    for on_gpu, each in ((True, 3), (False, 5)):
        whole, split = (compute_layer(MOE, size, Dtype.bfloat16, batch, on_gpu).mlp for size in (one, two))
        assert whole == 2 * routed * (64 + each * 48) + routes
        assert split == 2 * 2 * routed * (64 + each * 24) + routes


@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (4, 2), (8, 3)])
def test_the_first_stage_of_a_pipeline_holds_as_much_as_the_paper_says(pp: int, vpp: int) -> None:
    """2205.05198, section 4.2.3: L layers' worth; interleaved, L (1 + (p - 1) / (p m))."""
    parallel = ParallelConfig(num_processes=pp, pp=pp, vpp=vpp)
    factor = 1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1
    assert count_in_flight(parallel, 0, 1000) / pp == pytest.approx(factor)


def test_no_stage_holds_more_micro_batches_than_there_are() -> None:
    parallel = ParallelConfig(num_processes=8, pp=8)
    assert [count_in_flight(parallel, stage, 1000) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [count_in_flight(parallel, stage, 2) for stage in range(8)] == [2] * 7 + [1]
    assert count_in_flight(ParallelConfig(num_processes=2, pp=2, vpp=2), 0, 1) == 1


def test_the_optimizer_is_cut_over_data_and_context_parallel_ranks_and_experts_over_their_own() -> None:
    """1910.02054, P_os: 12 bytes a parameter over the replicas; of float32 weights, 8."""
    parameters = StageParameters(num_layers=4, dense=1000, experts=400, embedding=0, head=0)
    parallel = ParallelConfig(num_processes=16, tp=2, cp=2, ep=4)
    (memory,) = estimate_stages(build_role(MOE, parallel), (parameters,))
    assert (memory.weights, memory.gradients) == (2 * 1400, 4 * 1400)
    assert memory.optimizer == 12 * 1000 // 8 + 12 * 400 // 4
    (memory,) = estimate_stages(build_role(MOE, parallel, dtype=Dtype.float32), (parameters,))
    assert memory.optimizer == 8 * 1000 // 8 + 8 * 400 // 4


def test_frozen_weights_have_neither_gradients_nor_an_optimizers_state_nor_a_copy_of_it_in_a_save() -> None:
    parameters = StageParameters(4, dense=1000, experts=400, embedding=100, head=50, mlp=300)
    parallel = ParallelConfig(num_processes=4, ep=2)
    whole, partly = (
        build_role(MOE, parallel, CriticConfig, trainable=trainable) for trainable in (Trainable.all, Trainable.mlp)
    )
    before, (memory,) = estimate_stages(whole, (parameters,))[0], estimate_stages(partly, (parameters,))
    assert memory.weights == before.weights == 2 * 1400
    assert (memory.gradients, memory.optimizer) == (4 * 750, 12 * 350 // 4 + 12 * 400 // 2)
    assert memory.update == before.update - 4 * 650 - 12 * 650 // 4
    assert compute_saved(whole, parameters, 0) == 2 * 1400 + 12 * (1000 // 4 + 400 // 2)
    assert compute_saved(partly, parameters, 0) == 2 * 1400 + 12 * (88 + 400 // 2)


@pytest.mark.parametrize(("kind", "head"), [(PolicyConfig, 0), (CriticConfig, 70)])
def test_with_adapters_only_they_and_a_value_head_have_gradients_and_an_optimizers_state(kind: type, head: int) -> None:
    arch, parameters = replace(MOE, experts=None), StageParameters(4, dense=10**6, experts=0, embedding=0, head=70)
    parallel = ParallelConfig(num_processes=2, tp=2)
    job = build_role(arch, parallel, kind, lora=LoraConfig(rank=3))
    before, (memory,) = (
        estimate_stages(build_role(arch, parallel, kind), (parameters,))[0],
        estimate_stages(job, (parameters,)),
    )
    h, heads, kv_heads = arch.hidden_size, arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    qkv, out = h + (heads + 2 * kv_heads) // 2, heads // 2 + h
    fc1, fc2 = h + 2 * arch.ffn_size // 2, arch.ffn_size // 2 + h
    count = 4 * 3 * (qkv + out + fc1 + fc2)
    assert memory.weights == before.weights + 2 * count
    assert (memory.gradients, memory.optimizer) == (4 * (count + head), 12 * (count + head))
    assert compute_saved(job, parameters, 0) == 2 * (10**6 + count) + 12 * (count + head)


def test_what_is_offloaded_is_not_resident() -> None:
    parameters, parallel = (StageParameters(4, 10**9, 0, 0, 0),), ParallelConfig()
    none, optimizer, everything = (
        estimate_stages(build_role(SMALL, parallel, offload=offload), parameters)[0]
        for offload in (None, Offload.optimizer, Offload.all)
    )
    assert (none.resident, optimizer.resident, everything.resident) == (18 * 10**9, 2 * 10**9, 0)
    assert (none.offloaded, optimizer.offloaded, everything.offloaded) == (0, 12 * 10**9, 14 * 10**9)
    assert none.update == optimizer.update == everything.update
    assert everything.forward < none.forward


def test_fp8_copies_of_weights_and_transposes_stay_where_nothing_is_offloaded() -> None:
    """Of each parameter of the layers a byte, and one of the transpose; embedding and output layer have none."""
    parameters = (StageParameters(4, dense=1000, experts=400, embedding=100, head=200),)
    without = estimate_stages(build_role(MOE, ParallelConfig()), parameters)[0]
    cached = estimate_stages(build_role(MOE, ParallelConfig(), caches_fp8=True), parameters)[0]
    assert (without.fp8, cached.fp8) == (0, 2 * (1400 - 300))
    assert cached.update == without.update + 2200
    assert cached.forward == without.forward + 2200
    assert cached.resident == without.resident + 2200
    dropped = estimate_stages(build_role(MOE, ParallelConfig(), caches_fp8=True, offload=Offload.all), parameters)[0]
    assert dropped.resident == 0
    assert (dropped.update, dropped.forward) == (cached.update, 2200 + dropped.forward_work + dropped.weights)


def test_a_saves_copy_is_shared_by_data_parallel_ranks_and_its_buffer_on_the_gpu_is_bounded() -> None:
    dense, experts = StageParameters(4, 10**9, 0, 0, 0), StageParameters(4, 10**6, 4 * 10**6, 0, 0)
    job = build_role(ARCH_32B, ParallelConfig(num_processes=8, tp=2, cp=2))
    assert [compute_saved(job, dense, rank) for rank in range(8)] == [5 * 10**9] * 2 + [3 * 10**9] * 6
    memory = estimate_stages(job, (dense,))[0]
    assert memory.sent == 256 * 2**20
    assert memory.checkpoint == memory.resident + memory.sent < memory.update + memory.sent
    # Experts are sharded over the ranks with the same ones: the first four of the eight have each once.
    mixture = build_role(MOE, ParallelConfig(num_processes=8, ep=4), dtype=Dtype.float32)
    saved = [compute_saved(mixture, experts, rank) / 10**6 for rank in range(8)]
    assert saved == [25.5 + 4 + 16, *[25.5 + 16] * 3, *[25.5] * 4]


def test_the_logits_and_their_gradient_are_at_the_last_stage() -> None:
    parallel = ParallelConfig(num_processes=2, pp=2)
    parameters = (StageParameters(2, 1, 0, 0, 0),) * 2
    first, last = estimate_stages(build_role(ARCH_32B, parallel, batch=MicroBatch(16384, 16000, 4096)), parameters)
    logits = 2 * 16000 * 152064
    assert first.head == 0
    assert logits < last.head < 1.1 * logits
    assert last.work == logits + 3 * 4 * (1 << 23)
    # Of few tokens, the gradients of the hidden states and of the output weights are more.
    _, last = estimate_stages(build_role(ARCH_32B, parallel, batch=MicroBatch(4096, 4000, 4096)), parameters)
    assert last.work == 2 * (4000 + 152064) * 5120


def test_the_kv_cache_takes_what_the_weights_leave_of_the_static_share() -> None:
    rollout = RolloutConfig(tp=4, sglang={"mem_fraction_static": 0.88})
    weights = compute_server_weights(ARCH_32B, rollout.tp, rollout.dtype)
    assert weights == pytest.approx(2 * 32_763_876_352 / 4, rel=1e-3)
    memory = estimate_server(ARCH_32B, rollout, weights, 80 * GIB, 17408)
    # 64 layers, keys and values, 2 of the 8 heads, 128 elements of 2 bytes
    assert memory.bytes_per_token == 64 * 2 * 2 * 128 * 2 == 65536
    assert memory.kv_tokens == (int(0.88 * 80 * GIB) - weights) // 65536 == 903_449
    assert memory.num_longest == 903_449 // 17408 == 51
    fixed = estimate_server(ARCH_32B, replace(rollout, kv_cache_tokens=40_000), weights, 80 * GIB, 17408)
    assert (fixed.kv_tokens, fixed.num_longest) == (40_000, 2)
    # With more ranks than heads each has one.
    assert estimate_server(ARCH_32B, replace(rollout, tp=16), weights, 80 * GIB, 1).bytes_per_token == 65536 // 2


@pytest.mark.parametrize(
    ("arch", "parallel", "tp"),
    [
        (SMALL, ParallelConfig(num_processes=4, tp=2, pp=2), 1),
        (SMALL, ParallelConfig(num_processes=4, tp=2, cp=2), 4),
        (MOE, ParallelConfig(num_processes=8, tp=2, sp=True, pp=2, ep=4), 2),
    ],
)
def test_the_bytes_of_a_sync_are_those_of_its_plan(arch: Architecture, parallel: ParallelConfig, tp: int) -> None:
    from megarl.mcore.model import count_stages

    rollout = RolloutConfig(num_servers=3, tp=tp)
    job = build_role(arch, parallel)
    stages = estimate_stages(job, count_stages(arch, parallel, Dtype.bfloat16, {}, False))
    found = estimate_transfer(job, stages, rollout, compute_server_weights(arch, tp, rollout.dtype))
    targets = {server * tp + rank: predict_server_rank(arch, tp, rank) for server in range(3) for rank in range(tp)}
    dtypes = {piece.tensor: "bfloat16" for pieces in targets.values() for piece in pieces}
    plan = build_plan(predict_ranks(arch, parallel), targets, dtypes)
    assert found.total == count_bytes(plan, 0).total()
    assert found.received == max(count_bytes(plan, 1).values())
    assert found.sent == pytest.approx(max(count_bytes(plan, 0).values()), rel=0.2)


CHECKPOINTS = yaml.safe_load((Path(__file__).parents[1] / "config" / "checkpoints.yaml").read_text())
PRESETS = {
    "Qwen/Qwen2.5-32B": ("qwen32b", 32_763_876_352),
    "Qwen/Qwen2.5-7B": ("qwen2_5_7b", 7_615_616_512),
    "Qwen/Qwen2-7B-Instruct": ("qwen2_7b", 7_615_616_512),
    "Qwen/Qwen3-0.6B": ("qwen3_0_6b", 596_049_920),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2_5_0_5b", 494_032_768),
    "Qwen/Qwen3-8B": ("qwen3_8b", 8_190_735_360),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3_8b", 8_030_261_248),
    "Qwen/Qwen3-235B-A22B": ("qwen3_235b_a22b", 235_093_634_560),
    "Qwen/Qwen3-1.7B": ("qwen3_1_7b", 1_720_574_976),
    "Qwen/Qwen3-4B": ("qwen3_4b", 4_022_468_096),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama3_2_1b", 1_235_814_400),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("r1_distill_qwen_1_5b", 1_777_088_000),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": ("r1_distill_qwen_7b", 7_615_616_512),
    "Qwen/Qwen3-30B-A3B": ("qwen3_30b_a3b", 30_532_122_624),
    "lmsys/gpt-oss-20b-bf16": ("gpt_oss_20b", 20_914_757_184),
}
"""Preset, and the number of weights in the published checkpoint"""


def describe(name: str) -> Architecture:
    return parse_architecture(PUBLISHED[name], Path(name))


def count(
    arch: Architecture, parallel: ParallelConfig | None = None, critic: bool = False
) -> tuple[StageParameters, ...]:
    return count_stages(arch, parallel or ParallelConfig(), Dtype.bfloat16, {}, critic)


@pytest.mark.parametrize("name", PRESETS)
def test_the_sizes_known_here_are_those_of_the_published_config_and_megatron_builds_as_many_weights(name: str) -> None:
    arch, (preset, number) = describe(name), PRESETS[name]
    assert arch == parse_architecture(CHECKPOINTS["all"] | CHECKPOINTS[preset], Path(name))
    total = count(arch)[0].total if arch.experts is None else count_weights(arch)
    assert total == number


def count_weights(arch: Architecture) -> int:
    return sum(math.prod(shape) for entry in list_entries(arch, False) for shape in entry.shapes)


@pytest.mark.parametrize(("name", "number"), [("deepseek_v3", 671_026_419_200), ("moonlight", 15_960_110_208)])
def test_latent_attention_has_the_published_number_of_weights(name: str, number: int) -> None:
    arch = parse_architecture(CHECKPOINTS["all"] | CHECKPOINTS[name], Path(name))
    assert count_weights(arch) == number


def test_a_token_of_moonlight_keeps_its_vector_and_what_positions_turn_on_every_rank_of_a_server() -> None:
    arch = parse_architecture(CHECKPOINTS["all"] | CHECKPOINTS["moonlight"], Path("moonlight"))
    for tp in (1, 2):
        server = estimate_server(arch, RolloutConfig(tp=tp, dtype=Dtype.bfloat16), 10 * GIB, 60 * GIB, 1000)
        assert server.bytes_per_token == 27 * (512 + 64) * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_builds_the_weights_of_a_familys_table_over_the_stages(family: str, tied: bool) -> None:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4, tie_embeddings=tied))
    # The vocabulary is padded to 64 rows, and both stages hold a tied embedding.
    entries = [entry for entry in list_entries(arch, False) if not entry.is_constant]
    total = sum(math.prod(compute_megatron_shape(entry, arch, 1)) for entry in entries)
    first, last = count(arch, ParallelConfig(num_processes=2, pp=2))
    assert first.total + last.total == total + (64 * arch.hidden_size if arch.tied else 0)
    assert count(arch)[0].total == total


def test_a_tensor_parallel_rank_of_qwen32b_has_its_share_of_the_matrices_and_all_of_the_norms() -> None:
    (rank,) = count(describe("Qwen/Qwen2.5-32B"), ParallelConfig(num_processes=16, tp=8, sp=True, cp=2))
    h, f, qkv, vocabulary = 5120, 27648, (40 + 2 * 8) * 128, 152064
    matrices = 64 * (qkv * h + qkv + h * h + 3 * h * f) + 2 * vocabulary * h
    assert rank.total == rank.dense == matrices // 8 + (2 * 64 + 1) * h == 4_096_062_464
    assert rank.embedding == rank.head == vocabulary * h // 8


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_dense_weights_of_mlps_are_counted_apart(family: str) -> None:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4))
    stages = count(arch, ParallelConfig(num_processes=4, tp=2, sp=True, pp=2), critic=True)
    mlp = 0 if arch.experts else 2 * 3 * arch.hidden_size * arch.ffn_size // 2
    assert [stage.mlp for stage in stages] == [mlp, mlp]


def test_a_critic_has_a_row_of_weights_in_place_of_the_output_layer() -> None:
    arch = describe("Qwen/Qwen3-8B")
    (policy,), (critic,) = count(arch), count(arch, critic=True)
    assert policy.total - critic.total == (151936 - 1) * 4096
    assert critic.head == 4096


def test_stages_and_expert_ranks_have_the_whole_model_between_them() -> None:
    arch = replace(describe("Qwen/Qwen3-235B-A22B"), num_layers=4)
    parallel = ParallelConfig(num_processes=32, tp=2, sp=True, pp=2, ep=16)
    stages = count(arch, parallel)
    assert [stage.num_layers for stage in stages] == [2, 2]
    # 128 experts of three matrices [1536, 4096], an ep rank has 8 of each layer.
    assert [stage.experts for stage in stages] == [2 * 8 * 3 * 1536 * 4096] * 2
    assert stages[0].embedding == 151936 * 4096 // 2
    assert stages[1].embedding == 0


def test_interleaved_pieces_count_together() -> None:
    arch = replace(describe("Qwen/Qwen3-8B"), num_layers=8)
    plain = count(arch, ParallelConfig(num_processes=2, pp=2))
    assert count(arch, ParallelConfig(num_processes=2, pp=2, vpp=2)) == plain


def test_a_process_in_a_group_counts_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="no process group"):
            count(describe("Qwen/Qwen3-8B"))
    finally:
        dist.destroy_process_group()
    assert count(replace(describe("Qwen/Qwen3-8B"), num_layers=1))
    assert not dist.is_initialized()


def test_counting_asks_for_no_stream_of_a_gpu() -> None:
    """Transformer Engine's attention does with context parallelism, and the driver would hold memory of GPU 0."""
    with _playing(0, ParallelConfig(num_processes=2, cp=2)):
        # Without a GPU torch's own raises.
        assert torch.cuda.Stream() is None
