"""reward=weighted: its parts, their keys, their sum."""

import asyncio

import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.reward_parts import read_parts
from megarl.config.schema.reward import LetterCountRewardConfig, MathRewardConfig, StatedAnswer, WeightedRewardConfig
from megarl.task.reward import AsyncReward, DirectReward, RewardFailedError
from megarl.task.scorer import Part, WeightedReward
from megarl.types import Score

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
        (
            "reward.parts.right.anwser=boxed",
            r"reward\.parts\.right\.anwser: no such key.*reward\.parts\.right\.answer\?",
        ),
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
