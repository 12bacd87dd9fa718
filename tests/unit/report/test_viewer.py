"""The rollout viewer's section: which records it holds, how large it is, and that no text leaves its place."""

import contextlib
import itertools
from pathlib import Path

from megarl.report.page import format_viewer
from megarl.report.tokens import TokenFile, load_records
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

HOSTILE = "</script><script>window.hacked = 1</script><!--<img src=x onerror='window.hacked = 1'>\u202e\x07\ud800[]"


def write_tokens(run_dir: Path, num_iterations: int, text: str = "a", num: int = 20) -> None:
    samples = []
    for group, correct in enumerate((True, False)):
        response = Response([ord("a")] * num, text, [-0.5] * num, [True] * num, [0] * num, FinishReason.stop)
        prompt = Prompt(f"p{group}", text, (1,), text)
        samples.append(Sample(prompt, response, Score(float(correct), correct, answer=text), group))
    with contextlib.closing(TokenFile(run_dir / "tokens.jsonl", 2, lambda ids: text * len(ids))) as file:
        for iteration in range(num_iterations):
            file.write(iteration, Rollout(tuple(samples), 0), [0, 1], {})


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write_tokens(tmp_path, 3)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [record["iteration"] for record in load_records(tmp_path, 1_000_000)] == [0, 0, 1, 1, 2]


def test_records_never_have_more_bytes_than_allowed_and_show_the_whole_run(tmp_path: Path) -> None:
    write_tokens(tmp_path, 400, "<")
    frame = len(format_viewer(load_records(tmp_path, 1_000_000)[:1]).encode())
    for room in (3_000, 30_000, 90_000):
        records = load_records(tmp_path, room)
        assert len(format_viewer(records).encode()) <= frame + room
        iterations = [record["iteration"] for record in records]
        assert iterations == sorted(iterations)
        assert iterations[-1] == 399
    assert iterations[0] < 30
    assert max(after - before for before, after in itertools.pairwise(iterations)) < 60
