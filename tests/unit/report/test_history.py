"""A metrics.jsonl of any length, read in one pass, as a bounded number of points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.record import (
    MFU,
    MOST_POINTS,
    History,
    add_mfu,
    derive_metrics,
    load_history,
)


def build_history(values: list[float]) -> History:
    history = History()
    for iteration, value in enumerate(values, start=1):
        history.add({"iteration": iteration, "x": value})
    return history


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5 * MOST_POINTS))
def test_points_of_a_long_file_keep_its_mean_its_range_and_its_order(values):
    history = build_history(values)
    found = [point.metrics["x"] for point in history.points]
    assert len(found) <= MOST_POINTS
    assert sum(each.count for each in found) == len(values)
    assert sum(each.total for each in found) == pytest.approx(sum(values), abs=1e-3)
    assert (min(each.low for each in found), max(each.high for each in found)) == (min(values), max(values))
    ends = [(point.first, point.last) for point in history.points]
    assert [first for first, _ in ends] == [1, *(last + 1 for _, last in ends[:-1])]
    assert all(point.num_lines == history.width for point in history.points[:-1])


def test_lines_that_cannot_be_read_are_left_out_and_named_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "x": 1.0}\nnonsense\n[]\n{"iteration": 2, "x": 2.0}\n{"iteration": 3')
    problems: list[str] = []
    history = load_history(path, problems)
    assert history.num_lines == 2
    assert len(problems) == 1
    assert f"{path}:2" in problems[0]
    assert "2 lines more" in problems[0]
    assert [line["x"] for line in history.lines] == [1.0, 2.0]
    assert load_history(tmp_path / "none", problems).points == []
    assert "none: cannot be read" in problems[1]


def test_shares_and_mfu_follow_from_the_phases():
    history = History()
    for update in (2.0, 4.0):
        line = {"iteration": int(update), "perf/time_per_step": 10.0, "time/start": 99.0, "time/rollout": 6.0}
        line |= {"time/update": update, "time/evaluate": 2.0}
        line |= {"policy/model_tflop_sum": 3.0, "critic/model_tflop_sum": 1.0}
        history.add(line | derive_metrics(line))
    add_mfu(history, peak_tflops=4.0)
    assert [line[MFU] for line in history.lines] == [0.5, 0.25]
    assert history.last[MFU] == 0.25
    assert history.last["derived/rollout_frac"] == 0.6
    assert history.last["derived/servers_idle_frac"] == pytest.approx(0.2)
    assert derive_metrics({"time/sync": 1.0}) == {}
