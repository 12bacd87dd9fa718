"""From responses to a scored rollout and its tensors."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.interfaces import UNPUBLISHED
from megarl.rollout.collector import build_sequences, build_tensors, check_versions, compute_staleness
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn


def make_response(*ids: int, finish=FinishReason.stop, generated=None) -> Response:
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(ids)))
    return Response(ids, "", logprobs, generated or (True,) * len(ids), (0,) * len(ids), finish)


PROMPTS = [Prompt("a", "", (5, 6), "x"), Prompt("b", "", (7,), "y")]
GROUPS = [
    [make_response(8, 2), make_response(9, 9, 9, finish=FinishReason.length)],
    [make_response(2), make_response(4, 3, 2, generated=(True, False, True))],
]


def score(groups, reward=lambda _prompt, _response: Score(0.0, False)) -> tuple[Sample, ...]:
    return tuple(
        Sample(prompt, response, reward(prompt, response), number)
        for number, (prompt, responses) in enumerate(zip(PROMPTS, groups, strict=False))
        for response in responses
    )


@pytest.mark.parametrize(
    ("versions", "trainers", "keys", "message"),
    [
        ((0, 9, 0), 0, {}, None),  # The token in the middle was not generated.
        ((0, 0, 3), 0, {}, "weight version 0, 3; the trainer's is 0"),
        ((0, 0, 0), 1, {}, "weight version 0; the trainer's is 1"),
        ((0, 9, 3), 3, {"may_be_older": True}, None),
        ((3, 3, 4), 3, {"may_be_older": True}, "version 3, 4; the trainer's is 3"),
        ((UNPUBLISHED, 0, 0), 0, {"may_be_older": True}, "a server without the trainer's weights"),
    ],
)
def test_a_generated_token_of_other_weights_than_the_trainers_is_refused(versions, trainers, keys, message):
    samples = score([[], [replace(GROUPS[1][1], weight_versions=versions)]])
    with contextlib.nullcontext() if message is None else pytest.raises(RuntimeError, match=f"prompt 'b' .*{message}"):
        check_versions(samples, trainers, **keys)


def test_staleness_counts_versions_behind_over_the_generated_tokens():
    first, second = GROUPS[1][0], GROUPS[1][1]  # of 1 and 3 tokens; the middle one of the latter was not generated
    samples = score([[replace(first, weight_versions=(4,)), replace(second, weight_versions=(2, 0, 3))]])
    # Of the versions 4, 2 and 3 the second is too old where one of staleness is allowed.
    for allowed, mean, most, too_stale in ((2, 1.0, 2.0, 0.0), (1, 0.5, 1.0, pytest.approx(1 / 3))):
        found = {"rollout/staleness_mean": mean, "rollout/staleness_max": most, "rollout/mixed_frac": 0.5}
        assert compute_staleness(samples, 4, allowed) == found | {"rollout/too_stale_frac": too_stale}
    assert compute_staleness((), 4, 1) == {}


def test_tokens_are_too_stale_by_the_iteration_that_first_learned_from_them():
    first, second = GROUPS[1]
    samples = score([[replace(first, weight_versions=(4,)), replace(second, weight_versions=(1, 0, 3))]])
    replayed = tuple(replace(sample, age=2) for sample in samples)
    for rows, version, max_staleness, expected in (
        (samples, 4, 2, [[False] * 3, [True, False, False]]),
        (samples, 5, 1, [[False] * 3, [True, False, True]]),
        (samples, 4, 3, None),
        (replayed, 6, 2, [[False] * 3, [True, False, False]]),
        ((), 6, 2, None),
    ):
        found = build_tensors(Rollout(rows, version), None, max_staleness).too_stale
        assert (None if found is None else found.tolist()) == expected


def test_prompts_and_responses_are_concatenated_and_tensors_padded_with_zeros_and_skip_what_was_not_generated():
    rollout = Rollout(score(GROUPS, lambda p, r: Score(float(len(r)), p.id == "a")), 3)
    sequences = build_sequences(rollout)
    assert sequences.tokens.tolist() == [5, 6, 8, 2, 5, 6, 9, 9, 9, 7, 2, 7, 4, 3, 2]
    assert sequences.lengths.tolist() == [4, 5, 2, 4]
    assert sequences.prompt_lengths.tolist() == [2, 2, 1, 1]
    tensors = build_tensors(rollout)
    assert tensors.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 1]]
    expected = [[-0.5, -1, 0], [-0.5, -1, -1.5], [-0.5, 0, 0], [-0.5, 0, -1.5]]
    assert tensors.rollout_logprobs.tolist() == expected
    assert tensors.truncated.tolist() == [False, True, False, False]
    assert tensors.rewards.tolist() == [2, 3, 1, 3]
    assert tensors.groups.tolist() == [0, 0, 1, 1]
    assert tensors.rewards.dtype == tensors.rollout_logprobs.dtype == torch.float32


def test_mu_is_the_trainers_where_it_had_the_weights_that_sampled_and_else_the_engines():
    """At version 5: a fresh response, begun a version ago; replayed ones of version 3 with and without log-probs kept,
    and one of version 3 that was sampled ahead of its first iteration.
    """
    score, prompt = Score(0.0, False), Prompt("p", "p", (1,), "")

    def sample(versions, age=0, first=None):
        stop = FinishReason.stop
        response = Response((7, 8), "", (-0.1, -0.2), (True, True), versions, stop)
        return Sample(prompt, response, score, 0, age, first)

    kept = np.float32([-0.3, -0.4])
    samples = (sample((4, 5)), sample((3, 3), 2, kept), sample((3, 3), 2), sample((3, 4), 1, kept))
    tensors = build_tensors(Rollout(samples, 5))
    assert tensors.scored.tolist() == [[False, True], [True, True], [False, False], [False, True]]
    mu = tensors.find_sampling_logprobs(torch.full((4, 2), -9.0))
    expected = torch.tensor([[-0.1, -9.0], [-0.3, -0.4], [-0.1, -0.2], [-0.1, -0.4]])
    torch.testing.assert_close(mu, expected, rtol=0, atol=0)


def build_sample(turns, *, reward=1.0, failure=None, length=7):
    """A conversation of tokens 10, 11, ... whose actions are at these (start, end, reward)."""
    generated = np.zeros(length, dtype=bool)
    for start, end, _ in turns:
        generated[start:end] = True
    columns = range(10, 10 + length), "", np.where(generated, -0.5, 0.0), generated, [3] * length, FinishReason.stop
    response = Response(*columns, turns=[Turn(start, end, "", reward) for start, end, reward in turns])
    return Sample(Prompt("p", "", (1, 2), ""), response, Score(reward, False, failure=failure), 0)


def build(*samples):
    return build_tensors(Rollout(samples, 3))


def test_rewards_of_turns_before_the_last_stand_at_their_actions_last_tokens_and_the_rest_at_the_end():
    tensors = build(build_sample([(0, 2, 0.25), (3, 4, 0.0), (5, 7, 0.5)]), build_sample([(0, 3, 0.125), (6, 7, 0.0)]))
    expected = torch.zeros(2, 7)
    expected[0, 1], expected[1, 2] = 0.25, 0.125
    assert torch.equal(tensors.turn_rewards, expected)
    assert tensors.turn_rewards.dtype is torch.float32
    assert tensors.mask[0].tolist() == [True, True, False, True, False, True, True]
    assert tensors.rewards.tolist() == [1.0, 1.0]
    for turns in ([(0, 2, 0.0), (3, 7, 0.5)], [(0, 2, 0.0), (3, 3, 0.5), (4, 7, 0.0)]):  # an empty action
        assert build(build_sample(turns)).turn_rewards is None


def test_what_a_reward_function_places_is_added_to_the_rewards_of_turns():
    sample = build_sample([(0, 2, 0.25), (3, 7, 0.5)])
    score = replace(sample.score, token_rewards=(0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0))
    other = build_sample([(0, 3, 0.0)], length=3)
    tensors = build(replace(sample, score=score), other)
    assert tensors.turn_rewards.tolist() == [[0.5, 1.25, 0.0, 0.0, 0.0, 0.0, 2.0], [0.0] * 7]
    failed = replace(sample, score=replace(score, failure="TimeoutError"))
    assert not build(failed, build_sample([(0, 2, 0.25), (3, 7, 0.0)])).turn_rewards[0].any()


def test_a_failed_sample_has_no_token_to_learn_from_and_no_turn_reward():
    turns = [(0, 2, 0.25), (3, 7, 0.0)]
    failed = build_sample(turns, reward=0.0, failure="TimeoutError")
    tensors = build(build_sample(turns), failed)
    assert tensors.failed.tolist() == [False, True]
    assert tensors.mask.any(1).tolist() == [True, False]
    assert not any(each[1].any() for each in (tensors.scored, tensors.rollout_logprobs, tensors.turn_rewards))
    assert build(failed).turn_rewards is None
