"""The warning where the critic is a worse baseline than the mean of the group, or of the batch."""

import io
from pathlib import Path

from megarl.algo.registry import needs_critic
from megarl.config.load import load_config
from megarl.config.schema.logger import LoggerConfig
from megarl.report.critic_watch import ADVICE, BASELINES, NUM_ITERATIONS, CriticWatch
from megarl.report.report import build_report


def make_metrics(ratio: float, **more: float) -> dict[str, float]:
    return {"critic/mse_vs_group": ratio, "policy/loss": 0.1, **more}


def count_warnings(ratios: list[float]) -> int:
    watch = CriticWatch()
    return sum(watch.check(make_metrics(ratio)) is not None for ratio in ratios)


def test_it_warns_once_where_all_of_the_last_iterations_are_worse() -> None:
    watch = CriticWatch()
    texts = [watch.check(make_metrics(1.02 + 0.01 * number)) for number in range(3 * NUM_ITERATIONS)]
    assert [number for number, text in enumerate(texts) if text] == [NUM_ITERATIONS - 1]
    text = texts[NUM_ITERATIONS - 1]
    assert text is not None
    assert "the mean reward of the prompt's other responses (critic/mse_vs_group: 1.07 in the median" in text


def test_a_run_of_ten_iterations_hears_of_a_critic_that_is_clearly_of_no_use() -> None:
    watch = CriticWatch()
    texts = [watch.check(make_metrics(ratio)) for ratio in [0.9, 1.3, 1.4, 1.5, 1.3, 1.6, 1.3, 1.3, 1.3]]
    assert [number for number, text in enumerate(texts) if text] == [5]
    assert "in each of the last 5 iterations" in str(texts[5])
    assert "1.4 in the median" in str(texts[5])


def test_one_good_iteration_among_bad_ones_is_enough_for_silence() -> None:
    assert count_warnings(([1.2] * (NUM_ITERATIONS - 1) + [0.99]) * 5) == 0


def test_it_warns_again_only_after_the_critic_was_better_in_half_of_the_iterations() -> None:
    bad, half = [2.0] * NUM_ITERATIONS, NUM_ITERATIONS // 2
    assert count_warnings(bad + [0.5] * (half - 1) + bad) == 1
    assert count_warnings(bad + [0.5] * half + bad) == 2


def test_with_one_response_per_prompt_the_batch_is_what_it_is_compared_with() -> None:
    watch = CriticWatch()
    texts = [watch.check({"critic/mse_vs_batch": 3.0, "policy/loss": 0.0}) for _ in range(NUM_ITERATIONS)]
    assert "the mean reward of the batch's other responses (critic/mse_vs_batch: 3" in str(
        [text for text in texts if text]
    )


def test_iterations_that_do_not_update_the_policy_do_not_count() -> None:
    watch = CriticWatch()
    for _ in range(3 * NUM_ITERATIONS):
        assert watch.check({"critic/mse_vs_group": 9.0}) is None
    for _ in range(NUM_ITERATIONS - 1):
        assert watch.check(make_metrics(1.2)) is None
    assert watch.check(make_metrics(1.2)) is not None


def test_the_report_prints_the_warning_below_the_iteration_and_counts_afresh_when_it_resumes(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = build_report(LoggerConfig(tensorboard=False, terminal=True), tmp_path, 40, stream=stream)
    for iteration in range(1, NUM_ITERATIONS):
        report.log(iteration, make_metrics(1.2))
    report.rewind(NUM_ITERATIONS)
    for iteration in range(NUM_ITERATIONS, 2 * NUM_ITERATIONS):
        assert "warning" not in stream.getvalue()
        report.log(iteration, make_metrics(1.2))
    report.close()
    before, warning = stream.getvalue().split("warning: ")
    assert before.splitlines()[-1].startswith(f"iteration {2 * NUM_ITERATIONS - 1}/40")
    assert warning.startswith("in each of the last 10 iterations the critic's squared error was larger")


def test_the_advice_names_keys_and_presets_that_exist() -> None:
    config = load_config(["algo=vapo", "algo.value_pretrain.steps=8", "critic.updates_per_policy_update=2"])
    assert config.critic.optimizer.lr > 0
    for text in ("algo.value_pretrain.steps", "critic.updates_per_policy_update", "critic.optimizer.lr"):
        assert text in ADVICE
    for _, preset in BASELINES.values():
        assert not needs_critic(load_config([preset]).algo)
