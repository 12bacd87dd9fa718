"""The pictures of a critic: what each shows of the metrics, and that each is a file of its own."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from megarl.algo import diagnostics
from megarl.report.critic_pictures import GRAY, LOWEST, QUARTERS, Picture, build_pictures, draw_picture, write_pictures

TOOL = Path(__file__).parents[3] / "tools" / "critic_pictures.py"
SVG = "{http://www.w3.org/2000/svg}"


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


def test_explained_variance_over_time_is_cut_below() -> None:
    lines = [*LINES, make_line(10, explained_variance=-7.0)]
    curves = get_picture("explained_variance", lines).curves
    assert [curve.label for curve in curves] == ["all tokens", "first quarter", "last quarter"]
    assert curves[0].points[0] == (1, 0.01)
    assert curves[0].points[-1] == (10, LOWEST)


def test_by_position_each_third_of_the_run_has_its_median() -> None:
    picture = get_picture("explained_variance_by_position", LINES)
    assert [curve.label for curve in picture.curves] == ["iterations 1 to 3", "iterations 4 to 6", "iterations 7 to 9"]
    middle = picture.curves[1].points
    assert middle == [(n, pytest.approx(0.1 * n + 0.05)) for n in range(1, 5)]


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


@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_the_error_is_drawn_against_the_mean_that_the_run_has(baseline: str) -> None:
    lines = [{name.replace("_group", f"_{baseline}"): value for name, value in line.items()} for line in LINES]
    *curves, mean = get_picture("error_against_mean", lines).curves
    assert [curve.points[0] for curve in curves] == [(1, 0.8), (1, 1.1)]
    assert (mean.label, mean.points) == (f"mean of the {baseline}'s other responses", [(1, 1.0), (9, 1.0)])
    assert mean.group == GRAY


def test_iterations_without_a_critic_are_left_out() -> None:
    assert build_pictures([{"iteration": 0, "reward/heldout": 0.1}]) == []
    with_start = get_picture("explained_variance", [{"iteration": 0}, *LINES])
    assert with_start == get_picture("explained_variance", LINES)


def test_each_file_is_well_formed_and_says_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    paths = write_pictures(tmp_path, tmp_path / "out")
    assert [path.stem for path in paths] == [picture.name for picture in build_pictures(LINES)]
    assert len(paths) == 7
    for path, picture in zip(paths, build_pictures(LINES), strict=True):
        root = xml.etree.ElementTree.parse(path).getroot()
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert {picture.title, picture.x, *(curve.label for curve in picture.curves)} <= set(texts)
        assert len(list(root.iter(f"{SVG}circle"))) == len(picture.curves)


def test_labels_are_escaped() -> None:
    picture = get_picture("explained_variance", LINES)
    text = draw_picture(Picture(picture.name, "<b>", "a & b", picture.curves))
    assert "&lt;b&gt;" in text
    assert "a &amp; b" in text


def test_the_command_writes_the_files_or_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), str(tmp_path), str(tmp_path / "out")]
    none = subprocess.run(command, capture_output=True, text=True)
    assert (none.returncode, "metrics.jsonl" in none.stderr) == (2, True)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.returncode == 2
    assert "no line has critic/explained_variance" in without.stderr
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(Path(line).is_file() for line in done.stdout.splitlines())
