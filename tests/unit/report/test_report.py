"""The report room: metrics.jsonl, TensorBoard, and what a person sees."""

import contextlib
import io
import math
import os
import re
import time
from pathlib import Path

import pytest
from page_run import make_sample

from megarl.config.schema.run import LoggerConfig
from megarl.report.record import load_metrics, load_record
from megarl.report.report import Report, build_report

TEXT_ONLY = LoggerConfig(tensorboard=False, terminal=True, num_logged_samples=2)


def build_text_report(run_dir: Path, num_iterations: int = 3) -> tuple[Report, io.StringIO]:
    stream = io.StringIO()
    return build_report(TEXT_ONLY, run_dir, num_iterations, stream=stream), stream


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"policy/loss": math.nan}, "metric 'policy/loss' is nan"),
        ({"policy/loss": True}, "metric 'policy/loss' is bool, not an int or a float"),
        ({"iteration": 2.0}, "may not be named 'iteration'"),
        ({"time/sync": 1.0}, "'time/sync' has the name of a phase"),
    ],
)
def test_a_metric_that_is_no_number_or_has_a_taken_name_is_refused_and_nothing_is_written(
    tmp_path: Path, metrics: dict[str, float], problem: str
) -> None:
    report, stream = build_text_report(tmp_path)
    with report.phase("sync"):
        pass
    with pytest.raises((TypeError, ValueError), match=re.escape(problem)):
        report.log(1, {"reward/mean": 0.5, **metrics})
    report.close()
    assert (tmp_path / "metrics.jsonl").read_text() == stream.getvalue() == ""


def test_a_resumed_run_appends_after_cutting_off_a_half_written_line_and_a_line_is_on_disk_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "reward/mean": 0.5}\n{"iteration": 2, "rew')
    report, stream = build_text_report(tmp_path)
    report.log(2, {"reward/mean": 0.1 + 0.2, "sync/bytes": 12})
    assert load_metrics(path)[1] == {"iteration": 2, "reward/mean": 0.1 + 0.2, "sync/bytes": 12}
    report.close()
    report.close()
    assert "unfinished last line of 21 bytes" in stream.getvalue()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.jsonl", "train.log"]


def test_phases_are_timed_summed_over_the_iteration_also_one_that_fails_and_are_in_the_record(tmp_path: Path) -> None:
    report, _ = build_text_report(tmp_path)
    start, seen = time.perf_counter(), [load_record(tmp_path)]
    for _ in range(2):
        with contextlib.suppress(RuntimeError), report.phase("rollout"):
            seen.append(load_record(tmp_path)["status"])
            time.sleep(0.02)
            raise RuntimeError("a server died")
    seconds = time.perf_counter() - start
    seen.append(load_record(tmp_path)["status"])
    report.log(1, {})
    report.rewind(1)
    with report.phase("sync"):
        seen.append(load_record(tmp_path)["status"])
    report.log(2, {})
    report.close()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert 0.04 <= lines[0]["time/rollout"] <= seconds
    assert "time/rollout" not in lines[1]
    empty, *seen = seen
    assert empty == {}
    assert [status["phase"] for status in seen] == ["rollout", "rollout", None, "sync"]
    assert [status["iteration"] for status in seen] == [0, 0, 0, 1]
    assert all(status["pid"] == os.getpid() for status in seen)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json\n", "Expecting value"),
        ("[1, 2]\n", 'not a JSON object with a whole "iteration"'),
        ('{"iteration": 1.5}\n', 'not a JSON object with a whole "iteration"'),
        ('{"iteration": 2, "reward/mean": NaN}\n', "NaN is not JSON"),
        ('{"iteration": 2, "reward/mean": "0.5"}\n', "metric 'reward/mean' is str"),
        ('{"iteration": 2}', "the line is incomplete"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        load_metrics(path)


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


def test_text_that_the_stream_cannot_encode_is_escaped_not_an_error(tmp_path: Path) -> None:
    raw = io.BytesIO()
    report = build_report(TEXT_ONLY, tmp_path, 1, stream=io.TextIOWrapper(raw, encoding="ascii"))
    report.message("α = 1")
    report.samples([make_sample("✓")])
    report.close()
    assert raw.getvalue().startswith(b"\\u03b1 = 1\n")
    assert rb"response  \u2713" in raw.getvalue()
