"""Whole runs of the command: policy and critic on several processes; environments of the package verifiers."""

import json
import os
import re
import string
from pathlib import Path

import pytest
from generation import load_rollouts
from safetensors.torch import load_file
from whole_runs import train

from megarl.models.checkpoint import build_character_tokenizer
from megarl.report.record import load_metrics
from megarl.types import Metrics

pytestmark = pytest.mark.slow

SMALL = ("train.num_eval_prompts=8", "rollout.response_length=24")


def train_small(directory: Path, *overrides: str) -> list[Metrics]:
    """Run `megarl.train` to its end; the metrics of each of two iterations."""
    fixed = ["train.num_iterations=2", *SMALL, f"hydra.run.dir={directory}/run"]
    last = train(*overrides, *fixed, TMPDIR=str(directory)).strip().splitlines()[-1]
    assert re.fullmatch(r"done: iterations=2 reward/heldout=0\.\d{4} .*", last)
    lines = [line for line in load_metrics(directory / "run" / "metrics.jsonl") if line["iteration"] > 0]
    assert len(lines) == 2
    for line in lines:
        # SGLang's log-probs are those of Megatron's policy, before and after an update.
        assert line["mismatch/logprob_gap_max"] < 1e-4
        assert line["sync/bytes_over_bound"] == 1.0
    return lines


def test_a_policy_of_two_stages_and_two_shards_trains_with_a_critic_and_a_server_of_two_shards(
    short_path: Path,
) -> None:
    lines = train_small(
        short_path,
        *("algo=vapo", "model.random.num_layers=2", "algo.value_pretrain.steps=1", "train.prompts_per_iteration=4"),
        *("policy.parallel={num_processes: 4, tp: 2, sp: true, pp: 2}", "critic.parallel={num_processes: 2, tp: 2}"),
        "rollout.tp=2",
    )
    assert all(line[f"{role}/grad_norm"] > 0 for line in lines for role in ("policy", "critic"))


def test_a_mixture_of_experts_trains_with_its_experts_on_two_processes_and_two_servers(short_path: Path) -> None:
    lines = train_small(
        short_path,
        *("model=tiny_moe", "algo=grpo", "train.prompts_per_iteration=8", "policy.parallel={num_processes: 2, ep: 2}"),
        *("model.megatron={moe_aux_loss_coeff: 0.01}", "rollout.num_servers=2", "rollout.transport=split"),
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


ALPHABET = string.ascii_letters + string.digits + string.punctuation.replace('"', "").replace("\\", "") + " \n"


def test_a_policy_is_trained_in_environments_of_verifiers(short_path: Path) -> None:
    """One environment that the package brings and one of several turns, in one group."""
    pytest.importorskip("verifiers", reason="needs the extra: make install EXTRAS=verifiers")
    own = str(Path(__file__).parents[1] / "unit" / "task")
    train(
        *("algo=grpo", "model=tiny", "environment=verifiers", "data=verifiers", "reward=environment"),
        *("environment.id=vf_environments:mixed", "environment.turn_length=16", "environment.max_turns=3"),
        *("data.prompt_length=200", "rollout.response_length=48", "train.num_iterations=2", "train.eval_every=2"),
        *("train.samples_per_iteration=64", "train.samples_per_minibatch=32", f'model.random.alphabet="{ALPHABET}"'),
        *("checkpoint.save_every=null", "logger.save_rollouts=true", f"hydra.run.dir={short_path}/run"),
        PYTHONPATH=os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH")))),
    )
    samples = [s for rollout in load_rollouts(short_path / "run" / "rollouts.jsonl") for s in rollout.samples]
    assert [sample.score.failure for sample in samples] == [None] * 128
    countdown = [sample.response for sample in samples if "count down from" in sample.prompt.text]
    assert {len(s.response.turns) for s in samples if "count down from" not in s.prompt.text} == {1}
    several = [response for response in countdown if len(response.turns) > 1]
    assert several
    for response in several:
        first, second = response.turns[:2]
        observation = response.token_ids[first.end : second.start].tolist()
        assert build_character_tokenizer(ALPHABET, 256).decode(observation).startswith("now ")
        assert not response.generated[first.end : second.start].any()
    assert {"environment/num_turns", "reward/heldout"} <= set(load_metrics(short_path / "run" / "metrics.jsonl")[-1])
