"""Kinds of rewards, the user's own function, weighted sums; what a verifier does costs its sample, never the run."""

import asyncio
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from reward_cases import build_prompt, build_response, build_reward

from megarl import algo
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.reward_parts import read_parts
from megarl.config.schema.task import (
    SCHEMAS,
    AdditionRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    ReasoningGymRewardConfig,
    StatedAnswer,
    WeightedRewardConfig,
)
from megarl.task.function import RESERVED_NAMES, FunctionReward, decode_question, encode_question
from megarl.task.reward import AsyncReward, DirectReward, RewardFailedError
from megarl.task.scorer import EMPTY, Part, Scorer, WeightedReward, build_scorer, reads_answers
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn

PROMPT = build_prompt("")
READS_NO_ANSWER = {"environment", "letter_count", "reasoning_gym", "format", "length", "code", "http", "function"}

REQUIRED = {
    "function": {"path": "reward_cases:build_prompt"},
    "http": {"url": "http://127.0.0.1:1/score"},
    "judge": {"url": "http://127.0.0.1:9"},
    "reward_model": {"url": "http://127.0.0.1:9"},
    "weighted": {"parts": {"right": {"kind": "exact"}}},
}
"""Keys without a default, by kind"""
OF_SERVERS = ("judge", "reward_model")
"""Kinds that ask their server when they are built: test_served_rewards.py"""


def list_required(kind: str) -> list[str]:
    """The same as overrides."""
    return [f"++reward.{key}={value}".replace("'", "") for key, value in REQUIRED.get(kind, {}).items()]


@pytest.mark.parametrize("kind", sorted(set(SCHEMAS["reward"]) - {"function", "weighted"}))
def test_a_kind_that_reads_answers_reads_the_right_one_in_itself(kind):
    """85 as the expected answer and the response; the other kinds have no answer to read in it."""
    config = SCHEMAS["reward"][kind](**REQUIRED.get(kind, {}))
    if reads_answers(config):
        score = build_reward(config)(build_prompt("85"), build_response("85"))
        assert (score.correct, score.answer) == (True, "85")
    else:
        assert kind in {*READS_NO_ANSWER, *OF_SERVERS}


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_details_with_a_name_of_the_trainers_own_metrics_are_refused(name):
    verifier = FunctionReward(FunctionRewardConfig("package:function"))
    with pytest.raises(ValueError, match=rf"own metrics have the names {name} under reward/"):
        verifier.read({"reward": 0.0, "correct": False, "details": {"mine": 1.0, name: 1.0}}, PROMPT)


def test_the_names_that_the_algorithms_log_under_reward_are_reserved():
    sources = [file.read_text() for file in Path(algo.__file__).parent.glob("*.py")]
    logged = {name for source in sources for name in re.findall(r'"reward/(\w+)"', source)}
    assert logged
    assert logged <= RESERVED_NAMES


@pytest.mark.parametrize(
    ("config", "answer", "data"),
    [
        (LetterCountRewardConfig(), "85", "data=letter_count"),
        (AdditionRewardConfig(), "b37", "data=addition"),
        (ReasoningGymRewardConfig(), "85", "data=reasoning_gym"),
    ],
)
def test_a_reward_that_cannot_read_the_datas_answers_is_found_before_the_run(config, answer, data):
    with pytest.raises(ConfigError, match=rf"^reward=\.\.\. with data=\.\.\..*prompt 'p1'.*{data}"):
        build_scorer(config).check([build_prompt(answer)])


SUM = {"question": "1 + 2 =", "answer": "3", "metadata": {}}


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        (LetterCountRewardConfig(), build_prompt("b37")),
        (AdditionRewardConfig(), build_prompt("85")),
        (ExactRewardConfig(), build_prompt("Paris")),
        (MathRewardConfig(), build_prompt("\\frac{1}{2}")),
        (ReasoningGymRewardConfig(), build_prompt("3", reasoning_gym={"task": "chain_sum", "entry": SUM})),
        (FunctionRewardConfig("megarl.task.rule_rewards:score_exact"), build_prompt("Paris")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_reward_that_fits_its_data_passes_the_check(config, prompt):
    scorer = build_scorer(config)
    scorer.check([prompt])
    score = asyncio.run(scorer.score(prompt, EMPTY))
    assert (score.correct, score.failure) == (False, None)


@pytest.mark.parametrize("kind", SCHEMAS["reward"])
def test_every_kind_has_the_reward_of_a_wrong_answer(kind):
    overrides = [f"reward={kind}", "model=tiny", "reward.wrong=-1", "environment=guess", *list_required(kind)]
    assert load_config(overrides).reward.wrong == -1.0


COMMAND = (
    "reward=weighted",
    "reward.parts.right.kind=math",
    "reward.parts.right.weight=0.9",
    "reward.parts.right.answer=boxed",
    "reward.parts.letters.kind=letter_count",
)


def test_parts_are_written_on_the_command_line():
    config = load_config(["algo=vapo", "model=tiny", *COMMAND])
    right, letters = read_parts(config.reward)
    assert (right.name, right.weight) == ("right", 0.9)
    assert right.config == MathRewardConfig(answer=StatedAnswer.boxed)
    assert (letters.name, letters.weight, letters.config) == ("letters", 1.0, LetterCountRewardConfig())


def test_parts_are_written_in_a_file(tmp_path):
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        "defaults: [weighted_schema, _self_]\n"
        "correct_by: right\n"
        "parts:\n  right: {kind: exact, weight: 0.8}\n  letters: {kind: letter_count, tolerance: 2}\n"
    )
    config = load_config([f"hydra.searchpath=[file://{tmp_path}]", "reward=mine", "reward.parts.right.weight=0.7"])
    assert [(part.name, part.weight) for part in read_parts(config.reward)] == [("right", 0.7), ("letters", 1.0)]
    assert read_parts(config.reward)[1].config == LetterCountRewardConfig(tolerance=2.0)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("reward.parts.right.anwser=boxed", r"right\.anwser: no such key.*reward\.parts\.right\.answer\?"),
        ("reward.parts.right.answer=some", r"reward\.parts\.right\.answer: .*boxed"),
        ("reward.parts.right.timeout_s=-1", r"reward\.parts\.right\.timeout_s: found -1"),
        ("reward.parts.right.wrong=-1", r"reward\.parts\.right\.wrong: has no effect in a part"),
        ("reward.parts.right.kind=maths", r"reward\.parts\.right\.kind: found 'maths'; it must be one of .*math"),
        ("reward.parts.right.kind=weighted", r"reward\.parts\.right\.kind: found 'weighted'"),
        ("reward.parts.right.weight=much", r"reward\.parts\.right\.weight: found 'much'"),
        ("reward.parts.right=math", r"reward\.parts\.right: found 'math'; a part has keys of its own"),
        ("reward.parts.letters.kind=function", r"reward\.parts\.letters\.path: missing"),
        ("reward.parts.Right.kind=math", r"reward\.parts\.Right: found 'Right'"),
        ("reward.correct_by=wrong", r"reward\.correct_by: found 'wrong'; the parts are right, letters"),
        ("reward.parts=null", r"reward\.parts"),
        ("reward.part.right.kind=math", r"reward\.part\.right\.kind: no such key"),
    ],
)
def test_a_wrong_key_of_a_part_is_named_in_full(override, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(["algo=vapo", "model=tiny", *COMMAND, override])


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.parts: found none"):
        load_config(["algo=vapo", "model=tiny", "reward=weighted"])
    with pytest.raises(ConfigError, match=r"reward\.parts: found none"):
        read_parts(WeightedRewardConfig())


class Late(AsyncReward):
    """Gives its score, or raises, after the other parts."""

    def __init__(self, result: Score | Exception):
        self.result, self.closed, self.awaited = result, 0, 0

    async def score(self, prompt, response):
        await asyncio.sleep(0)
        self.awaited += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def check(self, prompt, empty):
        return None

    def close(self):
        self.closed += 1


def give(score: Score) -> DirectReward:
    return DirectReward(lambda prompt, response: score)


def ask(reward: AsyncReward) -> Score:
    return asyncio.run(reward.score(build_prompt("85"), build_response("85")))


def test_the_reward_is_the_weighted_sum_and_each_part_is_shown():
    right = give(Score(1.0, True, {"format": 1.0}, "85"))
    parts = {"right": Part(right, 0.75), "style": Part(Late(Score(0.5, False)), -0.5)}
    score = ask(WeightedReward(parts, "right", 1.0))
    assert score == Score(0.5, True, {"right": 1.0, "right/format": 1.0, "style": 0.5}, "85")
    assert not ask(WeightedReward(parts, "style", 1.0)).correct
    assert ask(WeightedReward(parts, "style", 1.0)).answer is None
    by_sum = ask(WeightedReward(parts, None, 0.5))
    assert (by_sum.correct, by_sum.answer) == (True, "85")
    assert not ask(WeightedReward(parts, None, 0.51)).correct


def test_weights_that_add_up_to_one_on_paper_are_correct_at_one():
    parts = {name: Part(give(Score(1.0, True)), weight) for name, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items()}
    score = ask(WeightedReward(parts, None, 1.0))
    assert score.reward != 1.0
    assert score.correct


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (RewardFailedError("no verdict"), r"^style: no verdict$"),
        (KeyError("x"), r"^style: raised KeyError: 'x'$"),
        (Score(0.0, False, failure="it died"), r"^style: it died$"),
    ],
)
def test_a_part_that_fails_fails_the_sample_and_is_named(result, reason):
    other = Late(Score(1.0, True))
    parts = {"right": Part(other, 1.0), "style": Part(Late(result), 1.0), "last": Part(Late(Exception("later")), 1.0)}
    with pytest.raises(RewardFailedError, match=reason):
        ask(WeightedReward(parts, None, 1.0))
    assert other.awaited == 1


def test_a_sum_with_a_part_that_cannot_be_asked_yet_is_not_checked():
    parts = {"right": Part(give(Score(1.0, True)), 1.0)}
    prompt, empty = build_prompt("85"), build_response("")
    assert asyncio.run(WeightedReward(parts, None, 1.0).check(prompt, empty)).reward == 1.0
    parts["late"] = Part(late := Late(Score(1.0, True)), 1.0)
    reward = WeightedReward(parts, None, 1.0)
    assert asyncio.run(reward.check(prompt, empty)) is None
    reward.close()
    assert late.closed == 1


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


def test_responses_are_scored_while_the_event_loop_goes_on(scorer):
    async def run():
        task = asyncio.create_task(scorer.score(build_prompt("yes"), build_response("slow")))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(run()) > 1


class Broken(AsyncReward):
    async def score(self, prompt, response):
        raise OSError("gone")


def test_a_failure_of_what_is_awaited_costs_its_sample():
    (score,) = score_all(Scorer(Broken()), ["x"])
    assert score.failure == "the reward raised OSError: gone"


def test_a_closed_scorer_fails_and_starts_nothing(functions):
    scorer = build_scorer(FunctionRewardConfig(f"{functions}:score", num_workers=1))
    scorer.close()
    (score,) = score_all(scorer, ["x"])
    assert score.failure is not None


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
    same, rebuilt = decode_question(encode_question(prompt, response))
    assert same == prompt
    assert same.messages == prompt.messages
    assert rebuilt == response
    assert rebuilt.rollout_logprobs.dtype == np.float32
