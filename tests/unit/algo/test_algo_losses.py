"""Policy and critic losses, DIS, DPPO, CISPO and TOPR: values, gradients and limits by hand; what they refuse."""

import math

import pytest
import torch
from algo_cases import (
    LIMIT,
    at_responses,
    build_targets,
    close,
    configure,
    f64,
    loss_of,
    make_experience,
    one_row,
    perturbed,
    whole,
)

from megarl.algo.losses import (
    LossCounts,
    compute_mismatch_weight,
    compute_value_loss,
    count_minibatch,
    critic_loss,
    policy_loss,
)
from megarl.algo.objective import reads_old_logprobs
from megarl.algo.policy_losses import POLICY_LOSSES, compute_cispo, compute_dis, compute_dppo, compute_sapo
from megarl.algo.statistics import NonFiniteError
from megarl.config.schema.algo import KLEstimator, MismatchCorrection, PositiveLMMean, RatioLevel, ValueLoss


def test_the_clipped_surrogate_by_hand():
    # clip 0.2/0.28. A=1: w=1.5 -> -1.28, w=0.5 -> -0.5; A=-1: w=0.5 -> 0.8, w=1.5 -> 1.5. Mean 0.52/4.
    case = one_row([1, 1, -1, -1], [1.5, 0.5, 0.5, 1.5])
    out = loss_of(*case, configure(clip_high=0.28))
    assert float(out.loss) == pytest.approx((-1.28 - 0.5 + 0.8 + 1.5) / 4)
    assert float(out.sums["policy/clip_frac"]) == 0.5
    assert float(out.sums["policy/ratio_mean"]) == pytest.approx(1.0)
    assert float(out.maxima["policy/ratio_max"]) == pytest.approx(1.5)
    # k3: w - 1 - ln w, twice for each of 1.5 and 0.5
    expected = (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 2
    assert float(out.sums["policy/approx_kl"]) == pytest.approx(expected)


OF_CRITIC = {"num_critic_tokens": 50, "num_critic_sequences": 9}
MINIBATCH = LossCounts(num_tokens=50, num_sequences=9, num_positive_tokens=8, num_negative_tokens=0, **OF_CRITIC)


@pytest.mark.parametrize(("mean_over", "weight"), [("positive_tokens", 0.1 * 50 / 8), ("all_tokens", 0.1)])
def test_the_positive_lm_loss_is_one_weight_added_to_the_advantage_of_each_correct_token(mean_over, weight):
    # At ratio 1 a token's gradient is -A / N_tok; mu / N_pos is mu N_tok / N_pos of the same unit.
    config = configure(positive_lm_coef=0.1, positive_lm_mean_over=PositiveLMMean[mean_over])
    for positive, added in ((True, weight), (False, 0.0)):
        logprobs, targets, _ = one_row([0.3, -0.2], [1, 1], positive=positive)
        logprobs.requires_grad_()
        out = loss_of(logprobs, targets, MINIBATCH, config)
        out.loss.backward()
        assert logprobs.grad.tolist() == pytest.approx([-(0.3 + added) / 50, -(-0.2 + added) / 50])
        assert float(out.maxima["policy/positive_lm_weight_max"]) == pytest.approx(weight)


def test_a_mismatch_weight_of_a_long_sequence_does_not_overflow():
    config = configure(mismatch__correction=MismatchCorrection.tis).mismatch
    found = compute_mismatch_weight(torch.tensor([2000.0, -2000.0]), config)
    assert found.tolist() == [2.0, 0.0]


def test_a_minibatch_with_nothing_to_learn_has_a_loss_of_zero_that_can_be_differentiated():
    e = make_experience([0, 0], [2, 0], [1.0, 0.0], [True, True], 0)
    config = configure(overlong__filter=True, positive_lm_coef=0.1)
    samples, rows, targets = whole(e, config)
    lp = perturbed(e, 0)[0]
    out = policy_loss(at_responses(samples, rows, lp), None, targets, config, count_minibatch(samples), LIMIT)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert float(lp.grad.abs().sum()) == 0.0


OF_THE_MODEL = ["logprobs", "entropy", "full_kl", "values"]
OF_THE_TARGETS = ["advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "returns", "old_values"]


@pytest.mark.parametrize("name", OF_THE_MODEL + OF_THE_TARGETS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_refused_with_name_count_and_row(name, bad):
    e = make_experience([0, 0], [2, 3], [1.0, 0.0], [False, False], 0, holes=False)
    estimator = KLEstimator.full if name == "full_kl" else KLEstimator.k3
    config = configure(kl__in_loss=True, kl__loss_estimator=estimator, entropy_coef=0.1, value_clip=0.2)
    samples, rows, targets = whole(e, config)
    found = (at_responses(samples, rows, x.detach()) for x in (*perturbed(e, 0), e.values))
    inputs, counts = dict(zip(OF_THE_MODEL, found, strict=True)), count_minibatch(samples)
    if name in inputs:
        inputs[name][3:] = bad
    else:
        values = getattr(targets, name).clone()
        values[3:] = bad
        targets = build_targets(samples, rows, **{name: values})
    compute, given = (
        policy_loss,
        [inputs["logprobs"], inputs["entropy"], targets, config, counts, LIMIT, inputs["full_kl"]],
    )
    if name in ("values", "returns", "old_values"):
        compute, given = critic_loss, [inputs["values"], targets, config, counts]
    with pytest.raises(NonFiniteError, match=rf"{name}: 2 of 5 entries are not finite, first in row 1"):
        compute(*given)


def test_the_cross_entropy_of_a_value_by_hand():
    # Of [-1, 1]: V = 0, 0.5, -1 are p = 1/2, 3/4 and, kept off its end, 1e-6; G = 1, -1, 0 and y = 1, 0, 1/2.
    values = f64([0.0, 0.5, -1.0]).requires_grad_()
    losses = compute_value_loss(values, f64([1.0, -1.0, 0.0]), ValueLoss.cross_entropy, (-1.0, 1.0))
    close(losses, [math.log(2), math.log(4), -0.5 * (math.log(1e-6) + math.log1p(-1e-6))])
    # Its gradient in p is (p - y) / (p (1 - p)), and p moves by half of what V does.
    losses[:2].sum().backward()
    close(values.grad, [-1.0, 2.0, 0.0])
    # A return beyond the range counts as its end.
    close(compute_value_loss(f64([0.0]), f64([7.0]), ValueLoss.cross_entropy, (-1.0, 1.0)), [math.log(2)])


def test_a_ratio_that_overflows_is_an_error_and_not_an_infinite_loss():
    logprobs, targets, counts = one_row([-1.0], [1.0])
    with pytest.raises(NonFiniteError, match="importance ratio"):
        loss_of(logprobs + 800.0, targets, counts, configure())


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ref_logprobs", {"kl__in_loss": True}),
        ("full_kl", {"kl__in_loss": True, "kl__loss_estimator": KLEstimator.full}),
        ("entropy", {"entropy_coef": 0.1}),
        ("sampling_logprobs", {"rl_loss_coef": 0.0, "topr__positive_loss_coef": 1.0, "topr__negative_loss_coef": 1.0}),
    ],
)
def test_missing_inputs_are_errors_by_name(name, keys):
    case = one_row([-1.0], [1.0], sampling_logprobs=None)
    with pytest.raises(ValueError, match=f"{name}: none found"):
        loss_of(*case, configure(**keys))
    with pytest.raises(ValueError, match="returns: none found"):
        critic_loss(f64([1.0]), case[1], configure(), case[2])


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


def test_sapos_gate_by_hand_and_its_gradient_is_that_of_the_ratio_at_one():
    ratios, advantages = f64([1.0, 1.0, 2.0, 0.5, 1e300]), f64([1.0, -2.0, 1.0, -1.0, 1.0])
    logs = ratios.log().requires_grad_()
    losses, metrics = compute_sapo(logs, advantages, 1.0, 2.0)
    # 4 sigmoid(0) = 2; 4/2 sigmoid(0) * 2 = 2; 4 sigmoid(1); 4/2 sigmoid(-1); 4
    assert losses.tolist() == pytest.approx([-2.0, 2.0, -2.9242343145, 0.5378828427, -4.0])
    losses.sum().backward()
    # -A f'(w) w with f'(w) = 4 s (1 - s): s (1 - s) is 1/4 at 0 and 0.1966119332 at 1 and -1.
    assert logs.grad.tolist() == pytest.approx([-1.0, 2.0, -2 * 0.7864477329, 0.5 * 0.7864477329, 0.0])
    assert metrics["policy/gate"].tolist() == pytest.approx([1.0, 1.0, 0.7864477329, 0.7864477329, 0.0])


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
