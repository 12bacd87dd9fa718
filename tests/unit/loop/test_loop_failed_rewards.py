"""Runs in which some responses have no reward, and runs in which too many have none.

Over the fakes (tests/fakes).
"""

from pathlib import Path
from typing import Any

import pytest
from fakes.disturbed import RUN, Disturbance, summarize
from fakes.run import World, reward_length

from megarl.report.metrics import load_metrics
from megarl.report.scores import TooManyFailuresError
from megarl.rollout.rollout_file import load_rollouts
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
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*overrides, "reward.max_failed_frac=0.5", "logger.terminal=true")
    World(reward=fail_some).run_job(monkeypatch, tmp_path / "one", overrides)
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: iteration-1: " in out
    assert "TimeoutError: no verdict on" in out
    metrics = [line for line in load_metrics(tmp_path / "one" / "metrics.jsonl") if line["iteration"] > 0]
    saved = load_rollouts(tmp_path / "one" / "rollouts.jsonl")[-len(metrics) :]
    lost = [[sample.score.failure is not None for sample in rollout.samples] for rollout in saved]
    assert [line["reward/failed_frac"] for line in metrics] == [sum(each) / len(each) for each in lost]
    assert sum(map(sum, lost)) > 3
    for line, rollout in zip(metrics, saved, strict=True):
        rewards = [sample.score.reward for sample in rollout.samples if sample.score.failure is None]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))

    world = World(reward=fail_some)
    world.watch = Disturbance(lambda: FloatingPointError("nan"), "policy", "update", 4).watch
    with pytest.raises(FloatingPointError):
        world.run_job(monkeypatch, tmp_path / "two", overrides)
    World(reward=fail_some).run_job(monkeypatch, tmp_path / "two", overrides)
    one, two = (
        [
            {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))}
            for line in load_metrics(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("one", "two")
    )
    assert one == two
    for name in ("policy/model.safetensors", "rollouts.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("in_pretraining", [False, True])
def test_too_many_failures_end_the_run_with_their_reasons_and_a_mended_reward_goes_on(
    in_pretraining: bool, untouched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, num_calls = tmp_path / "run", 0
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
        World(reward=reward).run_job(monkeypatch, run_dir, [*RUN, *SELDOM])
    assert str(caught.value).startswith(
        "3 of 24 responses have no reward: 3 x ConnectionError: the judge does not answer."
        " reward.max_failed_frac=0.1 allows 2:"
    )
    if not in_pretraining:
        assert (run_dir / "checkpoints" / "latest").read_text() == "iteration-000002\n"
    World().run_job(monkeypatch, run_dir, [*RUN, *SELDOM])
    assert summarize(run_dir) == untouched


def test_a_heldout_response_without_a_reward_counts_as_wrong_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_calls = 0

    def reward(prompt: Prompt, response: Response) -> Score:
        nonlocal num_calls
        num_calls += 1
        # The evaluation before the first update; more than training would bear.
        return Score(0.0, False, failure="lost") if num_calls <= 4 else Score(1.0, True)

    overrides = ("algo=reinforce_pp", "train.num_iterations=1", "logger.terminal=true")
    World(reward=reward).run_job(monkeypatch, tmp_path / "run", overrides)
    line = load_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert (line["reward/heldout"], line["heldout/correct"], line["heldout/failed_frac"]) == (0.5, 0.5, 0.5)
    assert "warning: evaluation-0: 4 of 8 responses have no reward: 4 x lost" in " ".join(
        capsys.readouterr().out.split()
    )


def test_groups_that_were_complete_ahead_are_sampled_again_where_too_many_had_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, judge_is_up = tmp_path / "run", False

    def reward(prompt: Prompt, response: Response) -> Score:
        return reward_length(prompt, response) if judge_is_up else Score(0.0, False, failure="ConnectionError")

    overrides = ("algo=reinforce_pp", "rollout.max_staleness=2", "algo.mismatch.correction=tis", *SELDOM)
    for _ in range(2):
        with pytest.raises(TooManyFailuresError):
            World(reward=reward).run_job(monkeypatch, run_dir, [*overrides, "train.num_iterations=3"])
    judge_is_up = True
    # One iteration: the fake servers generate on while weights reach them, which real ones do not.
    World(reward=reward).run_job(monkeypatch, run_dir, [*overrides, "train.num_iterations=1"])
    first, last = load_metrics(run_dir / "metrics.jsonl")
    assert (first["iteration"], last["iteration"], last["reward/failed_frac"]) == (0, 1, 0.0)
