"""rollouts.jsonl and the journal: what is written is read back bit by bit, what is wrong is named with FILE:LINE."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from generation import load_rollouts
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.rollout_file import (
    Journal,
    Limits,
    RolloutWriter,
    find_groups,
    load_samples,
    name_group,
    save_samples,
)
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


@st.composite
def rollouts(draw) -> Rollout:
    samples = []
    for group in range(draw(st.integers(1, 3))):
        prompt = Prompt(
            draw(st.text()),
            draw(st.text()),
            tuple(draw(st.lists(st.integers(0, 999), max_size=5))),
            draw(st.text()),
            draw(st.dictionaries(st.text(), st.text(), max_size=2)),
        )
        for _ in range(draw(st.integers(1, 3))):
            rows = draw(st.lists(tokens, max_size=6))
            columns = tuple(zip(*rows, strict=True)) if rows else ((), (), (), ())
            response = Response(
                columns[0], draw(st.text()), columns[1], columns[2], columns[3], draw(st.sampled_from(FinishReason))
            )
            details = draw(st.dictionaries(st.text(), finite, max_size=2))
            placed = tuple(draw(finite) for _ in rows) if draw(st.booleans()) else ()
            answer = draw(st.none() | st.text())
            score = Score(draw(finite), draw(st.booleans()), details, answer, token_rewards=placed)
            samples.append(Sample(prompt, response, score, group))
    return Rollout(tuple(samples), draw(st.integers(0, 100)))


def get_bytes(sample: Sample) -> bytes:
    """The bytes of all its floating-point numbers."""
    return struct.pack("d", sample.score.reward) + sample.response.rollout_logprobs.tobytes()


@settings(max_examples=60)
@given(written=st.lists(rollouts(), min_size=1, max_size=3))
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_refused_and_nothing_is_written(tmp_path, bad):
    rollout = Rollout((build_sample(), build_sample(rollout_logprobs=(bad, 0.0))), 0)
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path / "r.jsonl", rollout)
    assert (tmp_path / "r.jsonl").read_text() == ""


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_half_written_last_line_is_dropped_with_its_rollout_and_a_warning(tmp_path, cut):
    first, second = two_rollouts()
    path = write(tmp_path / "r.jsonl", second, first)
    content = path.read_bytes().rstrip(b"\n")
    path.write_bytes(content[:-cut])
    with pytest.warns(RuntimeWarning) as warned:
        assert load_rollouts(path) == (second,)
    messages = [str(w.message) for w in warned]
    assert messages[0].startswith(f"{path}:4: a half-written last line")
    assert "has 2 of its 3 samples" in messages[1]


def test_a_run_that_goes_on_after_a_kill_cuts_the_half_line_and_the_rest_of_that_rollout_is_dropped(tmp_path):
    first, second = two_rollouts()
    path = write(tmp_path / "r.jsonl", first)
    path.write_bytes(path.read_bytes()[:-30])
    write(path, second)
    with pytest.warns(RuntimeWarning, match=r"r\.jsonl:3: the rollout before it has 2 of its 3 samples"):
        assert load_rollouts(path) == (second,)


WRONG = [
    # line, keys, value ("": the key goes), what is said
    (2, "group", "", '"group": Field required'),
    (2, "extra", 1, '"extra": Extra inputs are not permitted'),
    (2, "response.generated", "", '"response.generated": Field required'),
    (1, "prompt.token_ids", [1, True], '"prompt.token_ids.1": Input should be a valid integer; found True'),
    *(
        (1, "response.token_ids", ids, r'"response.token_ids.0": ')
        for ids in ([2**31, 1], [-1, 1], [1.0, 1], [True, 1])
    ),
    (1, "response.rollout_logprobs", [1e39, 0], '"response.rollout_logprobs.0": Input should be less'),
    (3, "response.finish_reason", "abort", "Input should be 'stop', 'length' or 'max_turns'; found 'abort'"),
    (3, "response.generated", [True], "a response of 2 tokens has 1 generated"),
    (3, "response.turns.0.end", -1, '"response.turns.0.end": Input should be greater'),
    (1, "score.reward", "1", "\"score.reward\": Input should be a valid number; found '1'"),
    (1, "score.correct", 1, '"score.correct": Input should be a valid boolean'),
    (1, "group", 1, '"group" is 1; expected 0'),
    (3, "group", 2, '"group" is 2; expected 0 or 1'),
    (2, "sample", 2, "found sample 2 of 3; expected sample 1"),
    (2, "num_samples", 4, '"num_samples" is 4; the rollout\'s first line has 3'),
    (2, "weight_version", 1, '"weight_version" is 1; the rollout\'s first line has 2'),
    (4, "num_samples", 0, "found sample 0 of 0"),
]


@pytest.mark.parametrize(("line", "keys", "value", "message"), WRONG)
def test_a_wrong_line_is_named_with_what_was_found_and_what_would_be_right(tmp_path, line, keys, value, message):
    path = write(tmp_path / "r.jsonl", *two_rollouts())
    lines = path.read_text().splitlines()
    record = place = json.loads(lines[line - 1])
    *outer, last = keys.split(".")
    for key in outer:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    if value == "":
        del place[last]
    lines[line - 1] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"^{path}:{line}: .*{message}"):
        load_rollouts(path)


@pytest.mark.parametrize("text", ["{not json}", "[1]", '{"a": 1, "a": 2}', '{"iteration": Infinity}'])
def test_a_line_in_the_middle_that_is_no_strict_json_is_an_error(tmp_path, text):
    path = write(tmp_path / "r.jsonl", *two_rollouts())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], text, *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match=rf"^{path}:4: "):
        load_rollouts(path)


def test_a_file_without_a_complete_rollout_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="found no complete rollout"):
        load_rollouts(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError):
        load_rollouts(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("limits", "line", "message"),
    [
        (Limits(7, 100, 50), 4, "found token id 7; the critic's vocabulary has 7 tokens"),
        (Limits(1000, 3, 50), 1, "found prompt and response of 4 tokens; the length for the critic is 3"),
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
        score = Score(1 / 3, True, {"format": 0.1}, "2", token_rewards=(0.1,) * len(tokens) if number else ())
        return Sample(PROMPTS[group], response, score, group)

    return tuple(build(group, number) for group in (0, 1) for number in (0, 1, 2))


@pytest.mark.parametrize(
    "spoil",
    [lambda content: b"", lambda content: content[:-9], lambda content: content.replace(b"versions", b"vershuns")],
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
            lambda journal: journal.forget(through=10),
            {"iteration-11-round-2"},
        ),
        (
            (name_group(0, 3), name_group(1, 0), name_group(2, 10), name_group(10, 2)),
            lambda journal: journal.forget(10, num_groups=2),
            {"group-2-10", "group-10-2"},
        ),
        (
            ("pretraining-2", "pretraining-9", "pretraining-10", "iteration-1/round-1"),
            lambda journal: journal.forget(through=-1, num_steps=9),
            {"iteration-1-round-1", "pretraining-10"},
        ),
        (
            ("iteration-1/round-1", "iteration-1/round-2", "iteration-12/round-1"),
            lambda journal: journal.drop("iteration-1/round-1"),
            {"iteration-1-round-2", "iteration-12-round-1"},
        ),
    ],
)
def test_what_is_superfluous_or_dropped_is_removed_and_nothing_else(tmp_path, keys, forget, left):
    journal = Journal(tmp_path)
    for key in keys:
        journal.save(key, build_samples())
    forget(journal)
    assert {path.stem for path in tmp_path.iterdir()} == left
    groups = sorted(tuple(map(int, name.split("-")[1:])) for name in left if name.startswith("group"))
    assert journal.list_groups(0) == groups
