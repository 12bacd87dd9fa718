"""Recomputed activations and offloading save memory and change no number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, launch_each, run_role
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype, Offload, Recompute, RecomputeMethod
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
RECOMPUTE = {
    "none": {},
    "selective": {"recompute": Recompute.selective},
    "modules": {"recompute": Recompute.selective, "megatron": {"recompute_modules": ["core_attn", "mlp"]}},
    "full": {"recompute": Recompute.full},
    "pairs": {"recompute": Recompute.full, "recompute_num_layers": 2},
    "block": {"recompute": Recompute.full, "recompute_method": RecomputeMethod.block, "recompute_num_layers": 1},
}
ALONE = [(Role.policy, name) for name in RECOMPUTE if name != "none"] + [
    (Role.critic, "selective"),
    (Role.critic, "full"),
]
TOGETHER = ["selective", "full"]
OFFLOAD = {"none": {}, "optimizer": {"offload": Offload.optimizer}, "all": {"offload": Offload.all}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "qwen3"
    write_checkpoint(path, num_hidden_layers=NUM_LAYERS)
    return path


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> dict[str, Any]:
    specs = {}
    for role, name in [(Role.policy, "none"), (Role.critic, "none"), *ALONE]:
        spec = build_spec(role, checkpoint, tokens_per_microbatch=60, **RECOMPUTE[name])
        specs[f"{role.value}-{name}"] = spec
    for name, changes in OFFLOAD.items():
        specs[f"bf16-{name}"] = build_spec(Role.policy, checkpoint, dtype=Dtype.bfloat16, **changes)
    return launch_each(1, run_role, specs)


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> dict[str, Any]:
    names = ["none", *TOGETHER]
    specs = {f"tp-{name}": build_spec(Role.policy, checkpoint, "tp2_sp", **RECOMPUTE[name]) for name in names}
    specs |= {f"dp-{name}": build_spec(Role.critic, checkpoint, "dp2", **OFFLOAD[name]) for name in OFFLOAD}
    return launch_each(2, run_role, specs)


def assert_same_gradient(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradient"].keys() == expected["gradient"].keys()
    for name, tensor in expected["gradient"].items():
        assert tensor.norm() > 0, name
        assert (found["gradient"][name] - tensor).norm() <= 1e-6 * tensor.norm(), name
    assert found["metrics"][0] == pytest.approx(expected["metrics"][0], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("role", "name"), ALONE)
def test_recomputed_activations_leave_the_gradient_as_it_is(one: dict[str, Any], role: Role, name: str) -> None:
    assert_same_gradient(one[f"{role.value}-{name}"], one[f"{role.value}-none"])


@pytest.mark.parametrize("name", TOGETHER)
def test_so_they_do_under_tensor_and_sequence_parallelism(two: dict[str, Any], name: str) -> None:
    assert_same_gradient(two[f"tp-{name}"], two["tp-none"])


def find_runs(one: dict[str, Any], two: dict[str, Any], kind: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    runs = two if kind == "dp" else one
    return runs[f"{kind}-{name}"], runs[f"{kind}-none"]


@pytest.mark.parametrize("kind", ["bf16", "dp"])
@pytest.mark.parametrize("name", ["optimizer", "all"])
def test_offloading_changes_no_bit(one: dict[str, Any], two: dict[str, Any], kind: str, name: str) -> None:
    found, expected = find_runs(one, two, kind, name)
    assert found["checksum"] == expected["checksum"]
    assert found["metrics"] == expected["metrics"]
    assert all(torch.equal(found[key], expected[key]) for key in ("before", "after"))
    assert all(torch.equal(found["gradient"][key], x) for key, x in expected["gradient"].items())


@pytest.mark.parametrize("kind", ["bf16", "dp"])
def test_between_calls_nothing_of_what_is_offloaded_is_held(
    one: dict[str, Any], two: dict[str, Any], kind: str
) -> None:
    none = find_runs(one, two, kind, "none")[1]["held"]
    assert all(held["weights"] and held["gradients"] for held in none)
    assert all(held["optimizer"] for held in none[1:])
    optimizer = find_runs(one, two, kind, "optimizer")[0]["held"]
    assert [held["weights"] for held in optimizer] == [held["weights"] for held in none]
    assert all(held["gradients"] == held["optimizer"] == 0 for held in optimizer)
    assert all(not any(held.values()) for held in find_runs(one, two, kind, "all")[0]["held"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="other layers and another Adam may be there")
def test_a_worker_says_which_layers_and_which_adam_it_computes_with(one: dict[str, Any]) -> None:
    assert one["policy-none"]["description"] == "local layers in float32, torch's fused AdamW"
    assert one["bf16-all"]["description"] == "local layers in bfloat16, torch's fused AdamW"
