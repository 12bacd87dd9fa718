"""Whole runs with an environment that answers, over the fakes (tests/fakes)."""

import re
from pathlib import Path

import pytest
from fakes.disturbed import RUN, Disturbance, run_disturbed, summarize
from fakes.run import World

from megarl.environment import Action, Environment, Step
from megarl.report.metrics import load_metrics
from megarl.rollout.rollout_file import load_rollouts

CONVERSATION = ("environment=class", f"environment.path={__name__}:Echo", "environment.turn_length=5")


class Echo(Environment):
    """Three turns, a reward for each letter of the first two."""

    def step(self, action: Action) -> Step:
        reward = 0.125 * len(action.text) if action.turn < 2 else 0.0
        return Step("d.=", reward=reward, done=action.turn == 2, details={"letters": float(len(action.text))})


def test_a_run_of_conversations_learns_its_actions_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*RUN, *CONVERSATION, "logger.terminal=true", "logger.num_logged_samples=8")
    World().run_job(monkeypatch, tmp_path / "one", overrides)
    out = capsys.readouterr().out
    assert "R at the last token, less the environment's rewards of earlier turns" in " ".join(out.split())
    assert re.search(r"  observation( \(\S+\))? +d ?\. ?=", out)

    (*_, last) = load_rollouts(tmp_path / "one" / "rollouts.jsonl")
    line = load_metrics(tmp_path / "one" / "metrics.jsonl")[-1]
    responses = [sample.response for sample in last.samples]
    assert any(not response.generated.all() for response in responses)
    mean = {
        "length/mean": [int(response.generated.sum()) for response in responses],
        "environment/tokens_mean": [len(response) for response in responses],
        "environment/turns_mean": [len(response.turns) for response in responses],
        "environment/letters": [sum(turn.details["letters"] for turn in response.turns) for response in responses],
        "reward/mean": [sample.score.reward for sample in last.samples],
    }
    assert line == line | {name: pytest.approx(sum(each) / len(each)) for name, each in mean.items()}
    assert sum(turn.reward for response in responses for turn in response.turns) > 1

    failing = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 3)
    with pytest.raises(FloatingPointError):
        run_disturbed(monkeypatch, tmp_path / "two", failing, *CONVERSATION)
    World().run_job(monkeypatch, tmp_path / "two", overrides)
    assert summarize(tmp_path / "two") == summarize(tmp_path / "one")
