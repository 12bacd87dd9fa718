"""Tasks of several turns, each trained by the command: tools, guesses, and environments of the package verifiers."""

import os
import string
from pathlib import Path

import pytest
from whole_runs import train as run_command

from megarl.examples.toys.guess import compute_best_without_answers
from megarl.models.checkpoint import build_character_tokenizer
from megarl.report.evaluation import compute_mean
from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import load_rollouts

pytestmark = pytest.mark.slow

ALWAYS = ("checkpoint.save_every=null", "logger.save_rollouts=true")


def train(run_dir: Path, *overrides: str, path: str = "") -> list:
    """The rollouts of a run with these overrides. path: a folder that it imports from."""
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    run_command(*overrides, *ALWAYS, f"hydra.run.dir={run_dir}", PYTHONPATH=paths)
    return load_rollouts(run_dir / "rollouts.jsonl")


ALPHABET = string.ascii_letters + string.digits + string.punctuation.replace('"', "").replace("\\", "") + " \n"
MIXED = (
    *("algo=grpo", "model=tiny", "environment=verifiers", "data=verifiers", "reward=environment"),
    *("environment.id=vf_environments:mixed", "environment.turn_length=16", "environment.max_turns=3"),
    *("data.prompt_length=200", "rollout.response_length=48", "train.num_iterations=2", "train.eval_every=2"),
    *("train.samples_per_iteration=64", "train.samples_per_minibatch=32", f'model.random.alphabet="{ALPHABET}"'),
)
"""An environment that the package brings and one of several turns, in one group"""


def test_a_policy_is_trained_in_environments_of_verifiers(short_path):
    run_dir = short_path / "run"
    pytest.importorskip("verifiers", reason="needs the extra: make install EXTRAS=verifiers")
    rollouts = train(run_dir, *MIXED, path=str(Path(__file__).parents[1] / "unit" / "task"))
    tokenizer = build_character_tokenizer(ALPHABET, 256)
    samples = [s for rollout in rollouts for s in rollout.samples]
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


NUM_ITERATIONS = 30


def test_a_trained_policy_beats_the_best_that_ignores_the_answers(short_path):
    number = [f"train.{key}={NUM_ITERATIONS}" for key in ("num_iterations", "eval_every")]
    rollouts = train(short_path / "run", "experiment=guess", "algo=grpo", *number)
    assert len(rollouts) == NUM_ITERATIONS
    last = [sample.score.reward for rollout in rollouts[-4:] for sample in rollout.samples]
    assert len(last) == 1024
    assert compute_mean(last, 1).low > compute_best_without_answers(7, 3)
    # It reads: later guesses are hardly ever ones that an answer has ruled out; of random ones about half are.
    later = [turn for rollout in rollouts[-4:] for sample in rollout.samples for turn in sample.response.turns[1:]]
    assert sum(turn.details["ruled_out"] for turn in later) < 0.3 * len(later)
