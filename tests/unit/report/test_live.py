"""The live display's lines, and lines of at most 80 columns."""

import io
import os
import pty
import re
import select
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema.logger import LoggerConfig
from megarl.report.live import LiveView, draw_bar, draw_sparkline
from megarl.report.progress import LOG_WIDTH, Progress
from megarl.report.report import build_report
from megarl.report.text import INDENT, wrap

WORDS = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=60)


def test_the_sparkline_has_the_lowest_block_for_the_smallest_and_the_highest_for_the_largest() -> None:
    assert draw_sparkline([0.0, 0.5, 1.0, 0.25]) == "▁▅█▃"
    assert draw_sparkline([0.0, 1.0], is_unicode=False) == "_@"
    assert draw_sparkline([3.0, 3.0]) == "▅▅"


def test_a_long_series_is_shown_by_the_means_of_equal_parts() -> None:
    assert draw_sparkline([0, 0, 4, 4, 8, 8, 0, 16], width=4) == draw_sparkline([0, 4, 8, 8])


def test_the_bar_is_as_long_as_the_share_that_is_done() -> None:
    assert [draw_bar(done, 4, False) for done in (0.0, 0.5, 1.0, 2.0)] == ["----", "##--", "####", "####"]


def test_the_time_left_is_the_mean_duration_times_what_is_left_minus_what_has_passed() -> None:
    view = LiveView()
    for iteration, now in ((0, 100.0), (1, 110.0), (2, 130.0)):
        assert view.estimate_left(now) is None or iteration == 2
        view.log(iteration, 6, {"reward/mean": 0.5}, now)
    assert view.estimate_left(130.0) == 4 * 15.0
    assert view.estimate_left(137.0) == 4 * 15.0 - 7.0
    view.log(6, 6, {}, 150.0)
    assert view.estimate_left(151.0) is None


def test_the_display_has_progress_rewards_processes_and_the_last_warning() -> None:
    view = LiveView()
    assert list(view.list_lines("start ... 1.0 s", now=0.0)) == ["start ... 1.0 s"]
    view.log(0, 4, {"reward/heldout": 0.125}, 0.0)
    view.log(1, 4, {"reward/mean": 0.25}, 60.0)
    view.log(2, 4, {"reward/mean": 0.75}, 120.0)
    view.describe_processes = lambda: "2 servers | policy 1 worker"
    view.warning = "the critic\x1b[2J is late"
    lines = list(view.list_lines("iteration 3/4  rollout ... 12 s", now=132.0))
    assert lines == [
        "━━━━━━━━━━──────────  50%  108 s left  iteration 3/4  rollout ... 12 s",
        "reward ▁█ 0.75 | held-out 0.125",
        "2 servers | policy 1 worker",
        r"last warning: the critic\x1b[2J is late",
    ]


def test_after_a_resume_nothing_of_the_repeated_iterations_is_shown() -> None:
    view = LiveView()
    for iteration in range(3):
        view.log(iteration, 9, {"reward/mean": 0.5, "reward/heldout": 0.5}, float(iteration))
    view.forget_iterations()
    assert list(view.list_lines("load ... 1.0 s", now=3.0)) == ["load ... 1.0 s"]


def test_a_broken_line_keeps_a_number_with_its_name_and_is_indented() -> None:
    text = "iteration 3/20  reward 0.5 | held-out 1 | length 1234 | explained variance -0.5 | mismatch kl 3.1e-05"
    assert wrap(text, 60).split("\n") == [
        "iteration 3/20  reward 0.5 | held-out 1 | length 1234 |",
        "    explained variance -0.5 | mismatch kl 3.1e-05",
    ]
    times = "iteration 4/8  reward 0.466 | seconds: rollout 0.136, experience 0.029, checkpoint 0.0384, sync 0.01"
    assert wrap(times, 52).split("\n") == [
        "iteration 4/8  reward 0.466 | seconds:",
        "    rollout 0.136, experience 0.029,",
        "    checkpoint 0.0384, sync 0.01",
    ]
    assert wrap("short\n  line", 60) == "short\n  line"


@given(st.lists(st.lists(WORDS, max_size=12), max_size=5), st.integers(20, 100))
def test_no_line_is_too_long_unless_it_is_one_word_and_no_word_is_lost(lines: list[list[str]], width: int) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    wrapped = wrap(text, width).split("\n")
    assert " ".join(wrapped).split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in wrapped)
    assert all(len(line) <= width for line in wrap(text, width, breaks_words=True).split("\n"))


def test_lines_in_a_pipe_have_80_columns_and_the_log_has_them_whole_with_the_time(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = build_report(LoggerConfig(tensorboard=False), tmp_path, 2, stream=stream)
    path = "/a/rather/long/path/of/a/run/that/nobody/wants/to/see/broken/at/a/column/of/eighty"
    report.message(f"warning: {'word ' * 40}")
    report.message(f"resuming from {path}")
    names = ("reward/heldout", "length/mean", "policy/clip_frac", "critic/explained_variance", "mismatch/kl")
    report.log(1, {"reward/mean": 0.5, **dict.fromkeys(names, 0.125), "time/one": 2.0, "time/another": 3.0})
    report.close()
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if len(line) > LOG_WIDTH] == [" " * INDENT + path]
    log = (tmp_path / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in log)
    assert [line[20:] for line in log] == [
        f"warning: {'word ' * 40}",
        f"resuming from {path}",
        "iteration 1/2  reward 0.5 | held-out 0.125 | length 0.125 | clip 0.125 | ev 0.125 | mismatch kl 0.125"
        " | seconds: one 2, another 3",
    ]
    assert " ".join(stream.getvalue().split()) == " ".join(" ".join(line[20:] for line in log).split())


def test_without_a_terminal_wanted_the_log_has_the_lines_all_the_same(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = build_report(LoggerConfig(tensorboard=False, terminal=False), tmp_path, 2, stream=stream)
    report.message("data: 12 prompts")
    report.close()
    assert stream.getvalue() == ""
    assert (tmp_path / "train.log").read_text().endswith(" data: 12 prompts\n")


def read_until(descriptor: int, wanted: str) -> str:
    seen, deadline = b"", time.monotonic() + 10
    while wanted.encode() not in seen and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            seen += os.read(descriptor, 65536)
    return seen.decode()


def test_a_terminal_shows_warnings_and_processes_until_the_display_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    control, terminal = pty.openpty()
    try:
        with os.fdopen(terminal, "w", encoding="utf-8") as stream:
            report = build_report(LoggerConfig(tensorboard=False), tmp_path, 4, stream=stream)
            report.show_processes(lambda: "2 servers, 7 responses under way")
            report.log(1, {"reward/mean": 0.25})
            report.log(2, {"reward/mean": 0.5})
            report.message("warning: a server was lost")
            with report.phase("rollout"):
                shown = read_until(control, "last warning: a server was lost (iteration 3)")
            report.close()
            shown += read_until(control, "\x1b[?25h")
    finally:
        os.close(control)
    for text in (
        "2 servers, 7 responses under way",
        "reward ▁█ 0.5",
        "━" * 10 + "─" * 10,
        "iteration 3/4  rollout ...",
    ):
        assert text in shown


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    control, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        progress = Progress(stream)
        progress.line("data: 12 prompts")
        progress.close()
    try:
        assert read_until(control, "\n") == "data: 12 prompts\r\n"
    finally:
        os.close(control)
