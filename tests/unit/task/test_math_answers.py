"""reward=math: what states an answer, and which stated answers are right."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.schema.task import MathRewardConfig, StatedAnswer
from megarl.report.evaluation import count_votes
from megarl.task.math_grading import extract_statements, grade
from megarl.types import Sample

IN_BRACKETS = (
    *("since they are equal", "correct", "in dollars", "eggs", "approximately", "cm", "exact", "as required"),
    *("verified", "final answer", "dollars per hour", "per day", "units", "including Tom", "years old"),
    *("not counting Tom", "in base ten", "rounded"),
)
"""What may stand behind a right answer"""
TAKEN_BACK = (
    *("incorrect", "wrong", "not correct", "discarded", "rejected", "retracted", "a mistake", "not", "no", "invalid"),
    *("extraneous", "this is wrong", "isn't right", "mistake", "should be 11", "refuted", "impossible", "fails"),
    *("not a solution", "does not work", "false", "scratch that", "ignore", "nope", "disproved", "my first guess"),
    *("a guess", "if lucky", "or 11", "too large", "too small", "off by one", "inaccurate", "revised below"),
    *("superseded", "nonsense", "bad", "unlikely", "error", "wait, no", "ruled out", "excluded", "doubtful"),
    *("to be checked", "contradiction", "Wrong!", "incorrect!", "incorrect: it is 11", "see above; incorrect"),
    "that's wrong",
)
"""What takes it back"""


def read_pairs() -> dict[str, list[tuple[str, str]]]:
    """The pairs of answers.txt, and those with words in brackets."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    half = None
    for line in Path(__file__).with_name("answers.txt").read_text().replace("↩\n", "").splitlines():
        if line.startswith("= "):
            half = pairs.setdefault(line.split()[1], [])
        elif half is not None:
            for row in line.split(" ‖ "):
                golds, responses = (part.split(" ¦ ") for part in row.split(" ⇒ "))
                for gold, each in product(golds, responses):
                    text = each[1:] if each.startswith("@") else f"\\boxed{{{each}}}"
                    text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
                    half.append((gold, text.replace("⏎", "\n")))
    pairs["RIGHT"] += [("10", f"The answer is 10 ({words})") for words in IN_BRACKETS]
    for form in ("The answer is 10 ({})", "\\boxed{{10 \\text{{ ({})}}}}"):
        pairs["WRONG"] += [("10", form.format(words)) for words in TAKEN_BACK]
    return pairs


PAIRS = read_pairs()


@pytest.fixture(scope="module")
def math_reward():
    return build_reward(MathRewardConfig(timeout_s=20.0))


@pytest.mark.parametrize(("half", "gold", "text"), [(half, *pair) for half, pairs in PAIRS.items() for pair in pairs])
def test_a_response_is_right_where_a_careful_grader_says_so(half, gold, text):
    if half == "RIGHT":
        assert grade(gold, text, "final").is_right
    else:
        assert not any(grade(gold, text, mode).is_right for mode in ("boxed", "final"))


def test_the_table_has_enough_of_both_and_none_twice():
    assert all(len(set(pairs)) == len(pairs) >= 400 for pairs in PAIRS.values())


FORMS = (
    *("{0}", "\\boxed{{{0}}}", "$\\boxed{{{1}}}$", "The answer is {0}.", "So she needs {2} more, and\n#### {1}"),
    *("**Final Answer**: \\({0}\\)", "<think>The answer is {2}.</think>\n\nAnswer: ${0}$"),
    *("\\boxed{{{0} \\text{{ apples}}}}", "The final answer is \\[ x = {0} \\]", "\\boxed{{{0}.00}}"),
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
    **dict.fromkeys(("#### 72", "The answer is 72.", "72", "so $x = 72$."), frozenset({"final", "any"})),
    **dict.fromkeys(("She sold 48 + 24 = 72 clips altogether.", "so 72"), frozenset({"any"})),
    **dict.fromkeys(("72 and then 73", "48 + 24 = ?", "Since 72 is even, the result is unknown."), frozenset()),
    **dict.fromkeys(("Is it 72?", "So \\boxed{71}, or 72"), frozenset()),
}


@pytest.mark.parametrize(("text", "modes"), ENDINGS.items())
def test_reward_answer_decides_what_states_an_answer(text, modes):
    assert {each.value for each in StatedAnswer if grade("72", text, each.value).is_right} == modes


@pytest.mark.parametrize("tag", ["<think>", "<reasoning>", "[THINK]"])
def test_a_prompt_that_ends_in_an_open_thinking_tag_opens_the_responses_thinking(math_reward, tag):
    prompt = replace(build_prompt("72"), text=f"<|assistant|>{tag}\n")
    assert not math_reward(prompt, build_response("\\boxed{72}, but")).correct
    assert math_reward(prompt, build_response("\\boxed{71}</think>\\boxed{72}")).correct


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


def test_the_result_says_whether_there_was_one_answer_that_can_be_read_and_votes_count_it(math_reward):
    texts = {"\\boxed{72}": 1, "The answer is 71.": 1, "\\boxed{71.0}": 1, "I do not know.": 0}
    texts |= {"\\boxed{72} so the answer is 71": 0, "70 + 1": 1}
    scores = [math_reward(build_prompt("72"), build_response(text)) for text in texts]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    samples = [
        Sample(build_prompt("72"), build_response(text), score, 0) for text, score in zip(texts, scores, strict=True)
    ]
    (votes,) = count_votes(samples).values()
    assert [score.details for score in scores] == [{"format": float(it), "timeout": 0.0} for it in texts.values()]
    assert (votes.num_correct, votes.wrong, votes.num_silent) == (1, (2, 1), 2)


def test_an_escaped_brace_is_no_brace_of_a_box():
    text = "The set is \\boxed{\\left\\{ 1, 2 \\right.} and with it 12."
    assert extract_statements(text, "boxed") == ["\\left\\{ 1, 2 \\right."]


HOSTILE = (
    *("\\boxed{" * 30 + "45" + "}" * 30, "\\boxed{9^{9^{9^{9}}}}", "The answer is 9**9**9**9", "\\boxed{99999999!}"),
    *("\\boxed{\\binom{1000000}{500000}}", "\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}"),
    *("\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}", "\\boxed{" + "\\pm 1" * 100 + "}"),
    *("\\boxed{" + "x^" * 300 + "2}", "\\boxed{1 \\times 10^{999999999}}", "\\boxed{" + "9" * 90000 + "}"),
    *("\\boxed{" * 20000, "<answer>" * 50000, "answer" + " " * 100000, "The answer is 1. " * 20000, "\ud800" * 1000),
    *("answer is " * 25000, "answer is 12 " * 10000, "\\boxed{1}" * 20000, "<answer>1</answer>" * 5000),
    *("</s> " * 20000, "The answer is" + " " * 100000, "The answer is 1" + " , " * 30000),
    *("answer to this question " * 4000, "#### 1 " * 15000),
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_made_to_be_slow_is_wrong_without_running_out_of_time(math_reward, text):
    for gold in ("122", "x^2-1", "2^{10}", "(1,2)"):
        score = math_reward(build_prompt(gold), build_response(text))
        assert (score.correct, score.details["timeout"]) == (False, 0.0)
