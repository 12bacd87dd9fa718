"""The optimizer's state in a checkpoint: before the first step, from one Adam to another, in buckets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import save_and_load, save_in_buckets
from layout_runs import build_spec, launch
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

ADAMS = ["torch", "lazy"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Experts have an optimizer of their own, which Megatron chains to the other."""
    path = tmp_path_factory.mktemp("adam")
    write_checkpoint(path / "qwen3_moe", "qwen3_moe")
    spec = build_spec(Role.policy, path / "qwen3_moe", "dp2", dtype=Dtype.bfloat16)
    (path / "runs").mkdir()
    found = {name: launch(2, save_and_load, spec, name == "lazy", scratch=path / "runs") for name in ADAMS}
    assert {name: found[name]["kind"] for name in ADAMS} == {"torch": "AdamW", "lazy": "FusedAdam"}
    return found


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("key", ["fresh", "stepped"])
def test_a_state_is_saved_and_continued_bit_by_bit_also_before_the_first_step(
    runs: dict[str, Any], adam: str, key: str
) -> None:
    found = runs[adam][key]
    assert found["saved"] == found["again"] == found["loaded"]
    assert found["stepped"] == found["continued"] != found["saved"]
    assert found["metrics"] == found["after"]


@pytest.mark.parametrize("adam", ADAMS)
def test_a_load_keeps_the_tensors_that_are_there(runs: dict[str, Any], adam: str) -> None:
    """A second set of moments beside the first would be 8 bytes of GPU memory for each parameter."""
    assert all(runs[adam][key]["kept"] for key in ("fresh", "stepped"))


def test_one_adam_continues_what_the_other_wrote(runs: dict[str, Any]) -> None:
    found, expected = runs["lazy"]["other"], runs["torch"]["stepped"]
    assert found["loaded"] == expected["saved"]
    assert found["after"] == [pytest.approx(expected["metrics"][0], rel=1e-4)]


def test_a_checkpoint_is_the_same_whatever_the_buckets_of_gradients(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3")
    found = launch(2, save_in_buckets, tmp_path / "qwen3")
    one, many = found["one"]["tensors"], found["many"]["tensors"]
    assert found["one"]["num_buckets"] == 1 < found["many"]["num_buckets"]
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[key]) for key, tensor in one.items())
    weights = {key for key in one if not key.startswith("optimizer.")}
    for key in weights:
        # In float32 the optimizer's copy is the weight itself.
        assert torch.equal(many[f"optimizer.state.param.{key}"], many[key]), key
        assert many[f"optimizer.state.exp_avg.{key}"].abs().max() > 0, key
