"""How charts are drawn, and what the pictures of a critic show of the metrics."""

import pytest

from megarl.algo import diagnostics
from megarl.report.charts import (
    LOWEST,
    Chart,
    Curve,
    Picture,
    draw_curves,
    list_critic_pictures,
    name_metrics,
    needs_log,
    pile_up,
)
from megarl.report.record import QUARTERS, History


def make_line(iteration: int, **more: float) -> dict[str, float]:
    """Explained variance 0.1 times the quarter plus 0.01 times the iteration, and so on."""
    line = {"iteration": iteration, "critic/explained_variance": 0.01 * iteration}
    for number, quarter in enumerate(QUARTERS, start=1):
        line[f"critic/ev_at_{quarter}"] = 0.1 * number + 0.01 * iteration
        line[f"critic/ev_length_q{number}"] = 0.2 * number
        line[f"advantage/signal_frac_at_{quarter}"] = 0.2
        line[f"advantage/signal_frac_group_at_{quarter}"] = 0.1
        for state in ("first", "middle"):
            line[f"critic/value_{state}_q{number}"] = 0.25 * number
            line[f"critic/outcome_{state}_q{number}"] = 0.25 * number + 0.1
    line |= {"critic/mse_vs_group": 0.8, "critic/mse_vs_group_first": 1.1}
    return {**line, **{f"critic/{name}": value for name, value in more.items()}}


def get_picture(name: str, lines: list[dict[str, float]]) -> Picture:
    history = History()
    for line in lines:
        history.add(line)
    (found,) = [picture for picture in list_critic_pictures(history) if picture.title == name]
    return found


LINES = [make_line(iteration) for iteration in range(1, 10)]


def test_quarters_are_those_of_the_metrics() -> None:
    assert QUARTERS == diagnostics.QUARTERS


def test_each_third_of_the_run_has_its_median_and_a_missing_part_is_left_out() -> None:
    picture = get_picture("Explained variance by position", LINES)
    assert [curve.label for curve in picture.curves] == ["iterations 1 to 3", "iterations 4 to 6", "iterations 7 to 9"]
    assert picture.curves[1].points == [(n, pytest.approx(0.1 * n + 0.05)) for n in range(1, 5)]
    low = [{**line, "critic/ev_at_0_25": -7.0} for line in LINES]
    assert get_picture("Explained variance by position", low).curves[0].points[0] == (1, LOWEST)
    (line,) = [make_line(1)]
    del line["critic/ev_length_q2"]
    (curve,) = get_picture("Explained variance by length", [line]).curves
    assert curve.points == [(1, 0.2), (3, pytest.approx(0.6)), (4, 0.8)]


def test_calibration_has_the_bins_and_the_diagonal() -> None:
    *thirds, diagonal = get_picture("Calibration of the value of the middle state", LINES).curves
    assert [curve.points for curve in thirds] == [[(0.25 * n, pytest.approx(0.25 * n + 0.1)) for n in range(1, 5)]] * 3
    assert diagonal.points == [(0.25, 0.25), (1.0, 1.0)]


def test_snr_follows_from_the_share_of_signal() -> None:
    *thirds, group = get_picture("Signal-to-noise ratio of the advantages", LINES).curves
    assert thirds[0].points == [(n, pytest.approx(0.5)) for n in range(1, 5)]  # 0.2 / 0.8 = 1/4
    assert group.points == [(n, pytest.approx(1 / 3)) for n in range(1, 5)]
    lines = [{**make_line(1), "advantage/signal_frac_at_0_25": -0.2, "advantage/signal_frac_at_75_100": 1.3}]
    curve, _ = get_picture("Signal-to-noise ratio of the advantages", lines).curves
    assert [point for point in curve.points if point[0] in (1, 4)] == [(1, 0.0)]


def test_a_curve_is_drawn_where_its_points_are():
    text = draw_curves([Curve("a <b>", 2, [(0, 0.0), (10, 1.0)], run="r")])
    assert 'class="curve g2" data-run="r"' in text
    assert "<title>a &lt;b&gt;</title>" in text
    # 172 pixels high, of which 0.04 / 1.08 stay free at each end.
    assert 'points="46.0,175.6 328.0,16.4"' in text


def test_a_few_values_far_above_the_others_make_a_chart_logarithmic():
    assert needs_log([150.0, 0.5, 0.4, 0.6])
    assert not needs_log([150.0, 0.5, 0.4, -0.6])
    assert not needs_log([1.0, 0.5])
    text = draw_curves([Curve("r", 0, [(0, 1000.0), (1, 1.0), (2, 1.0)])])
    assert all(f">{label}</text>" in text for label in ("1", "10", "100", "1000"))


def test_areas_stand_upon_one_another_and_a_missing_point_counts_as_0():
    first, second = pile_up([Curve("a", 0, [(1, 2.0), (2, 1.0)]), Curve("b", 1, [(2, 4.0)])])
    assert (first.points, first.ranges) == ([(1, 2.0), (2, 1.0)], [(0.0, 2.0), (0.0, 1.0)])
    assert (second.points, second.ranges) == ([(1, 2.0), (2, 5.0)], [(2.0, 2.0), (1.0, 5.0)])
    assert draw_curves([first, second], is_stack=True).count('class="area') == 2


def test_a_star_stands_for_all_metrics_of_that_beginning_but_those_left_out():
    chart = Chart("t", "", {"reward/*": "of *", "other": "one"}, without="mean std")
    names = ["reward/mean", "reward/letters", "other", "another"]
    assert name_metrics(chart, names) == {"reward/letters": "of letters", "other": "one"}
