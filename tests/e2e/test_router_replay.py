"""Router replay between a real SGLang server and a real policy whose routers choose other experts near a tie."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_parts import hosts_of, open_trainer
from safetensors.torch import load_file, save_file
from servers import ALPHABET, running_server

from megarl.config.schema.roles import RandomModelConfig
from megarl.config.schema.run import RolloutConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.types import Rollout

pytestmark = pytest.mark.slow

TILT = 1e-6
"""Of this size, with opposite signs, the weights of experts 0 and 1 differ: ten times what rounding makes of them"""


def write_checkpoint(directory: Path, sign: int) -> Path:
    """A random mixture of 4 experts, 2 for each token, in which experts 0 and 1 tie but for a tilt of this sign."""
    config = RandomModelConfig(family="qwen3_moe", alphabet=ALPHABET, hidden_size=64, ffn_size=96, num_layers=3)
    checkpoint = build_random_checkpoint(config, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, router in tensors.items():
        if name.endswith("mlp.gate.weight"):
            router[1] = router[0] + sign * TILT * torch.randn(router[0].shape, generator=generator)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def test_a_policy_whose_routers_break_ties_otherwise_agrees_with_the_server_when_it_replays_its_experts(
    rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    served, trained = (write_checkpoint(tmp_path / name, sign) for name, sign in (("served", 1), ("trained", -1)))
    config = RolloutConfig(**{**vars(rollout_config), "router_replay": True})
    overrides = ("algo=grpo", f"model.path={trained}", "rollout.router_replay=true")
    with (
        running_server(config, served, tmp_path / "server.log", seed=1) as server,
        hosts_of(server, num_workers=1) as hosts,
        open_trainer(hosts, tmp_path / "run", overrides) as trainer,
    ):
        rollout, _ = trainer.source.take(1)
        assert all(sample.response.routed_experts is not None for sample in rollout.samples)
        chosen = tuple(replace(s, response=replace(s.response, routed_experts=None)) for s in rollout.samples)
        experience, _ = trainer.roles.score(Rollout(chosen, rollout.weight_version), 1)
        _, without = trainer.algorithm.build_targets(experience, 1)
        experience, _ = trainer.roles.score(rollout, 1)
        samples, metrics = trainer.algorithm.build_targets(experience, 1)
        update = trainer.roles.update(samples, 1)
        (greedy,) = trainer.components.collector.collect_greedy(
            trainer.components.heldout[:1], weight_version=0
        ).samples
    assert without["mismatch/logprob_gap_max"] > 0.5
    assert metrics["mismatch/logprob_gap_max"] < 5e-5
    assert 0.4 < update["policy/moe_routing_agreement"] < 0.9
    assert greedy.response.routed_experts is None
