"""The page of a run: what it reads, what it says, and that it is whole and safe; how charts are drawn, and what the
pictures of a critic show of the metrics; tokens.jsonl, and what the viewer shows of it.
"""

import contextlib
import itertools
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_run import Page, write_page_run, write_tokens

from megarl.algo import diagnostics
from megarl.config.load import find_changes
from megarl.config.overrides import write_search_path
from megarl.report import tokens as token_file
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
from megarl.report.page import format_run_page, format_viewer, read_warnings
from megarl.report.record import QUARTERS, History, is_run, load_run, update_record
from megarl.report.tokens import TokenFile, TokenTexts, choose_samples, load_records
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn

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


def test_the_command_of_an_experiment_in_a_folder_is_the_one_that_was_typed(tmp_path):
    given = (write_search_path([ROOT / "examples" / "own_task"]), "experiment=own_task")
    text = Page(format_run_page(load_run(write_page_run(tmp_path / "run", overrides=given)))).text
    assert f"megarl train --config-dir={ROOT}/examples/own_task experiment=own_task" in text
    folder = write_page_run(tmp_path / "other")
    update_record(folder, overrides=["hydra.searchpath=['file:///a','pkg://b']", "algo=vapo"])
    assert "hydra.searchpath=[" in Page(format_run_page(load_run(folder))).text


def test_whether_the_critic_helped_is_counted_in_the_second_half_of_the_iterations(tmp_path):
    folder = write_page_run(tmp_path / "run", 0)
    values = [9.0, 9.0, 9.0, 0.5, 0.75, 1.0]  # Of iterations -1 to 4: 3 and 4 are the second half.
    lines = [{"iteration": i, "critic/mse_vs_group": value} for i, value in enumerate(values, start=-1)]
    lines[4]["critic/explained_variance"] = 0.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = Page(format_run_page(load_run(folder))).text
    assert "Did the critic help? Iterations 3 to 4" in text
    assert "critic/mse_vs_group 0.875 0.75 to 1 below 1 in 1 of 2" in text
    assert "critic/explained_variance 0.25 0.25 to 0.25 above 0 in 1 of 1" in text
    (folder / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')
    assert "Did the critic help?" not in Page(format_run_page(load_run(folder))).text


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


def make_sample(prompt: str = "p", group: int = 0, num: int = 6, **score: Any) -> Sample:
    response = Response(list(range(num)), "abcdef", [-0.5] * num, [True] * num, [1] * num, FinishReason.stop)
    defaults: dict[str, Any] = {"reward": 1.0, "correct": True}
    return Sample(Prompt(prompt, "a+b=", (1, 2), "c"), response, Score(**(defaults | score)), group)


def write(path: Path, rollout: Rollout, max_bytes: int = 100_000, **fields: torch.Tensor) -> list[dict[str, Any]]:
    decode = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(TokenFile(path, 8, decode)) as file:
        patch.setattr(token_file, "MAX_BYTES", max_bytes)
        file.write(3, rollout, range(len(rollout.samples)), fields)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_each_token_with_its_numbers_and_the_environments_tokens_by_their_range(tmp_path: Path) -> None:
    response = Response(
        [0, 1, 2, 3], "d", [-0.25, -1.0, 0.0, -2.0], [True, True, False, True], [4, 4, 4, 5], FinishReason.length,
        turns=[Turn(0, 2, "ab", 0.5, {"calls": 1.0}), Turn(3, 4, "d")],
    )  # fmt: skip
    sample = replace(make_sample(), response=response)
    (line,) = write(tmp_path / "t", Rollout((sample,), 5), advantages=torch.tensor([[0.123456, -2.0, 0.0, 1.0, 9.0]]))
    assert line["tokens"] == ["a", "b", "c", "d"]
    assert line["rollout_logprobs"] == [-0.25, -1, 0, -2]
    assert line["advantages"] == [0.1235, -2, 0, 1]
    assert line["observed"] == [[2, 3]]
    assert line["versions"] == [[4, 3], [5, 4]]
    assert line["kept"] == [[0, 4]]
    assert line["turns"][0] == {"start": 0, "end": 2, "reward": 0.5, "details": {"calls": 1.0}}
    assert {name: line[name] for name in ("iteration", "kind", "weight_version", "num_tokens", "finish_reason")} == {
        **{"iteration": 3, "kind": "train", "weight_version": 5, "num_tokens": 4, "finish_reason": "length"}
    }


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 600), min_size=1, max_size=8), max_bytes=st.integers(100, 20_000))
def test_the_lines_of_an_iteration_never_have_more_bytes_than_allowed(
    sizes: list[int], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "t"
    samples = tuple(make_sample(num=num, group=row) for row, num in enumerate(sizes))
    lines = write(path, Rollout(samples, 0), max_bytes, values=torch.rand(len(sizes), max(sizes)))
    assert path.stat().st_size <= max_bytes
    for line in lines:
        kept = [place for start, end in line["kept"] for place in range(start, end)]
        assert len(kept) == len(line["tokens"]) == len(line["values"]) == len(line["rollout_logprobs"])
        assert line["tokens"] == [chr(97 + place % 26) for place in kept]
        assert line["num_tokens"] == len(kept) or len(kept) >= 16
        # Of a long response the two ends stay.
        (_, first), (last, end) = line["kept"] if len(line["kept"]) > 1 else [(0, 0), (line["num_tokens"],) * 2]
        assert end == line["num_tokens"]
        assert abs(first - (end - last)) <= 1


def test_the_same_prompts_are_chosen_each_time_with_a_response_of_each_outcome() -> None:
    cut = replace(make_sample().response, finish_reason=FinishReason.length)
    outcomes = [{}, {}, {"correct": False}, {"correct": False, "failure": "the verifier died"}]

    def sample_groups(names: str) -> list[Sample]:
        found = [make_sample(name, group, **score) for group, name in enumerate(names) for score in outcomes]
        return [*found, replace(make_sample(names[-1], len(names) - 1), response=cut)]

    samples = sample_groups("abcdefgh")
    chosen = [samples[row].prompt.id for row in choose_samples(samples, 6)]
    again = sample_groups("hgfedcba")
    assert {again[row].prompt.id for row in choose_samples(again, 6)} == set(chosen)
    assert len(chosen) == 6
    assert choose_samples(samples[:4], 8) == [0, 2, 3]
    assert choose_samples(sample_groups("x"), 8) == [0, 2, 3, 4]


def test_tokens_that_together_make_a_character_have_its_text_at_the_last_of_them() -> None:
    pieces = {0: b"a", 1: b"\xe2", 2: b"\x82", 3: b"\xac", 4: b" b"}
    texts = TokenTexts(lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace"))
    assert texts.list_texts([0, 1, 2, 3, 4]) == ["a", "", "", "€", " b"]
    assert texts.list_texts([1, 0]) == ["\N{REPLACEMENT CHARACTER}", "a"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write_tokens(tmp_path, 3)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [record["iteration"] for record in load_records(tmp_path, 1_000_000)] == [1, 1, 2, 2, 3]


def test_records_never_have_more_bytes_than_allowed_and_show_the_whole_run(tmp_path: Path) -> None:
    write_tokens(tmp_path, 400, text="<")
    frame = len(format_viewer(load_records(tmp_path, 1_000_000)[:1]).encode())
    for room in (3_000, 30_000, 90_000):
        records = load_records(tmp_path, room)
        assert len(format_viewer(records).encode()) <= frame + room
        iterations = [record["iteration"] for record in records]
        assert iterations == sorted(iterations)
        assert iterations[-1] == 400
    assert iterations[0] < 30
    assert max(after - before for before, after in itertools.pairwise(iterations)) < 60
