"""Presets, contradictions, and the printed objective."""

import dataclasses

import pytest
import reference
import torch
from algo_cases import (
    CONF,
    NAMES,
    as_lists,
    build_targets,
    configure,
    find_problems,
    load_preset,
    make_experience,
    norm,
    samples_as_lists,
)
from omegaconf import OmegaConf

from megarl.algo.algorithm import compute_targets
from megarl.algo.losses import count_minibatch, policy_loss
from megarl.algo.objective import format_objective
from megarl.config.schema.algo import (
    AdvantageStd,
    AlgoConfig,
    KLEstimator,
    LambdaLevel,
    LossAggMode,
    MismatchCorrection,
    StdOf,
)

pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_free_of_contradictions_and_holds_only_deltas(name):
    algo, train = load_preset(name)
    assert algo.name == name
    assert find_problems(algo, train.responses_per_prompt, train.num_optimizer_steps) == []
    preset = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    bases = preset.get("defaults", [])
    plain = OmegaConf.structured(load_preset(*bases)[0] if bases else AlgoConfig)

    def walk(node, base, path):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, base[key], f"{path}.{key}")
            else:
                assert getattr(base[key], "name", base[key]) != value, f"{path}.{key} repeats the default"

    walk(preset["algo"], plain, "algo")


@pytest.mark.parametrize("name", NAMES)
def test_a_presets_targets_loss_and_gradient_equal_the_reference(name):
    algo, _ = load_preset(name)
    lengths = [3, 5, 12, 1, 25, 40, 2, 8]
    e = make_experience([0] * 4 + [1] * 4, lengths, [1.0, 0.0, 0.3, 1.0, -1.0, 0.0, 1.0, 1.0], [False] * 8, 9)
    samples, _ = compute_targets(e, algo, algo.kl.coef, response_length=64)
    expected = reference.targets(as_lists(e), algo, algo.kl.coef, 64)
    torch.testing.assert_close(samples.advantages, torch.tensor(expected.advantages, dtype=torch.float64))
    rows = torch.arange(8)
    inside = torch.arange(e.mask.shape[1]) < e.sequences.response_lengths[:, None]
    lp = (e.old_logprobs * 0.8).requires_grad_()
    targets, counts = build_targets(samples, rows), count_minibatch(samples)
    loss = policy_loss(lp[inside], None, targets, algo, counts, 64).loss
    (found,) = torch.autograd.grad(loss, lp)
    theirs = reference.policy_loss(lp, None, samples_as_lists(samples), algo, 64)
    (wanted,) = torch.autograd.grad(theirs, lp)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(found, torch.nan_to_num(wanted))
    assert float(found.abs().sum()) > 0


@pytest.mark.parametrize("value", ["adaptive", "0.9", "1"])
@pytest.mark.parametrize("name", ["ppo", "vc_ppo", "vapo", "sao", "bpco", "cv_ppo"])
def test_lambda_policy_can_be_swept_under_every_preset_with_a_critic(name, value):
    algo, train = load_preset(name, f"algo.lambda_policy={value}")
    assert find_problems(algo, train.responses_per_prompt, train.num_optimizer_steps) == []
    assert str(algo.lambda_policy) == value


CONTRADICTIONS = [
    # Keys, responses per prompt and optimizer steps, what is said
    ({"advantage": "group"}, (1, 1), "train.responses_per_prompt: 1 found"),
    ({"advantage": "rloo"}, (1, 1), "train.responses_per_prompt: 1 found"),
    ({"reward_norm": norm("group", "none")}, (1, 1), "algo.reward_norm.mean=group"),
    ({"reward_norm": norm("none", "group")}, (1, 1), "algo.reward_norm.std=group"),
    ({"advantage": "group", "reward_norm": norm("group", "none")}, (8, 1), "algo.reward_norm.mean: group found"),
    ({"advantage": "rloo", "reward_norm": norm("group", "batch")}, (8, 1), "algo.reward_norm.mean: group found"),
    ({"advantage": "rloo", "surrogate": "logprob"}, (4, 2), "logprob found with 2 optimizer steps"),
    ({"advantage": "group", "gamma": 0.9}, (4, 1), "algo.gamma: 0.9 found"),
    ({"advantage_std": AdvantageStd.group}, (4, 1), "algo.advantage_std: group found"),
    ({"advantage": "group", "std_of": StdOf.centered}, (4, 1), "algo.std_of: centered found"),
    ({"lambda_policy": "0.9x"}, (1, 1), "algo.lambda_policy: '0.9x' found; must be a number from 0 to 1, or adaptive"),
    (
        {"lambda_policy": "adaptive", "lambda_level": LambdaLevel.turn},
        (1, 1),
        "algo.lambda_policy: adaptive found with",
    ),
    ({"lambda_critic": -0.1}, (1, 1), "algo.lambda_critic: found -0.1; it must be 0 or more and at most 1"),
    ({"gamma": float("nan")}, (1, 1), "algo.gamma: found nan"),
    ({"dual_clip": 1.0}, (1, 1), "algo.dual_clip: found 1.0; it must be above 1"),
    ({"kl__in_loss": True, "kl__loss_estimator": KLEstimator.k1}, (1, 1), "gradient on-policy is zero"),
    ({"kl__in_loss": True, "kl__loss_coef": 0.0}, (1, 1), "algo.kl.loss_coef: found 0.0"),
    ({"kl__in_reward": True, "kl__coef": 0.0}, (1, 1), "algo.kl.coef: found 0.0"),
    ({"kl__target": 0.1}, (1, 1), "algo.kl.target: 0.1 found"),
    ({"kl__in_reward": True, "kl__in_advantage": True}, (1, 1), "algo.kl.in_advantage: true found with algo.kl.in_rew"),
    ({"advantage": "none"}, (1, 1), "algo.advantage: none found with algo.kl.in_advantage=false"),
    (
        {"advantage": "group", "kl__in_advantage": True, "topr__positive_loss_coef": 1.0, "rl_loss_coef": 0.0},
        (4, 1),
        "algo.kl.in_advantage: true found; the topr terms",
    ),
    ({"overlong__filter_critic": True}, (1, 1), "algo.overlong.filter_critic: true found"),
    ({"rl_loss_coef": 0.0}, (1, 1), "algo.rl_loss_coef: 0 found"),
    ({"topr__positive_loss_coef": 1.0}, (1, 1), "algo.advantage: gae found; the topr terms"),
    ({"advantage": "group", "value_pretrain__enabled": True}, (4, 1), "algo.value_pretrain.enabled: true"),
    ({"advantage": "group", "value_clip": 0.2}, (4, 1), "algo.value_clip: 0.2 found"),
    ({"value_loss_agg_mode": LossAggMode["seq-mean-token-sum-norm"]}, (1, 1), "algo.value_loss_agg_mode"),
    ({"clip_low": 1.2}, (1, 1), "algo.clip_low: found 1.2"),
    (
        {"surrogate": "sapo", "surrogate_options": {"tau_negative": 0.0}},
        (1, 1),
        "algo.surrogate_options.tau_negative: 0 found; the gate divides by it: must be above 0",
    ),
    ({"surrogate": "dis", "clip_low": 0.0}, (1, 1), "algo.clip_low: 0 found with algo.surrogate=dis"),
    ({"surrogate": "dis", "clip_low": 1.0}, (1, 1), "must be above 0 and below 1"),
    ({"surrogate": "dis", "clip_high": 0.0}, (1, 1), "algo.clip_high: 0 found with algo.surrogate=dis"),
    ({"surrogate": "dppo", "clip_low": 0.0}, (1, 1), "algo.clip_low: 0 found with algo.surrogate=dppo"),
    ({"surrogate": "dppo", "clip_high": 1.5}, (1, 1), "must be above 0 and at most 1"),
    *(
        (
            {"surrogate": name, "mismatch__correction": MismatchCorrection.tis},
            (1, 1),
            f"found with algo.surrogate={name}",
        )
        for name in ("dis", "dppo")
    ),
    *(
        ({"surrogate": name, "dual_clip": 3.0}, (1, 1), f"it has no effect under algo.surrogate={name}")
        for name in ("dis", "dppo", "cispo", "sapo", "logprob")
    ),
]


@pytest.mark.parametrize(("values", "sizes", "message"), CONTRADICTIONS)
def test_a_contradiction_is_named_with_its_key_and_what_would_be_right(values, sizes, message):
    found = find_problems(configure(**values), *sizes)
    assert len(found) == 1, found
    assert message in found[0]
    assert "must be" in found[0] or "only with" in found[0]


def test_every_number_shows_in_the_printed_objective():
    """A changed number changes the text, so that the print can be trusted to tell two runs apart."""
    on = {
        **{"overlong__penalty": 1.0, "kl__in_reward": True, "kl__in_loss": True, "dual_clip": 3.0, "value_clip": 0.2},
        **{"positive_lm_coef": 0.1, "topr__positive_loss_coef": 1.0},
    }
    numbers = [name for name, value in dataclasses.asdict(AlgoConfig()).items() if isinstance(value, float)]
    assert "length_alpha" in numbers
    for name in (*numbers, *on.keys() - {"kl__in_reward", "kl__in_loss"}, "kl__coef", "kl__loss_coef"):
        base = on | {"lambda_policy": "adaptive"} if name in ("length_alpha", "lambda_min") else on
        texts = {format_objective(configure(**(base | {name: value})), 4) for value in (0.37, 0.38)}
        assert len(texts) == 2, name
    taught = {format_objective(configure(kl__in_advantage=True, kl__advantage_coef=value), 4) for value in (0.37, 0.38)}
    assert len(taught) == 2
