"""The rollout viewer's section: which records it holds, how large it is, and that no text leaves its place."""

import contextlib
import itertools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megarl.report import viewer
from megarl.report.token_file import TokenFile
from megarl.report.viewer import load_responses
from megarl.rollout.rollout_file import RolloutWriter
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

HOSTILE = "</script><script>window.hacked = 1</script><!--<img src=x onerror='window.hacked = 1'>\u202e\x07\ud800[]"


class Page(HTMLParser):
    """The tags of a page, and the JSON of its records."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.data: list[str] = []
        self.is_records = False
        self.feed(text)
        self.records: list[dict[str, Any]] = json.loads("".join(self.data))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.is_records = ("id", "rollout-records") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.is_records = False

    def handle_data(self, data: str) -> None:
        if self.is_records:
            self.data.append(data)


def make_rollout(text: str, num: int = 20) -> Rollout:
    samples = []
    for group, correct in enumerate((True, False)):
        response = Response([ord("a")] * num, text, [-0.5] * num, [True] * num, [0] * num, FinishReason.stop)
        prompt = Prompt(f"p{group}", text, (1,), text)
        samples.append(Sample(prompt, response, Score(float(correct), correct, answer=text), group))
    return Rollout(tuple(samples), 0)


def write_tokens(run_dir: Path, num_iterations: int, text: str = "a", num: int = 20) -> None:
    with contextlib.closing(TokenFile(run_dir / "tokens.jsonl", 2, 100_000, lambda ids: text * len(ids))) as file:
        for iteration in range(num_iterations):
            file.write(iteration, make_rollout(text, num), [0, 1], {})


def format_viewer(run_dir: Path, max_bytes: int) -> str:
    return viewer.format_viewer(load_responses(run_dir), max_bytes)


def test_without_records_there_is_no_section(tmp_path: Path) -> None:
    assert format_viewer(tmp_path, 1_000_000) == ""
    (tmp_path / "tokens.jsonl").touch()
    assert format_viewer(tmp_path, 1_000_000) == ""


@pytest.mark.parametrize("name", ["tokens.jsonl", "rollouts.jsonl"])
def test_hostile_text_stays_in_the_records(name: str, tmp_path: Path) -> None:
    tags = []
    for number, text in enumerate(("harmless", HOSTILE)):
        run_dir = tmp_path / str(number)
        if name == "tokens.jsonl":
            write_tokens(run_dir, 2, text)
        else:
            with contextlib.closing(RolloutWriter(run_dir / name)) as writer:
                writer.write(make_rollout(text), 1)
        page = Page(format_viewer(run_dir, 1_000_000))
        tags.append(page.tags)
        for record in page.records:
            shown = record["tokens"][0] if "tokens" in record else record["turns"][0]["text"]
            assert shown == record["prompt"]["text"] == record["score"]["answer"] == text
    assert tags[0] == tags[1]


@pytest.mark.parametrize("read_whole", [0, 10**9])
def test_a_section_never_has_more_bytes_than_allowed_and_shows_the_whole_run(
    read_whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "READ_WHOLE", read_whole)
    monkeypatch.setattr(viewer, "TAIL", 3000)
    write_tokens(tmp_path, 400)
    everything = format_viewer(tmp_path, 10**9)
    frame = len(viewer.format_frame(True).encode())
    for room in (2_000, 20_000, 60_000):
        section = format_viewer(tmp_path, frame + room)
        assert len(section.encode()) <= frame + room < len(everything.encode())
        iterations = [record["iteration"] for record in Page(section).records]
        assert iterations == sorted(iterations)
        assert iterations[-1] == 399
    assert iterations[0] == 0
    gaps = [after - before for before, after in itertools.pairwise(iterations)]
    assert max(gaps) < 60
    assert format_viewer(tmp_path, frame) == ""


def test_the_line_that_a_run_is_writing_is_left_out(tmp_path: Path) -> None:
    write_tokens(tmp_path, 3)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [record["iteration"] for record in Page(format_viewer(tmp_path, 1_000_000)).records] == [0, 0, 1, 1, 2]
