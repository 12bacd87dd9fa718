"""Weights of every family to a real SGLang server of it, against what SGLang itself makes of the same checkpoint."""

from pathlib import Path

import pytest
import torch
from loop_parts import build_policy
from safetensors.torch import load_file, save_file
from servers import ALPHABET, API_KEY, running_server

from megarl.cluster.actors import WorkerGroup
from megarl.cluster.opened import open_ray
from megarl.config.placement import DeviceSlot
from megarl.config.schema.roles import Dtype, RandomModelConfig
from megarl.config.schema.run import ClusterConfig, RolloutConfig, Transport
from megarl.mcore.spec import read_architecture
from megarl.models.checkpoint import build_random_checkpoint
from megarl.models.families import FAMILIES
from megarl.rollout.client import SGLangClient
from megarl.sync.ranks import Ranks
from megarl.sync.sync import ShardSync

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
    config = RolloutConfig(**{**vars(rollout_config), "transport": Transport.colocated})
    with (
        running_server(config, policy, tmp_path / "server.log", seed=1) as server,
        open_ray(ClusterConfig(), num_actors=2) as cluster,
    ):
        client = SGLangClient(server.url, vocab_size=55, deadline_s=60.0, api_key=API_KEY)
        expected = client.load_checksums()
        client.pause()
        client.begin_update()
        client.update_weights_from_disk(other)
        client.end_update()
        client.resume()
        before = client.load_checksums()
        assert all(a.keys() == b.keys() and all(a[x] != b[x] for x in a) for a, b in zip(expected, before, strict=True))
        group = WorkerGroup(build_policy(policy), tmp_path / "logs", cluster, (DeviceSlot(), DeviceSlot()), 240.0)
        group.start().result()
        ranks = Ranks(group, [client], config, read_architecture(policy), "127.0.0.1")
        where = {"scratch": cluster.scratch, "host": "127.0.0.1", "policy_dtype": Dtype.float32}
        sync = ShardSync(group, [client], config, ranks, list(range(3, 40)), **where)
        try:
            metrics = sync.publish(3)
            assert client.load_checksums() == expected
        finally:
            sync.close()
            group.close()
    assert metrics["sync/bytes_over_bound"] == 1.0
    assert metrics["sync/probe_logprob_gap"] < 1e-4
