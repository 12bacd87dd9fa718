"""Megatron's faster ways change when numbers travel and where they are rounded, and nothing else."""

from typing import Any

import pytest
import torch
from layout_runs import build_spec, launch, run_ways
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Offload, OptimizerConfig, ParallelConfig
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

DP2 = ParallelConfig(num_processes=2)
EP2 = ParallelConfig(num_processes=2, ep=2)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
REDUCE = {"overlap_grad_reduce": True}


def build_optimizer(**overlap: bool) -> OptimizerConfig:
    # No clipping: other buckets are other shards, whose squares add up to the norm in another order.
    return OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.0, **overlap)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dense, moe = (tmp_path_factory.mktemp("ways") / family for family in ("qwen2", "qwen3_moe"))
    write_checkpoint(dense, "qwen2", tied=True)
    write_checkpoint(moe, "qwen3_moe")
    specs = {}
    for kind, role, path, parallel in (
        ("policy", Role.policy, dense, DP2),
        ("critic", Role.critic, dense, DP2),
        ("moe", Role.policy, moe, EP2),
    ):
        for name, overlap in {"plain": {}, "overlap": OVERLAP, "overlap-buckets": OVERLAP}.items():
            optimizer = build_optimizer(**overlap)
            common = {"parallel": parallel, "optimizer": optimizer, "tokens_per_microbatch": 60}
            offload = Offload.all if name == "overlap-buckets" and kind == "critic" else None
            specs[f"{kind}-{name}"] = build_spec(role, path, **common, offload=offload)
    common = {"parallel": DP2, "tokens_per_microbatch": 60}
    specs["policy-reduce"] = build_spec(Role.policy, dense, **common, optimizer=build_optimizer(**REDUCE))
    plain = {**common, "optimizer": build_optimizer()}
    specs["policy-swiglu"] = build_spec(Role.policy, dense, **plain, megatron={"bias_activation_fusion": True})
    specs["policy-te"] = build_spec(
        Role.policy, dense, **plain, megatron={"apply_rope_fusion": False, "bias_activation_fusion": False}
    )
    return launch(2, run_ways, specs)


@pytest.mark.parametrize("kind", ["policy", "critic", "moe"])
@pytest.mark.parametrize("name", ["overlap", "overlap-buckets"])
def test_overlapped_communication_of_two_ranks_changes_no_bit(runs: dict[str, Any], kind: str, name: str) -> None:
    found, expected = runs[f"{kind}-{name}"], runs[f"{kind}-plain"]
    assert found["checksum"] == expected["checksum"]
    assert all(map(torch.equal, found["evaluations"], expected["evaluations"]))
    for step, right in zip(found["metrics"], expected["metrics"], strict=True):
        norm = next(key for key in step if key.endswith("/grad_norm"))
        assert step.pop(norm) == pytest.approx(right[norm], rel=1e-6)
        assert step == {key: value for key, value in right.items() if key != norm}
    assert "on: overlap_grad_reduce, overlap_param_gather" in found["description"]
    assert (found["num_buckets"] > 3) == name.endswith("buckets")


def test_reduction_alone_may_overlap(runs: dict[str, Any]) -> None:
    assert runs["policy-reduce"]["checksum"] == runs["policy-plain"]["checksum"]
    assert runs["policy-reduce"]["metrics"] == runs["policy-plain"]["metrics"]


def test_the_fused_swiglu_gives_the_same_losses_and_gradient_norms(runs: dict[str, Any]) -> None:
    found, expected = runs["policy-swiglu"], runs["policy-plain"]
    assert found["swiglu"]
    assert not expected["swiglu"]
    assert found["metrics"][0] == pytest.approx(expected["metrics"][0], rel=1e-6, abs=1e-9)
    for found_values, values in zip(found["evaluations"], expected["evaluations"], strict=True):
        torch.testing.assert_close(found_values, values, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the layers may be Transformer Engine's")
def test_an_output_layer_is_built_where_transformer_engine_fuses_gradients_and_apex_is_missing(
    runs: dict[str, Any],
) -> None:
    """Megatron's ColumnParallelLinear raises for the field without Apex; local layers compute as without it."""
    assert runs["policy-te"]["fuses"] == [True, False]
    assert runs["policy-plain"]["fuses"] == [False, False]
