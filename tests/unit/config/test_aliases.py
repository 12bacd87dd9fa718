"""ROLL's names: each of the list works, shown by the composed value, or is refused with its reason."""

import pytest
from test_overrides import COMPOSED, REFUSED

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, load_config
from megarl.config.names import ALIASES
from megarl.config.roll import rewrite_overrides

OF_TABLES = [row.values[1] for row in (*COMPOSED, *REFUSED)]
TOGETHER = ("adv_estimator", "reward_norm", "reward_shift", "reward_scale", "use_pg_clip_range", "use_kl_loss")
"""Names that set other keys than the table says, where others come with them."""


def name_alias(override):
    return str(override).split("=")[0].removeprefix("algo.")


def problems_of(overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def test_every_alias_with_a_counterpart_is_in_the_tables():
    named = {name_alias(text) for row in OF_TABLES for text in row}
    assert {name for name, alias in ALIASES.items() if alias.targets} <= named


@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if not alias.targets])
def test_what_has_no_counterpart_is_refused_with_the_reason_and_may_be_switched_off(name):
    assert f"{name}: no such thing here: {ALIASES[name].text}" in problems_of([f"{name}=true"])
    for off in ALIASES[name].off:
        assert rewrite_overrides([f"{name}={str(off).lower() if isinstance(off, bool) else off}"]).overrides == []


@pytest.mark.parametrize(
    "row", [row.values[1][:-1] for row in COMPOSED if sum(name_alias(text) in ALIASES for text in row.values[1]) == 1]
)
def test_an_alias_sets_only_the_keys_that_the_table_says(row):
    (own,) = [text for text in row if name_alias(text) in ALIASES]
    if name_alias(own) not in TOGETHER and not own.startswith("algo.reward_norm"):
        keys = {text.split("=")[0] for text in rewrite_overrides([own]).overrides}
        assert keys <= set(ALIASES[name_alias(own)].targets)


def test_the_rewriting_is_told_in_one_line_with_its_meaning():
    rewritten = rewrite_overrides(["algo=ppo", "pg_clip=0.2", "seed=3"])
    assert rewritten.overrides == ["algo=ppo", "algo.clip_low=0.2", "algo.clip_high=0.2", "seed=3"]
    assert rewritten.lines == ["pg_clip=0.2 -> algo.clip_low=0.2 algo.clip_high=0.2 (ROLL's pg_clip sets both)"]


def test_our_own_keys_are_left_as_they_are():
    own = [
        "algo.gamma=0.9",
        "algo.reward_norm={mean: batch}",
        "algo.reward_norm.std=batch",
        "-m",
        "~algo.x",
        "algo=ppo",
    ]
    assert rewrite_overrides(own).overrides == own
    assert rewrite_overrides(own).lines == []


def rewrite_and_check(*overrides):
    check_overrides(overrides)
    rewritten = rewrite_overrides(overrides).overrides
    check_overrides(rewritten)
    return rewritten


@pytest.mark.parametrize(
    ("overrides", "rewritten"),
    [
        (["pg_clip=0.2,0.3"], ["algo.clip_low=0.2,0.3", "algo.clip_high=${algo.clip_low}"]),
        (
            ["algo=ppo", "lambd=0.9,1.0"],
            ["algo=ppo", "algo.lambda_policy=0.9,1.0", "algo.lambda_critic=${algo.lambda_policy}"],
        ),
        (["dual_clip_loss=true,false"], ["algo.dual_clip=1.4,null"]),
        (
            ["dual_clip_loss=true,false", "pg_clip=0.3"],
            ["algo.clip_low=0.3", "algo.clip_high=0.3", "algo.dual_clip=1.6,null"],
        ),
        (
            ["algo=ppo", "reward_norm=batch,running", "reward_shift=true"],
            ["algo=ppo", "algo.reward_norm.mean=batch,running", "algo.reward_norm.std=none"],
        ),
        (["whiten_advantages=true,false", "seed=1,2"], ["algo.whiten_advantages=true,false", "seed=1,2"]),
        (["token_level_loss=true,false"], ["algo.loss_agg_mode=token-mean,seq-mean-token-mean"]),
    ],
)
def test_a_sweep_over_an_alias_has_one_run_per_value(overrides, rewritten):
    assert rewrite_and_check(*overrides) == rewritten


def test_keys_that_follow_another_have_its_value_in_every_run():
    config = load_config(["algo.clip_low=0.3", "algo.clip_high=${algo.clip_low}"])
    assert (config.algo.clip_low, config.algo.clip_high) == (0.3, 0.3)
    config = load_config(["algo=ppo", "algo.reward_norm.mean=batch", "algo.reward_norm.std=${algo.reward_norm.mean}"])
    assert config.algo.reward_norm.std.name == "batch"


@pytest.mark.parametrize(
    "overrides",
    [
        ["pg_clip=0.2,0.3", "dual_clip_loss=true"],
        ["pg_clip=0.2,0.3", "dual_clip_loss=false,true"],
        ["algo=grpo", "div_std_global=true,false"],
        ["algo=ppo", "reward_norm=batch,running", "reward_shift=true,false"],
    ],
)
def test_a_sweep_that_would_change_keys_in_different_ways_is_refused(overrides):
    with pytest.raises(ConfigError, match="a sweep would have to change"):
        rewrite_overrides(overrides)


def test_every_value_of_a_swept_alias_is_checked():
    with pytest.raises(ConfigError, match="seq-mean"):
        check_overrides(["loss_agg_mode=token-mean,seq-mean"])


def test_a_range_is_a_sweep_and_an_interval_is_refused():
    assert rewrite_overrides(["ppo_epochs=range(1,4)"]).overrides == ["train.epochs_per_iteration=1,2,3"]
    with pytest.raises(ConfigError, match="list its values"):
        rewrite_overrides(["gamma=interval(0.9,1.0)"])


def test_an_alias_without_effect_is_told_with_the_name_that_was_given():
    assert "algo.lambda_policy (from lambd=0.9): has no effect" in problems_of(["algo=grpo", "lambd=0.9"])
