"""What is said of a run that goes wrong: while it runs, and on its page, and of the gap between its two engines."""

import io
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from page_run import build_metrics

from megarl.algo.objective import needs_critic
from megarl.config.load import compose_config, load_config
from megarl.config.overrides import list_values
from megarl.config.schema.root import LoggerConfig
from megarl.report import charts, signs
from megarl.report.record import History, derive_metrics
from megarl.report.report import build_report
from megarl.report.signs import BASELINES, NUM_RATIOS, SIGNS, Watch, list_warnings

FINE = {
    **{"length/truncated_frac": 0.1, "length/max": 40.0},
    **{"reward/mean": 0.5, "reward/shaped_mean": 0.5, "reward/min": 0.0, "reward/max": 1.0},
}


def watch(*iterations: Mapping[str, float]) -> list[int]:
    """How many warnings each iteration gives."""
    watch = Watch()
    return [len(list(watch.check({**FINE, **metrics}))) for metrics in iterations]


def test_a_sign_is_said_once_after_three_iterations_in_a_row():
    bad = {"reward/format": 0.0}
    assert watch(bad, bad, {}, *[bad] * 6) == [0, 0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("more", [{"critic/loss": 0.1}, {"reward/correct": 0.95}, {"reward/shaped_mean": 0.4}])
def test_equal_groups_are_no_sign_with_a_critic_or_a_penalty_or_once_the_task_is_solved(more):
    assert not any(watch(*[{"reward/equal_groups_frac": 0.75, **more}] * 6))


BAD = {"critic/mse_vs_group": 1.2, "policy/loss": 0.1}


def test_a_critic_that_is_the_worse_baseline_is_said_once_after_ten_updates_of_the_policy_in_a_row():
    pretraining, good = {"critic/mse_vs_group": 9.0}, {**BAD, "critic/mse_vs_group": 0.9}
    assert watch(*[BAD] * 30) == [0] * 9 + [1] + [0] * 20
    assert not any(watch(*[*[pretraining] * 30, *[BAD] * 9, good, *[BAD] * 9]))


def test_the_report_prints_a_warning_below_the_iteration_and_counts_afresh_when_it_resumes(tmp_path: Path):
    stream = io.StringIO()
    report = build_report(LoggerConfig(tensorboard=False, terminal=True), tmp_path, 40, stream=stream)
    for iteration in range(1, NUM_RATIOS):
        report.log(iteration, BAD)
    report.rewind(NUM_RATIOS)
    for iteration in range(NUM_RATIOS, 2 * NUM_RATIOS):
        assert "warning" not in stream.getvalue()
        report.log(iteration, BAD)
    report.close()
    before, warning = stream.getvalue().split("warning: ")
    assert before.splitlines()[-1].startswith(f"iteration {2 * NUM_RATIOS - 1}/40")
    assert warning.startswith("in each of the last 10 iterations the critic's squared error is larger")


def build_history(num_iterations: int = 40, **changes: object) -> History:
    """changes: by the metric's name with __ for its slash; a value, or a function of the iteration."""
    history = History()
    for iteration in range(1, num_iterations + 1):
        line = {"iteration": iteration, **build_metrics(iteration, num_iterations)}
        for name, value in changes.items():
            line[name.replace("__", "/")] = value(iteration) if callable(value) else value
        history.add(derive_metrics(line) | line)
    return history


def list_titles(history: History) -> list[str]:
    return [warned.title for warned in list_warnings(history)]


def test_the_page_of_a_run_that_goes_well_has_no_warning():
    assert list_titles(build_history()) == []
    assert list_titles(History()) == []
    assert list_titles(build_history(reward__equal_groups_frac=0.95, reward__correct=0.97)) == []


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.title)
def test_each_sign_shows_beyond_its_bound_on_the_terminal_and_on_the_page_and_not_before(sign):
    beyond = 2 * sign.above if 0 < sign.above < float("inf") else max(sign.below, 0) - 1
    beyond = min(beyond, 0.9) if sign.title in ("Responses are cut off", "Few groups carry a signal") else beyond
    metrics = {"advantage/max_abs": 1.0, "length/max": 9.0, "policy/loss": 0.1}
    metrics |= {"reward/min": 0.5, "reward/max": 0.5, sign.metric: beyond if sign.equal is None else sign.equal}
    metrics |= {"reward/mean": 0.5} if sign.title == "All rewards are equal" else {}
    if sign.patience:
        found = Watch()
        said = [text for _ in range(sign.patience) for text in found.check(metrics)]
        assert any(sign.found.format(**metrics) in text for text in said)
    if sign.fewest:
        changes = {name.replace("/", "__"): value for name, value in metrics.items()}
        assert sign.title in list_titles(build_history(**changes))
        assert sign.title not in list_titles(build_history(**changes, num_iterations=sign.fewest - 1))


@pytest.mark.parametrize(
    ("title", "changes"),
    [
        ("The training reward has not risen", {"reward__mean": lambda i: 0.5 - i / 1000}),
        ("The held-out reward has fallen", {"reward__heldout": lambda i: min(i, 50 - i) / 25}),
        ("The entropy has collapsed", {"policy__entropy": lambda i: 2 / i**2}),
        ("The policy's gradient has spikes", {"policy__grad_norm": lambda i: 900.0 if i == 30 else 1.0}),
        ("The critic is the worse baseline", {"critic__mse_vs_group": 1.5}),
        ("Trainer and rollout engine disagree", {"mismatch__logprob_gap_mean": 0.4}),
        ("Much time goes into sync", {"time__sync": 30.0}),
    ],
)
def test_each_rule_warns_of_the_run_that_it_is_for(title, changes):
    assert title in list_titles(build_history(**changes))


def test_the_critic_is_judged_after_its_value_pretraining_alone():
    history = History()
    for i in range(-39, 1):
        history.add({"iteration": i, "critic/explained_variance": -0.5, "critic/grad_norm": 1.0 - 99 * i})
    assert list_titles(history) == []
    for iteration in range(1, 6):
        assert list_titles(history) == []
        history.add({"iteration": iteration, "critic/explained_variance": -0.2})
    (warned,) = list_warnings(history)
    assert warned.title == "The critic is worse than a constant"
    assert warned.found.startswith("its explained variance is -0.2 (median of the last 5;")


@pytest.mark.parametrize("module", [signs, charts], ids=lambda module: module.__name__)
def test_every_key_that_advice_names_is_one_of_the_configuration(module):
    known = {key for key, _ in list_values(compose_config(["experiment=guess"]))} | {"train.log"}
    groups = "algo|policy|critic|rollout|train|checkpoint|logger|reward|environment"
    # Texts go on in the next line, with its quotation marks between.
    text = re.sub(r'"\s*\n\s*f?"', "", Path(module.__file__).read_text())
    named = set(re.findall(rf"(?<![\w./])(?:{groups})\.[a-z_.]*[a-z]8?", text))
    assert named
    assert sorted(name for name in named if name not in known) == []


def test_every_value_and_preset_that_is_advised_is_one_that_the_key_takes():
    advised = [each for sign in SIGNS for each in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+=[\w.]*\w", sign.do)]
    assert "algo.overlong.penalty=1" in advised
    alone = {"algo.mismatch.correction=tis", "algo.overlong.filter=true", "rollout.max_staleness=1"}
    for override in advised:
        compose_config([override]) if override in alone else load_config([override])
    for _, preset in BASELINES.values():
        assert not needs_critic(load_config([preset]).algo)
