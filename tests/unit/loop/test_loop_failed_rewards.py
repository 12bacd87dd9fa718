"""Runs in which responses have no reward, and runs with an environment, over the fakes (tests/fakes)."""

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.disturbed import RUN, Disturbance, check_disturbed, check_resumed
from fakes.run import Said, World, reward_length
from generation import load_rollouts

from megarl.environment import Action, Environment, Step
from megarl.report.evaluation import TooManyFailuresError
from megarl.report.record import load_metrics
from megarl.types import Prompt, Response, Score

REPLAYED = ("algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", "train.num_iterations=5")
REPLAYED += ("checkpoint.save_every=2", "logger.save_rollouts=true")
SELDOM = ("checkpoint.save_every=100", "checkpoint.max_restarts=0")


def fail_some(prompt: Prompt, response: Response) -> Score:
    """About one response in eight has no reward: those of the weights, not of the time, so that a run repeats."""
    if int(response.token_ids.sum()) % 8 == 0:
        return Score(0.0, False, failure=f"TimeoutError: no verdict on {len(response)} tokens")
    return reward_length(prompt, response)


@pytest.mark.parametrize("overrides", [RUN, REPLAYED], ids=["vapo", "topr with replay"])
def test_a_run_with_failed_samples_ends_and_repeats_from_a_checkpoint(
    overrides: tuple[str, ...], tmp_path: Path, said: Said
) -> None:
    overrides = (*overrides, "reward.max_failed_frac=0.5", "logger.terminal=true")
    failing = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 4)
    check_disturbed(tmp_path, overrides, failing, fail_some)
    out = said()
    assert "warning: iteration-1: " in out
    assert "TimeoutError: no verdict on" in out
    metrics = [line for line in load_metrics(tmp_path / "whole" / "metrics.jsonl") if line["iteration"] > 0]
    saved = load_rollouts(tmp_path / "whole" / "rollouts.jsonl")[-len(metrics) :]
    lost = [[sample.score.failure is not None for sample in rollout.samples] for rollout in saved]
    assert [line["reward/failed_frac"] for line in metrics] == [sum(each) / len(each) for each in lost]
    assert sum(map(sum, lost)) > 3
    for line, rollout in zip(metrics, saved, strict=True):
        rewards = [sample.score.reward for sample in rollout.samples if sample.score.failure is None]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("in_pretraining", [False, True])
def test_too_many_failures_end_the_run_with_their_reasons_and_a_mended_reward_goes_on(
    in_pretraining: bool, untouched: dict[str, Any], run_dir: Path
) -> None:
    num_calls = 0
    # Value pretraining has three rollouts of 24, each evaluation 8 prompts: iteration 3 begins after two of each.
    first = 24 if in_pretraining else 5 * 24 + 2 * 8

    def reward(prompt: Prompt, response: Response) -> Score:
        nonlocal num_calls
        num_calls += 1
        # 10% of 24 are two.
        if first < num_calls <= first + 3:
            return Score(0.0, False, failure="ConnectionError: the judge does not answer")
        return reward_length(prompt, response)

    with pytest.raises(TooManyFailuresError) as caught:
        World(reward=reward).run_job(run_dir, [*RUN, *SELDOM])
    assert str(caught.value).startswith(
        "3 of 24 responses have no reward: 3 x ConnectionError: the judge does not answer."
        " reward.max_failed_frac=0.1 allows 2:"
    )
    if not in_pretraining:
        assert (run_dir / "checkpoints" / "latest").read_text() == "iteration-000002\n"
    check_resumed(run_dir, untouched, [*RUN, *SELDOM])


def test_groups_that_were_complete_ahead_are_sampled_again_where_too_many_had_failed(run_dir: Path) -> None:
    judge_is_up = False

    def reward(prompt: Prompt, response: Response) -> Score:
        return reward_length(prompt, response) if judge_is_up else Score(0.0, False, failure="ConnectionError")

    overrides = ("algo=reinforce_pp", "rollout.max_staleness=2", "algo.mismatch.correction=tis", *SELDOM)
    for _ in range(2):
        with pytest.raises(TooManyFailuresError):
            World(reward=reward).run_job(run_dir, [*overrides, "train.num_iterations=3"])
    judge_is_up = True
    # One iteration: the fake servers generate on while weights reach them, which real ones do not.
    World(reward=reward).run_job(run_dir, [*overrides, "train.num_iterations=1"])
    first, last = load_metrics(run_dir / "metrics.jsonl")
    assert (first["iteration"], last["iteration"], last["reward/failed_frac"]) == (0, 1, 0.0)


CONVERSATION = ("environment=class", f"environment.path={__name__}:Echo", "environment.turn_length=5")


class Echo(Environment):
    """Three turns, a reward for each letter of the first two."""

    def step(self, action: Action) -> Step:
        reward = 0.125 * len(action.text) if action.turn < 2 else 0.0
        return Step("d.=", reward=reward, done=action.turn == 2, details={"letters": float(len(action.text))})


def test_a_run_of_conversations_learns_its_actions_and_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*RUN, *CONVERSATION, "logger.terminal=true", "logger.num_logged_samples=8")
    failing = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 3)
    check_disturbed(tmp_path, overrides, failing)
    out = capsys.readouterr().out
    assert "R at the last token, less the environment's rewards of earlier turns" in " ".join(out.split())
    assert re.search(r"  observation( \(\S+\))? +d ?\. ?=", out)

    (*_, last) = load_rollouts(tmp_path / "whole" / "rollouts.jsonl")
    line = load_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]
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
