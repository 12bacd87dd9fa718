"""environment=verifiers, trained by the command: one that the package brings and one of several turns, in one group."""

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="needs the extra: make install EXTRAS=verifiers")

from megarl.models.checkpoint import build_character_tokenizer
from megarl.report.metrics import load_metrics
from megarl.rollout.rollout_file import load_rollouts

pytestmark = pytest.mark.slow

ENVIRONMENTS = Path(__file__).parents[1] / "unit" / "environment"
ALPHABET = string.ascii_letters + string.digits + string.punctuation.replace('"', "").replace("\\", "") + " \n"
COMMAND = (
    *(sys.executable, "-m", "megarl.train", "algo=grpo", "model=tiny"),
    *("environment=verifiers", "data=verifiers", "reward=environment", "environment.id=vf_environments:mixed"),
    *("data.prompt_length=200", "rollout.response_length=48", "environment.turn_length=16", "environment.max_turns=3"),
    *("train.num_iterations=2", "train.samples_per_iteration=64", "train.samples_per_minibatch=32"),
    *("train.eval_every=2", "checkpoint.save_every=null", "logger.save_rollouts=true"),
    f'model.random.alphabet="{ALPHABET}"',
)


def test_a_policy_is_trained_in_environments_of_verifiers(short_path):
    run_dir = short_path / "run"
    path = os.pathsep.join(filter(None, (str(ENVIRONMENTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*COMMAND, f"hydra.run.dir={run_dir}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer = build_character_tokenizer(ALPHABET, 256)
    samples = [s for rollout in load_rollouts(run_dir / "rollouts.jsonl") for s in rollout.samples]
    assert len(samples) == 128
    assert [sample.score.failure for sample in samples] == [None] * len(samples)
    countdown = [sample for sample in samples if "count down from" in sample.prompt.text]
    assert 0 < len(countdown) < len(samples)
    assert {len(sample.response.turns) for sample in samples if sample not in countdown} == {1}
    several = [sample.response for sample in countdown if len(sample.response.turns) > 1]
    assert several
    for response in several:
        first, second = response.turns[:2]
        observation = tokenizer.decode(response.token_ids[first.end : second.start].tolist())
        assert observation.startswith("now ")
        assert not response.generated[first.end : second.start].any()
        assert first.reward == 0.0
    last = load_metrics(run_dir / "metrics.jsonl")[-1]
    assert "environment/num_turns" in last, sorted(last)
    assert "reward/heldout" in last
