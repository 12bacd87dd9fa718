"""Policy and critic losses: golden values by hand, and what they refuse."""

import math
from dataclasses import replace

import pytest
import torch
from algo_cases import (
    LIMIT,
    at_responses,
    build_targets,
    configure,
    f64,
    loss_of,
    make_experience,
    one_row,
    perturbed,
    whole,
)

from megarl.algo.blocks import NonFiniteError
from megarl.algo.losses import aggregate, count_minibatch, critic_loss, policy_loss
from megarl.algo.tokens import LossCounts, compute_log_ratio, compute_mismatch_weight, compute_outside
from megarl.config.schema.algo import (
    KLEstimator,
    LossAggMode,
    MismatchCorrection,
    PositiveLMMean,
    RatioLevel,
)


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


def test_dual_clip_by_hand():
    # A = -2, w = 5: 10 unbounded, 3 * 2 = 6 bounded; w = 1.1: 2.2 stays. A = 1, w = 5: -1.2 stays.
    out = loss_of(*one_row([-2, -2, 1], [5, 1.1, 5]), configure(dual_clip=3.0))
    assert float(out.loss) == pytest.approx((6 + 2.2 - 1.2) / 3)
    assert float(out.sums["policy/dual_clip_frac"]) == pytest.approx(1 / 3)


def test_the_positive_lm_loss_by_hand():
    # Ratio 1, A = 0: only mu * mean(-log 0.5) is left; without correct samples nothing is.
    config = configure(positive_lm_coef=0.1)
    out = loss_of(*one_row([0, 0], [1, 1], positive=True), config)
    assert float(out.loss) == pytest.approx(0.1 * math.log(2))
    assert float(out.sums["policy/positive_lm"]) == pytest.approx(math.log(2))
    assert float(loss_of(*one_row([0, 0], [1, 1]), config).loss) == 0.0


MINIBATCH = LossCounts(
    num_tokens=50,
    num_sequences=9,
    num_positive_tokens=8,
    num_critic_tokens=50,
    num_critic_sequences=9,
    num_negative_tokens=0,
)


def test_the_positive_lm_loss_divides_by_the_positive_tokens_of_the_minibatch():
    logprobs, targets, _ = one_row([0, 0], [1, 1], positive=True)
    out = loss_of(logprobs, targets, MINIBATCH, configure(positive_lm_coef=1.0))
    assert float(out.loss) == pytest.approx(2 * math.log(2) / 8)


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


def test_the_positive_lm_loss_weighs_nothing_without_a_correct_response():
    case = one_row([1, 1], [1, 1])
    assert float(loss_of(*case, configure(positive_lm_coef=0.1)).maxima["policy/positive_lm_weight_max"]) == 0
    assert "policy/positive_lm_weight_max" not in loss_of(*case, configure()).maxima


def test_the_entropy_bonus_by_hand():
    out = loss_of(*one_row([0, 0], [1, 1]), configure(entropy_coef=0.5), f64([1.0, 3.0]))
    assert float(out.loss) == pytest.approx(-0.5 * 2)
    assert float(out.sums["policy/entropy"]) == pytest.approx(2)


def test_the_kl_loss_by_hand():
    # d = log 0.5 - log 0.25 = ln 2: abs = ln 2; k2 = ln2^2/2; k3 = 0.5 + ln 2 - 1; with k1 the error is at config time
    ref = torch.full((1,), math.log(0.25), dtype=torch.float64)
    case = one_row([0], [1], ref_logprobs=ref)
    by_hand = {
        KLEstimator.abs: math.log(2),
        KLEstimator.k2: math.log(2) ** 2 / 2,
        KLEstimator.mse: math.log(2) ** 2 / 2,
        KLEstimator.k3: math.log(2) - 0.5,
    }
    for estimator, expected in by_hand.items():
        config = configure(kl__in_loss=True, kl__loss_coef=0.1, kl__loss_estimator=estimator)
        out = loss_of(*case, config)
        assert float(out.loss) == pytest.approx(0.1 * expected)
        assert float(out.sums["policy/kl_loss"]) == pytest.approx(expected)


def test_the_full_kl_loss_by_hand():
    # Two tokens of KL 0.2 and 0.6: coef * mean; the gradient is coef/2 each. No reference log-probs are needed.
    config = configure(kl__in_loss=True, kl__loss_coef=0.1, kl__loss_estimator=KLEstimator.full)
    logprobs, targets, counts = one_row([0, 0], [1, 1])
    full = f64([0.2, 0.6]).requires_grad_()
    out = policy_loss(logprobs, None, targets, config, counts, LIMIT, full)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(0.1 * 0.4)
    assert float(out.sums["policy/kl_loss"]) == pytest.approx(0.4)
    assert full.grad.tolist() == pytest.approx([0.05, 0.05])


def test_the_logprob_surrogate_by_hand():
    # -A lp with lp = log 0.5 for both tokens: sum over the one sequence 3 ln 2
    config = configure(surrogate="logprob", loss_agg_mode=LossAggMode["seq-mean-token-sum"])
    assert float(loss_of(*one_row([2, 1], [1, 1]), config).loss) == pytest.approx(3 * math.log(2))


def test_the_gspo_surrogate_by_hand():
    # Ratios 2 and 1/2 of the tokens: their geometric mean is 1, which no bound clips, for each token A = 1 and A = 3.
    config = configure(surrogate="gspo", loss_agg_mode=LossAggMode["seq-mean-token-mean"])
    logprobs, targets, counts = one_row([1, 3], [2, 0.5])
    logprobs.requires_grad_()
    out = policy_loss(logprobs, None, targets, config, counts, LIMIT)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-2.0)
    assert float(out.sums["policy/clip_frac"]) == 0.0
    # d/dlp of -(1/2)(1 + 3) s with s = exp(mean log-ratio): -(1/2) 4 s / 2 for either token
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -1.0])
    # sqrt(2 * 2) = 2 is clipped at 1.2: no gradient where A > 0
    assert float(loss_of(*one_row([1, 1], [2, 2]), config).loss) == pytest.approx(-1.2)


def test_mismatch_weights_by_hand():
    # ratios 1, 4 in a row of two, 0.25 in a row of one; bounds 0.5 and 2
    log_ratio, rows, lengths = f64([1.0, 4.0, 0.25]).log(), torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    expected = {
        RatioLevel.token: ([1, 2, 0.25], [1, 0, 0]),
        RatioLevel.sequence: ([2, 2, 0.25], [0, 0, 0]),
        RatioLevel.geometric: ([2, 2, 0.25], [2, 2, 0]),  # sqrt(4) = 2 is on the bound
    }
    for level, (truncated, masked) in expected.items():
        at = compute_log_ratio(log_ratio, rows, lengths, level)
        tis = configure(mismatch__correction=MismatchCorrection.tis, mismatch__level=level).mismatch
        torch.testing.assert_close(compute_mismatch_weight(at, tis), f64(truncated).double())
        mis = configure(mismatch__correction=MismatchCorrection.mis, mismatch__level=level).mismatch
        if level is not RatioLevel.geometric:  # rounding decides on the bound itself
            torch.testing.assert_close(compute_mismatch_weight(at, mis), f64(masked).double())
            assert compute_outside(at, mis).tolist() == [x == 0 for x in masked]


def test_a_truncated_weight_has_no_lower_bound():
    config = configure(mismatch__correction=MismatchCorrection.tis, mismatch__low=0.5).mismatch
    found = compute_mismatch_weight(f64([0.0003, 0.3, 1.9, 2.1]).log(), config)
    torch.testing.assert_close(found, f64([0.0003, 0.3, 1.9, 2.0]))


def test_masking_by_the_geometric_mean_by_hand():
    # ratios 1, 3.24 in a row of two: geometric mean 1.8, inside 0.5..2; 0.16, 1: 0.4, outside
    log_ratio, rows, lengths = f64([1.0, 3.24, 0.16, 1.0]).log(), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    level = RatioLevel.geometric
    config = configure(mismatch__correction=MismatchCorrection.mis, mismatch__level=level).mismatch
    at = compute_log_ratio(log_ratio, rows, lengths, level)
    torch.testing.assert_close(compute_mismatch_weight(at, config), f64([1.8, 1.8, 0.0, 0.0]))
    assert compute_outside(at, config).tolist() == [False, False, True, True]


def test_a_mismatch_weight_of_a_long_sequence_does_not_overflow():
    config = configure(mismatch__correction=MismatchCorrection.tis).mismatch
    found = compute_mismatch_weight(torch.tensor([2000.0, -2000.0]), config)
    assert found.tolist() == [2.0, 0.0]


def test_the_mismatch_correction_weights_the_surrogate_only():
    rollout = torch.full((2,), math.log(0.5) - math.log(1.5), dtype=torch.float64)  # ratio 1.5
    config = configure(mismatch__correction=MismatchCorrection.tis, entropy_coef=1.0)
    out = loss_of(*one_row([1, 1], [1, 1], rollout_logprobs=rollout), config, f64([2.0, 2.0]))
    assert float(out.loss) == pytest.approx(-1.5 - 2.0)


def test_aggregations_by_hand():
    # Row 0 losses 1, 2 (l = 2), row 1 loss 6 (l = 3: two of its tokens have none)
    loss, rows, lengths = f64([1, 2, 6, 0, 0]), torch.tensor([0, 0, 1, 1, 1]), torch.tensor([2, 3])
    expected = {
        "token-mean": 9 / 5,
        "seq-mean-token-sum": 9 / 2,
        "seq-mean-token-mean": (3 / 2 + 6 / 3) / 2,
        "seq-mean-token-sum-norm": 9 / (2 * 10),
    }
    for name, value in expected.items():
        found = aggregate(loss.double(), LossAggMode[name], rows, lengths, 5, 2, 10)
        assert float(found) == pytest.approx(value), name


def test_the_critic_loss_by_hand():
    # V = 1, 3; G = 0, 2: 0.5 * (1 + 1) / 2 = 0.5. Clip 0.5 around 0 and 5: V' = 0.5, 4.5, squares 0.25, 6.25
    _, targets, counts = one_row([0, 0], [1, 1], returns=f64([0.0, 2.0]), old_values=f64([0.0, 5.0]))
    values = f64([1.0, 3.0])
    assert float(critic_loss(values, targets, configure(), counts).loss) == pytest.approx(0.5)
    out = critic_loss(values, targets, configure(value_clip=0.5), counts)
    assert float(out.loss) == pytest.approx(0.5 * (1 + 6.25) / 2)
    assert float(out.sums["critic/clip_frac"]) == 0.5
    assert float(out.sums["critic/abs_error"]) == pytest.approx(1.0)


def test_tokens_that_are_too_stale_have_advantages_and_returns_and_no_loss():
    e = make_experience([0, 0], [3, 4], [1.0, 0.0], [False, False], 0, holes=False)
    too_stale = torch.zeros_like(e.mask)
    too_stale[1, :2] = True
    config = configure(advantage="gae")
    fresh, rows, _ = whole(e, config)
    samples, _, targets = whole(replace(e, too_stale=too_stale), config)
    assert torch.equal(samples.advantages, fresh.advantages)
    assert torch.equal(samples.returns, fresh.returns)
    assert torch.equal(samples.mask, fresh.mask)
    assert torch.equal(samples.loss_mask, fresh.loss_mask & ~too_stale)
    counts = count_minibatch(samples)
    assert (counts.num_tokens, counts.num_critic_tokens, counts.num_critic_sequences) == (5, 5, 2)
    lp = perturbed(e, 0)[0]
    values = e.values.double().nan_to_num().requires_grad_()
    policy_loss(at_responses(samples, rows, lp), None, targets, config, counts, LIMIT).loss.backward()
    critic_loss(at_responses(samples, rows, values), targets, config, counts).loss.backward()
    for gradient in (lp.grad, values.grad):
        assert float(gradient[1, :2].abs().sum()) == 0.0
        assert float(gradient[1, 2:4].abs().min()) > 0.0


def test_a_minibatch_with_nothing_to_learn_has_a_loss_of_zero_that_can_be_differentiated():
    e = make_experience([0, 0], [2, 0], [1.0, 0.0], [True, True], 0)
    config = configure(overlong__filter=True, positive_lm_coef=0.1)
    samples, rows, targets = whole(e, config)
    lp = perturbed(e, 0)[0]
    out = policy_loss(at_responses(samples, rows, lp), None, targets, config, count_minibatch(samples), LIMIT)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert float(lp.grad.abs().sum()) == 0.0


OF_THE_MODEL = ["logprobs", "entropy", "full_kl"]
OF_THE_TARGETS = ["advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs"]


@pytest.mark.parametrize("name", OF_THE_MODEL + OF_THE_TARGETS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_refused_with_name_count_and_row(name, bad):
    e = make_experience([0, 0], [2, 3], [1.0, 0.0], [False, False], 0, holes=False)
    estimator = KLEstimator.full if name == "full_kl" else KLEstimator.k3
    config = configure(kl__in_loss=True, kl__loss_estimator=estimator, entropy_coef=0.1)
    samples, rows, targets = whole(e, config)
    found = (at_responses(samples, rows, x.detach()) for x in perturbed(e, 0))
    inputs = dict(zip(OF_THE_MODEL, found, strict=True))
    if name in inputs:
        inputs[name][3:] = bad
    else:
        values = getattr(targets, name).clone()
        values[3:] = bad
        targets = build_targets(samples, rows, **{name: values})
    with pytest.raises(NonFiniteError, match=rf"{name}: 2 of 5 entries are not finite, first in row 1"):
        policy_loss(
            inputs["logprobs"], inputs["entropy"], targets, config, count_minibatch(samples), LIMIT, inputs["full_kl"]
        )


@pytest.mark.parametrize("name", ["values", "returns", "old_values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_critic_inputs_that_are_not_finite_are_refused_with_name_count_and_row(name, bad):
    e = make_experience([0, 0], [2, 3], [1.0, 0.0], [False, False], 0, holes=False)
    config = configure(value_clip=0.2)
    samples, rows, targets = whole(e, config)
    inputs = {
        "values": at_responses(samples, rows, e.values),
        "returns": targets.returns,
        "old_values": targets.old_values,
    }
    inputs[name] = torch.where(torch.arange(5) >= 3, bad, inputs[name])
    targets = build_targets(samples, rows, returns=inputs["returns"], old_values=inputs["old_values"])
    with pytest.raises(NonFiniteError, match=rf"{name}: 2 of 5 entries are not finite, first in row 1"):
        critic_loss(inputs["values"], targets, config, count_minibatch(samples))


def test_a_ratio_that_overflows_is_an_error_and_not_an_infinite_loss():
    logprobs, targets, counts = one_row([-1.0], [1.0])
    with pytest.raises(NonFiniteError, match="importance ratio"):
        loss_of(logprobs + 800.0, targets, counts, configure())


def test_missing_inputs_are_errors_by_name():
    case = one_row([1.0], [1.0])
    with pytest.raises(ValueError, match="ref_logprobs: none found"):
        loss_of(*case, configure(kl__in_loss=True))
    with pytest.raises(ValueError, match="full_kl: none found"):
        loss_of(*case, configure(kl__in_loss=True, kl__loss_estimator=KLEstimator.full))
    with pytest.raises(ValueError, match="entropy: none found"):
        loss_of(*case, configure(entropy_coef=0.1))
    with pytest.raises(ValueError, match="returns: none found"):
        critic_loss(f64([1.0]), case[1], configure(), case[2])
