"""reward=math: what states an answer, and which stated answers are right."""

from dataclasses import replace

import pytest
from answers import RIGHT, WRONG
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.schema.task import MathRewardConfig, StatedAnswer
from megarl.report.evaluation import count_votes
from megarl.task.math_grading import grade
from megarl.task.math_text import extract_statements
from megarl.types import Sample


@pytest.fixture(scope="module")
def math_reward():
    return build_reward(MathRewardConfig(timeout_s=20.0))


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_a_response_that_states_the_answer_is_right(gold, text):
    assert grade(gold, text, "final").is_right


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_a_response_that_does_not_state_the_answer_is_wrong(gold, text):
    assert not any(grade(gold, text, mode).is_right for mode in ("boxed", "final"))


def test_the_table_has_enough_of_both_and_none_twice():
    assert min(len(RIGHT), len(WRONG)) >= 400
    assert len({*RIGHT, *WRONG}) == len(RIGHT) + len(WRONG)


FORMS = (
    "{0}",
    "\\boxed{{{0}}}",
    "$\\boxed{{{1}}}$",
    "The answer is {0}.",
    "So she needs {2} more, and\n#### {1}",
    "**Final Answer**: \\({0}\\)",
    "<think>The answer is {2}.</think>\n\nAnswer: ${0}$",
    "\\boxed{{{0} \\text{{ apples}}}}",
    "The final answer is \\[ x = {0} \\]",
    "\\boxed{{{0}.00}}",
    "<answer>{1}</answer>",
)


@settings(max_examples=60)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from(FORMS))
def test_a_whole_number_is_right_in_every_usual_form_and_another_one_in_none(number, other, form):
    text = form.format(number, f"{number:,}", number + 1)
    for gold in (str(number), f"{number:,}"):
        assert grade(gold, text, "final").is_right
    assert grade(str(other), text, "final").is_right == (other == number)


ENDINGS = {
    "\\boxed{72}": {"boxed", "final", "any"},
    "#### 72": {"final", "any"},
    "The answer is 72.": {"final", "any"},
    "72": {"final", "any"},
    "She sold 48 + 24 = 72 clips altogether.": {"any"},
    "so $x = 72$.": {"final", "any"},
    "so 72": {"any"},
    "72 and then 73": set(),
    "48 + 24 = ?": set(),
    "Since 72 is even, the result is unknown.": set(),
    "Is it 72?": set(),
    "So \\boxed{71}, or 72": set(),
}


@pytest.mark.parametrize(("text", "modes"), ENDINGS.items())
def test_reward_answer_decides_what_states_an_answer(text, modes):
    assert {each.value for each in StatedAnswer if grade("72", text, each.value).is_right} == modes


@pytest.mark.parametrize("tag", ["<think>", "<reasoning>", "[THINK]"])
def test_a_prompt_that_ends_in_an_open_thinking_tag_opens_the_responses_thinking(math_reward, tag):
    prompt = replace(build_prompt("72"), text=f"<|assistant|>{tag}\n")
    assert not math_reward(prompt, build_response("\\boxed{72}, but")).correct
    assert math_reward(prompt, build_response("\\boxed{71}</think>\\boxed{72}")).correct


def test_the_result_says_whether_there_was_one_answer_that_can_be_read(math_reward):
    results = [math_reward(build_prompt("72"), build_response(text)) for text in ("72", "71", "I do not know.")]
    assert [(each.reward, each.details) for each in results] == [
        (1.0, {"format": 1.0, "timeout": 0.0}),
        (0.0, {"format": 1.0, "timeout": 0.0}),
        (0.0, {"format": 0.0, "timeout": 0.0}),
    ]


EQUAL = [
    (["\\boxed{72}", "$72.0$", "#### 72", "\\boxed{72 \\text{ eggs}}", "x = 72"], "72"),
    (["\\boxed{0.5}", "$\\frac{2}{4}$", "1/2"], "1/2"),
    (["\\boxed{2, 1}", "\\boxed{\\{1, 2\\}}", "\\boxed{1} and \\boxed{2}"], "{1, 2}"),
    (["I do not know.", "", "\\boxed{1} or \\boxed{3}"], None),
]


@pytest.mark.parametrize(("texts", "read"), EQUAL)
def test_equal_answers_are_read_alike_whether_right_or_wrong(texts, read):
    for gold in ("72", "1, 2"):
        answers = {verdict.answer for text in texts if (verdict := grade(gold, text, "final")).is_read}
        assert answers <= {read, "{1, 3}"}
        assert read is None or read in answers or gold != "1, 2"


def test_majority_votes_count_what_was_graded(math_reward):
    texts = ["\\boxed{72}", "The answer is 71.", "\\boxed{71.0}", "\\boxed{72} so the answer is 71", "70 + 1"]
    samples = []
    for text in texts:
        response = build_response(text)
        samples.append(Sample(build_prompt("72"), response, math_reward(build_prompt("72"), response), 0))
    (votes,) = count_votes(samples).values()
    assert (votes.num_correct, votes.wrong, votes.num_silent) == (1, (2, 1), 1)


def test_an_escaped_brace_is_no_brace_of_a_box():
    text = "The set is \\boxed{\\left\\{ 1, 2 \\right.} and with it 12."
    assert extract_statements(text, "boxed") == ["\\left\\{ 1, 2 \\right."]


HOSTILE = [
    "\\boxed{" * 30 + "45" + "}" * 30,
    "\\boxed{9^{9^{9^{9}}}}",
    "The answer is 9**9**9**9",
    "\\boxed{99999999!}",
    "\\boxed{\\binom{1000000}{500000}}",
    "\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}",
    "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
    "\\boxed{" + "\\pm 1" * 100 + "}",
    "\\boxed{" + "x^" * 300 + "2}",
    "\\boxed{1 \\times 10^{999999999}}",
    "\\boxed{" + "9" * 90000 + "}",
    "\\boxed{" * 20000,
    "<answer>" * 50000,
    "answer" + " " * 100000,
    "The answer is 1. " * 20000,
    "\ud800" * 1000,
    "answer is " * 25000,
    "answer is 12 " * 10000,
    "\\boxed{1}" * 20000,
    "<answer>1</answer>" * 5000,
    "</s> " * 20000,
    "The answer is" + " " * 100000,
    "The answer is 1" + " , " * 30000,
    "answer to this question " * 4000,
    "#### 1 " * 15000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_made_to_be_slow_is_wrong_without_running_out_of_time(math_reward, text):
    for gold in ("122", "x^2-1", "2^{10}", "(1,2)"):
        score = math_reward(build_prompt(gold), build_response(text))
        assert (score.correct, score.details["timeout"]) == (False, 0.0)
