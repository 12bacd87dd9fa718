"""The page of a run and the rollout viewer as a reader meets them, in headless Chromium."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from page_run import write_page_run, write_tokens

from megarl.report.tokens import TokenFile
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn

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


LETTERS = "abcdefgh"
NUM_ITERATIONS = 5
COUNT, DETAIL, TOKEN = '[data-rv="count"]', '[data-rv="detail"]', '[data-rv="token"]'


def build_sample(group: int, name: str, text: str = "what is a?", **score: object) -> Sample:
    own = [True, True, True, False, False, True, True, True]
    turns = [Turn(0, 3, "abc", 0.25, {"calls": 1.0}), Turn(5, 8, "fgh")]
    logprobs = [-0.1 * (group + 1)] * 8
    response = Response(range(8), "fgh", logprobs, own, [0] * 8, FinishReason.stop, turns=turns)
    values = {"reward": 1.0, "correct": True, "details": {"format": 0.5}, "answer": "a", **score}
    return Sample(Prompt(name, text, (1,), "a"), response, Score(**values), group)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run in which each iteration has a right, a wrong, a failed response, and one of a hostile prompt."""
    run_dir = write_page_run(tmp_path_factory.mktemp("viewer") / "run", NUM_ITERATIONS)
    samples = (
        build_sample(0, "one"),
        build_sample(1, "two", reward=0.0, correct=False),
        build_sample(2, "three", reward=0.0, correct=False, failure=f"TimeoutError: {HOSTILE}"),
        build_sample(3, "four", HOSTILE, reward=0.0, correct=False, answer=HOSTILE),
    )
    advantages = torch.tensor([[0.5, 0.5, -0.5, 0.0, 0.0, 0.25, 0.25, 0.25]] * 4)

    def decode(ids):
        return "".join(LETTERS[i] if i != 7 else f"h{HOSTILE}" for i in ids)

    with contextlib.closing(TokenFile(run_dir / "tokens.jsonl", 4, decode)) as file:
        for iteration in range(1, NUM_ITERATIONS + 1):
            file.write(iteration, Rollout(samples, iteration - 1), range(4), {"advantages": advantages})
            file.write_heldout(iteration, Rollout(samples[:2], iteration))
    command = [sys.executable, "tools/report.py", str(run_dir)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return run_dir / "report.html"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_hostile_texts_of_prompts_tokens_answers_and_failures_stay_text(look, page, width, scheme):
    steps = [["fill", '[data-rv="query"]', "window.hacked"], ["click", '[data-choice="failed"]']]
    steps += [["click", '[data-rv="list"] button'], ["text", DETAIL], ["click", '[data-choice="wrong"]']]
    steps += [["click", '[data-rv="list"] button:nth-child(2)'], ["text", DETAIL]]
    steps += [["eval", "window.hacked === undefined"], ["count", ".viewer img"], ["count", ".viewer script"]]
    found = look(page, steps, width, scheme)
    assert found["problems"] == []
    assert found["requests"] == [f"file://{page}"]
    assert found["pageWidth"] <= width
    failed, wrong = found["results"][3], found["results"][6]
    assert "TimeoutError: </script><script>window.hacked = 1</script>" in failed
    for shown in (failed, wrong):
        assert "<img src=x onerror='window.hacked = 1'>\\u202e\\u0007" in shown
        assert "\u202e" not in shown
    assert found["results"][-3:] == [True, 0, 1]


def test_tokens_are_coloured_by_the_sign_of_their_advantage_and_observations_are_grey(look, page):
    colours = "[...document.querySelectorAll('.rv-token')].map((span) => span.style.background)"
    grey = "[...document.querySelectorAll('.rv-observed .rv-token')].map((span) => span.textContent)"
    steps = [["click", '[data-choice="train"]'], ["click", '[data-rv="list"] button'], ["eval", colours]]
    _, _, shown, observed, headings, _, token = look(
        page, [*steps, ["eval", grey], ["text", DETAIL], ["click", ".rv-token:nth-child(3)"], ["text", TOKEN]]
    )["results"]
    assert len(shown) == 8
    assert "--c0" in shown[0]
    assert "--c1" in shown[2]
    assert shown[0] != shown[5]
    assert shown[3] == shown[4] == ""
    assert observed == ["d", "e"]
    assert "Turn 1 · reward 0.25 · calls 1" in headings
    assert token.startswith("token 3 of 8 c · log-prob")
    assert "advantage -0.5" in token


def test_responses_are_filtered_and_searched_with_the_newest_first(look, page):
    steps = [["text", COUNT], ["click", '[data-choice="right"]'], ["text", COUNT], ["click", '[data-choice="heldout"]']]
    steps += [["text", COUNT], ["fill", '[data-rv="query"]', "no such text"], ["text", COUNT]]
    steps += [["click", '[data-choice=""]'], ["fill", '[data-rv="query"]', "four"], ["click", '[data-choice="train"]']]
    steps += [["click", '[data-rv="list"] button'], ["text", DETAIL]]
    found = look(page, steps)["results"]
    assert [found[i] for i in (0, 2, 4, 6)] == ["30 of 30", "10 of 30", "5 of 30", "0 of 30"]
    assert "prompt four" in found[-1]
    assert f"iteration {NUM_ITERATIONS}" in found[-1]
