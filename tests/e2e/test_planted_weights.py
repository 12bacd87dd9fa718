"""Wrong weights of experts, tied embeddings and adapters in a job's server: the checksums of its sync find them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop_parts import open_trainer
from safetensors.torch import load_file
from syncs import assert_refuted_and_mended
from torch import Tensor

pytestmark = pytest.mark.slow


def swap_two_experts(right: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    experts = [[right[f"model.layers.1.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")] for e in (1, 0, 2, 3)]
    return {"model.layers.1.mlp.experts.w13_weight": torch.stack([torch.cat(each) for each in experts])}


def change_the_tied_embedding(right: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "model.embed_tokens.weight"
    assert "lm_head.weight" not in right
    # The server's has as many rows as are a multiple of 64.
    changed = torch.cat([right[name], torch.zeros(-len(right[name]) % 64, right[name].shape[1])])
    changed[7, 5] += 1e-6
    return {name: changed}


def leave_the_adapter_out(right: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(right[name], base[name])
    return {name: base[name]}


@pytest.mark.parametrize(
    ("overrides", "corrupt"),
    [
        (["model=tiny_moe"], swap_two_experts),
        (["model.random.tie_embeddings=true"], change_the_tied_embedding),
        (["policy.lora.rank=4"], leave_the_adapter_out),
    ],
    ids=["experts", "tied", "lora"],
)
def test_a_wrong_expert_tied_embedding_or_adapter_fails_the_checksums_and_the_next_sync_mends_it(
    overrides: list[str], corrupt: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    with open_trainer(None, tmp_path / "run", ["algo=grpo", *overrides]) as trainer:
        parts = trainer.components
        (client,), base, right = parts.engine.clients, tmp_path / "base", tmp_path / "right"
        trainer.fleet.publish(0)
        parts.policy.export_weights(base).result()
        trainer.train(1)
        parts.policy.export_weights(right).result()
        planted = corrupt(*(load_file(each / "model.safetensors") for each in (right, base)))
        assert_refuted_and_mended(parts.sync, client, [planted], f"the checksum of {next(iter(planted))} ")
