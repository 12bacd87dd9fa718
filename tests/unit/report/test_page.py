"""The page of a run: what it reads, what it says, and that it is whole and safe; how charts are drawn, and what the
pictures of a critic show of the metrics.
"""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_run import Page, write_page_run, write_tokens

from megarl.algo import diagnostics
from megarl.config.load import find_changes
from megarl.config.overrides import write_search_path
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
from megarl.report.page import format_run_page, read_warnings
from megarl.report.record import QUARTERS, History, is_run, load_run, update_record

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = write_page_run(tmp_path_factory.mktemp("run") / "first", overrides=("algo=vapo", "algo.clip_high=0.4"))
    write_tokens(folder)
    return folder


def test_the_page_is_whole_loads_nothing_and_has_every_section(run_dir):
    run = load_run(run_dir)
    changes = find_changes(run.overrides, run.config)
    assert changes == (["algo=vapo"], {"algo.clip_high": (0.28, 0.4)})
    text = format_run_page(run, changes)
    page = Page(text)
    assert page.loads == []
    sections = ("Warnings", "Learning", "Policy", "Critic", "Trainer and rollout engine", "Time", "Configuration")
    assert all(f'<h2 id="{name.lower().replace(" ", "-")}">' in text for name in sections)
    for shown in (
        "40 of 80",
        "1.000 at 40",
        "Explained variance by position",
        "Where the time goes",
        socket.gethostname(),
    ):
        assert shown in page.text
    assert "policy loss = 1/N_tok" in page.text
    assert "Files that are missing or damaged" not in page.text
    assert "algo.clip_high 0.28 0.4" in page.text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert len(data["charts"]) == len(page.charts)
    assert data["domain"] == [-1, 40]


def test_the_settings_in_an_experiment_of_the_users_own_are_shown_beside_the_groups_that_it_chooses(tmp_path):
    example = ROOT / "examples" / "own_task"
    given = (write_search_path([example]), "experiment=own_task", "algo=grpo", "seed=3")
    run = load_run(write_page_run(tmp_path / "run", overrides=given))
    choices, changes = find_changes(run.overrides, run.config)
    assert set(choices) == {"model=smollm2_135m", "data=jsonl", "reward=function", "algo=grpo"}
    assert changes["data.path"] == (None, "prompts.jsonl")
    assert changes["reward.path"] == (None, "my_reward.py:score")
    assert changes["rollout.response_length"] == (256, 12)
    assert changes["seed"] == (1, 3)
    assert run.problems == []


def test_a_run_in_progress_shows_what_is_there_and_says_how_to_go_on(tmp_path):
    folder = write_page_run(tmp_path / "run", 30)
    update_record(folder, outcome=None, status={"iteration": 31, "phase": "rollout", "since": 0.0, "pid": 1})
    page = Page(format_run_page(load_run(folder)))
    assert "in progress or killed, at iteration 31, in rollout" in page.text
    assert re.search(r"\d+ iterations left, about", page.text)
    assert f"megarl train resume={folder}" in page.text


@pytest.mark.parametrize("left", [(), ("run.json",), ("metrics.jsonl",)])
def test_a_page_is_made_of_whatever_files_there_are(tmp_path, left):
    folder = write_page_run(tmp_path / "run", 3)
    for path in folder.iterdir():
        if path.name not in left:
            path.write_text("{damaged" if path.suffix == ".json" else "[" * 100_000 + "\n")
    page = Page(format_run_page(load_run(folder)))
    assert "Files that are missing or damaged" in page.text
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    assert "Warnings" in Page(format_run_page(load_run(folder))).text


def test_hostile_text_is_escaped(tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    folder = write_page_run(tmp_path / "a<b>")
    (folder / "train.log").write_text(f"warning: {hostile}\nwarning: {hostile}\n")
    line = {"iteration": 41, f"reward/{hostile}": 1.0}
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + json.dumps(line) + "\n")
    page = Page(format_run_page(load_run(folder)))
    assert page.loads == []
    assert f"Logged {hostile}" in page.text


def test_warnings_of_a_log_are_told_from_its_other_lines(tmp_path):
    log, time = tmp_path / "train.log", "2026-01-01 10:00:00 "
    log.write_text(f"a prompt about a warning: no\n{time}warning: first\nwarning: second\n{time}warning: first\n")
    assert read_warnings(log) == {"second": "", "first": time}
    assert read_warnings(tmp_path / "none") == {}


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/report.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_tells_a_run_from_a_sweep_and_both_from_anything_else(run_dir, tmp_path):
    done = run_tool(run_dir, "--out", tmp_path / "page.html")
    assert done.stdout == f"40 iterations: {tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert is_run(run_dir)
    assert not is_run(run_dir.parent)
    assert run_tool(run_dir.parent, "--out", tmp_path / "sweep.html").stdout.startswith("1 runs: ")
    for arguments, reason in (([tmp_path / "empty"], "holds no run"), ([run_dir, tmp_path], "is not the folder of a")):
        refused = run_tool(*arguments)
        assert refused.returncode == 2
        assert reason in refused.stderr


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
