"""SGLang's answers: what is read without an object per token is what the json module reads."""

import json

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.per_token import WeightVersions
from megarl.rollout.answers import parse_answer, parse_answers
from megarl.rollout.client import RequestError
from megarl.types import FinishReason, Response

INT32 = st.integers(0, 2**31 - 1)


def make_answer(ids=(8, 9, 2), logprobs=(-0.1, -0.2, -0.3), text="hi", **changes):
    meta = {
        "id": "a1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 5,
        "weight_version": "4",
        "input_token_logprobs": [],
        "output_token_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": len(ids),
        "e2e_latency": 0.5,
    }
    return {"text": text, "output_ids": list(ids), "meta_info": meta | changes}


def write(content) -> bytes:
    """As SGLang writes it."""
    return orjson.dumps(content)


@given(
    tokens=st.lists(st.tuples(INT32, st.floats(-1e30, 1e30) | st.floats(-50, 0, width=32)), min_size=1),
    text=st.text() | st.sampled_from(['"output_ids":[1,2]', '\\"output_token_logprobs":[[', '"routed_experts":"']),
    num_answers=st.integers(1, 3),
)
def test_ids_and_logprobs_are_bit_for_bit_those_of_the_json_module(tokens, text, num_answers):
    ids, logprobs = zip(*tokens, strict=True)
    raw = write([make_answer(ids, logprobs, text)] * num_answers)
    expected = json.loads(raw)
    found = parse_answers(raw)
    assert len(found) == num_answers
    for answer, other in zip(found, expected, strict=True):
        assert other["text"] == text
        assert answer.token_ids.dtype == np.int32
        assert answer.token_ids.tolist() == other["output_ids"]
        with np.errstate(over="ignore"):
            values = np.float32([entry[0] for entry in other["meta_info"]["output_token_logprobs"]])
        assert answer.logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize("written", ["-0.0", "0", "-1e-7", "-1.5E+2", "-12", "-0.30000001192092896", "5e-324"])
def test_every_form_of_a_json_number_is_read(written):
    raw = write(make_answer()).replace(b"-0.2", written.encode())
    assert parse_answer(raw).logprobs.tobytes() == np.float32([-0.1, float(written), -0.3]).tobytes()


def test_an_answer_has_its_versions_as_runs_and_what_else_is_asked_of_it():
    spans = [("3", 0, 0), ("3", 0, 1), ("4", 1, 2), ("4", 2, 3)]
    spans = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    answer = parse_answer(write({**make_answer(weight_versions=spans), "index": 6}))
    assert answer.weight_versions == WeightVersions((3, 4), (1, 3)) == WeightVersions.of((3, 4, 4))
    assert (answer.finish_reason, answer.num_prompt_tokens, answer.index) == (FinishReason.stop, 5, 6)
    assert answer.routed_experts is None
    response = parse_answer(write(make_answer())).build_response("hi")
    assert response == Response((8, 9, 2), "hi", (-0.1, -0.2, -0.3), (True,) * 3, (4, 4, 4), FinishReason.stop)


def entries(*found):
    return {"output_token_logprobs": list(found)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": {"type": "abort", "message": "lost"}}, "ended with {'type': 'abort', 'message': 'lost'}"),
        ({"finish_reason": None}, "ended with None; stop or length was expected"),
        (entries([-0.1, 8, None]), "3 tokens came with 1 log-probs"),
        (entries(), "3 tokens came with 0 log-probs"),
        (entries([-0.1, 8, None], [-0.2, 9, None], [-0.3, 3, None]), "log-probs, not of these tokens"),
        (entries([-0.1, 8, None], [None, 9, None], [-0.3, 2, None]), "Failed to parse string: 'null'"),
        (entries([-0.1, 8, None], [-1e39, 9, None], [-0.3, 2, None]), "has id 9 with log-prob -inf"),
        (entries([-0.1, 8, None], [-0.2, 9, "x"], [-0.3, 2, None]), "have no end"),
        (entries([-0.1, 8], [-0.2, 9], [-0.3, 2]), "is not what SGLang writes"),
        ({"output_token_logprobs": None}, "is not what SGLang writes"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "do not cover a response of 3 tokens"),
        (
            {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "3", "start": 1, "end": 3}]},
            "do not cover a response of 3 tokens",
        ),
        ({"weight_version": "default"}, "'default'"),
    ],
)
def test_an_answer_that_was_aborted_or_is_inconsistent_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        parse_answer(write(make_answer(**changes)))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not the JSON that SGLang writes"),
        (b'{"error": {"message": "out of memory"}}', "meta_info.*out of memory"),
        (write(make_answer((), ())), "a response of 0 tokens"),
        (json.dumps(make_answer()).encode(), "is not what SGLang writes"),
        (write(make_answer())[:30], "an answer cannot be read: its output_ids have no end"),
        (write(make_answer())[:-40], "is not the JSON that SGLang writes"),
        (write(make_answer()).replace(b"9", b"99999999999"), "has id 99999999999"),
        (write(make_answer()).replace(b"9", b"-9"), "has id -9"),
        (write(make_answer()).replace(b"],[-0.2,", b"],,-0.2"), "not of these tokens|a log-prob is missing"),
        (
            write(make_answer()).replace(b",9,null],[-0.3", b",9,null],,-0.3"),
            "not of these tokens|a log-prob is missing",
        ),
    ],
)
def test_what_sglang_does_not_write_is_refused(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_answer(raw)


def test_a_list_of_answers_is_not_one_object():
    with pytest.raises(RequestError, match="a list was expected"):
        parse_answers(write(make_answer()))
