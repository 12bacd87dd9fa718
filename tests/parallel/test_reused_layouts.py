"""An update that computes old_logprobs itself has the gradient of one that is given those of a pass before it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, launch_each, train_reusing
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.algo import AlgoConfig, MismatchConfig, MismatchCorrection
from megarl.mcore.spec import Role, WorkerSpec

pytestmark = pytest.mark.slow

ORDER = [7, 3, 11, 0, 5, 1, 9, 2, 10, 6, 4, 8]
ALGORITHMS = {
    "grpo": AlgoConfig(clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
    "gspo": AlgoConfig(surrogate="gspo"),
    "tis": AlgoConfig(mismatch=MismatchConfig(correction=MismatchCorrection.tis)),
}
"""Losses of GRPO and PPO (the same: advantages are given), of a ratio per response, and with a correction"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "qwen3"
    write_checkpoint(path, num_hidden_layers=4)
    return path


def check(num_processes: int, specs: dict[str, WorkerSpec]) -> None:
    runs = {f"{name}-{own}": (spec, ORDER, own) for name, spec in specs.items() for own in (False, True)}
    found: dict[str, Any] = launch_each(num_processes, train_reusing, runs)
    for name in specs:
        given, own = found[f"{name}-False"], found[f"{name}-True"]
        torch.testing.assert_close(own["own"], given["before"], atol=1e-5, rtol=1e-5, msg=name)
        assert given["own"] is None
        for key, gradient in given["gradient"].items():
            torch.testing.assert_close(own["gradient"][key], gradient, atol=1e-6, rtol=1e-4, msg=f"{name} {key}")
        assert own["metrics"] == pytest.approx(given["metrics"], rel=1e-4, abs=1e-5)
        assert own["metrics"]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("tokens", [10_000, 60])
def test_the_gradient_and_the_metrics_of_one_process_are_those_with_a_pass(checkpoint: Path, tokens: int) -> None:
    specs = {
        name: build_spec(Role.policy, checkpoint, algo=algo, tokens_per_microbatch=tokens)
        for name, algo in ALGORITHMS.items()
    }
    check(1, specs)


def test_every_layout_returns_the_rows_of_the_update_in_their_own_order(checkpoint: Path) -> None:
    specs = {
        layout: build_spec(Role.policy, checkpoint, layout, algo=ALGORITHMS["grpo"], tokens_per_microbatch=60)
        for layout in ("tp2_sp", "pp2", "vpp2", "dp2", "cp2")
    }
    check(2, specs)
