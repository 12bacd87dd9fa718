"""Losses and gradients against the reference, under every cut of the minibatch, and without old_logprobs, when the loss
takes the policy's own, detached: what a pass before the first step would give.
"""

import math
from dataclasses import replace

import pytest
import reference
import torch
from algo_cases import (
    LIMIT,
    at_responses,
    build_targets,
    configure,
    experiences,
    few,
    perturbed,
    samples_as_lists,
    some,
    whole,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.algo.losses import count_minibatch, critic_loss, policy_loss
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.config.schema.algo import (
    KLEstimator,
    LossAggMode,
    MismatchCorrection,
    PositiveLMMean,
    RatioLevel,
    ValueLoss,
)

AGGREGATIONS = list(LossAggMode)


def policy_configs():
    return st.builds(
        lambda mode, kl, entropy, topr, level, correction, mismatch, dual, surrogate, lm, over, overlong: configure(
            loss_agg_mode=mode,
            kl__in_loss=kl is not None,
            kl__loss_estimator=kl or KLEstimator.k3,
            kl__loss_coef=0.3,
            entropy_coef=entropy,
            topr__positive_loss_coef=topr,
            topr__negative_loss_coef=2 * topr,
            topr__ratio_level=level,
            mismatch__correction=correction,
            mismatch__level=mismatch,
            mismatch__low=0.7,
            mismatch__high=1.3,
            dual_clip=dual,
            surrogate=surrogate,
            surrogate_options={"tau_positive": 0.7} if surrogate == "sapo" else {},
            positive_lm_coef=lm,
            positive_lm_mean_over=over,
            advantage="group",
            overlong__filter=overlong,
            clip_high=0.28,
            rl_loss_coef=0.8,
        ),
        st.sampled_from(AGGREGATIONS),
        st.sampled_from([None, KLEstimator.k2, KLEstimator.k3, KLEstimator.abs, KLEstimator.full]),
        st.sampled_from([0.0, 0.2]),
        st.sampled_from([0.0, 0.7]),
        st.sampled_from(RatioLevel),
        st.sampled_from(MismatchCorrection),
        st.sampled_from(RatioLevel),
        st.sampled_from([None, 1.5]),
        st.sampled_from(sorted(POLICY_LOSSES)),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from(PositiveLMMean),
        st.booleans(),
    )


@some
@given(experiences(), policy_configs(), st.integers(0, 1000))
def test_the_policy_loss_and_its_gradient_equal_the_reference(e, config, seed):
    samples, rows, targets = whole(e, config)
    counts = count_minibatch(samples)
    found = perturbed(e, seed)
    lp, h, full = (at_responses(samples, rows, x) for x in found)
    out = policy_loss(lp, h, targets, config, counts, LIMIT, full)
    out.loss.backward()
    theirs = perturbed(e, seed)
    expected = reference.policy_loss(*theirs[:2], samples_as_lists(samples), config, LIMIT, theirs[2])
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-9)
    if expected.requires_grad:
        expected.backward()
    for mine, other in zip(found, theirs, strict=True):
        zero = torch.zeros_like(mine)
        torch.testing.assert_close(
            zero if mine.grad is None else mine.grad, zero if other.grad is None else other.grad, rtol=1e-9, atol=1e-9
        )
    assert all(torch.isfinite(x) for x in out.sums.values())
    logged = [out.sums.get(f"topr/taper_{name}") for name in ("mean", "zero_frac", "one_frac")]
    used = config.topr.positive_loss_coef > 0
    expected = reference.taper_metrics(theirs[0], samples_as_lists(samples), config) if used else None
    assert logged == ([None] * 3 if expected is None else [pytest.approx(x, abs=1e-9) for x in expected])


@some
@given(
    experiences(),
    st.sampled_from(AGGREGATIONS[:3]),
    st.sampled_from([None, 0.1]),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.sampled_from([(ValueLoss.squared, None), (ValueLoss.cross_entropy, (-2.0, 3.0))]),
    st.integers(0, 1000),
)
def test_the_critic_loss_and_its_gradient_equal_the_reference(e, mode, clip, filters, loss, seed):
    config = configure(value_loss_agg_mode=mode, value_clip=clip, value_loss=loss[0])
    config.overlong.filter, config.overlong.filter_critic = filters
    samples, rows, targets = whole(e, config)
    g = torch.Generator().manual_seed(seed)
    found = (e.values + torch.randn(e.mask.shape, generator=g, dtype=torch.float64) * 0.3).requires_grad_()
    out = critic_loss(at_responses(samples, rows, found), targets, config, count_minibatch(samples), loss[1])
    out.loss.backward()
    other = found.detach().clone().requires_grad_()
    expected = reference.critic_loss(other, samples_as_lists(samples), config, loss[1])
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-9)
    if expected.requires_grad:
        expected.backward()
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-9, atol=1e-9)


@few
@given(experiences(), policy_configs(), st.integers(0, 1000), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_split_into_micro_batches_in_any_order_gives_the_same_loss_gradient_and_metrics(
    e, config, seed, pieces, random
):
    samples, rows, targets = whole(e, config)
    counts = count_minibatch(samples)
    one = perturbed(e, seed)
    args = (config, counts, LIMIT)
    lp, h, full = (at_responses(samples, rows, x) for x in one)
    expected = policy_loss(lp, h, targets, *args, full)
    expected.loss.backward()
    order = rows.tolist()
    random.shuffle(order)
    cut = perturbed(e, seed)
    loss, sums, largest = torch.zeros((), dtype=torch.float64), {}, -math.inf
    for piece in torch.tensor(order).tensor_split(pieces):
        part = build_targets(samples, piece)
        lp, h, full = (at_responses(samples, piece, x) for x in cut)
        out = policy_loss(lp, h, part, *args, full)
        out.loss.backward()
        loss = loss + out.loss.detach()
        sums = {name: sums.get(name, 0.0) + value for name, value in out.sums.items()}
        largest = max(largest, float(out.maxima["policy/ratio_max"]))
    torch.testing.assert_close(loss, expected.loss.detach())
    for mine, whole_ in zip(cut, one, strict=True):
        torch.testing.assert_close(mine.grad, whole_.grad, rtol=1e-9, atol=1e-12)
    assert largest == pytest.approx(float(expected.maxima["policy/ratio_max"]))
    for name, value in expected.sums.items():
        torch.testing.assert_close(torch.as_tensor(sums[name]), value)


@few
@given(experiences(dtype=torch.float32), policy_configs(), st.integers(0, 1000))
def test_the_loss_has_the_dtype_of_its_input_and_float32_is_close_to_the_reference(e, config, seed):
    samples, rows, targets = whole(e, config)
    lp, h, full = perturbed(e, seed)
    mine = [at_responses(samples, rows, x.detach()).float() for x in (lp, h, full)]
    out = policy_loss(*mine[:2], targets, config, count_minibatch(samples), LIMIT, mine[2])
    assert out.loss.dtype is torch.float32
    expected = reference.policy_loss(lp, h, samples_as_lists(samples), config, LIMIT, full)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-4)


@settings(some, max_examples=160)
@given(experiences(), policy_configs(), st.integers(0, 2**31))
def test_loss_gradient_and_metrics_without_old_logprobs_are_those_with_the_log_probs_of_a_pass(e, config, seed):
    assume(not POLICY_LOSSES[config.surrogate].ratio_to_rollout)
    samples, rows, targets = whole(e, config)
    logprobs, entropy, full = (at_responses(samples, rows, x) for x in perturbed(e, seed))
    outputs, gradients = [], []
    for old in (logprobs.detach(), None):
        given_targets, counts = replace(targets, old_logprobs=old), count_minibatch(samples)
        output = policy_loss(logprobs, entropy, given_targets, config, counts, LIMIT, full)
        gradients.append(torch.autograd.grad(output.loss, logprobs, retain_graph=True)[0])
        outputs.append(output)
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(gradients[0], gradients[1])
    for kind in ("sums", "maxima"):
        before, after = (getattr(output, kind) for output in outputs)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert outputs[0].old_logprobs is None
    assert torch.equal(outputs[1].old_logprobs[targets.mask], logprobs.detach()[targets.mask])
    assert not outputs[1].old_logprobs.requires_grad
