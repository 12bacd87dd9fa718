"""A reward model's loss, gradient and updates are those of transformers in float64, under every layout and cut into
micro-batches.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layout_runs import FLOAT32, build_spec, compare_runs, find_problems, read_layout, run_layouts
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.algo import AlgoConfig, ValueLoss
from megarl.config.schema.roles import OptimizerConfig
from megarl.mcore.spec import Role
from megarl.types import TrainingSamples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BOUNDS = FLOAT32 | {"loss": 5e-6}
"""A margin is the difference of two scores"""
LAYOUTS = ("tp2-sp", "pp2", "pp2-vpp2", "dp2", "cp2")


def build_pairs() -> TrainingSamples:
    """Seven pairs, which two ranks do not divide evenly; in some the second response is the better one."""
    samples = build_samples(14)
    sequences = replace(samples.sequences, prompt_lengths=samples.sequences.lengths - 1)
    ones = torch.ones(14, 1, dtype=torch.bool)
    cut = {"mask": ones, "loss_mask": ones, "advantages": torch.zeros(14, 1), "rollout_logprobs": torch.zeros(14, 1)}
    nothing = dict.fromkeys(("old_logprobs", "sampling_logprobs", "ref_logprobs", "old_values", "returns"))
    positive = torch.tensor([True, False, False, True] * 3 + [True, False])
    return replace(samples, sequences=sequences, positive=positive, **cut, **nothing)


def test_a_layout_and_a_cut_compute_what_one_process_and_transformers_do(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    write_checkpoint(tmp_path / "model", num_hidden_layers=4)
    samples, algo = build_pairs(), AlgoConfig(value_loss=ValueLoss.bradley_terry)
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
    one = build_spec(Role.critic, tmp_path / "model", algo=algo, optimizer=optimizer)
    specs = {"one": one, **{f"cut{n}": replace(one, tokens_per_microbatch=n) for n in (1, 50, 100)}}
    specs |= {x: replace(one, parallel=read_layout(x), tokens_per_microbatch=50) for x in LAYOUTS}
    runs = run_layouts(tmp_path / "runs", specs, samples)
    for name, run in runs.items():
        assert find_problems(compare_runs(run, runs["one"]), BOUNDS) == [], name
        for found, expected in zip(run.metrics, runs["one"].metrics, strict=True):
            for metric in ("critic/pair_accuracy", "critic/pair_margin"):
                assert found[metric] == pytest.approx(expected[metric], abs=1e-5), name
    before = runs["one"].directory / "before"
    model = AutoModelForSequenceClassification.from_pretrained(before, dtype=torch.float64)
    rows = samples.sequences.tokens.split(samples.sequences.lengths.tolist())
    scores = torch.stack([model(tokens[None, :-1]).logits[0, 0] for tokens in rows])
    better, worse = scores[samples.positive], scores[~samples.positive]
    order = samples.positive.nonzero()[:, 0] // 2
    assert torch.equal(order, (~samples.positive).nonzero()[:, 0] // 2)
    loss = -torch.nn.functional.logsigmoid(better - worse).mean()
    loss.backward()
    assert runs["one"].list_metrics("loss")[0] == pytest.approx(loss.item(), rel=1e-6)
    gradient = runs["one"].read("gradient")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[name].double(), parameter.grad, rtol=2e-4, atol=2e-6, msg=name)
