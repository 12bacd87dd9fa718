"""Whole runs of the command with policy and critic on several processes, as a user starts them."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from whole_runs import train as run_command

from megarl.report.record import load_metrics
from megarl.types import Metrics

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 2
SMALL = ("train.num_eval_prompts=8", "rollout.response_length=24")


def train(directory: Path, *overrides: str) -> list[Metrics]:
    """Run `megarl.train` to its end; the metrics of each iteration."""
    fixed = [f"train.num_iterations={NUM_ITERATIONS}", *SMALL, f"hydra.run.dir={directory}/run"]
    last = run_command(*overrides, *fixed, TMPDIR=str(directory)).strip().splitlines()[-1]
    assert re.fullmatch(rf"done: iterations={NUM_ITERATIONS} reward/heldout=0\.\d{{4}} .*", last)
    lines = [line for line in load_metrics(directory / "run" / "metrics.jsonl") if line["iteration"] > 0]
    assert len(lines) == NUM_ITERATIONS
    for line in lines:
        # SGLang's log-probs are those of Megatron's policy, before and after an update.
        assert line["mismatch/logprob_gap_max"] < 1e-4
        assert line["sync/bytes_over_bound"] == 1.0
    return lines


def test_a_policy_of_two_stages_and_two_shards_trains_with_a_critic_and_a_server_of_two_shards(
    short_path: Path,
) -> None:
    lines = train(
        short_path,
        "algo=vapo",
        "model.random.num_layers=2",
        "algo.value_pretrain.steps=1",
        "train.prompts_per_iteration=4",
        "policy.parallel={num_processes: 4, tp: 2, sp: true, pp: 2}",
        "critic.parallel={num_processes: 2, tp: 2}",
        "rollout.tp=2",
    )
    assert all(line[f"{role}/grad_norm"] > 0 for line in lines for role in ("policy", "critic"))


def test_a_mixture_of_experts_trains_with_its_experts_on_two_processes_and_two_servers(short_path: Path) -> None:
    lines = train(
        short_path,
        "model=tiny_moe",
        "algo=grpo",
        "train.prompts_per_iteration=8",
        "policy.parallel={num_processes: 2, ep: 2}",
        "model.megatron={moe_aux_loss_coeff: 0.01}",
        "rollout.num_servers=2",
        "rollout.transport=split",
        "rollout.router_replay=true",
    )
    for line in lines:
        # Rounding alone, which no tie of these routers is near enough for.
        assert line["policy/moe_routing_agreement"] == 1.0
        assert 1.0 <= line["policy/moe_max_load"] <= 2.0
        assert line["policy/moe_aux_loss"] > 0.9
    assert json.loads((short_path / "run" / "policy" / "config.json").read_text())["model_type"] == "qwen3_moe"
    experts = {name for name in load_file(short_path / "run" / "policy" / "model.safetensors") if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
