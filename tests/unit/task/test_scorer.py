"""The scorer: what a verifier does costs its sample, never the run."""

import asyncio
import sys

import numpy as np
import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import AdditionRewardConfig, ExactRewardConfig, FunctionRewardConfig, MathRewardConfig
from megarl.task.function import decode_prompt, decode_response, encode_prompt, encode_response
from megarl.task.reward import AsyncReward
from megarl.task.scorer import Scorer, build_scorer
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn

FUNCTIONS = """
import asyncio, os, re, signal, time
from megarl.types import Score

def score(prompt, response):
    text = response.text
    if text == "hang": time.sleep(600)
    if text == "raise": raise KeyError("missing")
    if text == "abort": os.abort()
    if text == "fill": bytearray(2 ** 34)
    if text == "nan": return Score(float("nan"), False, {"a": 0.0})
    if text == "nothing": return None
    if text == "text": return Score("good", True, {"a": 0.0})
    if text == "other details": return Score(0.5, False, {"b": 0.0})
    if text == "details": return Score(0.5, False, {"a": float("inf")})
    if text == "slow": time.sleep(0.2)
    if text == "backtrack": re.match("(a+)+$", "a" * 60 + "b")
    if text.startswith("fork"): os.fork()
    return Score(len(text), prompt.answer == text, {"a": 1.0})

async def wait(prompt, response):
    await asyncio.sleep(0)
    return Score(1.0, True)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "scorer_functions.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(folder))
    yield "scorer_functions"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def scorer(functions):
    scorer = build_scorer(FunctionRewardConfig(f"{functions}:score", num_workers=2, timeout_s=1.0))
    scorer.check([build_prompt("yes")])
    yield scorer
    scorer.close()


def score_all(scorer, texts, answer="yes"):
    async def run():
        return await asyncio.gather(*(scorer.score(build_prompt(answer), build_response(text)) for text in texts))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "the reward took longer than reward.timeout_s=1 s"),
        ("backtrack", "the reward took longer than reward.timeout_s=1 s"),
        ("raise", "the reward raised KeyError: 'missing' ("),
        ("raise", 'scorer_functions.py, line 8: if text == "raise": raise KeyError("missing"))'),
        ("abort", "the reward failed: its process died (signal SIGABRT)"),
        ("fill", "the reward needed more memory than reward.memory_gb=8"),
        ("nan", "the reward is nan; it must be a finite number"),
        ("details", "the details 'a' is inf; it must be a finite number"),
        ("nothing", "TypeError: reward.path=scorer_functions:score returned None (NoneType); it must return a number"),
        ("text", "the reward raised ValueError: could not convert string to float: 'good'"),
        ("other details", "found details b; the first response had a"),
    ],
)
def test_what_a_function_does_costs_its_sample_and_no_other(scorer, text, reason):
    before, failed, after = score_all(scorer, ["yes", text, "no"])
    assert (before.reward, before.correct, before.failure) == (3.0, True, None)
    assert (after.reward, after.correct, after.failure) == (2.0, False, None)
    assert (failed.reward, failed.correct) == (0.0, False)
    assert reason in failed.failure
    assert "\n" not in failed.failure


def test_scores_are_those_of_their_responses_whichever_process_gives_them(scorer):
    texts = ["slow", "a", "fork", "bb", "slow", "fork it", "ccc"] * 3
    assert [score.reward for score in score_all(scorer, texts)] == [len(text) for text in texts]


def test_a_coroutine_function_is_a_reward(functions):
    scorer = build_scorer(FunctionRewardConfig(f"{functions}:wait", num_workers=1))
    assert [score.reward for score in score_all(scorer, ["", ""])] == [1.0, 1.0]
    scorer.close()


def test_responses_are_scored_while_the_event_loop_goes_on(scorer):
    async def run():
        task = asyncio.create_task(scorer.score(build_prompt("yes"), build_response("slow")))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(run()) > 1


def test_a_response_that_math_cannot_compare_in_time_is_wrong_and_no_failure():
    scorer = build_scorer(MathRewardConfig(timeout_s=1.0, num_workers=1))
    endless, right = score_all(scorer, ["\\boxed{\\sum_{k=1}^{99999999} k^{k}}", "\\boxed{\\sum_{k=1}^{n} k^2}"],
                               "\\sum_{k=1}^{n} k^2")  # fmt: skip
    assert (endless.reward, endless.failure, endless.details["timeout"]) == (0.0, None, 1.0)
    assert right.correct
    scorer.close()


class Broken(AsyncReward):
    async def score(self, prompt, response):
        raise OSError("gone")


def test_a_failure_of_what_is_awaited_costs_its_sample():
    (score,) = score_all(Scorer(Broken()), ["x"])
    assert score.failure == "the reward raised OSError: gone"


def test_a_plain_function_can_be_awaited():
    (score,) = score_all(Scorer(lambda prompt, response: Score(float(len(response.text)), True)), ["xyz"])
    assert score.reward == 3.0


def test_a_closed_scorer_fails_and_starts_nothing(functions):
    scorer = build_scorer(FunctionRewardConfig(f"{functions}:score", num_workers=1))
    scorer.close()
    (score,) = score_all(scorer, ["x"])
    assert score.failure is not None


@pytest.mark.parametrize(
    ("config", "answer", "message"),
    [
        (AdditionRewardConfig(), "b37", r"^reward=\.\.\. with data=\.\.\..*prompt 'p1'.*data=addition"),
        (FunctionRewardConfig("scorer_functions:missing"), "", r"^reward\.path: found .*has no missing"),
    ],
)
def test_a_reward_that_cannot_score_is_found_before_the_run(functions, config, answer, message):
    scorer = build_scorer(config)
    with pytest.raises(ConfigError, match=message):
        scorer.check([build_prompt(answer)])
    scorer.close()


def test_a_scale_of_its_own_is_refused_beside_reward_wrong():
    scorer = Scorer(lambda prompt, response: Score(-1.0, False))
    scorer.check([build_prompt("")])
    with pytest.raises(ConfigError, match=r"reward\.wrong: found -1 with a score of -1"):
        scorer.check([build_prompt("")], wrong=-1.0)


def test_the_check_runs_where_an_event_loop_runs_already():
    async def run():
        build_scorer(ExactRewardConfig()).check([build_prompt("")])

    asyncio.run(run())


def test_prompts_and_responses_are_the_same_in_the_other_process():
    prompt = Prompt("p", "text", (1, 70_000), "a", {"k": "v"}, (Message("user", "text"),))
    experts = RoutedExperts(b"\x00\xff", 1, 1, 4)
    turns = (Turn(0, 2, "one", 0.5, {"calls": 1.0}), Turn(3, 4, "two"))
    response = Response(
        (5, 6, 7, 8), "two", (-0.1, -0.2, 0, -0.3), (True, True, False, True), (3, 3, 4, 4),
        FinishReason.max_turns, experts, turns,
    )  # fmt: skip
    same = decode_prompt(encode_prompt(prompt))
    assert same == prompt
    assert same.messages == prompt.messages
    rebuilt = decode_response(encode_response(response))
    assert rebuilt == response
    assert rebuilt.rollout_logprobs.dtype == np.float32
