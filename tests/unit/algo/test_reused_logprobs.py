"""Without old_logprobs the loss takes the policy's own, detached: what a pass before the first step would give."""

from dataclasses import replace

import pytest
import torch
from algo_cases import configure, experiences, perturbed, response_positions, some, whole
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.losses import count_minibatch, policy_loss
from megarl.algo.policy_losses import POLICY_LOSSES
from megarl.config.schema.algo import KLEstimator, LossAggMode, MismatchCorrection, RatioLevel

READING = sorted(name for name, loss in POLICY_LOSSES.items() if not loss.ratio_to_rollout)


@pytest.mark.parametrize("surrogate", READING)
@some
@given(
    correction=st.sampled_from(MismatchCorrection),
    level=st.sampled_from(RatioLevel),
    experience=experiences(),
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(LossAggMode),
)
def test_loss_gradient_and_metrics_are_those_with_the_log_probs_of_a_pass(
    surrogate, correction, level, experience, seed, mode
):
    config = configure(
        surrogate=surrogate,
        loss_agg_mode=mode,
        entropy_coef=0.01,
        positive_lm_coef=0.1,
        kl__in_loss=True,
        kl__loss_estimator=KLEstimator.k3,
        mismatch__correction=correction,
        mismatch__level=level,
    )
    samples, rows, targets = whole(experience, config)
    logprobs, entropy, _ = (x[response_positions(samples, rows)] for x in perturbed(experience, seed))
    outputs, gradients = [], []
    for old in (logprobs.detach(), None):
        given_targets = replace(targets, old_logprobs=old)
        output = policy_loss(logprobs, entropy, given_targets, config, count_minibatch(samples), 24)
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
