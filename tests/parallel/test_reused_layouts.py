"""An update that computes old_logprobs itself has the gradient of one that is given those of a pass before it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, run_specs
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.algo import AlgoConfig, MismatchConfig, MismatchCorrection
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "grpo": AlgoConfig(clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
    "gspo": AlgoConfig(surrogate="gspo"),
    "tis": AlgoConfig(mismatch=MismatchConfig(correction=MismatchCorrection.tis)),
}
"""Losses of GRPO and PPO (the same: advantages are given), of a ratio per response, and with a correction"""
RUNS: dict[str, tuple[str, str, int]] = {
    **{f"{name}-{tokens}": (name, "one", tokens) for name in ALGORITHMS for tokens in (10_000, 60)},
    **{layout: ("grpo", layout, 60) for layout in ("tp2-sp", "pp2", "pp2-vpp2", "dp2", "cp2")},
}


def test_the_gradient_the_metrics_and_the_logprobs_are_those_with_a_pass_in_every_layout(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", num_hidden_layers=4)
    specs = {
        name: build_spec(Role.policy, tmp_path / "qwen3", layout, algo=ALGORITHMS[algo], tokens_per_microbatch=tokens)
        for name, (algo, layout, tokens) in RUNS.items()
    }
    passes = run_specs(tmp_path / "passes", specs, "scores")
    pairs: dict[str, tuple[Any, Any]] = {}
    for kind, verbs in (("given", "gradient:gradient reversed"), ("own", "gradient:gradient reversed updated")):
        old = {name: run["scores"][0] if kind == "given" else None for name, run in passes.items()}
        given = {x: (spec, {"samples": replace(build_samples(), old_logprobs=old[x])}) for x, spec in specs.items()}
        pairs[kind] = run_specs(tmp_path / kind, given, verbs)
    for name, own in pairs["own"].items():
        given = pairs["given"][name]
        torch.testing.assert_close(own["updated"][0], passes[name]["scores"][0], atol=1e-5, rtol=1e-5, msg=name)
        gradient = own.read("gradient")
        for key, expected in given.read("gradient").items():
            torch.testing.assert_close(gradient[key], expected, atol=1e-6, rtol=1e-4, msg=f"{name} {key}")
        assert own.metrics[0] == pytest.approx(given.metrics[0], rel=1e-4, abs=1e-5)
        assert own.list_metrics("ratio_mean")[0] == pytest.approx(1.0, abs=1e-6)
