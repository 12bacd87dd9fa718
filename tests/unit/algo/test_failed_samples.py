"""Samples without a reward: everything is as if they were not there."""

import dataclasses

import pytest
import torch
from algo_cases import NAMES, configure, experiences, load_preset, make_experience, some, start_kl, with_failures
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.algorithm import compute_targets, update_reward_moments
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.statistics import RunningMoments
from megarl.config.schema.algo import KLEstimator
from megarl.types import TrainingSamples

LIMIT = 30

pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")


def learn(e, algo):
    """Targets, every metric and every running statistic of an iteration."""
    moments = update_reward_moments(RunningMoments(3, 0.5, 1.0), e, algo, LIMIT)
    samples, metrics = compute_targets(e, algo, 0.1, response_length=LIMIT, reward_moments=moments)
    kl = dataclasses.replace(algo.kl, in_reward=True, target=0.1, reward_estimator=KLEstimator.k3)
    controller, kl_metrics = start_kl(kl).update(e)
    batch = compute_batch_metrics(e)
    batch.pop("reward/failed_frac", None)
    noise = {"coef": controller.coef}
    return samples, moments, metrics | kl_metrics | batch | noise


@some
@given(experiences(), st.sampled_from([*NAMES, "tether"]), st.data())
def test_targets_and_metrics_are_those_of_the_others_under_any_preset(e, name, data):
    algo = configure(advantage=name, surrogate="logprob") if name == "tether" else load_preset(name)[0]
    failed = [True for _ in e.groups] if data.draw(st.booleans()) else [data.draw(st.booleans()) for _ in e.groups]
    lost = with_failures(e, failed)
    kept = torch.tensor([i for i, f in enumerate(failed) if not f], dtype=torch.int64)
    samples, moments, metrics = learn(lost, algo)
    alone, their_moments, their_metrics = learn(e.select(kept), algo)
    assert moments == their_moments
    assert metrics == pytest.approx(their_metrics, rel=1e-12)
    assert not samples.mask[lost.failed].any()
    assert not samples.loss_mask[lost.failed].any()
    assert not samples.positive[lost.failed].any()
    for field in dataclasses.fields(TrainingSamples):
        mine, other = getattr(samples, field.name), getattr(alone, field.name)
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine[kept], other, equal_nan=True)
            assert not mine[lost.failed].any(), field.name
    assert samples.sequences is lost.sequences


def test_tokens_of_a_failed_sample_are_refused():
    e = make_experience([0, 0], [2, 4], [1.0, 0.0], [False] * 2, 0, holes=False)
    with pytest.raises(ValueError, match="mask: found tokens of failed samples"):
        compute_targets(dataclasses.replace(e, failed=torch.tensor([True, False])), configure(), 0.0)
