"""TOPR: its terms by hand, what its taper is logged as, and how much of it the rollout engine's noise explains."""

import dataclasses
import math
import warnings

import pytest
import torch
from algo_cases import at_responses, configure, loss_of, make_experience, one_row, perturbed, whole, with_gaps

from megarl.algo.diagnostics import compute_engine_taper, measure_engine_noise
from megarl.algo.losses import count_minibatch
from megarl.algo.targets import compute_targets
from megarl.config.schema.algo import LossAggMode, RatioLevel


def test_topr_by_hand():
    # lp = ln 0.5, ln 0.25; mu says 0.5 for both: rho of the sequence 1/2, of the tokens 1 and 1/2.
    mode = LossAggMode["seq-mean-token-sum"]
    config = configure(rl_loss_coef=0.0, topr__positive_loss_coef=2.0, topr__negative_loss_coef=3.0, loss_agg_mode=mode)
    total = 3 * math.log(2)  # -lp summed
    assert float(loss_of(*one_row([1, 1], [1, 0.5]), config).loss) == pytest.approx(2 * total)
    negative = one_row([-1, -1], [1, 0.5])
    assert float(loss_of(*negative, config).loss) == pytest.approx(-3 * 0.5 * total)
    config.topr.ratio_level = RatioLevel.token
    assert float(loss_of(*negative, config).loss) == pytest.approx(-3 * (math.log(2) + 0.5 * 2 * math.log(2)))
    # rho above 1 is held at 1: mu thought the tokens less likely than the policy does
    sampling = torch.full((2,), -10.0, dtype=torch.float64)
    likely = one_row([-1, -1], [1, 0.5], sampling_logprobs=sampling)
    assert float(loss_of(*likely, config).loss) == pytest.approx(-3 * total)
    config.topr.ratio_level = RatioLevel.geometric
    assert float(loss_of(*negative, config).loss) == pytest.approx(-3 * math.sqrt(0.5) * total)


def topr_config(level=RatioLevel.sequence):
    return configure(
        rl_loss_coef=0.0, topr__positive_loss_coef=1.0, topr__negative_loss_coef=1.0, topr__ratio_level=level
    )


def test_the_rollout_engines_logprobs_do_not_taper_what_the_trainer_holds_for_as_likely_as_when_it_was_sampled():
    noisy = torch.full((2,), 0.0, dtype=torch.float64)  # The engine held the tokens for certain.
    out = loss_of(*one_row([-1, -1], [1, 1], rollout_logprobs=noisy), topr_config())
    assert float(out.loss) == pytest.approx(-math.log(2))
    assert [float(out.sums[f"topr/taper_{name}"]) for name in ("mean", "zero_frac", "one_frac")] == [1, 0, 1]


def test_the_taper_is_logged_over_the_tokens_of_negative_advantage():
    # rho of the tokens 0.005, 0.5 and 2, the last of a positive token's neighbours left out
    case = one_row([-1, -1, -1, 1], [0.005, 0.5, 2, 0.001])
    sums = loss_of(*case, topr_config(RatioLevel.token)).sums
    assert float(sums["topr/taper_mean"]) == pytest.approx((0.005 + 0.5 + 1) / 3)
    assert float(sums["topr/taper_zero_frac"]) == pytest.approx(1 / 3)
    assert float(sums["topr/taper_one_frac"]) == pytest.approx(1 / 3)
    assert not any(name.startswith("topr/") for name in loss_of(*one_row([1, 1], [1, 1]), topr_config()).sums)


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


def test_topr_adds_to_the_surrogate():
    mode = LossAggMode["seq-mean-token-sum"]
    case = one_row([1, 1], [1, 1])
    both = configure(topr__positive_loss_coef=1.0, loss_agg_mode=mode, rl_loss_coef=0.5)
    assert float(loss_of(*case, both).loss) == pytest.approx(-0.5 * 2 + 2 * math.log(2))


def negatives(lengths, scored):
    """Responses of negative advantage, and the tokens that the trainer scored: those of the rows `scored`."""
    e = make_experience([0] * len(lengths), lengths, [0.0] * len(lengths), [False] * len(lengths), 1, holes=False)
    samples, _ = compute_targets(e, configure(advantage="group"), 0.0)
    rows = torch.tensor(scored)[:, None]
    return dataclasses.replace(samples, advantages=-samples.mask.double()), samples.mask & rows


@pytest.mark.parametrize(("length", "weight"), [(256, 0.87), (4096, 0.52), (16384, 0.20)])
def test_engine_noise_of_a_fiftieth_a_token_takes_long_negatives_from_a_product_of_ratios(length, weight):
    samples, scored = negatives([length], [False])
    with pytest.warns(RuntimeWarning, match="the rollout engine's noise alone leaves the negative responses"):
        metrics = compute_engine_taper(samples, scored, RatioLevel.sequence, 0.02)
    assert metrics == {"topr/engine_mu_frac": 1.0, "topr/engine_taper": pytest.approx(weight, abs=0.005)}
    # The same by sampling: log pi - log mu of 20000 responses
    noise, g = 0.02 * length**0.5, torch.Generator().manual_seed(0)
    drawn = torch.randn(20000, generator=g, dtype=torch.float64) * noise - noise**2 / 2
    assert metrics["topr/engine_taper"] == pytest.approx(float(drawn.clamp(max=0).exp().mean()), abs=0.01)
    # Per token and length-normalized it is borne, and where the trainer scored the tokens there is none.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for level, expected in ((RatioLevel.token, 0.992), (RatioLevel.geometric, 1.0)):
            found = compute_engine_taper(samples, scored, level, 0.02)["topr/engine_taper"]
            assert found == pytest.approx(expected, abs=0.001)
        own = compute_engine_taper(samples, samples.mask, RatioLevel.sequence, 0.02)
        assert own == {"topr/engine_mu_frac": 0.0, "topr/engine_taper": 1.0}


def test_engine_noise_counts_for_negative_tokens_only_and_is_unknown_without_tokens_of_the_same_weights():
    samples, scored = negatives([4, 12], [True, False])
    assert compute_engine_taper(samples, scored, RatioLevel.sequence, None) == {"topr/engine_mu_frac": 0.75}
    positive = dataclasses.replace(samples, advantages=-samples.advantages)
    assert compute_engine_taper(positive, scored, RatioLevel.sequence, 0.02) == {}


def test_engine_noise_is_measured_where_the_same_weights_gave_both_logprobs():
    e = with_gaps([[0.1, -0.1, 5.0], [7.0]], [0, 1], [3, 1])
    scored = e.mask.clone()
    scored[0, 2] = False
    assert measure_engine_noise(dataclasses.replace(e, scored=scored)) == pytest.approx(0.1)
    assert measure_engine_noise(dataclasses.replace(e, scored=torch.zeros_like(e.mask))) is None
