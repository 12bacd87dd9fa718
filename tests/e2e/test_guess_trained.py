"""environment=guess, trained by the command: the policy reads the answers, and is learned from what it was sent."""

import subprocess
import sys

import pytest

from megarl.environment import Action, EpisodeSetting
from megarl.examples.toys.guess import Guess, compute_best_without_answers
from megarl.models.checkpoint import build_character_tokenizer
from megarl.report.evaluation import compute_mean
from megarl.rollout.rollout_file import load_rollouts
from megarl.types import FinishReason, Sample

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 30
COMMAND = (
    *(sys.executable, "-m", "megarl.train", "experiment=guess", "algo=grpo", f"train.num_iterations={NUM_ITERATIONS}"),
    *(f"train.eval_every={NUM_ITERATIONS}", "checkpoint.save_every=null", "logger.save_rollouts=true"),
)
TOKENIZER = build_character_tokenizer("1234567-<>", 64)


def replay(sample: Sample) -> None:
    """Asks the environment again, and compares what is learned from with its answers."""
    environment = Guess(3, ">", "<")
    environment.reset(EpisodeSetting(sample.prompt, seed=0))
    response = sample.response
    starts = [turn.start for turn in response.turns[1:]] + [len(response)]
    for number, (turn, start) in enumerate(zip(response.turns, starts, strict=True)):
        ids = response.token_ids[turn.start : turn.end].tolist()
        assert turn.text == TOKENIZER.decode(ids, skip_special_tokens=True)
        cut = ids[-1] != TOKENIZER.eos_token_id
        reason = FinishReason.length if cut else FinishReason.stop
        step = environment.step(Action(turn.text, "", tuple(ids), number, reason))
        assert (turn.reward, dict(turn.details)) == (step.reward, dict(step.details))
        observation = TOKENIZER.decode(response.token_ids[turn.end : start].tolist())
        # Where the limit leaves no room for another action, the observation is left out.
        assert observation == ("" if number + 1 == len(response.turns) else step.observation)
        assert response.generated[turn.start : turn.end].all()
        assert not response.generated[turn.end : start].any()
        if number + 1 == len(response.turns):
            assert step.done or response.finish_reason is FinishReason.length
    assert sample.score.reward == sum(turn.reward for turn in response.turns)


def test_a_trained_policy_beats_the_best_that_ignores_the_answers(short_path):
    run_dir = short_path / "run"
    done = subprocess.run(
        [*COMMAND, f"hydra.run.dir={run_dir}"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = load_rollouts(run_dir / "rollouts.jsonl")
    assert len(rollouts) == NUM_ITERATIONS
    for rollout in rollouts:
        for sample in rollout.samples:
            replay(sample)
    last = [sample.score.reward for rollout in rollouts[-4:] for sample in rollout.samples]
    assert len(last) == 1024
    assert compute_mean(last, 1, 0.999).low > compute_best_without_answers(7, 3)
    # It reads: later guesses are hardly ever ones that an answer has ruled out; of random ones about half are.
    later = [turn for rollout in rollouts[-4:] for sample in rollout.samples for turn in sample.response.turns[1:]]
    assert sum(turn.details["ruled_out"] for turn in later) < 0.3 * len(later)
