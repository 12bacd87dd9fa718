"""A key that somebody set and that has no effect under the chosen algorithm is an error that says so."""

from dataclasses import replace
from functools import cache

import pytest
from omegaconf import OmegaConf
from test_load import problems_of

from megarl.config.checks import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, list_options, load_config
from megarl.config.overrides import list_values
from megarl.config.schema.algo import AlgoConfig

PRESETS = list_options("algo")
GAE = {"ppo", "vc_ppo", "vapo", "sao", "bpco"}
CRITIC = GAE | {"cv_ppo"}
PRETRAINED = {"vc_ppo", "vapo", "sao"}
ADAPTIVE = {"vapo", "sao", "bpco"}
FILTERED = {"dapo", "cispo"}
GROUPED = {"grpo", "dapo", "lite_ppo", "topr", "reinforce_pp_baseline", "gspo", "cispo", "dr_grpo"}
LIVE = {
    "mismatch.level mismatch.low mismatch.high": set(PRESETS) - {"sao", "bpco"},
    "lambda_policy lambda_floor lambda_critic lambda_level value_loss value_clip value_loss_agg_mode": CRITIC,
    "value_pretrain.enabled": CRITIC,
    "value_pretrain.steps value_pretrain.patience value_pretrain.min_improvement value_pretrain.rollouts": PRETRAINED,
    "value_pretrain.stop_at_explained_variance": PRETRAINED,
    "length_alpha lambda_min": ADAPTIVE,
    "reward_norm.std reward_clip overlong.penalty whiten_advantages": set(PRESETS) - {"distill"},
    "gamma": GAE | {"reinforce_pp"},
    "reward_norm.mean": CRITIC | {"reinforce_pp"},
    "advantage_std": GROUPED,
    "std_of": {"lite_ppo"},
    "dynamic_sampling.value_low dynamic_sampling.value_high": FILTERED & CRITIC,
    "overlong.buffer_frac dynamic_sampling.by dynamic_sampling.max_rounds": FILTERED,
    "dynamic_sampling.low dynamic_sampling.high dynamic_sampling.rest dynamic_sampling.skip_epochs": FILTERED,
    "kl.reward_estimator kl.coef kl.target": {"reinforce_pp", "rloo"},
    "kl.advantage_coef": {"distill"},
    "kl.loss_estimator kl.loss_coef": {"grpo", "reinforce_pp_baseline"},
    "surrogate surrogate_options mismatch.correction": set(PRESETS) - {"topr"},
    "clip_low clip_high": set(PRESETS) - {"topr", "rloo"},
    "dual_clip": set(PRESETS) - {"topr", "rloo", "cispo", "sao", "bpco"},
    "positive_lm_mean_over": {"vapo"},
    "topr.ratio_level": {"topr"},
    "tether.decay tether.initial kl.horizon replay.frac": set(),
    "overlong.filter_critic": set(),
}
"""The presets under which a key counts; under all of them where it is not named."""
VALUES = {
    "name": "x", "advantage": "gae", "surrogate": "clip", "advantage_std": "batch", "std_of": "centered",
    "surrogate_options": {"tau_positive": 2.0},
    "value_pretrain.rollouts": "x.jsonl", "value_pretrain.patience": "3", "value_pretrain.steps": "3",
    "mismatch.level": "sequence", "mismatch.correction": "tis", "dual_clip": "3", "topr.ratio_level": "token",
    "kl.reward_estimator": "k1", "kl.loss_estimator": "k2", "positive_lm_mean_over": "all_tokens",
    "dynamic_sampling.by": "reward", "dynamic_sampling.max_rounds": "3", "replay.num_iterations": "2",
    "reward_norm.mean": "batch", "reward_norm.std": "batch", "loss_agg_mode": "token-mean",
    "reward_norm.parts": {"a": 1.0}, "dynamic_sampling.rest": "mask", "dynamic_sampling.skip_epochs": "3",
    "value_loss_agg_mode": "token-mean", "value_loss": "cross_entropy", "lambda_level": "turn", "mismatch.high": "3",
    **dict.fromkeys(("overlong.filter", "overlong.filter_critic", "kl.in_reward", "kl.in_loss"), "true"),
    "kl.in_advantage": "true",
    **dict.fromkeys(("dynamic_sampling.enabled", "value_pretrain.enabled", "whiten_advantages"), "true"),
}  # fmt: skip
"""What is set; 0.5 for the others."""
KEYS = [key for key, value in list_values(AlgoConfig()) if not str(value).endswith("Config")]


@cache
def load_preset(preset: str):
    return load_config([f"algo={preset}", "model=tiny"])


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_refused_under_exactly_the_presets_where_it_is_dead(key: str) -> None:
    live = next((presets for keys, presets in LIVE.items() if key in keys.split()), set(PRESETS))
    found = set()
    for preset in PRESETS:
        config = load_preset(preset)
        algo = OmegaConf.structured(config.algo)
        OmegaConf.update(algo, key, VALUES.get(key, "0.5"))
        if not list(find_unused(replace(config, algo=OmegaConf.to_object(algo)), [f"algo.{key}"])):
            found.add(preset)
    assert found == live


@pytest.mark.parametrize("preset", sorted(CRITIC - {"sao", "bpco"}))
@pytest.mark.parametrize("advantage", ["group", "reinforce", "rloo"])
def test_another_advantage_under_a_preset_with_a_critic_asks_for_nothing_that_is_then_refused(preset, advantage):
    """VAPO's adaptive lambda_policy is the preset's, and does not count; value pretraining can be switched off."""
    overrides = [f"algo={preset}", f"algo.advantage={advantage}", "train.responses_per_prompt=4"]
    if preset in PRETRAINED:
        problems = problems_of(*overrides).splitlines()
        assert [line.split(":")[0] for line in problems] == ["algo.value_pretrain.enabled"]
        overrides.append("algo.value_pretrain.enabled=false")
    load_config(overrides)


def test_each_command_has_its_own_dead_keys():
    for key in ("policy.optimizer.lr=1e-3", "reward.wrong=-1"):
        assert "trains nothing" in problems_of(key, command="evaluate")
    load_config(["evaluate.num_samples=2"], "evaluate")


def test_where_the_critic_alone_learns_the_reward_of_a_wrong_answer_counts():
    alone = ["algo.value_pretrain.rollouts=r.jsonl", "train.num_iterations=0"]
    assert load_config([*alone, "reward.wrong=-1"]).reward.wrong == -1
    for key in ("reward.tolerance=1.5", "logger.save_rollouts=true", "policy.dtype=float32", "train.max_samples=9"):
        assert "where the critic alone learns" in problems_of(*alone, key)


def test_every_run_of_a_sweep_is_checked_before_any_starts():
    for sweep in (["algo=vapo,grpo", "algo.lambda_policy=0.9"], ["algo.lambda_policy=0.95,adaptive,quick"]):
        with pytest.raises(ConfigError, match=r"algo\.lambda_policy"):
            check_overrides(sweep)
    check_overrides(["algo=vapo,ppo", "algo.lambda_policy=0.9"])
