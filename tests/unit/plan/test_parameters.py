"""Parameters per rank, counted in Megatron's own model on the meta device."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.schema.roles import Dtype, ParallelConfig, RandomModelConfig
from megarl.mcore.checkpoints import compute_megatron_shape, list_entries
from megarl.mcore.model import _playing, count_stages
from megarl.mcore.spec import StageParameters
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, parse_architecture
from megarl.plan.job import PUBLISHED, describe_random

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
    if arch.experts is None:
        assert count(arch)[0].total == number


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_builds_the_weights_of_a_familys_table_over_the_stages(family: str, tied: bool) -> None:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4, tie_embeddings=tied))
    # The vocabulary is padded to 64 rows, and both stages hold a tied embedding.
    entries = [entry for entry in list_entries(arch, False) if not entry.is_constant]
    total = sum(math.prod(compute_megatron_shape(entry, arch, 1)) for entry in entries)
    first, last = count(arch, ParallelConfig(num_processes=2, pp=2))
    assert first.total + last.total == total + (64 * arch.hidden_size if tied else 0)
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
