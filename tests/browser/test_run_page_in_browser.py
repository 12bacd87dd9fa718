"""The page of a run as a reader meets it, in headless Chromium."""

import subprocess
import sys
from pathlib import Path

import pytest
from page_run import write_page_run, write_tokens

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202e\x07"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of one run and that of two, made by the command."""
    folder = tmp_path_factory.mktemp("pages")
    first = write_page_run(folder / "first")
    write_tokens(first, text=HOSTILE)
    (first / "train.log").write_text(f"warning: {HOSTILE}\n")
    second = write_page_run(folder / "second", 25, overrides=("algo=vapo", "algo.clip_high=0.4"))
    for out, arguments in (("one.html", [first]), ("two.html", [first, second])):
        command = [sys.executable, "tools/report.py", *map(str, arguments), "--out", str(folder / out)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return folder


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["one.html", "two.html"])
def test_a_page_fits_its_window_needs_nothing_but_itself_and_runs_no_text(look, pages, name, width, scheme):
    steps = [["eval", "getComputedStyle(document.body).backgroundColor"]]
    steps += [["eval", "window.hacked === undefined"], ["count", "img"]]
    found = look(pages / name, steps, width, scheme)
    assert found["problems"] == []
    assert found["requests"] == [f"file://{pages / name}"]
    assert found["pageWidth"] <= width
    assert found["outside"] == []
    assert found["results"] == ["rgb(247, 247, 245)" if scheme == "light" else "rgb(20, 21, 23)", True, 0]


def test_pointing_at_one_chart_shows_the_values_of_all_charts_at_that_iteration(look, pages):
    reward, svg = '.card:has-text("reward/heldout") .keys', '.card:has-text("policy/grad_norm") svg'
    steps = [["text", reward], ["hover", svg, 0.5], ["text", "#at"], ["text", reward], ["hover", "h1", 0.1]]
    before, _, at, pointed, _, after = look(pages / "one.html", [*steps, ["text", reward]])["results"]
    iteration = int(at.removeprefix("Iteration "))
    assert 5 < iteration < 35
    # reward/mean is iteration / 40, reward/heldout that of the last multiple of 10.
    shown = [float(word) for word in pointed.split() if word[0].isdigit()]
    assert shown == [pytest.approx(iteration // 10 * 10 / 40), pytest.approx(iteration / 40, abs=6e-4)]
    assert before == after


def test_pointing_at_a_run_of_a_comparison_follows_it_through_all_charts_and_the_table(look, pages):
    number = "document.querySelectorAll('.hot[data-run=second]').length"
    steps = [["eval", number], ["hover", "td[data-run=second]", 0.5], ["eval", number]]
    before, _, pointed = look(pages / "two.html", steps)["results"]
    assert before == 0
    assert pointed > 5


def test_each_link_of_the_head_leads_to_its_section(look, pages):
    target = "document.querySelector(a.getAttribute('href'))?.textContent"
    targets = f"[...document.querySelectorAll('nav a')].map((a) => {target} === a.textContent)"
    (found,) = look(pages / "one.html", [["eval", targets]])["results"]
    assert len(found) >= 7
    assert all(found)
