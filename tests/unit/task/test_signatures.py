"""Reward functions of one's own: in a file, with megarl's, TRL's or verl's parameters, and what they may return."""

import contextlib
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from reward_cases import ask

from megarl.config.errors import ConfigError
from megarl.config.schema.task import FunctionRewardConfig
from megarl.task.reward import adapt, decode_question, encode_question, encode_score
from megarl.task.scorer import build_scorer
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn

RECORD = {"question": "6 * 7?", "solution": "so #### 42", "level": 3, "tags": ["a", "b"]}
CHAT = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}
OF_VERL = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "forty-two"},
    "extra_info": {"index": 7},
}


def build_prompt(record=RECORD):
    return Prompt("p", "<user>6 * 7?", (1,), "42", {"k": "v"}, (Message("user", "6 * 7?"),), record)


def score(function, record=RECORD, text="42"):
    response = Response((1, 2), text, (0.0, 0.0), (True, True), (0, 0), FinishReason.stop)
    return adapt("mine.py:score", function)(build_prompt(record), response)


def reward_as_trl(prompts, completions, solution, **columns):
    assert (prompts, completions, solution) == (["6 * 7?"], ["42"], ["so #### 42"])
    assert (columns["level"], columns["tags"], columns["answer"]) == ([3], [["a", "b"]], ["42"])
    assert columns["completion_ids"] == [[1, 2]]
    return [0.5]


def reward_as_trl_with_chats(prompts, completions):
    assert prompts == [[{"role": "user", "content": "6 * 7?"}]]
    return [completions[0][0]["content"] == "42"]


async def reward_later(prompt, response):
    return prompt.answer == response.text


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "forty-two", {"index": 7})
    return {"score": float(solution_str == "42"), "acc": solution_str == "42", "pred": solution_str}


@pytest.mark.parametrize(
    ("function", "record", "expected"),
    [
        (reward_as_trl, RECORD, Score(0.5, False)),
        (reward_as_trl_with_chats, CHAT, Score(1.0, True)),
        (compute_score, OF_VERL, Score(1.0, True, {"acc": 1.0})),
        (reward_later, RECORD, Score(1.0, True)),
    ],
)
def test_a_function_gets_what_its_parameters_ask_for_with_the_columns_as_the_data_have_them(function, record, expected):
    assert score(function, record) == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        *[(it, Score(float(it), it == 1)) for it in (0.25, 1, True, False)],
        ({"score": 0.5, "correct": True, "brief": 1}, Score(0.5, True, {"brief": 1.0})),
        ({"reward": 1.0, "note": "text", "none": None}, Score(1.0, True)),
        (Score(0.1, True, {"a": 2.0}), Score(0.1, True, {"a": 2.0})),
        *[({"score": 1.0, "it": it}, Score(1.0, True, {"it": float(value)})) for it, value in (
            (np.float32(0.5), 0.5), (np.bool_(True), 1), (torch.tensor(0.5), 0.5), (np.array([2]), 2),
            (Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5))],
        ({"score": 1.0, "huge": 10**400}, Score(1.0, True, {"huge": math.inf})),
        ({"score": 1.0, "acc": 0.5}, Score(1.0, False, {"acc": 0.5})),
        ({"score": 1.0, "acc": np.True_}, Score(1.0, True, {"acc": 1.0})),
        ({"score": 1.0, "acc": None}, Score(1.0, True)),
    ],
)  # fmt: skip
def test_a_number_a_truth_value_a_dict_or_a_score_is_a_score(result, expected):
    assert score(lambda prompt, response: result) == expected


ACCEPTED = r"mine\.py:score takes \(.*accepted are \(prompt, response\), TRL's .*verl's"
NO_ENTRY = r"mine\.py:score returned 'style': .*; beside 'score' there may be numbers"
NO_TRUTHS = ("False", "", 0.5, math.nan, [True], {})
NO_RESULT = r'mine\.py:score returned .*; it must return a number, .*"score"'


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        *[(it, ValueError, ACCEPTED) for it in (
            lambda response: 1.0, lambda prompt, response, truth: 1.0, lambda solution_str, truth: 1.0, lambda: 1.0)],
        (lambda completions, gold: [1.0], ValueError, "'gold'; the columns of the data are answer, level, question, "),
        (lambda completions, **columns: 1.0, TypeError, r"returned 1\.0 \(float\) for one completion; TRL's functions"),
        *[(lambda prompt, response, it=it: it, TypeError, message)
          for its, message in [
              (("1.0", None, [1.0], {"value": 1.0}, {"score": "good"}), NO_RESULT),
              # An entry is a number or a text,
              ([{"score": 1.0, "style": it}
                for it in ([0.5], np.array([0.5, 0.7]), torch.zeros(2), {"a": 1.0}, b"1", 1j, object)], NO_ENTRY),
              # and correct a truth value, and nothing that is one to Python.
              ([{"score": 0.0, "correct": it} for it in NO_TRUTHS], r"returned 'correct': .*; it must be True or"),
          ] for it in its],
    ],
)  # fmt: skip
def test_other_parameters_columns_and_results_are_refused_with_what_is_accepted(function, error, message):
    with pytest.raises(error, match=message):
        score(function)


@pytest.mark.parametrize("value", NO_TRUTHS)
def test_a_scores_correct_is_a_truth_value(value):
    with pytest.raises(TypeError, match=r"a Score has the correct .*; it must be True or False"):
        encode_score(Score(0.0, value))


def test_prompts_and_responses_are_the_same_in_the_other_process():
    turns = (Turn(0, 2, "one", 0.5, {"calls": 1.0}), Turn(3, 4, "two"))
    numbers = ((-0.1, -0.2, 0, -0.3), (True, True, False, True), (3, 3, 4, 4))
    experts = RoutedExperts(b"\x00\xff", 1, 1, 4)
    response = Response((5, 6, 7, 8), "two", *numbers, FinishReason.max_turns, experts, turns)
    same, rebuilt = decode_question(encode_question(build_prompt(), response))
    assert (same, same.messages, same.columns) == (build_prompt(), build_prompt().messages, RECORD)
    assert rebuilt == response
    assert rebuilt.rollout_logprobs.dtype == np.float32


CANNOT, DEF = "cannot be scored: ", "def score(prompt, response):\n    "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{DEF}return 1 / 0", r"ZeroDivisionError.*my_reward\.py, line 2: return 1 / 0"),
        (f"{DEF}return '42' in response", r"line 2: .* in response\); the texts are prompt\.text and response\.text"),
        ("def score(prompt, response:", r"SyntaxError: .*my_reward\.py, line 1: def score\(prompt, response:"),
        (f"{DEF}import torchh", r"No module named 'torchh' \(my_reward\.py, line 2: import torchh\)"),
        ("def reward(prompt, response):\n    return 1", r"my_reward\.py has no score, it has reward"),
        ("score = 3", r"a int; a callable was expected"),
        (
            f"{DEF}return int(response.text or 0) / (len(response.text) - 2)",
            rf"mine: the reference answer '42' as a response to '6 \* 7\?' {CANNOT}.*line 2: ",
        ),
        (
            f"{DEF}return prompt.columns['gold']",
            r"mine: an empty response to .*KeyError: 'gold' \(.*\); the columns of the data are level, qu",
        ),
        (
            f"{DEF}return {{'score': 1.0, 'style': float('nan')}}",
            rf"mine: an empty .* {CANNOT}the details 'style' is nan",
        ),
        (f"{DEF}return float('inf') if response.text else 0.0", rf"mine: the reference .* {CANNOT}the reward is inf"),
    ],
)
def test_what_fails_is_shown_with_its_own_line_before_the_run(tmp_path, monkeypatch, source, message):
    (tmp_path / "my_reward.py").write_text(f"{source}\n")
    monkeypatch.chdir(tmp_path)
    with (
        contextlib.closing(build_scorer(FunctionRewardConfig("my_reward.py:score", num_workers=1))) as scorer,
        pytest.raises(ConfigError, match=message) as raised,
    ):
        scorer.check([build_prompt()], chosen="mine")
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


def read(scorer, *texts):
    scores = [ask(scorer, text, prompt=build_prompt())[0] for text in texts]
    return [score.reward if score.failure is None else score.failure for score in scores]


def test_what_a_reward_keeps_is_saved_and_goes_on_in_another_process(tmp_path):
    def keeping(name="score", **keys):
        config = FunctionRewardConfig(path=f"{tmp_path}/novelty.py:{name}", **keys)
        return contextlib.closing(build_scorer(config))

    (tmp_path / "novelty.py").write_text(KEEPING)
    with keeping() as scorer:
        assert read(scorer, "a", "a", "b") == [1.0, 0.5, 1.0]
        state = scorer.state()
        assert state == {"a": 2, "b": 1}
        # Its process is lost: the next one goes on from the state that was read last.
        assert "its process died" in read(scorer, "a", "die")[1]
        assert read(scorer, "a") == [1 / 3]
    with keeping() as scorer:
        scorer.load_state(state)
        assert scorer.state() == state
        assert read(scorer, "a", "b") == [1 / 3, 0.5]
    # A state that no checkpoint could hold is refused before the start.
    for name, num_workers, message in (
        ("score", 2, r"reward.num_workers: 2 found; the reward has state_dict.*must be 1 or null"),
        ("broken", None, r"reward.path: .*broken: state_dict\(\) comes back from JSON as another value"),
    ):
        with keeping(name, num_workers=num_workers) as scorer, pytest.raises(ConfigError, match=message):
            scorer.check([build_prompt()])
