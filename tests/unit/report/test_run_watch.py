"""What keeps a run from learning is said once, after three iterations, with the key that mends it."""

import re

import pytest

from megarl.config.load import load_config
from megarl.report.run_watch import PATIENCE, SIGNS, RunWatch

FINE = {
    **{"length/truncated_frac": 0.1, "length/max": 40.0},
    **{"reward/mean": 0.5, "reward/shaped_mean": 0.5, "reward/min": 0.0, "reward/max": 1.0},
}


def watch(*iterations):
    watch = RunWatch()
    return [list(watch.check({**FINE, **metrics})) for metrics in iterations]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (
            {"length/truncated_frac": 0.25},
            "25% of the responses are cut at the limit: where right ones.*rollout.response_length",
        ),
        ({"length/truncated_frac": 1.0}, "no response ends by itself, all 40 tokens are used: .*data.chat_template"),
        ({"reward/min": 0.5, "reward/max": 0.5}, r"all rewards are equal \(0.5\).*train.responses_per_prompt"),
        ({"reward/equal_groups_frac": 0.75}, "75% of the groups have equal rewards.*dynamic_sampling"),
        ({"reward/format": 0.0}, "no response has the form.*data.instruction"),
        ({"reward/block": 0.0}, "no response has a block of code.*data.instruction"),
        ({"policy/grad_norm": 0.0, "advantage/max_abs": 1.0}, "the policy's gradient is 0 though.*model.lora"),
    ],
)
def test_each_sign_is_said_once_after_three_iterations_in_a_row(metrics, text):
    found = watch(*[metrics] * (PATIENCE + 3))
    assert [len(lines) for lines in found] == [0, 0, 1, 0, 0, 0]
    assert re.match(f"warning: {text}", found[2][0])


def test_a_sign_that_is_interrupted_begins_anew_and_a_healthy_run_is_silent():
    bad = {"reward/format": 0.0}
    assert [len(lines) for lines in watch(bad, bad, {}, bad, bad, bad)] == [0, 0, 0, 0, 0, 1]
    assert not any(watch(*[{"reward/format": 0.1}] * 6))


@pytest.mark.parametrize("more", [{"critic/loss": 0.1}, {"reward/correct": 0.95}, {"reward/shaped_mean": 0.4}])
def test_equal_groups_are_no_sign_with_a_critic_or_a_penalty_or_once_the_task_is_solved(more):
    assert not any(watch(*[{"reward/equal_groups_frac": 0.75, **more}] * 6))


def test_every_value_that_is_advised_is_one_that_the_key_takes():
    advised = [each for sign in SIGNS for each in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+=[\w.]*\w", sign.text)]
    assert "algo.overlong.penalty=1" in advised
    for override in advised:
        load_config([override])
