"""Weights of every family to a real SGLang server of it, against what SGLang itself makes of the same checkpoint; wrong
weights of experts, tied embeddings and adapters in a server: the checksums of its sync find them.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.backend import Done
from loop_parts import build_policy, open_trainer
from safetensors.torch import load_file, save_file
from servers import ALPHABET, API_KEY, running_server
from syncs import Sides, assert_refuted_and_mended, load_checksums, updating
from torch import Tensor

from megarl.cluster.actors import merge_rows
from megarl.config.schema.roles import ParallelConfig, RandomModelConfig
from megarl.config.schema.root import RolloutConfig, Transport
from megarl.mcore.worker import MegatronWorker
from megarl.models.checkpoint import build_random_checkpoint
from megarl.models.families import FAMILIES
from megarl.rollout.client import SGLangClient
from megarl.sync.ends import WeightSender
from megarl.types import Sequences

pytestmark = pytest.mark.slow


def swap_two_experts(right: dict[str, Tensor]) -> dict[str, Tensor]:
    experts = [[right[f"model.layers.1.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")] for e in (1, 0, 2, 3)]
    return {"model.layers.1.mlp.experts.w13_weight": torch.stack([torch.cat(each) for each in experts])}


def change_the_tied_embedding(right: dict[str, Tensor]) -> dict[str, Tensor]:
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


def test_an_adapter_left_out_fails_the_checksums_and_the_next_sync_mends_it(tmp_path: Path) -> None:
    with open_trainer(None, tmp_path / "run", ["algo=grpo", "policy.lora.rank=4"]) as trainer:
        parts = trainer.components
        (client,), base, right = parts.engine.clients, tmp_path / "base", tmp_path / "right"
        trainer.fleet.publish(0)
        trainer.roles.policy.export_weights(base).result()
        trainer.train(1)
        trainer.roles.policy.export_weights(right).result()
        planted = leave_the_adapter_out(*(load_file(each / "model.safetensors") for each in (right, base)))
        assert_refuted_and_mended(parts.sync, client, [planted], f"the checksum of {next(iter(planted))} ")


SERVED_ELSEWHERE = {"qwen3", "qwen3_moe"}
"""By test_reshard.py and by test_trained.py"""
WRONG = {"glm4_moe": swap_two_experts, "mistral": change_the_tied_embedding}
"""What is planted into a family's server. Mistral has the modules of Llama, whose embedding is not tied here"""


def write_checkpoint(directory: Path, family: str, seed: int) -> Path:
    """Random weights in which no norm is 1 and no bias 0, where a swapped or missing one would not show."""
    sizes = {"hidden_size": 64, "ffn_size": 96, "num_layers": 3}
    is_tied = WRONG.get(family) is change_the_tied_embedding
    config = RandomModelConfig(family=family, alphabet=ALPHABET, tie_embeddings=is_tied, **sizes)
    checkpoint = build_random_checkpoint(config, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    changed = {name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}
    # SGLang keeps sinks in bfloat16, whatever the dtype.
    changed |= {name: x.bfloat16().float() for name, x in changed.items() if name.endswith(".sinks")}
    save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@dataclass(frozen=True)
class OwnRank:
    """A policy of one rank in this process, as a sync takes it: a family needs no other processes than a server's."""

    worker: MegatronWorker
    sender: WeightSender

    def call_senders(
        self, verb: str, arguments: Sequence[tuple[Any, ...]] | None, deadline_s: float
    ) -> Done[list[Any]]:
        return Done([getattr(self.sender, verb)(*(arguments[0] if arguments else ()))])

    def logprobs(self, sequences: Sequences, temperature: float) -> Done[Tensor]:
        return Done(merge_rows(sequences)([self.worker.logprobs(sequences, temperature)]))

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Done[Tensor]:
        return Done(merge_rows(sequences)([self.worker.rounded_logprobs(sequences, temperature, unit)]))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SERVED_ELSEWHERE))
def test_a_server_holds_after_a_publish_what_sglang_loads_of_the_policys_checkpoint(
    family: str, rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    policy, other = (write_checkpoint(tmp_path / str(seed), family, seed) for seed in range(2))
    spec = replace(build_policy(policy), parallel=ParallelConfig())
    config = replace(rollout_config, transport=Transport.colocated)
    with (
        running_server(config, policy, tmp_path / "server.log", seed=1) as server,
        contextlib.closing(MegatronWorker(spec, 0, 1, f"file://{tmp_path}/init")) as worker,
    ):
        client = SGLangClient(server.url, vocab_size=55, deadline_s=60.0, api_key=API_KEY)
        group = OwnRank(worker, WeightSender(worker))
        with Sides(group, tmp_path, client, config, policy).open_sync() as sync:
            expected = load_checksums(client)
            with updating(client):
                client.update_weights_from_disk(other)
            before = load_checksums(client)
            assert all(
                a.keys() == b.keys() and all(a[x] != b[x] for x in a) for a, b in zip(expected, before, strict=True)
            )
            metrics = sync.publish(3)
            assert load_checksums(client) == expected
            if family in WRONG:
                planted = WRONG[family](load_file(policy / "model.safetensors"))
                assert_refuted_and_mended(sync, client, [planted], f"the checksum of {next(iter(planted))} ")
                assert load_checksums(client) == expected
    assert metrics["sync/bytes_over_bound"] == 1.0
    assert metrics["sync/probe_logprob_gap"] < 1e-4
