"""DIS, DPPO, CISPO and TOPR: values, gradients and limits by hand."""

import math

import pytest
import torch
from algo_cases import at_responses, configure, f64, loss_of, make_experience, one_row, perturbed, whole

from megarl.algo.losses import count_minibatch
from megarl.algo.objective import reads_old_logprobs
from megarl.algo.policy_losses import POLICY_LOSSES, compute_cispo, compute_dis, compute_dppo
from megarl.algo.statistics import NonFiniteError
from megarl.config.schema.algo import KLEstimator, RatioLevel

DIS = {"surrogate": "dis", "clip_low": 0.3, "clip_high": 5.0}
DPPO = {"surrogate": "dppo", "clip_low": 0.2, "clip_high": 0.2}
CISPO = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}
OF_ROLLOUT = [DIS, DPPO]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_that_overflow_or_vanish_leave_finite_losses_and_gradients(dtype):
    """A token that was all but impossible (mu = exp(-2000)) and one that has become so."""
    mu = torch.tensor([-2000.0, -0.01, -0.01], dtype=dtype)
    for compute, advantages, gradient in (
        (compute_dis, [1.0, 1.0, 1.0], [0.0, 0.0, -1.0]),
        (compute_dis, [-1.0, -1.0, -1.0], [0.0, 0.0, 1.0]),
        (compute_dppo, [1.0, 1.0, 1.0], [0.0, 0.0, -1.0]),
        (compute_cispo, [1.0, 1.0, 1.0], [-6.0, 0.0, -1.0]),
    ):
        logprobs = torch.tensor([-0.01, -2000.0, -0.01], dtype=dtype, requires_grad=True)
        low = 0.2 if compute is compute_dppo else 0.99 if compute is compute_dis else 1.0
        high = 0.2 if compute is compute_dppo else 5.0
        losses, _ = compute(logprobs, mu, torch.tensor(advantages, dtype=dtype), low, high)
        losses.sum().backward()
        assert bool(torch.isfinite(losses).all())
        assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_a_ratio_that_dppo_does_not_clip_and_that_overflows_is_an_error():
    with pytest.raises(NonFiniteError, match=r"importance ratio exp\(logprobs - rollout_logprobs\)"):
        compute_dppo(f64([-0.1]), f64([-2000.0]), f64([-1.0]), 0.2, 0.2)


def test_dppo_masks_a_token_that_moved_by_more_than_the_bound_of_its_advantages_sign():
    mu, pi, advantages = f64([0.5] * 5), f64([0.7, 0.85, 0.35, 0.45, 0.15]), f64([1.0, 1.0, -1.0, -1.0, 1.0])
    losses, flags = compute_dppo(pi.log(), mu.log(), advantages, clip_low=0.1, clip_high=0.3)
    assert losses.tolist() == pytest.approx([-1.4, 0.0, 0.0, 0.9, -0.3])
    assert flags["policy/clip_frac"].tolist() == [False, True, True, False, False]


def test_old_logprobs_are_read_by_everything_but_a_ratio_to_the_rollout_alone():
    assert [name for name, it in POLICY_LOSSES.items() if it.ratio_to_rollout] == ["dis", "dppo"]
    for values in OF_ROLLOUT:
        assert not reads_old_logprobs(configure(**values))
        assert not reads_old_logprobs(configure(**values, kl__in_loss=True, kl__loss_estimator=KLEstimator.full))
        for more in (
            {"kl__in_reward": True},
            {"kl__in_loss": True},
            {"topr__negative_loss_coef": 1.0},
            {"rl_loss_coef": 0.0, "topr__negative_loss_coef": 1.0},
        ):
            assert reads_old_logprobs(configure(**values | more))
    assert reads_old_logprobs(configure(**CISPO))
    assert reads_old_logprobs(configure())


def topr_config(level=RatioLevel.sequence):
    return configure(
        rl_loss_coef=0.0, topr__positive_loss_coef=1.0, topr__negative_loss_coef=1.0, topr__ratio_level=level
    )


def test_the_rollout_engines_logprobs_do_not_taper_what_the_trainer_holds_for_as_likely_as_when_it_was_sampled():
    noisy = torch.full((2,), 0.0, dtype=torch.float64)  # The engine held the tokens for certain.
    out = loss_of(*one_row([-1, -1], [1, 1], rollout_logprobs=noisy), topr_config())
    assert float(out.loss) == pytest.approx(-math.log(2))
    assert [float(out.sums[f"topr/taper_{name}"]) for name in ("mean", "zero_frac", "one_frac")] == [1, 0, 1]


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
