"""The report room: metrics.jsonl, TensorBoard, and what a person sees."""

import io
import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from report_samples import make_sample

from megarl.config.schema.run import LoggerConfig
from megarl.report.metrics import MetricsWriter, load_metrics
from megarl.report.record import load_status
from megarl.report.report import Report, build_report
from megarl.report.terminal import Progress

QUIET = LoggerConfig(tensorboard=False, terminal=False)
TEXT_ONLY = LoggerConfig(tensorboard=False, terminal=True, num_logged_samples=2)


def build_text_report(run_dir: Path, num_iterations: int = 3) -> tuple[Report, io.StringIO]:
    stream = io.StringIO()
    return build_report(TEXT_ONLY, run_dir, num_iterations, stream=stream), stream


def test_what_is_logged_is_what_load_metrics_reads_at_once(tmp_path: Path) -> None:
    report = build_report(QUIET, tmp_path, 2)
    report.log(1, {"reward/mean": 0.1 + 0.2, "sync/bytes": 12})
    assert [line["iteration"] for line in load_metrics(tmp_path / "metrics.jsonl")] == [1]
    report.log(2, {"reward/mean": 1e-300})
    report.close()
    assert load_metrics(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "reward/mean": 0.1 + 0.2, "sync/bytes": 12},
        {"iteration": 2, "reward/mean": 1e-300},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_json_cannot_hold_is_refused_by_name_and_nothing_is_written(tmp_path: Path, value: float) -> None:
    report, stream = build_text_report(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"metric 'policy/loss' is {value}")):
        report.log(1, {"reward/mean": 0.5, "policy/loss": value})
    report.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("reward/mean", True, "metric 'reward/mean' is bool, not an int or a float"),
        ("reward/mean", "0.5", "metric 'reward/mean' is str, not an int or a float"),
        ("reward/mean", None, "metric 'reward/mean' is NoneType, not an int or a float"),
        ("iteration", 2.0, "may not be named 'iteration'"),
    ],
)
def test_a_metric_that_is_no_number_or_has_the_lines_own_name_is_refused(
    tmp_path: Path, name: str, value: float, problem: str
) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises((TypeError, ValueError), match=problem):
        writer.write(1, {name: value})
    writer.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json\n", "Expecting value"),
        ("\n", "Expecting value"),
        ("[1, 2]\n", "a JSON list, not an object"),
        ('{"reward/mean": 0.5}\n', '"iteration" is None, not a whole number'),
        ('{"iteration": 1.5}\n', '"iteration" is 1.5, not a whole number'),
        ('{"iteration": 2, "reward/mean": NaN}\n', "NaN is not JSON"),
        ('{"iteration": 2, "reward/mean": 1e999}\n', "metric 'reward/mean' is inf"),
        ('{"iteration": 2, "reward/mean": "0.5"}\n', "metric 'reward/mean' is str"),
        ('{"iteration": 2, "a": 1, "a": 2}\n', "the same key twice: a"),
        ('{"iteration": 2}', "the line is incomplete"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        load_metrics(path)


def test_a_resumed_run_appends_after_cutting_off_a_half_written_line_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "reward/mean": 0.5}\n{"iteration": 2, "rew')
    report, stream = build_text_report(tmp_path)
    report.log(2, {"reward/mean": 0.75})
    report.close()
    assert [line["reward/mean"] for line in load_metrics(path)] == [0.5, 0.75]
    assert "unfinished last line of 21 bytes" in stream.getvalue()


def test_phases_are_timed_summed_over_the_iteration_and_then_forgotten(tmp_path: Path) -> None:
    report = build_report(QUIET, tmp_path, 2)
    start = time.perf_counter()
    for _ in range(2):
        with report.phase("rollout"):
            time.sleep(0.02)
    seconds = time.perf_counter() - start
    report.log(1, {"reward/mean": 0.5})
    report.log(2, {"reward/mean": 0.5})
    report.close()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert 0.04 <= lines[0]["time/rollout"] <= seconds
    assert "time/rollout" not in lines[1]


def test_the_status_file_says_which_iteration_and_phase_are_under_way(tmp_path: Path) -> None:
    report = build_report(QUIET, tmp_path, 2)
    path = tmp_path / "status.json"
    assert load_status(path) is None
    seen = []
    for iteration in (0, 1):
        with report.phase("rollout"):
            seen.append(load_status(path))
        seen.append(load_status(path))
        report.log(iteration, {})
    report.rewind(1)
    with report.phase("sync"):
        seen.append(load_status(path))
    report.close()
    found = [(status["iteration"], status["phase"]) for status in seen if status is not None]
    assert found == [(0, "rollout"), (0, None), (1, "rollout"), (1, None), (1, "sync")]
    assert all(status is not None and status["pid"] == os.getpid() for status in seen)


def test_a_phase_that_fails_is_timed_and_no_longer_shown(tmp_path: Path) -> None:
    progress = Progress(io.StringIO())
    report = Report(MetricsWriter(tmp_path / "metrics.jsonl"), (), progress, 2, 2)
    shown_inside = ""

    def fail_inside_a_phase() -> None:
        nonlocal shown_inside
        with report.phase("rollout"):
            shown_inside = progress.describe_phase()
            raise RuntimeError("server died")

    with pytest.raises(RuntimeError, match="server died"):
        fail_inside_a_phase()
    assert shown_inside.startswith("rollout ... ")
    assert progress.describe_phase() == ""
    report.log(1, {})
    report.close()
    assert load_metrics(tmp_path / "metrics.jsonl")[0].keys() == {"iteration", "time/rollout"}


def test_a_metric_with_the_name_of_a_timed_phase_is_refused(tmp_path: Path) -> None:
    report = build_report(QUIET, tmp_path, 2)
    with report.phase("sync"):
        pass
    with pytest.raises(ValueError, match="'time/sync' has the name of a phase"):
        report.log(1, {"time/sync": 1.0})
    report.close()


def test_tensorboard_holds_every_metric_at_its_iteration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = build_report(LoggerConfig(tensorboard=True, terminal=False), tmp_path, 4)
    for iteration in (1, 2):
        with report.phase("update"):
            pass
        report.log(iteration, {"reward/mean": iteration / 4})
    report.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward/mean", "time/update"}
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_without_tensorboard_no_event_file_is_made(tmp_path: Path) -> None:
    build_report(QUIET, tmp_path, 1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_file_gets_one_line_per_iteration_without_control_characters(tmp_path: Path) -> None:
    report, stream = build_text_report(tmp_path, 2)
    for iteration in (1, 2):
        with report.phase("rollout"):
            pass
        report.log(iteration, {"reward/mean": 0.25, "policy/clip_frac": 0.03125, "debug/other": 7.0})
    report.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"iteration 2/2  reward 0\.25 \| clip 0\.0312 \| seconds: rollout \S+", lines[1])
    assert all(line.isprintable() for line in lines)


def test_text_that_the_stream_cannot_encode_is_escaped_not_an_error(tmp_path: Path) -> None:
    raw = io.BytesIO()
    report = build_report(TEXT_ONLY, tmp_path, 1, stream=io.TextIOWrapper(raw, encoding="ascii"))
    report.message("α = 1")
    report.samples([make_sample("✓")])
    report.close()
    assert raw.getvalue().startswith(b"\\u03b1 = 1\n")
    assert rb"response  \u2713" in raw.getvalue()


def test_logged_samples_are_as_many_as_configured(tmp_path: Path) -> None:
    report, stream = build_text_report(tmp_path)
    report.samples([make_sample("4") for _ in range(5)])
    report.samples([])
    report.close()
    assert stream.getvalue().count("sample task-1") == 2


def test_a_report_can_be_closed_twice(tmp_path: Path) -> None:
    report, _ = build_text_report(tmp_path)
    report.close()
    report.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text() or "null") is None
