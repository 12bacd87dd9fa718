"""Kinds of rewards, weighted sums; what a verifier does costs its sample, never the run; functions of one's own: in a
file, with megarl's, TRL's or verl's parameters, and what they may return.
"""

import asyncio
import contextlib
import math
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_cases import ask, build_prompt, build_response, build_reward

from megarl import algo
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import task as schema
from megarl.config.schema.task import SCHEMAS, FunctionRewardConfig, read_parts
from megarl.task.process import call
from megarl.task.reward import (
    RESERVED_NAMES,
    AsyncReward,
    DirectReward,
    RewardFailedError,
    UserFunction,
    decode_question,
    encode_question,
    encode_score,
)
from megarl.task.scorer import Part, Scorer, WeightedReward, build_scorer, reads_answers
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn

REQUIRED = {
    **dict.fromkeys(("function", "group_function"), "path=reward_cases:build_prompt"),
    **dict.fromkeys(("http", "judge", "reward_model"), "url=http://127.0.0.1:9"),
    "weighted": "parts.right.kind=exact",
}
READS_NO_ANSWER = {"environment", "letter_count", "reasoning_gym", "format", "length", "code", *REQUIRED} - {"weighted"}


@pytest.mark.parametrize("kind", SCHEMAS["reward"])
def test_every_kind_has_the_reward_of_a_wrong_answer_and_some_read_the_right_one_in_itself(kind):
    """85 as the expected answer and the response; the other kinds have no answer to read in it."""
    keys = [f"reward.{REQUIRED[kind]}"] if kind in REQUIRED else []
    config = load_config([f"reward={kind}", "model=tiny", "reward.wrong=-1", "environment=guess", *keys]).reward
    assert config.wrong == -1.0
    if reads_answers(config):
        score = build_reward(config)(build_prompt("85"), build_response("85"))
        assert (score.correct, score.answer) == (True, "85")
    else:
        assert kind in READS_NO_ANSWER


@pytest.mark.parametrize("kind", ["letter_count", "addition", "reasoning_gym"])
def test_a_reward_that_cannot_read_the_datas_answers_is_found_before_the_run(kind):
    with (
        contextlib.closing(build_scorer(SCHEMAS["reward"][kind]())) as scorer,
        pytest.raises(ConfigError, match=rf"^reward=\.\.\. with data=\.\.\..*prompt 'p1'.*data={kind}"),
    ):
        scorer.check([build_prompt("?")])


COMMAND = (
    *("reward=weighted", "reward.parts.right.kind=math", "reward.parts.right.weight=0.9"),
    *("reward.parts.right.answer=boxed", "reward.parts.letters.kind=letter_count"),
)


def test_parts_are_written_on_the_command_line_or_in_a_file(tmp_path):
    found = read_parts(load_config(["algo=vapo", "model=tiny", *COMMAND]).reward)
    answer, letters = schema.MathRewardConfig(answer=schema.StatedAnswer.boxed), schema.LetterCountRewardConfig()
    assert [(it.name, it.weight, it.config) for it in found] == [("right", 0.9, answer), ("letters", 1.0, letters)]
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        "defaults: [weighted_schema, _self_]\ncorrect_by: right\n"
        "parts:\n  right: {kind: exact, weight: 0.8}\n  letters: {kind: letter_count, tolerance: 2}\n"
    )
    config = load_config([f"hydra.searchpath=[file://{tmp_path}]", "reward=mine", "reward.parts.right.weight=0.7"])
    assert [(part.name, part.weight) for part in read_parts(config.reward)] == [("right", 0.7), ("letters", 1.0)]
    assert read_parts(config.reward)[1].config == schema.LetterCountRewardConfig(tolerance=2.0)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("reward.parts.right.anwser=boxed", r"right\.anwser: .*kind=math has weight, .*answer"),
        ("reward.parts.right.answer=some", r"reward\.parts\.right\.answer: .*boxed"),
        ("reward.parts.right.timeout_s=-1", r"reward\.parts\.right\.timeout_s: found -1"),
        ("reward.parts.right.wrong=-1", r"reward\.parts\.right\.wrong: has no effect in a part"),
        ("reward.parts.right.kind=maths", r"reward\.parts\.right: found .*'maths'.*kind is one of .*math"),
        ("reward.parts.right=math", r"reward\.parts\.right: found 'math'; a part has a name"),
        ("reward.parts.letters.kind=function", r"reward\.parts\.letters\.path: .*missing"),
        ("reward.parts.Right.kind=math", r"reward\.parts\.Right: found"),
        ("reward.correct_by=wrong", r"reward\.correct_by: found 'wrong'; the parts are right, letters"),
        ("reward.parts={}", r"reward\.parts: found"),
        ("reward.part.right.kind=math", r"reward\.part\.right\.kind: no such key"),
    ],
)
def test_a_wrong_key_of_a_part_is_named_in_full(override, problem):
    command = COMMAND[:1] if override.endswith("{}") else COMMAND
    with pytest.raises(ConfigError, match=problem):
        load_config(["algo=vapo", "model=tiny", *command, override])


class Late(AsyncReward):
    """Gives its score, or raises, after the other parts."""

    def __init__(self, result):
        self.result, self.closed, self.awaited = result, 0, 0

    async def score(self, prompt, response):
        await asyncio.sleep(0)
        self.awaited += 1
        if isinstance(self.result, Score):
            return self.result
        raise self.result

    def close(self):
        self.closed += 1


def give(score: Score) -> DirectReward:
    return DirectReward(lambda prompt, response: score)


def test_the_reward_is_the_weighted_sum_and_each_part_is_shown():
    right = give(Score(1.0, True, {"format": 1.0}, "85"))
    parts = {"right": Part(right, 0.75), "style": Part(late := Late(Score(0.5, False)), -0.5)}
    details = {"right": 1.0, "right/format": 1.0, "style": 0.5}
    for correct_by, correct_at, correct, answer in [
        ("right", 1.0, True, "85"),
        ("style", 1.0, False, None),
        (None, 0.5, True, "85"),
        (None, 0.51, False, "85"),
    ]:
        reward = WeightedReward(parts, correct_by, correct_at)
        assert ask(Scorer(reward), "85") == [Score(0.5, correct, details, answer)]
    reward.close()
    assert late.closed == 1
    # Weights that add up to one on paper are correct at one.
    parts = {name: Part(give(Score(1.0, True)), weight) for name, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items()}
    (score,) = ask(Scorer(WeightedReward(parts, None, 1.0)), "85")
    assert score.reward != 1.0
    assert score.correct


def test_a_part_that_fails_fails_the_sample_and_is_named():
    for result, reason in (
        (RewardFailedError("no verdict"), "style: no verdict"),
        (KeyError("x"), "style: raised KeyError: 'x'"),
        (Score(0.0, False, failure="it died"), "style: it died"),
    ):
        right, style, last = (Late(it) for it in (Score(1.0, True), result, Exception("later")))
        parts = {"right": Part(right, 1.0), "style": Part(style, 1.0), "last": Part(last, 1.0)}
        assert ask(Scorer(WeightedReward(parts, None, 1.0)), "85") == [Score(0.0, False, failure=reason)]
        assert right.awaited == 1


FUNCTIONS = """
import os, time
from megarl.types import Score

def score(prompt, response):
    text = response.text
    if text == "hang": time.sleep(600)
    if text == "raise": raise KeyError("missing")
    if text == "abort": os.abort()
    if text == "fill": bytearray(2 ** 34)
    if text == "nan": return Score(float("nan"), False, {"a": 0.0})
    if text == "nothing": return None
    if text == "reserved": return Score(0.5, False, {"mean": 0.0})
    if text == "slow": time.sleep(0.2)
    if text.startswith("fork"): os.fork()
    return Score(len(text), prompt.answer == text, {"a": 1.0})
"""


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "scorer_functions.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(folder))
    scorer = build_scorer(FunctionRewardConfig("scorer_functions:score", num_workers=2, timeout_s=1.0))
    scorer.check([build_prompt("yes")])
    yield scorer
    scorer.close()
    (score,) = ask(scorer, "yes")
    assert "closed" in score.failure or "shutdown" in score.failure
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "the reward took longer than reward.timeout_s=1 s"),
        ("raise", 'the reward raised KeyError: \'missing\' ('),
        ("raise", 'scorer_functions.py, line 8: if text == "raise": raise KeyError("missing"))'),
        ("abort", "the reward failed: its process died (signal SIGABRT)"),
        ("fill", "the reward needed more memory than reward.memory_gb=8"),
        ("nan", "the reward is nan; it must be a finite number"),
        ("nothing", "TypeError: reward.path=scorer_functions:score returned None (NoneType); it must return a number"),
        ("reserved", "found details mean; megarl's own metrics have these names under reward/"),
    ],
)  # fmt: skip
def test_what_a_function_does_costs_its_sample_and_no_other(scorer, text, reason):
    before, failed, after = ask(scorer, "yes", text, "no", answer="yes")
    assert (before.reward, before.correct, before.failure) == (3.0, True, None)
    assert (after.reward, after.correct, after.failure) == (2.0, False, None)
    assert (failed.reward, failed.correct) == (0.0, False)
    assert reason in failed.failure
    assert "\n" not in failed.failure
    # The names that the algorithms log are reserved.
    sources = [file.read_text() for file in Path(algo.__path__[0]).glob("*.py")]
    assert {name for source in sources for name in re.findall(r'"reward/(\w+)"', source)} <= RESERVED_NAMES


def test_scores_are_those_of_their_responses_whichever_process_gives_them_while_the_loop_goes_on(scorer):
    texts, turns = ["slow", "a", "fork", "bb", "slow", "fork it", "ccc"] * 3, 0

    async def run():
        nonlocal turns
        task = asyncio.gather(*(scorer.score(build_prompt("yes"), build_response(text)) for text in texts))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return await task

    assert [score.reward for score in asyncio.run(run())] == [len(text) for text in texts]
    assert turns > 1


def test_a_scale_of_its_own_is_refused_beside_reward_wrong_also_where_an_event_loop_runs():
    async def run():
        scorer = Scorer(lambda prompt, response: Score(-1.0, False))
        scorer.check([build_prompt("")])
        with pytest.raises(ConfigError, match=r"reward\.wrong: found -1 with a score of -1"):
            scorer.check([build_prompt("")], wrong=-1.0)

    asyncio.run(run())


RECORD = {"question": "6 * 7?", "solution": "so #### 42", "level": 3, "tags": ["a", "b"]}
CHAT = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}
OF_VERL = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "forty-two"},
    "extra_info": {"index": 7},
}


def build_columned(record=RECORD):
    return Prompt("p", "<user>6 * 7?", (1,), "42", {"k": "v"}, (Message("user", "6 * 7?"),), record)


def score(function, record=RECORD, text="42"):
    response = Response((1, 2), text, (0.0, 0.0), (True, True), (0, 0), FinishReason.stop)
    prompt, mine = build_columned(record), UserFunction("mine.py:score", function)
    (encoded,) = mine.encode(call(mine.begin, prompt, [response]), [response])
    return Score(**encoded)


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
        *[(it, Score(float(it), it == 1)) for it in (0.25, 1, True, False, np.float32(0.25), np.True_, np.array(1),
            torch.tensor([True]), Decimal(1))],
        (torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True), Score(0.25, False)),
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


def place(result, sees_group=False):
    """Of a response of two turns with an observation between them"""
    generated, turns = (True, True, False, True, True), (Turn(0, 2, "a"), Turn(3, 5, "b"))
    response = Response((1, 2, 3, 4, 5), "b", (0.0,) * 5, generated, (0,) * 5, FinishReason.stop, turns=turns)
    mine = UserFunction("mine.py:score", lambda *_: result, sees_group)
    return mine.encode(mine.begin(build_columned(), [response]), [response])[0]


@pytest.mark.parametrize(
    ("result", "reward", "token_rewards"),
    [
        ({"score": 0.5, "turn_rewards": [0.25, 0.5]}, 1.25, [0, 0.25, 0, 0, 0.5]),
        ({"turn_rewards": torch.tensor([0.25, 0.0])}, 0.25, [0, 0.25, 0, 0, 0]),
        ({"reward": -1, "token_rewards": np.array([1, 2, 0, 3, 4])}, 9.0, [1, 2, 0, 3, 4]),
        ({"token_rewards": [0.5, 0, 0, 0, 0], "turn_rewards": (0, True)}, 1.5, [0.5, 0, 0, 0, 1]),
        (Score(2.0, False, token_rewards=(1.0, 0, 0, 0, 0)), 2.0, [1, 0, 0, 0, 0]),
    ],
)
def test_rewards_of_turns_and_tokens_are_added_to_the_score_and_stand_at_their_tokens(result, reward, token_rewards):
    found = place(result)
    assert (found["reward"], list(found["token_rewards"])) == (reward, token_rewards)
    assert place([result], sees_group=True) == found
    assert found["correct"] == (reward >= 1 and not isinstance(result, Score))
    assert found["details"] == {}
    part = Part(give(Score(**{**found, "token_rewards": tuple(found["token_rewards"])})), 0.5)
    (of_sum,) = ask(
        Scorer(WeightedReward({"a": part, "b": Part(give(Score(1.0, True)), 1.0), "c": part}, None, 1.0)), ""
    )
    assert (of_sum.reward, of_sum.token_rewards) == (1 + reward, tuple(token_rewards))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            {"turn_rewards": [0.5]},
            r"'turn_rewards': \[0\.5\] .*a list with a number for each of the 2 turns of the resp",
        ),
        ({"token_rewards": [0.5] * 4}, r"a list with a number for each of the 5 tokens of the response"),
        ({"token_rewards": 0.5}, r"a list with a number"),
        ({"turn_rewards": "ab"}, r"a list with a number"),
        ({"turn_rewards": [0.5, None]}, r"a list with a number"),
        ({"token_rewards": [0, 0, 0.5, 0, 0]}, r"'token_rewards' with 0\.5: the policy did not generate all"),
        (Score(1.0, True, token_rewards=(0.5,)), r"a Score has 1 token_rewards for 5 tokens"),
    ],
)
def test_rewards_that_do_not_fit_the_response_are_refused(result, message):
    with pytest.raises((TypeError, ValueError), match=message):
        place(result)
    assert re.search(message, place([result], sees_group=True)["failure"])


def test_a_reward_of_a_token_that_is_no_number_is_named():
    (score,) = ask(Scorer(give(Score(0.0, False, token_rewards=(0.0, math.nan)))), "")
    assert score.failure == "the reward at token 1 is nan; it must be a finite number"


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
              (("1.0", None, [1.0], [[1.0]], np.zeros(2), torch.zeros(1, 1), {"value": 1.0}, {"score": "good"},
                {"score": {"score": 1.0}}, {"score": [1.0]}), NO_RESULT),
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
        encode_score(Score(0.0, value), build_response(""))


def test_prompts_and_responses_are_the_same_in_the_other_process():
    turns = (Turn(0, 2, "one", 0.5, {"calls": 1.0}), Turn(3, 4, "two"))
    numbers = ((-0.1, -0.2, 0, -0.3), (True, True, False, True), (3, 3, 4, 4))
    experts = RoutedExperts(b"\x00\xff", 1, 1, 4)
    response = Response((5, 6, 7, 8), "two", *numbers, FinishReason.max_turns, experts, turns)
    same, (rebuilt, again) = decode_question(encode_question(build_columned(), [response, response]))
    assert (same, same.messages, same.columns) == (build_columned(), build_columned().messages, RECORD)
    assert rebuilt == again == response
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
        scorer.check([build_columned()], chosen="mine")
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
    scores = [ask(scorer, text, prompt=build_columned())[0] for text in texts]
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
            scorer.check([build_columned()])


ASYNC = """
import asyncio, time

running, loop = 0, None

async def score(prompt, response):
    global running, loop
    loop = loop or asyncio.get_running_loop()
    assert loop is asyncio.get_running_loop()
    running += 1
    try:
        await asyncio.sleep({"wait": 600, "slow": 0.5}.get(response.text, 0.1))
        if response.text == "block":
            time.sleep(600)
        if response.text == "raise":
            raise KeyError("missing")
        if response.text == "timeout":
            raise TimeoutError("of its own")
        return {"score": 1.0, "running": running}
    finally:
        running -= 1
"""


def test_calls_of_an_async_function_are_awaited_together_and_each_has_its_own_limit(tmp_path):
    (tmp_path / "later.py").write_text(ASYNC)
    config = FunctionRewardConfig(path=f"{tmp_path}/later.py:score", num_workers=1, timeout_s=3.0)
    with contextlib.closing(build_scorer(config)) as scorer:
        # The first goes alone; while it is awaited the others come together.
        scores = ask(scorer, "slow", *["good"] * 5, "wait", "raise", "timeout")
        assert max(score.details.get("running", 0) for score in scores) >= 6
        reasons = [score.failure for score in scores]
        assert reasons[:6] == [None] * 6
        assert reasons[6] == "the reward took longer than reward.timeout_s=3 s"
        assert "the reward raised KeyError: 'missing' (" in reasons[7]
        assert "the reward raised TimeoutError: of its own (" in reasons[8]
        # What keeps the others from running costs itself alone.
        reasons = [score.failure for score in ask(scorer, "slow", "good", "block", "good")]
        assert reasons == [None, None, "the reward took longer than reward.timeout_s=3 s", None]


GROUPS = """
import numpy, torch
from megarl.types import Score

def rank(prompt, responses):
    lengths = [len(response.text) for response in responses]
    return [{"score": sum(other < mine for other in lengths) / len(lengths), "length": mine} for mine in lengths]

def odd(prompt, responses):
    odd = {"none": None, "nan": float("nan"), "list": [1.0], "named": {"score": 1.0, "mean": 1.0}, "other": "text"}
    return [odd.get(response.text, Score(0.5, True)) for response in responses]

def short(prompt, responses):
    return [1.0] * (len(responses) - 1)

def bare(prompt, responses):
    return 1.0

def broken(prompt, responses):
    return [1.0 / len(response.text) for response in responses]

def of_numpy(prompt, responses):
    return numpy.arange(len(responses))

def of_torch(prompt, responses):
    return torch.arange(len(responses)) > 0

def square(prompt, responses):
    return numpy.zeros((len(responses), len(responses)))

def as_trl(prompts, completions, level, **columns):
    assert prompts == ["6 * 7?"] * len(completions) and level == [3] * len(completions)
    return [float(len(set(completions)))] * len(completions)

async def later(prompt, responses):
    return [True for response in responses]

class Novelty:
    seen = []
    def __call__(self, prompt, responses):
        scores = [float(response.text not in self.seen) for response in responses]
        self.seen = [*self.seen, *(response.text for response in responses)]
        return scores
    def state_dict(self):
        return self.seen
    def load_state_dict(self, state):
        self.seen = state

novelty = Novelty()
"""


@pytest.fixture
def open_group_scorer(tmp_path):
    (tmp_path / "groups.py").write_text(GROUPS)

    def open_scorer(name, **keys):
        config = schema.GroupFunctionRewardConfig(path=f"{tmp_path}/groups.py:{name}", **{"num_workers": 1, **keys})
        return contextlib.closing(build_scorer(config))

    return open_scorer


def ask_for_group(scorer, *texts):
    return asyncio.run(scorer.score_group(build_columned(), [build_response(text) for text in texts]))


def test_a_group_function_scores_the_responses_to_a_prompt_together(open_group_scorer):
    with open_group_scorer("rank") as scorer:
        assert scorer.sees_group
        scorer.check([build_columned()])
        scores = ask_for_group(scorer, "aa", "a", "aaa", "")
        assert scores == [Score(n / 4, False, {"length": length}) for n, length in ((2, 2), (1, 1), (3, 3), (0, 0))]
    for name, expected in (
        ("as_trl", [2.0, 2.0, 2.0]),
        ("of_numpy", [0.0, 1.0, 2.0]),
        ("of_torch", [0.0, 1.0, 1.0]),
        ("later", [1.0, 1.0, 1.0]),
    ):
        with open_group_scorer(name) as scorer:
            assert [(it.reward, it.failure) for it in ask_for_group(scorer, "a", "b", "a")] == [
                (reward, None) for reward in expected
            ]


def test_what_is_wrong_with_a_score_costs_its_response_and_with_a_call_the_group(open_group_scorer):
    with open_group_scorer("odd") as scorer:
        good, *failed = ask_for_group(scorer, "good", "none", "nan", "list", "named", "other")
        assert good == Score(0.5, True)
        for score, reason in zip(
            failed,
            (
                "odd returned None (NoneType); it must return a number",
                "the reward is nan; it must be a finite number",
                "odd returned [1.0] (list); it must return a number",
                "found details mean; megarl's own metrics",
                "odd returned 'text' (str); it must return a number",
            ),
            strict=True,
        ):
            assert reason in score.failure
    for name, reason in (
        ("short", r"returned \[1\.0\] \(list\) for 2 responses; reward=group_function needs a list with as many"),
        ("bare", r"returned 1\.0 \(float\) for 2 responses"),
        ("square", r"returned array\(.* for 2 responses"),
        ("broken", r"ZeroDivisionError.*groups\.py, line \d+"),
    ):
        with open_group_scorer(name) as scorer:
            first, second = ask_for_group(scorer, "", "a")
            assert first == second
            assert re.search(reason, first.failure)
            with pytest.raises(ConfigError, match=reason):
                scorer.check([build_columned()])


def test_a_group_function_keeps_a_state_and_is_a_part_of_a_weighted_sum(open_group_scorer, tmp_path):
    with open_group_scorer("novelty", num_workers=None) as scorer:
        assert [score.reward for score in ask_for_group(scorer, "a", "b")] == [1.0, 1.0]
        state = scorer.state()
    parts = {
        "new": {"kind": "group_function", "path": f"{tmp_path}/groups.py:novelty", "weight": 0.5},
        "right": {"kind": "exact"},
    }
    with contextlib.closing(build_scorer(schema.WeightedRewardConfig(parts=parts, correct_by="right"))) as scorer:
        scorer.load_state({"new": state})
        assert ask_for_group(scorer, "42", "a") == [
            Score(1.5, True, {"new": 1.0, "right": 1.0}, "42"),
            Score(0.0, False, {"new": 0.0, "right": 0.0}, "a"),
        ]
        assert scorer.state() == {"new": ["a", "b", "42", "a"], "right": None}
    parts["new"]["path"] = f"{tmp_path}/groups.py:odd"
    with contextlib.closing(build_scorer(schema.WeightedRewardConfig(parts=parts, correct_by="right"))) as scorer:
        failed, score = ask_for_group(scorer, "none", "42")
        assert "new: " in failed.failure
        assert score.reward == 1.25


def test_verls_functions_score_no_groups():
    with pytest.raises(ValueError, match=r"verl's functions score one response; accepted are \(prompt, responses\) or"):
        UserFunction("mine.py:score", compute_score, sees_group=True)
