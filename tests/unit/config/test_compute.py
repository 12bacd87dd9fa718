"""The keys of a role that say how it computes: recompute, offload, fp8."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.roles import Fp8, Fp8Recipe, Offload, Recompute


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def test_each_role_has_its_own_way_to_compute() -> None:
    config = load_config(
        [
            "policy={recompute: full, recompute_num_layers: 2, offload: all}",
            "critic={recompute: selective, offload: optimizer, dtype: bfloat16, fp8: hybrid, fp8_recipe: blockwise}",
        ]
    )
    policy, critic = config.policy, config.critic
    assert (policy.recompute, policy.recompute_num_layers, policy.offload, policy.fp8) == (
        Recompute.full,
        2,
        Offload.all,
        None,
    )
    assert (critic.recompute, critic.offload) == (Recompute.selective, Offload.optimizer)
    assert (critic.fp8, critic.fp8_recipe) == (Fp8.hybrid, Fp8Recipe.blockwise)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.recompute=some"], "policy.recompute: Invalid value 'some', expected one of [none, selective, full]"),
        (
            ["policy.offload=weights"],
            "policy.offload: Invalid value 'weights', expected one of [optimizer, all], or null",
        ),
        (
            ["policy.dtype=bfloat16", "policy.fp8=hybrid", "policy.fp8_recipe=delayed"],
            "policy.fp8_recipe: Invalid value 'delayed', expected one of [tensorwise, blockwise, mxfp8]",
        ),
        (["critic.fp8=e5m2"], "critic.fp8: Invalid value 'e5m2', expected one of [hybrid, e4m3], or null"),
        (
            ["policy.recompute=full", "policy.recompute_num_layers=0"],
            "policy.recompute_num_layers: found 0; it must be 1 or more",
        ),
        (
            ["policy.fp8=hybrid"],
            "policy.fp8: found hybrid with policy.dtype=float32; FP8 products need policy.dtype=bfloat16",
        ),
        (
            ["algo.kl.in_loss=true", "reference.offload=optimizer"],
            "reference.offload: found optimizer; the reference has none: all, or null",
        ),
        (
            ["policy.recompute=selective", "policy.recompute_num_layers=2"],
            "policy.recompute_num_layers: has no effect under policy.recompute=selective; it counts with full",
        ),
        (
            ["critic.recompute_method=block"],
            "critic.recompute_method: has no effect under critic.recompute=none; it counts with full",
        ),
        (
            ["policy.fp8_recipe=tensorwise"],
            "policy.fp8_recipe: has no effect with policy.fp8=null; it counts with hybrid or e4m3",
        ),
        (["algo=grpo", "critic.fp8=hybrid"], "critic.fp8: has no effect under algo.advantage=group"),
    ],
)
def test_values_that_contradict_are_refused_by_key(overrides: list[str], message: str) -> None:
    assert message in problems_of(*overrides)
