"""tokens.jsonl: which responses are written, what a line holds, how large it may become, and what the viewer shows."""

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_run import write_tokens

from megarl.report import tokens as token_file
from megarl.report.page import format_viewer
from megarl.report.tokens import TokenFile, TokenTexts, choose_samples, load_records
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn


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
