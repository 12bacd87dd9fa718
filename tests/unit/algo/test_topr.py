"""TOPR: its terms by hand, what its taper is logged as, and what the rollout engine's log-probs change."""

import math

import pytest
import torch
from algo_cases import at_responses, configure, loss_of, make_experience, one_row, perturbed, whole

from megarl.algo.losses import count_minibatch
from megarl.config.schema.algo import RatioLevel


def topr_config(level=RatioLevel.sequence):
    return configure(
        rl_loss_coef=0.0, topr__positive_loss_coef=1.0, topr__negative_loss_coef=1.0, topr__ratio_level=level
    )


def test_the_rollout_engines_logprobs_do_not_taper_what_the_trainer_holds_for_as_likely_as_when_it_was_sampled():
    noisy = torch.full((2,), 0.0, dtype=torch.float64)  # The engine held the tokens for certain.
    out = loss_of(*one_row([-1, -1], [1, 1], rollout_logprobs=noisy), topr_config())
    assert float(out.loss) == pytest.approx(-math.log(2))
    assert [float(out.sums[f"topr/taper_{name}"]) for name in ("mean", "zero_frac", "one_frac")] == [1, 0, 1]


def test_topr_without_the_sampling_policys_logprobs_is_an_error():
    with pytest.raises(ValueError, match="sampling_logprobs: none found"):
        loss_of(*one_row([-1], [1], sampling_logprobs=None), topr_config())


def test_rewards_of_zero_and_one_and_of_minus_one_and_one_have_the_same_positives_under_topr():
    tapers, losses = [], []
    for wrong in (0.0, -1.0):
        e = make_experience([0, 0, 0, 1, 1], [5, 3, 4, 2, 2], [1.0, wrong, wrong, wrong, wrong], [False] * 5, 3)
        config = topr_config()
        config.advantage = "group"
        samples, rows, targets = whole(e, config)
        assert (samples.advantages > 0).any(1).tolist() == [True, False, False, False, False]
        assert (samples.advantages < 0).any(1).tolist() == [False, True, True, False, False]
        lp = at_responses(samples, rows, perturbed(e, 1)[0])
        out = loss_of(lp, targets, count_minibatch(samples), config)
        losses.append(float(out.loss.detach()))
        tapers.append(float(out.sums["topr/taper_mean"]))
    assert tapers[0] == pytest.approx(tapers[1])
    assert losses[1] == pytest.approx(2 * losses[0])  # advantages of twice the size
