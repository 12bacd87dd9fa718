"""The pictures of a critic: what each shows of the metrics."""

import pytest

from megarl.algo import diagnostics
from megarl.report.critic_pictures import LOWEST, Picture, build_pictures
from megarl.report.metric_names import QUARTERS


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
    (found,) = [picture for picture in build_pictures(lines) if picture.name == name]
    return found


LINES = [make_line(iteration) for iteration in range(1, 10)]


def test_quarters_are_those_of_the_metrics() -> None:
    assert QUARTERS == diagnostics.QUARTERS


def test_by_position_each_third_of_the_run_has_its_median() -> None:
    picture = get_picture("explained_variance_by_position", LINES)
    assert [curve.label for curve in picture.curves] == ["iterations 1 to 3", "iterations 4 to 6", "iterations 7 to 9"]
    middle = picture.curves[1].points
    assert middle == [(n, pytest.approx(0.1 * n + 0.05)) for n in range(1, 5)]
    low = [{**line, "critic/ev_at_0_25": -7.0} for line in LINES]
    assert get_picture("explained_variance_by_position", low).curves[0].points[0] == (1, LOWEST)


def test_one_iteration_is_one_curve_and_a_missing_part_is_left_out() -> None:
    (line,) = [make_line(1)]
    del line["critic/ev_length_q2"]
    (curve,) = get_picture("explained_variance_by_length", [line]).curves
    assert curve.points == [(1, 0.2), (3, pytest.approx(0.6)), (4, 0.8)]


def test_calibration_has_the_bins_and_the_diagonal() -> None:
    *thirds, diagonal = get_picture("calibration_middle", LINES).curves
    assert len(thirds) == 3
    assert thirds[0].points == [(0.25 * n, pytest.approx(0.25 * n + 0.1)) for n in range(1, 5)]
    assert diagonal.points == [(0.25, 0.25), (1.0, 1.0)]


def test_snr_follows_from_the_share_of_signal() -> None:
    *thirds, group = get_picture("snr_by_position", LINES).curves
    assert thirds[0].points == [(n, pytest.approx(0.5)) for n in range(1, 5)]  # 0.2 / 0.8 = 1/4
    assert group.points == [(n, pytest.approx(1 / 3)) for n in range(1, 5)]
    lines = [{**make_line(1), "advantage/signal_frac_at_0_25": -0.2, "advantage/signal_frac_at_75_100": 1.3}]
    curve, _ = get_picture("snr_by_position", lines).curves
    assert [point for point in curve.points if point[0] in (1, 4)] == [(1, 0.0)]


def test_iterations_without_a_critic_are_left_out() -> None:
    assert build_pictures([{"iteration": 0, "reward/heldout": 0.1}]) == []
    name = "explained_variance_by_position"
    assert get_picture(name, [{"iteration": 0}, *LINES]) == get_picture(name, LINES)
