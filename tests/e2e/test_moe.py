"""A model with a mixture of experts, its experts on two processes, as a user trains it."""

import json
import os
import re
import subprocess
import sys

from safetensors.torch import load_file

from megarl.report.metrics import load_metrics


def test_a_mixture_of_experts_trains_with_its_experts_on_two_processes(tmp_path):
    overrides = [
        "model=tiny_moe",
        "algo=grpo",
        "policy.parallel={num_processes: 2, ep: 2}",
        "model.megatron={moe_aux_loss_coeff: 0.01}",
        "train.num_iterations=2",
        f"hydra.run.dir={tmp_path}/run",
    ]
    command = [sys.executable, "-m", "megarl.train", *overrides]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=580, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert re.fullmatch(r"done: iterations=2 reward/heldout=0\.\d{4} .*", run.stdout.strip().splitlines()[-1])
    lines = load_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert len(lines) == 2
    for line in lines:
        # SGLang's log-probs are those of the experts that Megatron routes to, before and after an update.
        assert line["mismatch/logprob_gap_max"] < 1e-4
        assert 1.0 <= line["policy/moe_max_load"] <= 2.0
        assert line["policy/moe_aux_loss"] > 0.9
    assert json.loads((tmp_path / "run" / "policy" / "config.json").read_text())["model_type"] == "qwen3_moe"
    experts = {name for name in load_file(tmp_path / "run" / "policy" / "model.safetensors") if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
