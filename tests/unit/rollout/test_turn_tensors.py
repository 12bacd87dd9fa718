"""Conversations and failed samples as tensors."""

import numpy as np
import pytest
import torch

from megarl.rollout.tensors import build_tensors
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn


def build_sample(turns, *, reward=1.0, failure=None, reason=FinishReason.stop, length=7):
    """A conversation of tokens 10, 11, ... whose actions are at these (start, end, reward)."""
    generated = np.zeros(length, dtype=bool)
    for start, end, _ in turns:
        generated[start:end] = True
    response = Response(
        token_ids=range(10, 10 + length),
        text="",
        rollout_logprobs=np.where(generated, -0.5, 0.0),
        generated=generated,
        weight_versions=[3] * length,
        finish_reason=reason,
        turns=[Turn(start, end, "", reward) for start, end, reward in turns],
    )
    return Sample(Prompt("p", "", (1, 2), ""), response, Score(reward, False, failure=failure), 0)


def build(*samples):
    return build_tensors(Rollout(samples, 3))


def test_rewards_of_turns_before_the_last_stand_at_their_actions_last_tokens():
    tensors = build(build_sample([(0, 2, 0.25), (3, 4, 0.0), (5, 7, 0.5)]), build_sample([(0, 3, 0.125), (6, 7, 0.0)]))
    expected = torch.zeros(2, 7)
    expected[0, 1], expected[1, 2] = 0.25, 0.125
    assert torch.equal(tensors.turn_rewards, expected)
    assert tensors.turn_rewards.dtype is torch.float32
    assert tensors.mask[0].tolist() == [True, True, False, True, False, True, True]
    assert tensors.rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("turns", [[(0, 7, 0.5)], [(0, 2, 0.0), (3, 7, 0.5)], [(0, 2, 0.0), (3, 3, 0.5), (4, 7, 0.0)]])
def test_rewards_of_the_last_turn_and_of_empty_actions_are_in_the_rest_at_the_end(turns):
    assert build(build_sample(turns)).turn_rewards is None


def test_a_failed_sample_has_no_token_to_learn_from_and_no_turn_reward():
    turns = [(0, 2, 0.25), (3, 7, 0.0)]
    tensors = build(build_sample(turns), build_sample(turns, reward=0.0, failure="TimeoutError"))
    assert tensors.failed.tolist() == [False, True]
    assert tensors.mask.any(1).tolist() == [True, False]
    assert not tensors.scored[1].any()
    assert not tensors.rollout_logprobs[1].any()
    assert not tensors.turn_rewards[1].any()
    assert build(build_sample(turns, failure="TimeoutError")).turn_rewards is None


def test_only_the_length_limit_truncates_a_response():
    reasons = (FinishReason.stop, FinishReason.length, FinishReason.max_turns)
    tensors = build(*(build_sample([(0, 7, 0.0)], reason=reason) for reason in reasons))
    assert tensors.truncated.tolist() == [False, True, False]


def test_an_experience_has_what_the_rollout_has():
    tensors = build(build_sample([(0, 2, 0.25), (3, 7, 0.0)]), build_sample([(0, 7, 0.0)], failure="lost"))
    old = torch.full((2, 7), -0.7)
    experience = tensors.build_experience(old, values=old)
    assert experience.failed is tensors.failed
    assert experience.turn_rewards is tensors.turn_rewards
    assert torch.equal(experience.sampling_logprobs[tensors.mask], old[tensors.mask])
    assert experience.ref_logprobs is None
