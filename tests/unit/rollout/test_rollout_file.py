"""rollouts.jsonl and the journal: what is written is read back bit by bit, what is wrong is named with FILE:LINE."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.journal import Journal, load_samples, name_group, save_samples
from megarl.rollout.rollout_file import Limits, RolloutWriter, find_groups, load_rollouts
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score


def build_sample(group: int = 0, token: int = 3, **changes) -> Sample:
    response = {
        "token_ids": (token, 4),
        "text": "ab\n\u2028",
        "rollout_logprobs": (-0.1, 0.0),
        "generated": (True, False),
        "weight_versions": (2, 0),
        "finish_reason": FinishReason.length,
        **changes,
    }
    prompt = Prompt(f"p{group}", "é?", (1, 2), "42", {"level": "5"})
    return Sample(prompt, Response(**response), Score(0.3, True, {"format": 1.0}, "42"), group)


def write(path: Path, *rollouts: Rollout) -> Path:
    writer = RolloutWriter(path)
    for iteration, rollout in enumerate(rollouts):
        writer.write(rollout, iteration)
    writer.close()
    return path


def two_rollouts() -> tuple[Rollout, Rollout]:
    first = Rollout((build_sample(0), build_sample(0, 5), build_sample(1, 6)), 2)
    return first, Rollout((build_sample(0, 7),), 3)


finite = st.floats(allow_nan=False, allow_infinity=False)
single = st.floats(width=32, allow_nan=False, allow_infinity=False)
tokens = st.tuples(st.integers(0, 999), single, st.booleans(), st.integers(-1, 10**6))


responses = st.lists(tokens, max_size=6).flatmap(
    lambda rows: st.builds(
        Response,
        st.just(tuple(row[0] for row in rows)),
        st.text(),
        *(st.just(tuple(row[i] for row in rows)) for i in range(1, 4)),
        st.sampled_from(FinishReason),
    )
)
scores = st.builds(Score, finite, st.booleans(), st.dictionaries(st.text(), finite, max_size=2), st.none() | st.text())
ids = st.lists(st.integers(0, 999), max_size=5).map(tuple)
prompts = st.builds(Prompt, st.text(), st.text(), ids, st.text(), st.dictionaries(st.text(), st.text(), max_size=2))
groups = st.tuples(prompts, st.lists(st.tuples(responses, scores), min_size=1, max_size=3))
rollouts = st.builds(
    lambda groups, version: Rollout(
        tuple(Sample(prompt, *each, number) for number, (prompt, rows) in enumerate(groups) for each in rows), version
    ),
    st.lists(groups, min_size=1, max_size=3),
    st.integers(0, 100),
)


def get_bytes(sample: Sample) -> bytes:
    """The bytes of all its floating-point numbers."""
    return struct.pack("d", sample.score.reward) + sample.response.rollout_logprobs.tobytes()


@settings(max_examples=60)
@given(written=st.lists(rollouts, min_size=1, max_size=3))
def test_what_is_written_is_read_back_bit_by_bit(tmp_path_factory, written):
    path = write(tmp_path_factory.mktemp("file") / "rollouts.jsonl", *written)
    to_resume = [[tuple(replace(s, first_old_logprobs=np.float32([0.1])) for s in each.samples)] for each in written]
    save_samples(path.with_name("replay.samples"), to_resume)
    resumed = load_samples(path.with_name("replay.samples"))
    for a, b, c in zip(load_rollouts(path), resumed, written, strict=True):
        assert a == c == Rollout(b[0], c.weight_version)
        # == takes 0.0 and -0.0 for the same.
        assert [get_bytes(s) for s in a.samples] == [get_bytes(s) for s in b[0]] == [get_bytes(s) for s in c.samples]
        assert {s.first_old_logprobs.tobytes() for s in b[0]} == {np.float32([0.1]).tobytes()}


def test_every_line_is_a_strict_json_object_that_says_where_it_belongs(tmp_path):
    lines = write(tmp_path / "r.jsonl", *two_rollouts()).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    places = [(r["iteration"], r["sample"], r["num_samples"], r["group"], r["weight_version"]) for r in records]
    assert places == [(0, 0, 3, 0, 2), (0, 1, 3, 0, 2), (0, 2, 3, 1, 2), (1, 0, 1, 0, 3)]
    score = {"reward": 0.3, "correct": True, "details": {"format": 1.0}, "answer": "42", "failure": None}
    assert records[2]["score"] == score
    turn = {"start": 0, "end": 2, "text": "ab\n\u2028", "reward": 0.0, "details": {}}
    assert (records[2]["response"]["token_ids"], records[2]["response"]["turns"]) == ([6, 4], [turn])


def test_a_number_that_json_lacks_is_refused_and_nothing_is_written(tmp_path):
    rollout = Rollout((build_sample(), build_sample(rollout_logprobs=(math.nan, 0.0))), 0)
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path / "r.jsonl", rollout)
    assert (tmp_path / "r.jsonl").read_text() == ""


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_half_written_last_line_is_dropped_with_its_rollout_and_a_warning_also_by_a_run_that_goes_on(tmp_path, cut):
    first, second = two_rollouts()
    path = write(tmp_path / "r.jsonl", second, first)
    content = path.read_bytes().rstrip(b"\n")
    path.write_bytes(content[:-cut])
    with pytest.warns(RuntimeWarning) as warned:
        assert load_rollouts(path) == (second,)
    messages = [str(w.message) for w in warned]
    assert messages[0].startswith(f"{path}:4: a half-written last line")
    assert "has 2 of its 3 samples" in messages[1]
    write(path, second)
    with pytest.warns(RuntimeWarning, match=r"r\.jsonl:4: the rollout before it has 2 of its 3 samples"):
        assert load_rollouts(path) == (second, second)


def spoil(path: Path, line: int, change) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[line - 1])
    replaced = change(record)
    lines[line - 1] = json.dumps(record if replaced is None else replaced)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (2, lambda r: r.__delitem__("group"), '"group" is missing; found iteration, weight_version'),
        (2, lambda r: r.update(extra=1), '"extra" is not a key of a rollout; the keys are iteration'),
        (1, lambda r: r["prompt"].update(token_ids=[1, True]), r'"prompt.token_ids" is \[1, True\]; expected a list'),
        (1, lambda r: r["response"].update(token_ids=[2**31, 1]), "token_ids.*expected a list of whole"),
        (1, lambda r: r["response"].update(rollout_logprobs=[1e39, 0]), "rollout_logprobs.*expected a list of finite"),
        (3, lambda r: r["response"].update(finish_reason="abort"), "is 'abort'; expected stop, length"),
        (3, lambda r: r["response"].update(generated=[True]), "a response of 2 tokens has 1 generated"),
        (3, lambda r: r["response"]["turns"][0].update(end=-1), '"response.turns.0.end" is -1; expected a whole'),
        (1, lambda r: r["score"].update(reward="1"), "\"score.reward\" is '1'; expected a finite number"),
        (1, lambda r: r["score"].update(correct=1), '"score.correct" is 1; expected true or false'),
        (3, lambda r: r.update(group=2), '"group" is 2; expected 0 or 1'),
        (2, lambda r: r.update(sample=2), "found sample 2 of 3; expected sample 1"),
        (2, lambda r: r.update(num_samples=4), '"num_samples" is 4; the rollout\'s first line has 3'),
        (2, lambda r: r.update(weight_version=1), '"weight_version" is 1; the rollout\'s first line has 2'),
        (2, lambda r: [r], "found a JSON list; expected an object"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_found_and_what_would_be_right(tmp_path, line, change, message):
    path = write(tmp_path / "r.jsonl", *two_rollouts())
    spoil(path, line, change)
    with pytest.raises(ValueError, match=rf"^{path}:{line}: .*{message}"):
        load_rollouts(path)


@pytest.mark.parametrize("text", ["{not json}", "NaN", '{"a": 1, "a": 2}'])
def test_a_line_in_the_middle_that_is_no_strict_json_is_an_error(tmp_path, text):
    path = write(tmp_path / "r.jsonl", *two_rollouts())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], text, *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match=rf"^{path}:4: "):
        load_rollouts(path)
    path.write_text("")
    with pytest.raises(ValueError, match="found no complete rollout"):
        load_rollouts(path)


@pytest.mark.parametrize(
    ("limits", "line", "message"),
    [
        (Limits(7, 100, 50), 4, "found token id 7; the critic's vocabulary has 7 tokens"),
        (Limits(1000, 3, 50), 1, "found 2 prompt and 2 response tokens; the critic has 3 positions"),
        (Limits(1000, 100, 1), 1, "found a response of 2 tokens; rollout.response_length is 1"),
    ],
)
def test_what_the_critic_cannot_take_is_named_with_its_line(tmp_path, limits, line, message):
    path = write(tmp_path / "r.jsonl", *two_rollouts())
    with pytest.raises(ValueError, match=rf"^{path}:{line}: {message}"):
        find_groups(path, limits)


PROMPTS = [Prompt("a", "1+1=", (3, 4), "2"), Prompt("b", "2+2=", (5,), "4", {"kind": "sum"})]


def build_samples() -> tuple[Sample, ...]:
    def build(group: int, number: int) -> Sample:
        tokens = tuple(range(number + 1))
        logprobs = tuple(-0.1 / (k + 3) for k in tokens)
        response = Response(tokens, "x", logprobs, (True,) * len(tokens), (7,) * len(tokens), FinishReason.stop)
        return Sample(PROMPTS[group], response, Score(1 / 3, True, {"format": 0.1}, "2"), group)

    return tuple(build(group, number) for group in (0, 1) for number in (0, 1, 2))


@pytest.mark.parametrize(
    "spoil", [lambda content: b"", lambda content: content[:-9], lambda content: content.replace(b"sizes", b"seizs")]
)
def test_files_that_cannot_be_read_and_samples_of_other_prompts_are_not_used_and_that_is_said(tmp_path, spoil):
    journal = Journal(tmp_path)
    journal.save("iteration-3/round-1", build_samples())
    for prompts, num_responses in ((PROMPTS[::-1], 3), (PROMPTS[:1], 3), (PROMPTS, 2)):
        with pytest.warns(RuntimeWarning, match=r"other prompts.* sampled again"):
            assert journal.load("iteration-3/round-1", prompts, num_responses) is None
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"{path}: .*sampled again"):
        assert journal.load("iteration-3/round-1", PROMPTS, 3) is None


@pytest.mark.parametrize(
    ("keys", "forget", "left"),
    [
        (
            ("pretraining-1", "iteration-2/round-1", "iteration-10/round-1", "iteration-11/round-2"),
            {"through": 10},
            {"iteration-11-round-2"},
        ),
        (
            (name_group(0, 3), name_group(1, 0), name_group(2, 10), name_group(10, 2)),
            {"through": 10, "num_groups": 2},
            {"group-2-10", "group-10-2"},
        ),
        (
            ("pretraining-2", "pretraining-9", "pretraining-10", "iteration-1/round-1"),
            {"through": -1, "num_steps": 9},
            {"iteration-1-round-1", "pretraining-10"},
        ),
    ],
)
def test_what_is_superfluous_or_dropped_is_removed_and_nothing_else(tmp_path, keys, forget, left):
    journal = Journal(tmp_path)
    for key in (*keys, "iteration-30/round-1", "iteration-30/round-10"):
        journal.save(key, build_samples())
    journal.drop("iteration-30/round-1")
    journal.forget(**forget)
    assert {path.stem for path in tmp_path.iterdir()} == left | {"iteration-30-round-10"}
    groups = sorted(tuple(map(int, name.split("-")[1:])) for name in left if name.startswith("group"))
    assert journal.list_groups(0) == groups
