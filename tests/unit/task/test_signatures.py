"""Reward functions of one's own: in a file, with megarl's, TRL's or verl's parameters, and what they may return."""

import asyncio
import contextlib
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.schema.task import FunctionRewardConfig, JsonlDataConfig
from megarl.task.function import adapt, decode_question, encode_question, encode_score, read_result
from megarl.task.scorer import build_scorer
from megarl.task.sources import load_files
from megarl.types import FinishReason, Message, Prompt, Response, Score

RECORD = {"question": "6 * 7?", "solution": "so #### 42", "level": 3, "tags": ["a", "b"]}


def build_prompt(record=RECORD, question="6 * 7?"):
    return Prompt("p", "<user>6 * 7?", (1,), "42", {}, (Message("user", question),), record)


def build_response(text):
    return Response((1, 2), text, (0.0, 0.0), (True, True), (0, 0), FinishReason.stop)


def score(function, text="42", prompt=None):
    return adapt("mine.py:score", function)(prompt or build_prompt(), build_response(text))


def test_trl_gets_lists_of_one_and_the_columns_as_the_data_have_them():
    seen = {}

    def reward(prompts, completions, solution, **columns):
        seen.update(columns, prompts=prompts, completions=completions, solution=solution)
        return [0.5 for _ in completions]

    assert score(reward) == Score(0.5, False)
    assert (seen["prompts"], seen["completions"], seen["solution"]) == (["6 * 7?"], ["42"], ["so #### 42"])
    assert (seen["level"], seen["tags"], seen["answer"], seen["completion_ids"]) == (
        [3],
        [["a", "b"]],
        ["42"],
        [[1, 2]],
    )


def test_trl_gets_chats_where_the_data_are_chats():
    def reward(prompts, completions):
        assert prompts == [[{"role": "user", "content": "6 * 7?"}]]
        return [completions[0][0]["content"] == "42"]

    prompt = build_prompt({"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"})
    assert score(reward, prompt=prompt) == Score(1.0, True)


def test_verl_gets_its_four_arguments_from_its_own_columns():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "forty-two", {"index": 7})
        return {"score": float(solution_str == "42"), "acc": solution_str == "42", "pred": solution_str}

    columns = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "forty-two"},
        "extra_info": {"index": 7},
    }
    assert score(compute_score, prompt=build_prompt(columns)) == Score(1.0, True, {"acc": 1.0})


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (0.25, Score(0.25, False)),
        (1, Score(1.0, True)),
        (True, Score(1.0, True)),
        (False, Score(0.0, False)),
        ({"score": 0.5, "correct": True, "brief": 1}, Score(0.5, True, {"brief": 1.0})),
        ({"reward": 1.0, "note": "text"}, Score(1.0, True)),
        (Score(0.1, True, {"a": 2.0}), Score(0.1, True, {"a": 2.0})),
    ],
)
def test_a_number_a_truth_value_a_dict_or_a_score_is_a_score(result, expected):
    assert read_result("mine.py:score", result) == expected
    assert score(lambda prompt, response: result) == expected


@pytest.mark.parametrize(
    ("entries", "details"),
    [
        ({"style": np.float32(0.5), "long": np.bool_(True)}, {"style": 0.5, "long": 1.0}),
        ({"style": torch.tensor(0.5), "one": np.array([2])}, {"style": 0.5, "one": 2.0}),
        ({"style": Decimal("0.5"), "third": Fraction(1, 2)}, {"style": 0.5, "third": 0.5}),
        ({"huge": 10**400}, {"huge": math.inf}),
        ({"pred": "42", "note": None}, {}),
    ],
)
def test_every_number_of_a_dict_is_a_detail_whatever_its_type(entries, details):
    assert read_result("mine.py:score", {"score": 1.0, **entries}) == Score(1.0, True, details)


@pytest.mark.parametrize(
    "value", [[0.5], [0.5, 0.7], np.array([0.5, 0.7]), torch.zeros(2), {"a": 1.0}, b"1", 1j, {1}, object]
)
def test_an_entry_that_is_neither_number_nor_text_is_refused_by_its_name(value):
    with pytest.raises(TypeError, match=r"mine\.py:score returned 'style': .*; beside 'score' there may be numbers"):
        read_result("mine.py:score", {"score": 1.0, "style": value})


@pytest.mark.parametrize("value", ["False", "", 0.5, math.nan, [], [True], {}])
def test_correct_is_a_truth_value_and_nothing_that_is_one_to_python(value):
    with pytest.raises(TypeError, match=r"returned 'correct': .*; it must be True or False"):
        read_result("mine.py:score", {"score": 0.0, "correct": value})
    with pytest.raises(TypeError, match=r"a Score has the correct .*; it must be True or False"):
        encode_score(Score(0.0, value))


@pytest.mark.parametrize(
    ("acc", "correct"), [(0.5, False), (1.0, True), (np.True_, True), (None, True), (False, False)]
)
def test_verls_acc_says_correct_from_one_on(acc, correct):
    assert read_result("mine.py:score", {"score": 1.0, "acc": acc}).correct is correct


@pytest.mark.parametrize("result", ["1.0", None, [1.0], {"value": 1.0}, {"score": "good"}])
def test_another_result_is_refused_with_what_may_be_returned(result):
    with pytest.raises(TypeError, match=r'mine\.py:score returned .*; it must return a number, .*"score"'):
        score(lambda prompt, response: result)


def test_a_trl_function_that_returns_a_number_is_told_to_return_a_list():
    with pytest.raises(TypeError, match=r"returned 1\.0 \(float\) for one completion; TRL's functions return a list"):
        score(lambda completions, **columns: 1.0)


@pytest.mark.parametrize(
    "function",
    [lambda response: 1.0, lambda prompt, response, truth: 1.0, lambda solution_str, truth: 1.0, lambda: 1.0],
)
def test_other_parameters_are_refused_with_those_found_and_the_three_signatures(function):
    with pytest.raises(ValueError, match=r"mine\.py:score takes \(.*accepted are \(prompt, response\), TRL's .*verl's"):
        adapt("mine.py:score", function)


def test_a_column_that_the_data_do_not_have_is_named_with_those_they_have():
    with pytest.raises(ValueError, match="asks for gold; the columns of the data are answer, level, question, "):
        score(lambda completions, gold: [1.0])


def test_columns_reach_the_functions_process_with_their_types(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "6 * 7?", "answer": "so #### 42", "level": 3, "tags": ["a"]}\n')
    (problem,) = load_files(JsonlDataConfig(path=str(path)), 0).train
    prompt = Prompt("p", "", (1,), problem.answer, problem.metadata, problem.messages, problem.columns)
    assert decode_question(encode_question(prompt, build_response("")))[0].columns == {
        "question": "6 * 7?", "answer": "so #### 42", "level": 3, "tags": ["a"]
    }  # fmt: skip


def check(path, *prompts):
    scorer = build_scorer(FunctionRewardConfig(path, num_workers=1))
    try:
        return scorer.check(prompts or [build_prompt()], chosen="mine")
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(prompt, response):\n    return 1 / 0\n", r"ZeroDivisionError.*my_reward\.py, line 2: return 1 / 0"),
        (
            "def score(prompt, response):\n    return '42' in response\n",
            r"line 2: return '42' in response\); the texts are prompt\.text and response\.text",
        ),
        ("def score(prompt, response:\n", r"SyntaxError: .*my_reward\.py, line 1: def score\(prompt, response:"),
        ("import torchh\n", r"No module named 'torchh' \(my_reward\.py, line 1: import torchh\)"),
        ("def reward(prompt, response):\n    return 1\n", r"my_reward\.py has no score, it has reward"),
        ("score = 3\n", r"a int; a callable was expected"),
        (
            "def score(prompt, response):\n    return int(response.text or 0) / (len(response.text) - 2)\n",
            r"mine: the reference answer as a response to '6 \* 7\?' cannot be scored: .*line 2: .* response '42'",
        ),
        (
            "def score(prompt, response):\n    return prompt.columns['gold']\n",
            r"mine: an empty response to .*KeyError: 'gold' \(.*\); the columns of the data are level, qu",
        ),
        (
            "def score(prompt, response):\n    return {'score': 1.0, 'style': float('nan')}\n",
            r"mine: an empty response to .* cannot be scored: the details 'style' is nan; it must be a finite number",
        ),
        (
            "def score(prompt, response):\n    return float('inf') if response.text else 0.0\n",
            r"mine: the reference answer .* cannot be scored: the reward is inf; .*, with the response '42'",
        ),
    ],
)
def test_what_fails_is_shown_with_its_own_line_before_the_run(tmp_path, monkeypatch, source, message):
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as raised:
        check("my_reward.py:score")
    assert "Traceback" not in str(raised.value)
    assert "\n" not in str(raised.value)


KEEPING = """
import os

class Novelty:
    def __init__(self):
        self.seen = {}
    def __call__(self, prompt, response):
        if response.text == "die":
            os._exit(3)
        self.seen[response.text] = self.seen.get(response.text, 0) + 1
        return 1.0 / self.seen[response.text]
    def state_dict(self):
        return self.seen
    def load_state_dict(self, state):
        self.seen = dict(state)

score = Novelty()
broken = Novelty()
broken.seen = {1: 2}
"""


@pytest.fixture
def keeping(tmp_path):
    (tmp_path / "novelty.py").write_text(KEEPING)
    return lambda name="score", **keys: build_scorer(FunctionRewardConfig(path=f"{tmp_path}/novelty.py:{name}", **keys))


def ask(scorer, *texts):
    async def score_all():
        return [await scorer.score(build_prompt(), build_response(text)) for text in texts]

    return [score.reward if score.failure is None else score.failure for score in asyncio.run(score_all())]


def test_what_a_reward_keeps_is_saved_and_goes_on_in_another_process(keeping):
    with contextlib.closing(keeping()) as scorer:
        assert ask(scorer, "a", "a", "b") == [1.0, 0.5, 1.0]
        state = scorer.state()
        assert state == {"a": 2, "b": 1}
        # Its process is lost: the next one goes on from the state that was read last.
        assert "its process died" in ask(scorer, "a", "die")[1]
        assert ask(scorer, "a") == [1 / 3]
    with contextlib.closing(keeping()) as scorer:
        scorer.load_state(state)
        assert scorer.state() == state
        assert ask(scorer, "a", "b") == [1 / 3, 0.5]


@pytest.mark.parametrize(
    ("name", "num_workers", "message"),
    [
        ("score", 2, r"reward.num_workers: 2 found; the reward has state_dict.*must be 1 or null"),
        ("broken", None, r"reward.path: .*broken: state_dict\(\) comes back from JSON as another value"),
    ],
)
def test_a_state_that_no_checkpoint_could_hold_is_refused_before_the_start(keeping, name, num_workers, message):
    with (
        contextlib.closing(keeping(name, num_workers=num_workers)) as scorer,
        pytest.raises(ConfigError, match=message),
    ):
        scorer.check([build_prompt()])
