"""Weights of every family to a real SGLang server of it, against what SGLang itself makes of the same checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import ALPHABET
from syncs import open_sides, updating

from megarl.config.schema.roles import RandomModelConfig
from megarl.config.schema.run import RolloutConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.models.families import FAMILIES

pytestmark = pytest.mark.slow

SERVED_ELSEWHERE = {"qwen3", "qwen3_moe"}
"""By test_reshard.py and by test_layouts_trained.py"""


def write_checkpoint(directory: Path, family: str, seed: int) -> Path:
    """Random weights in which no norm is 1 and no bias 0, where a swapped or missing one would not show."""
    config = RandomModelConfig(family=family, alphabet=ALPHABET, hidden_size=64, ffn_size=96, num_layers=3)
    checkpoint = build_random_checkpoint(config, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    changed = {name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}
    save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SERVED_ELSEWHERE))
def test_a_server_holds_after_a_publish_what_sglang_loads_of_the_policys_checkpoint(
    family: str, rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    policy, other = (write_checkpoint(tmp_path / str(seed), family, seed) for seed in range(2))
    with open_sides(rollout_config, policy, policy, tmp_path) as sides, sides.open_sync() as sync:
        expected = sides.client.load_checksums()
        with updating(sides.client):
            sides.client.update_weights_from_disk(other)
        before = sides.client.load_checksums()
        assert all(a.keys() == b.keys() and all(a[x] != b[x] for x in a) for a, b in zip(expected, before, strict=True))
        metrics = sync.publish(3)
        assert sides.client.load_checksums() == expected
    assert metrics["sync/bytes_over_bound"] == 1.0
    assert metrics["sync/probe_logprob_gap"] < 1e-4
