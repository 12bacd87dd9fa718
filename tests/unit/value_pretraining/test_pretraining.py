"""When value pretraining ends, and that it asks for no more rollouts than it learns from."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.algo import ValuePretrainConfig
from megarl.rollout.rollout_file import RolloutWriter
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score
from megarl.value_pretraining.job import check_pretraining, run_value_pretraining
from megarl.value_pretraining.loop import build_pretraining_algo, find_end, fit_rise, repeat_rollouts, take_until


def build_rollout(number: int) -> Rollout:
    response = Response((3,), "a", (-0.5,), (True,), (0,), FinishReason.stop)
    return Rollout((Sample(Prompt(f"p{number}", "a", (3,), "a"), response, Score(1.0, True), 0),), 0)


def test_a_limit_is_asked_before_each_rollout_and_not_after():
    asked: list[int] = []

    def source() -> Iterator[Rollout]:
        for number in itertools.count():
            asked.append(number)
            yield build_rollout(number)

    taken = list(take_until(lambda: len(asked) == 3, source()))
    assert len(taken) == 3
    assert asked == [0, 1, 2]


def test_a_file_is_passed_over_again_only_when_more_rollouts_are_asked_for(tmp_path):
    writer = RolloutWriter(tmp_path / "r.jsonl")
    for number in range(2):
        writer.write(build_rollout(number), number)
    writer.close()
    said: list[str] = []
    rollouts = repeat_rollouts(tmp_path / "r.jsonl", said.append)
    assert [r.samples[0].prompt.id for r in itertools.islice(rollouts, 2)] == ["p0", "p1"]
    assert said == []
    assert next(rollouts).samples[0].prompt.id == "p0"
    assert said[0].startswith(f"pass 1 over the 2 rollouts of {tmp_path}/r.jsonl is complete")


def test_a_file_is_gone_on_with_where_an_earlier_start_was_in_whichever_pass(tmp_path):
    writer = RolloutWriter(tmp_path / "r.jsonl")
    for number in range(3):
        writer.write(build_rollout(number), number)
    writer.close()
    for num_done in range(8):
        rollouts = repeat_rollouts(tmp_path / "r.jsonl", lambda _: None, num_done)
        first = [r.samples[0].prompt.id for r in itertools.islice(rollouts, 2)]
        assert first == [f"p{num_done % 3}", f"p{(num_done + 1) % 3}"]


def test_it_ends_where_the_fitted_rise_is_smaller_than_asked_for_by_more_than_its_error():
    settings = ValuePretrainConfig(steps=9, patience=4, min_improvement=0.1)
    # 0.1, 0.3, 0.2, 0.4 rise by 0.08 a step on the line 0.13 + 0.08 t, 0.32 in 4 steps; residuals -0.03, 0.09, -0.09,
    # 0.03: sqrt(0.018 / 2 / 5) = 0.0424 a step, 0.170 in 4.
    assert fit_rise([0.1, 0.3, 0.2, 0.4]) == pytest.approx((0.32, 4 * (0.018 / 2 / 5) ** 0.5))
    assert find_end(settings, [0.1, 0.3, 0.2, 0.4]) is None
    # No noise: 0.01 a step are 0.04 in 4 steps. Fewer than 4 steps say nothing.
    assert find_end(settings, [0.3, 0.31, 0.32]) is None
    found = find_end(settings, [0.1, 0.3, 0.31, 0.32, 0.33])
    assert found == "explained variance has risen by 0.040 +- 0.000 in the last 4 (min 0.1)"
    # Level, but too noisy to tell: 0 +- 0.36.
    assert find_end(settings, [0.3, 0.1, 0.1, 0.3]) is None
    assert find_end(ValuePretrainConfig(patience=None), [0.3] * 99) is None


def test_it_ends_at_the_explained_variance_that_is_aimed_at():
    settings = ValuePretrainConfig(patience=None, stop_at_explained_variance=0.3)
    assert find_end(settings, [0.1]) is None
    assert find_end(settings, [0.1, 0.3]) == "explained variance has reached 0.300 (aimed at: 0.3)"


def simulate_ends(trend: np.ndarray, noise: float, num_runs: int = 300) -> list[int | None]:
    """The step at which each run ends by default; None: none before the last."""
    settings, generator, ends = ValuePretrainConfig(), np.random.default_rng(0), []
    for _ in range(num_runs):
        curve = (trend + noise * generator.standard_normal(len(trend))).tolist()
        ends.append(next((n for n in range(1, len(curve)) if find_end(settings, curve[:n])), None))
    return ends


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("rise", [0.004, 0.006, 0.008])
def test_a_steady_rise_under_ordinary_noise_is_not_ended(rise, noise):
    ends = simulate_ends(0.1 + rise * np.arange(50), noise)
    assert sum(end is not None for end in ends) <= 0.03 * len(ends)


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.02, 0.95), (0.05, 0.6)])
def test_a_plateau_is_found(noise, least):
    """A rise of 0.03 a step up to step 15; of 100 steps at most."""
    ends = simulate_ends(0.1 + 0.03 * np.minimum(np.arange(100), 15), noise)
    assert sum(end is not None and end <= 50 for end in ends) >= least * len(ends)
    assert sum(end is not None for end in ends) >= 0.98 * len(ends)
    # Never while it still rises, and for a few steps more.
    assert min(end for end in ends if end is not None) > 20


def test_value_pretraining_has_monte_carlo_returns_and_the_rewards_of_training():
    algo = load_config(["algo=vapo", "algo.kl.in_reward=true", "algo.kl.in_loss=true"]).algo
    pretraining = build_pretraining_algo(algo)
    assert (pretraining.lambda_critic, pretraining.lambda_policy) == (1.0, 1.0)
    assert pretraining.kl.in_reward
    assert not pretraining.kl.in_loss
    assert pretraining.reward_norm == algo.reward_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=grpo"], "algo.advantage: found group, which has no critic to pretrain"),
        (["algo=vapo", "algo.value_pretrain.steps=0"], "algo.value_pretrain.steps: found 0; it must be 1 or more"),
    ],
)
def test_a_job_with_nothing_to_pretrain_is_refused(tmp_path, overrides, message):
    config = load_config(["model=tiny", *overrides])
    with pytest.raises(ConfigError, match=message):
        run_value_pretraining(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert check_pretraining(load_config(["model=tiny", "algo=vapo"])) == []


@pytest.mark.parametrize(
    "override",
    ["logger.save_rollouts=true", "policy.dtype=bfloat16", "train.max_samples=9", "train.eval_every=2"],
)
def test_a_key_without_effect_where_the_critic_learns_from_a_file_is_refused(override):
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}: "):
        load_config(["model=tiny", "algo.value_pretrain.rollouts=r.jsonl", override], "pretrain_value")
