"""`python -m megarl.train rollout.file=...` with the real training processes and no server."""

import random
import re
from pathlib import Path

import pytest
from whole_runs import find_marked, find_scratch, start, wait_end

from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import RolloutWriter
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

LETTERS, DOT, EQUALS, EOS = "abcdef", 9, 10, 2
"""Of model=tiny: <pad>, <bos>, <eos>, then `abcdef.=`"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To each prompt four right responses, the prompt's letter three times, and four of random letters."""
    chosen = random.Random(1)
    samples = []
    for group in range(24):
        letter = group % len(LETTERS)
        prompt = Prompt(f"p{group}", f"{LETTERS[letter]}.=", (3 + letter, DOT, EQUALS), LETTERS[letter])
        for number in range(8):
            right = number < 4
            tokens = [3 + letter] * 3 if right else [chosen.randrange(3, 9) for _ in range(3)]
            response = Response([*tokens, EOS], "?", [-2.0] * 4, [True] * 4, [0] * 4, FinishReason.stop)
            samples.append(Sample(prompt, response, Score(float(right), right), group))
    path = tmp_path_factory.mktemp("saved") / "rollouts.jsonl"
    writer = RolloutWriter(path)
    writer.write(Rollout(tuple(samples), 0), 1)
    writer.close()
    return path


def test_a_run_without_servers_learns_and_says_that_nothing_was_evaluated(saved, short_path):
    run_dir = short_path / "run"
    run = start(
        *("model=tiny", "algo=topr", f"rollout.file={saved}", f"hydra.run.dir={run_dir}", "reward.wrong=0"),
        *("train.num_iterations=4", "train.prompts_per_iteration=12", "train.responses_per_prompt=8"),
        *("algo.topr.ratio_level=geometric", "train.num_minibatches=4"),
    )
    code, output = wait_end(run)
    assert code == 0, output
    assert output.strip().splitlines()[-1] == f"done: iterations=4 reward/heldout=none run_dir={run_dir}"
    assert (
        f"rollout.file: 192 responses in 24 groups, of 1 rollouts in {saved}; a pass over them takes 2"
        in (run_dir / "train.log").read_text()
    )
    lines = load_metrics(run_dir / "metrics.jsonl")
    assert lines[-1]["saved/epoch"] == 2
    assert lines[-1]["replay/logprob_above"] > lines[1]["replay/logprob_above"] + 0.5
    logs = {re.sub(r"-\d+\.log", "", file.name) for file in (run_dir / "logs").iterdir()}
    assert logs == {"driver.log", "policy"}
    assert (run_dir / "policy" / "model.safetensors").is_file()
    assert find_marked(run_dir) == []
    assert find_scratch(run, short_path) == []
