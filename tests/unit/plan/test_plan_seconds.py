"""Seconds of an iteration and of value pretraining, and when Slurm has to say that a job's time is over."""

import re
from pathlib import Path

import pytest
from apart_job import PRESET, QWEN32B

from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.plan import assumptions
from megarl.plan.job import build_plan, find_models
from megarl.plan.seconds import Seconds, compute_forward, compute_update, describe_work
from megarl.plan.tables import describe_pretraining, describe_stop

ROOT = Path(__file__).resolve().parents[3]


def estimate(*overrides: str) -> tuple[Config, Seconds]:
    config = load_config([*QWEN32B, *overrides])
    return config, build_plan(config, find_models(config)).seconds


def test_a_step_of_value_pretraining_is_generation_values_and_the_critics_update() -> None:
    config, seconds = estimate()
    step = seconds.pretraining
    assert step is not None
    assert step.generation == seconds.generation
    plan = build_plan(config, find_models(config))
    arguments = (plan.jobs["critic"], plan.stages["critic"], describe_work(config), config.cluster.hardware, 8)
    assert step.scoring == pytest.approx(compute_forward(*arguments))
    assert step.update == pytest.approx(compute_update(*arguments))
    assert step.total == pytest.approx(step.generation + step.scoring + step.update)
    (line,) = describe_pretraining(config, seconds)
    assert line.startswith(
        f"Value pretraining: up to 50 steps of {step.total:,.1f} s (generation {step.generation:,.1f},"
        f" values {step.scoring:,.1f},"
    )
    assert f"{50 * step.total / 3600:.1f} hours in all; it may end earlier (algo.value_pretrain: patience=20)" in line


def test_the_critics_own_text_counts_for_the_critic_alone() -> None:
    given = [*QWEN32B, "data.critic_prompt='{answer}'", "data.critic_prompt_length=2048"]
    config, plain = load_config(given), load_config(QWEN32B)
    plan, before = build_plan(config, find_models(config)), build_plan(plain, find_models(plain))
    assert plan.jobs["policy"] == before.jobs["policy"]
    assert plan.jobs["critic"].batch.longest == before.jobs["critic"].batch.longest + 2048
    assert plan.seconds.pretraining.scoring > before.seconds.pretraining.scoring
    assert plan.seconds.pretraining.update > before.seconds.pretraining.update
    assert plan.seconds.generation == before.seconds.generation
    assert plan.host_bytes > before.host_bytes


def test_the_critics_updates_for_each_of_the_policy_count_in_pretraining_too() -> None:
    (_, once), (_, thrice) = estimate(), estimate("critic.updates_per_policy_update=3")
    assert once.pretraining is not None
    assert thrice.pretraining is not None
    assert thrice.pretraining.update == pytest.approx(3 * once.pretraining.update)
    assert thrice.pretraining.scoring == once.pretraining.scoring


def test_policy_and_reference_score_where_a_kl_in_the_reward_needs_them() -> None:
    config, seconds = estimate("algo.kl.in_reward=true", "rollout.num_servers=6")
    assert seconds.pretraining is not None
    assert seconds.pretraining.scoring == seconds.scoring
    assert "log-probs and values" in next(describe_pretraining(config, seconds))
    _, without = estimate("algo.kl.in_loss=true", "rollout.num_servers=6")
    assert without.pretraining is not None
    assert without.pretraining.scoring < without.scoring


def test_saved_rollouts_are_not_generated() -> None:
    config, seconds = estimate(
        *("algo.value_pretrain.rollouts=rollouts.jsonl", "algo.value_pretrain.steps=1"),
        "algo.value_pretrain.patience=null",
    )
    assert seconds.pretraining is not None
    assert seconds.pretraining.generation == 0
    (line,) = describe_pretraining(config, seconds)
    assert line.startswith("Value pretraining: 1 step of ")
    assert "generation" not in line
    assert "end earlier" not in line
    assert "saved rollouts are taken to be like those of an iteration" in line


@pytest.mark.parametrize(
    "override", ["algo.value_pretrain.steps=0", "algo.value_pretrain.taken_from=runs/a", "algo=dapo"]
)
def test_without_a_critic_or_steps_of_its_own_nothing_is_pretrained(override: str) -> None:
    config = load_config([*PRESET, override])
    seconds = build_plan(config, find_models(config)).seconds
    assert seconds.pretraining is None
    assert list(describe_pretraining(config, seconds)) == []


@pytest.mark.parametrize(
    ("update", "advice"),
    [
        (540.0, None),  # and 60 s to queue the job again
        (541.0, "sbatch --signal=B:USR1@2500 suffices"),  # 541 + 1800 + 60 = 2401
        (3332.0, "sbatch --signal=B:USR1@5200 suffices"),  # 5192
        (64000.0, "65900 would suffice, but sbatch takes no more than --signal=B:USR1@65535"),
    ],
)
def test_an_update_that_outlasts_slurms_signal_asks_for_an_earlier_one(update: float, advice: str | None) -> None:
    config = load_config(QWEN32B)
    assert config.checkpoint.stop_deadline_s == 1800
    lines = list(describe_stop(config, Seconds(1.0, 1.0, update, 1.0, 0.0, {}, None)))
    if advice is None:
        assert lines == []
    else:
        (line,) = lines
        assert f"an update in progress, of {update:,.0f} s, does not end by then" in line
        assert advice in line


def test_the_seconds_before_the_time_limit_are_those_of_the_script() -> None:
    script, restart = ((ROOT / "slurm" / name).read_text() for name in ("train.sh", "restart.sh"))
    assert f"#SBATCH --signal=B:USR1@{assumptions.SIGNAL_S}\n" in script
    assert re.search(rf"^MARGIN_S={assumptions.REQUEUE_S}\b", restart, re.MULTILINE)


def test_a_policy_whose_logprobs_nothing_reads_has_no_pass_before_its_update() -> None:
    (config, clipped), (_, of_rollout) = estimate(), estimate("algo.surrogate=dis", "algo.clip_high=5")
    plan = build_plan(config, find_models(config))
    passes = {
        name: compute_forward(job, plan.stages[name], describe_work(config), config.cluster.hardware, 8)
        for name, job in plan.jobs.items()
    }
    assert clipped.scoring == pytest.approx(max(passes.values())) == pytest.approx(passes["policy"])
    assert of_rollout.scoring == pytest.approx(passes["critic"])
    assert of_rollout.training < clipped.training
