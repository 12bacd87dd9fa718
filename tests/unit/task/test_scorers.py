"""Kinds of rewards, the user's own function, weighted sums; what a verifier does costs its sample, never the run."""

import asyncio
import contextlib
import re
import sys
from pathlib import Path

import pytest
from reward_cases import ask, build_prompt, build_response, build_reward

from megarl import algo
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import task as schema
from megarl.config.schema.task import SCHEMAS, FunctionRewardConfig, read_parts
from megarl.task.reward import RESERVED_NAMES, AsyncReward, DirectReward, RewardFailedError
from megarl.task.scorer import Part, Scorer, WeightedReward, build_scorer, reads_answers
from megarl.types import Score

REQUIRED = {
    "function": "path=reward_cases:build_prompt",
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
