"""Weights of every family to a real SGLang server of it, against what SGLang itself makes of the same checkpoint; wrong
weights of experts, tied embeddings and adapters in a job's server: the checksums of its sync find them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop_parts import open_trainer
from safetensors.torch import load_file, save_file
from servers import ALPHABET
from syncs import assert_refuted_and_mended, load_checksums, open_sides, updating
from torch import Tensor

from megarl.config.schema.roles import RandomModelConfig
from megarl.config.schema.root import RolloutConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.models.families import FAMILIES

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
        trainer.roles.policy.export_weights(base).result()
        trainer.train(1)
        trainer.roles.policy.export_weights(right).result()
        planted = corrupt(*(load_file(each / "model.safetensors") for each in (right, base)))
        assert_refuted_and_mended(parts.sync, client, [planted], f"the checksum of {next(iter(planted))} ")


SERVED_ELSEWHERE = {"qwen3", "qwen3_moe"}
"""By test_reshard.py and by test_trained.py"""


def write_checkpoint(directory: Path, family: str, seed: int) -> Path:
    """Random weights in which no norm is 1 and no bias 0, where a swapped or missing one would not show."""
    config = RandomModelConfig(family=family, alphabet=ALPHABET, hidden_size=64, ffn_size=96, num_layers=3)
    checkpoint = build_random_checkpoint(config, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    changed = {name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}
    # SGLang keeps sinks in bfloat16, whatever the dtype.
    changed |= {name: x.bfloat16().float() for name, x in changed.items() if name.endswith(".sinks")}
    save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SERVED_ELSEWHERE))
def test_a_server_holds_after_a_publish_what_sglang_loads_of_the_policys_checkpoint(
    family: str, rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    policy, other = (write_checkpoint(tmp_path / str(seed), family, seed) for seed in range(2))
    with open_sides(rollout_config, policy, policy, tmp_path) as sides, sides.open_sync() as sync:
        expected = load_checksums(sides.client)
        with updating(sides.client):
            sides.client.update_weights_from_disk(other)
        before = load_checksums(sides.client)
        assert all(a.keys() == b.keys() and all(a[x] != b[x] for x in a) for a, b in zip(expected, before, strict=True))
        metrics = sync.publish(3)
        assert load_checksums(sides.client) == expected
    assert metrics["sync/bytes_over_bound"] == 1.0
    assert metrics["sync/probe_logprob_gap"] < 1e-4
