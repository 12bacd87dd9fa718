"""A key that somebody set and that has no effect under the chosen algorithm is an error that says so."""

from dataclasses import is_dataclass, replace
from functools import cache, reduce

import pytest
from omegaconf import OmegaConf

from megarl.config.checks.keys import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, list_options, load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.values import list_values

PRESETS = list_options("algo")
CRITIC = {"ppo", "vc_ppo", "vapo", "sao", "bpco"}
PRETRAINED = {"vc_ppo", "vapo", "sao"}
ADAPTIVE = {"vapo", "sao", "bpco"}
KL_IN_REWARD = {"reinforce_pp", "rloo"}
KL_IN_LOSS = {"grpo", "reinforce_pp_baseline"}
GROUPED = {"rloo", "grpo", "dapo", "lite_ppo", "topr", "reinforce_pp_baseline", "gspo", "cispo", "dr_grpo"}
FILTERED = {"dapo", "cispo"}

ALWAYS = {
    *("name", "advantage", "positive_threshold", "whiten_advantages", "advantage_clip", "reward_clip"),
    *("reward_norm.std", "overlong.penalty", "overlong.filter", "kl.in_reward", "kl.in_loss", "rl_loss_coef"),
    *("positive_lm_coef", "entropy_coef", "topr.positive_loss_coef", "topr.negative_loss_coef", "loss_agg_mode"),
    *("dynamic_sampling.enabled", "replay.num_iterations"),
}
"""Keys that count under every preset."""
LIVE = {
    **dict.fromkeys(("mismatch.level", "mismatch.low", "mismatch.high"), set(PRESETS) - {"sao", "bpco"}),
    **dict.fromkeys(("lambda_policy", "lambda_critic", "value_clip", "value_loss_agg_mode"), CRITIC),
    "tether.decay": set(),
    "tether.initial": set(),
    "value_pretrain.enabled": CRITIC,
    "value_pretrain.steps": PRETRAINED,
    **{f"value_pretrain.{name}": PRETRAINED for name in ("patience", "min_improvement", "rollouts")},
    "value_pretrain.stop_at_explained_variance": PRETRAINED,
    "length_alpha": ADAPTIVE,
    "lambda_min": ADAPTIVE,
    "gamma": CRITIC | {"reinforce_pp"},
    "reward_norm.mean": CRITIC | {"reinforce_pp"},
    "advantage_std": GROUPED - {"rloo"},
    "std_of": {"lite_ppo"},
    "overlong.buffer_frac": FILTERED,
    "overlong.filter_critic": set(),
    **dict.fromkeys(("kl.reward_estimator", "kl.coef", "kl.target"), KL_IN_REWARD),
    "kl.horizon": set(),
    **dict.fromkeys(("kl.loss_estimator", "kl.loss_coef"), KL_IN_LOSS),
    **dict.fromkeys(("surrogate", "mismatch.correction"), set(PRESETS) - {"topr"}),
    **dict.fromkeys(("clip_low", "clip_high"), set(PRESETS) - {"topr", "rloo"}),
    "dual_clip": set(PRESETS) - {"topr", "rloo", "cispo", "sao", "bpco"},
    "positive_lm_mean_over": {"vapo"},
    "topr.ratio_level": {"topr"},
    **dict.fromkeys(("dynamic_sampling.by", "dynamic_sampling.max_rounds"), FILTERED),
    "replay.frac": set(),
}
"""The others: the presets under which each counts."""


LEAVES = [
    key for key, _ in list_values(AlgoConfig()) if not is_dataclass(reduce(getattr, key.split("."), AlgoConfig()))
]


VALUES = {
    **{"name": "x", "advantage": "gae", "whiten_advantages": "true", "advantage_clip": "2", "reward_clip": "5"},
    **{"reward_norm.std": "batch", "reward_norm.mean": "batch", "overlong.penalty": "1", "overlong.filter": "true"},
    **{"kl.in_reward": "true", "kl.in_loss": "true", "mismatch.level": "sequence", "loss_agg_mode": "token-mean"},
    **{"dynamic_sampling.enabled": "true", "replay.num_iterations": "2", "value_loss_agg_mode": "token-mean"},
    **{"value_pretrain.rollouts": "x.jsonl", "value_pretrain.patience": "3", "value_pretrain.steps": "3"},
    "value_pretrain.enabled": "true",
    **{"advantage_std": "batch", "std_of": "centered", "overlong.filter_critic": "true"},
    **{"kl.reward_estimator": "k1", "kl.target": "0.1", "kl.horizon": "1000", "kl.loss_estimator": "k2"},
    **{"surrogate": "clip", "mismatch.correction": "tis", "dual_clip": "3", "topr.ratio_level": "token"},
    "positive_lm_mean_over": "all_tokens",
    **{"dynamic_sampling.by": "reward", "dynamic_sampling.max_rounds": "3"},
    **{"value_clip": "0.5", "mismatch.high": "3", "kl.coef": "0.1"},
}
"""What is set; 0.5 for the others."""


def problems_of(*overrides, command="train"):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, command)
    return str(caught.value)


@cache
def load_preset(preset):
    return load_config([f"algo={preset}", "model=tiny"])


def find_dead_presets(key):
    """The presets under which the key has no effect, set to its value, everything else as the preset has it."""
    dead = set()
    for preset in PRESETS:
        config = load_preset(preset)
        algo = OmegaConf.structured(config.algo)
        OmegaConf.update(algo, key, VALUES.get(key, "0.5"))
        config = replace(config, algo=OmegaConf.to_object(algo))
        if list(find_unused(config, [f"algo.{key}"])):
            dead.add(preset)
    return dead


def test_every_key_of_the_algo_group_is_in_one_of_the_tables():
    assert set(LEAVES) == ALWAYS | set(LIVE)
    assert not ALWAYS & set(LIVE)


@pytest.mark.parametrize("key", sorted(ALWAYS))
def test_a_key_that_always_counts_is_dead_under_no_preset(key):
    assert find_dead_presets(key) == set()


@pytest.mark.parametrize("key", sorted(LIVE))
def test_a_key_is_refused_under_exactly_the_presets_where_it_is_dead(key):
    assert find_dead_presets(key) == set(PRESETS) - LIVE[key]


def test_a_key_set_to_the_value_that_it_has_already_counts_as_set():
    message = problems_of("algo=grpo", "algo.gamma=1.0")
    assert message.startswith("algo.gamma: has no effect under algo.advantage=group")
    assert "gae or reinforce" in message


@pytest.mark.parametrize(
    "override",
    [
        *("algo.value_pretrain.steps=0", "algo.value_clip=null", "algo.kl.in_loss=false", "algo.kl.target=null"),
        *("algo.advantage_std=none", "algo.overlong.filter_critic=false", "algo.dual_clip=null", "algo.std_of=raw"),
        *("algo.reward_norm.mean=none", "algo.value_pretrain.patience=null", "algo.mismatch.correction=none"),
        "algo.value_pretrain.rollouts=null",
    ],
)
def test_switching_a_feature_off_that_is_off_anyway_is_allowed(override):
    for preset in ("topr", "rloo"):
        load_config([f"algo={preset}", override])


def test_a_key_is_live_again_with_what_the_message_asks_for():
    load_config(
        ["algo=grpo", "algo.kl.in_reward=true", "algo.kl.target=0.1", "algo.kl.horizon=100", "algo.kl.coef=0.1"]
    )
    load_config(["algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.25"])
    load_config(["algo=ppo", "algo.overlong.filter=true", "algo.overlong.filter_critic=true"])
    load_config(["algo=grpo", "algo.reward_norm.mean=batch", "algo.reward_clip=1"])


def test_the_numbers_that_a_preset_leaves_unused_are_nobodys_mistake():
    config = load_config(["algo=grpo", "model=tiny"])
    assert config.critic.optimizer.lr == 2e-3


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
    assert "trains nothing" in problems_of("policy.optimizer.lr=1e-3", command="evaluate")
    load_config(["evaluate.num_samples=2"], "evaluate")


def test_the_reward_of_a_wrong_answer_counts_wherever_something_is_learned_from_it():
    alone = ["algo.value_pretrain.rollouts=r.jsonl", "train.num_iterations=0"]
    assert load_config([*alone, "reward.wrong=-1"]).reward.wrong == -1
    for key in ("reward.tolerance=1.5", "logger.save_rollouts=true", "policy.dtype=float32", "train.max_samples=9"):
        assert "where the critic alone learns" in problems_of(*alone, key)
    assert "trains nothing" in problems_of("reward.wrong=-1", command="evaluate")


def test_a_sweep_over_presets_checks_the_key_under_each():
    with pytest.raises(ConfigError, match=r"algo\.lambda_policy: has no effect under algo\.advantage=group"):
        check_overrides(["algo=vapo,grpo", "algo.lambda_policy=0.9"])
    check_overrides(["algo=vapo,ppo", "algo.lambda_policy=0.9"])
