"""Dynamic sampling and replay: which groups make an iteration."""

import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema.algo import DynamicSamplingConfig, ReplayConfig, SamplingBy
from megarl.rollout.collector import build_tensors
from megarl.rollout.source import NoSignalError, ReplayBuffer, collect_groups, has_signal, join_groups
from megarl.types import FinishReason, Prompt, Response, Sample, Score


def make_group(name: str, rewards: list[float], version: int = 0) -> tuple[Sample, ...]:
    prompt = Prompt(name, name, (1,), "")
    response = Response((2,), "", (-0.5,), (True,), (version,), FinishReason.stop)
    return tuple(Sample(prompt, response, Score(reward, reward > 0), 0) for reward in rewards)


BY = SamplingBy.reward
EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


class Task:
    """Groups "0", "1", ... whose rewards are given; keeps the sizes of the requests."""

    def __init__(self, *rewards: list[float]):
        self.rewards, self.sizes = rewards, list[int]()

    def collect(self, num: int) -> list[tuple[Sample, ...]]:
        first, _ = sum(self.sizes), self.sizes.append(num)
        return [make_group(str(i), self.rewards[i % len(self.rewards)]) for i in range(first, first + num)]


def test_groups_of_equal_rewards_are_replaced_until_there_are_enough():
    task = Task(EASY, MIXED, HARD, MIXED)
    groups, metrics = collect_groups(task.collect, 4, DynamicSamplingConfig(True, BY, 10))
    assert [group[0].prompt.id for group in groups] == ["1", "3", "5", "7"]
    # Half of the first four carried signal: two more need four prompts.
    assert task.sizes == [4, 4]
    assert metrics == {
        "sampling/reward_mean": 0.5,
        "sampling/rounds": 2,
        "sampling/num_prompts": 8,
        "sampling/signal_frac": 0.5,
        "sampling/equal_correct_frac": 0.25,
        "sampling/equal_wrong_frac": 0.25,
    }


@pytest.mark.parametrize(
    ("rewards", "by", "text"),
    [
        ([EASY], BY, "max_rounds=3 rounds.*too easy"),
        ([HARD], BY, "max_rounds=3 rounds.*too hard"),
        # Only partial scores differ: the key that learns from them is named.
        (
            [[-0.1, -0.3], [-0.2, -0.2]],
            SamplingBy.correct,
            "no group with right and wrong responses.*0 are correct and 12 wrong; in 6 of them rewards differ.*by=rew",
        ),
    ],
)
def test_a_task_without_signal_is_an_error_that_says_whether_it_is_too_easy_or_too_hard(rewards, by, text):
    task = Task(*rewards)
    with pytest.raises(NoSignalError, match=text):
        collect_groups(task.collect, 4, DynamicSamplingConfig(True, by, 3))
    assert task.sizes == [4, 4, 4]


@given(st.lists(st.booleans(), min_size=30, max_size=30), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_groups_are_taken_until_there_are_enough_or_up_to_the_bound(signals, num, max_rounds, one_by_one):
    task = Task(*(MIXED if signal else HARD for signal in signals))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            taken, metrics = collect_groups(
                task.collect, num, DynamicSamplingConfig(True, BY, max_rounds), one_by_one=one_by_one
            )
        except NoSignalError:
            taken, metrics = [], {}
    num_asked = sum(task.sizes)
    assert max(task.sizes) <= num
    kept = [int(group[0].prompt.id) for group in taken if has_signal(group, BY)]
    assert kept == [i for i in range(num_asked) if signals[i % 30]][:num]
    assert bool(found) == (0 < len(kept) < num)
    if len(kept) < num:
        assert len(task.sizes) == max_rounds * (num if one_by_one else 1)
    elif one_by_one:
        assert num_asked == kept[-1] + 1
    if taken:
        assert len(taken) == num
        assert metrics["sampling/num_prompts"] == num_asked
        assert metrics["sampling/rounds"] == -(-num_asked // num) if one_by_one else len(task.sizes)


@pytest.mark.parametrize(
    ("correct", "rewards", "by_correct", "by_reward"),
    [
        ((False, False), (0.1, 0.3), False, True),  # All wrong, of different lengths
        ((True, True), (0.8, 1.0), False, True),
        ((False, True), (0.1, 1.0), True, True),
        ((False, True), (1.0, 1.0), False, False),  # What is equally paid teaches nothing.
        ((False, True), (1.0, 1.0 + 1e-9), False, False),
        ((False, False), (-1e6, -1e6 + 1e-4), False, False),
        ((False, True), (0.0, 1e-5), True, True),
    ],
)
def test_a_group_that_is_all_wrong_has_no_signal_whatever_else_its_rewards_pay(correct, rewards, by_correct, by_reward):
    scores = [Score(reward, right) for reward, right in zip(rewards, correct, strict=True)]
    # One without a reward does not count.
    scores.append(Score(9.0, True, failure="the reward raised"))
    group = tuple(
        replace(sample, score=score) for sample, score in zip(make_group("a", [0.0] * 3), scores, strict=True)
    )
    assert has_signal(group, SamplingBy.correct) is by_correct
    assert has_signal(group, SamplingBy.reward) is by_reward


def test_replay_draws_its_share_of_past_groups_without_repeats_and_forgets_the_oldest():
    buffer = ReplayBuffer(ReplayConfig(num_iterations=2, frac=0.5), seed=1)
    assert buffer.draw(8, iteration=1) == []
    for version in range(3):
        buffer.add([make_group(f"{version}-{i}", MIXED, version) for i in range(8)])
    drawn = buffer.draw(8, iteration=4)
    names = [group[0].prompt.id for group in drawn]
    assert len(set(names)) == 4
    assert {name[0] for name in names} <= {"1", "2"}
    assert buffer.draw(8, iteration=4) == drawn
    assert buffer.draw(8, iteration=5) != drawn


def test_replay_plans_how_many_fresh_groups_the_next_iterations_need():
    for config in (ReplayConfig(num_iterations=2, frac=0.5), ReplayConfig(num_iterations=1, frac=0.9), ReplayConfig()):
        buffer = ReplayBuffer(config, seed=1)
        planned, drawn = buffer.plan_fresh(6, 5), []
        for iteration in range(1, 6):
            assert buffer.plan_fresh(6, 1) == planned[iteration - 1 : iteration]
            drawn.append(6 - len(buffer.draw(6, iteration)))
            buffer.add([make_group(f"{iteration}-{i}", MIXED) for i in range(drawn[-1])])
        assert drawn == planned


def test_the_age_of_a_replayed_sample_is_the_number_of_iterations_since_it_was_sampled_for_one():
    buffer = ReplayBuffer(ReplayConfig(num_iterations=3, frac=0.9), seed=1)
    for number in range(4):
        # Generated ahead: the weights' version says nothing of the iteration.
        buffer.add([make_group(str(number), EASY, version=max(0, number - 1))])
    drawn = sorted(buffer.draw(100, iteration=5), key=lambda group: group[0].prompt.id)
    rollout = join_groups([make_group("fresh", EASY, version=3), *drawn], 4)
    assert build_tensors(rollout).ages.tolist() == [0, 0, 3, 3, 2, 2, 1, 1]


def fail(group: tuple[Sample, ...], *numbers: int) -> tuple[Sample, ...]:
    """The group without the rewards of these samples."""
    lost = Score(0.0, False, failure="TimeoutError")
    return tuple(replace(s, score=lost) if i in numbers else s for i, s in enumerate(group))


def test_groups_without_any_reward_are_neither_correct_nor_wrong():
    groups = [
        make_group("0", MIXED),
        fail(make_group("1", EASY), 0),
        fail(make_group("2", HARD), 1),
        fail(make_group("3", MIXED), 0, 1),
    ]
    _, metrics = collect_groups(lambda _: groups, 1, DynamicSamplingConfig(True, BY, 1))
    assert metrics["sampling/equal_correct_frac"] == metrics["sampling/equal_wrong_frac"] == 0.25
    # 0 and 1, one 1 and one 0 are left.
    assert metrics["sampling/reward_mean"] == 0.5
    text = "2 of 2 responses have no reward: 2 x TimeoutError.*the verifier or the environment must be mended$"
    with pytest.raises(NoSignalError, match=text):
        collect_groups(lambda _: groups[3:], 1, DynamicSamplingConfig(True, BY, 1))
