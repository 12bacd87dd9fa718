"""From responses to a scored rollout and its tensors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.interfaces import UNPUBLISHED
from megarl.rollout.client import RequestError
from megarl.rollout.collector import check_versions, compute_staleness, score_groups
from megarl.rollout.engine import build_response
from megarl.rollout.tensors import build_sequences, build_tensors
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, WeightVersions


def make_response(*ids: int, finish=FinishReason.stop, generated=None) -> Response:
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(ids)))
    return Response(ids, "", logprobs, generated or (True,) * len(ids), (0,) * len(ids), finish)


PROMPTS = [Prompt("a", "", (5, 6), "x"), Prompt("b", "", (7,), "y")]
GROUPS = [
    [make_response(8, 2), make_response(9, 9, 9, finish=FinishReason.length)],
    [make_response(2), make_response(4, 3, 2, generated=(True, False, True))],
]


def score(groups):
    return score_groups(PROMPTS[: len(groups)], groups, lambda p, r: Score(0.0, False))


def make_rollout() -> Rollout:
    return Rollout(score_groups(PROMPTS, GROUPS, lambda p, r: Score(float(len(r.token_ids)), p.id == "a")), 3)


def test_groups_are_contiguous_and_in_the_prompts_order():
    samples = make_rollout().samples
    assert [s.group for s in samples] == [0, 0, 1, 1]
    assert [s.prompt.id for s in samples] == ["a", "a", "b", "b"]
    assert [s.score.reward for s in samples] == [2.0, 3.0, 1.0, 3.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_names_the_prompt(bad):
    with pytest.raises(ValueError, match=f"prompt 'b' is {bad}"):
        score_groups(PROMPTS, GROUPS, lambda p, r: Score(bad if p.id == "b" else 0.0, False))


def test_a_token_of_other_weights_than_the_trainers_is_refused_unless_it_was_not_generated():
    first, second = GROUPS[1]
    stale = replace(second, weight_versions=(0, 0, 3))
    with pytest.raises(RuntimeError, match=r"prompt 'b' .* weight version 0, 3; the trainer's is 0"):
        check_versions(score([GROUPS[0], [first, stale]]), 0)
    with pytest.raises(RuntimeError, match=r"prompt 'a' .* weight version 0; the trainer's is 1"):
        check_versions(score(GROUPS), 1)
    # GROUPS' last response has a token in its middle that the policy did not generate.
    check_versions(score([GROUPS[0], [first, replace(second, weight_versions=(0, 9, 0))]]), 0)


def test_tokens_may_be_as_many_versions_behind_as_the_staleness_and_none_ahead():
    first, _ = GROUPS[0]
    check_versions(score([[replace(first, weight_versions=(2, 3))]]), 3, max_staleness=1)
    with pytest.raises(RuntimeError, match=r"version 2, 3; the trainer's is 4, and rollout.max_staleness is 1"):
        check_versions(score([[replace(first, weight_versions=(2, 3))]]), 4, max_staleness=1)
    with pytest.raises(RuntimeError, match=r"version 3, 4; the trainer's is 3"):
        check_versions(score([[replace(first, weight_versions=(3, 4))]]), 3, max_staleness=1)


def test_tokens_of_a_server_without_a_version_are_refused_however_stale_tokens_may_be():
    first, _ = GROUPS[0]
    with pytest.raises(RuntimeError, match="version -1, 0; the trainer's is 0"):
        check_versions(score([[replace(first, weight_versions=(UNPUBLISHED, 0))]]), 0, max_staleness=4)


def test_staleness_counts_versions_behind_over_the_generated_tokens():
    first, second = GROUPS[1][0], GROUPS[1][1]  # of 1 and 3 tokens; the middle one of the latter was not generated
    samples = score([[replace(first, weight_versions=(4,)), replace(second, weight_versions=(2, 0, 3))]])
    found = compute_staleness(samples, 4)
    assert found == {"rollout/staleness_mean": 1.0, "rollout/staleness_max": 2.0, "rollout/mixed_frac": 0.5}
    assert compute_staleness((), 4) == {}


def test_sequences_concatenate_prompt_and_response():
    sequences = build_sequences(make_rollout())
    assert sequences.tokens.tolist() == [5, 6, 8, 2, 5, 6, 9, 9, 9, 7, 2, 7, 4, 3, 2]
    assert sequences.lengths.tolist() == [4, 5, 2, 4]
    assert sequences.prompt_lengths.tolist() == [2, 2, 1, 1]


def test_tensors_are_padded_with_zeros_and_skip_what_was_not_generated():
    tensors = build_tensors(make_rollout())
    assert tensors.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 1]]
    expected = [[-0.5, -1, 0], [-0.5, -1, -1.5], [-0.5, 0, 0], [-0.5, 0, -1.5]]
    assert tensors.rollout_logprobs.tolist() == expected
    assert tensors.truncated.tolist() == [False, True, False, False]
    assert tensors.rewards.tolist() == [2, 3, 1, 3]
    assert tensors.groups.tolist() == [0, 0, 1, 1]
    assert tensors.rewards.dtype == tensors.rollout_logprobs.dtype == torch.float32


def make_answer(**changes):
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.1, 8, None], [-0.2, 9, None], [-0.3, 2, None]],
        "weight_version": "4",
    }
    return {"output_ids": [8, 9, 2], "meta_info": meta | changes}


def test_an_answer_becomes_a_response_with_a_version_per_token():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    response = build_response(make_answer(weight_versions=spans), "hi")
    assert response.rollout_logprobs.tolist() == np.float32([-0.1, -0.2, -0.3]).tolist()
    assert response.weight_versions == WeightVersions((3, 4), (1, 3))
    assert response.generated.all()
    assert response.finish_reason is FinishReason.stop
    assert build_response(make_answer(), "").weight_versions == WeightVersions((4,), (3,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": {"type": "abort"}}, "abort"),
        ({"output_token_logprobs": [[-0.1, 8, None]]}, "3 tokens came with 1 log-probs"),
        (
            {"weight_versions": [{"version": "3", "start": 0, "end": 2}]},
            "do not cover a response of 3 tokens",
        ),
    ],
)
def test_an_inconsistent_answer_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        build_response(make_answer(**changes), "")


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
