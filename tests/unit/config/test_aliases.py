"""ROLL's names: each of the list works, shown by the composed value, or is refused with its reason."""

from functools import reduce

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, load_config
from megarl.config.names import ALIASES
from megarl.config.roll import rewrite_overrides

GROUPED = "train.responses_per_prompt=4"
WORKING: dict[str, list[tuple[list[str], dict[str, object]]]] = {
    "rollout_batch_size": [(["rollout_batch_size=64"], {"train.prompts_per_iteration": 64})],
    "num_return_sequences_in_group": [(["num_return_sequences_in_group=8"], {"train.responses_per_prompt": 8})],
    "ppo_epochs": [(["ppo_epochs=3"], {"train.epochs_per_iteration": 3})],
    "prompt_length": [(["prompt_length=30", "data=addition"], {"data.prompt_length": 30})],
    "response_length": [(["response_length=40"], {"rollout.response_length": 40})],
    "adv_estimator": [
        (["algo=ppo", "adv_estimator=gae"], {"algo.advantage": "gae"}),
        (["algo=reinforce_pp", "adv_estimator=reinforce"], {"algo.advantage": "reinforce"}),
        (["algo=lite_ppo", "adv_estimator=grpo"], {"algo.advantage": "group", "algo.advantage_std": "group"}),
        (["algo=grpo", "adv_estimator=grpo", "reward_shift=true"], {"algo.advantage_std": "none"}),
        (["algo=grpo", "adv_estimator=grpo", "reward_norm=group"], {"algo.reward_norm.mean": "none"}),
        (["algo=rloo", "adv_estimator=rloo"], {"algo.advantage": "rloo"}),
        (["algo=lite_ppo", "adv_estimator=group"], {"algo.advantage": "group", "algo.advantage_std": "batch"}),
    ],
    "reward_norm": [
        (["algo=ppo", "reward_norm=batch"], {"algo.reward_norm.mean": "batch", "algo.reward_norm.std": "batch"}),
        (
            ["algo=ppo", "algo.reward_norm=running"],
            {"algo.reward_norm.mean": "running", "algo.reward_norm.std": "running"},
        ),
        (
            ["algo=ppo", "reward_norm=group", GROUPED],
            {"algo.reward_norm.mean": "group", "algo.reward_norm.std": "group"},
        ),
        (["reward_norm=null"], {"algo.reward_norm.mean": "none", "algo.reward_norm.std": "none"}),
    ],
    "reward_shift": [
        (
            ["algo=ppo", "reward_shift=true", "reward_norm=batch"],
            {"algo.reward_norm.mean": "batch", "algo.reward_norm.std": "none"},
        ),
        (["reward_shift=false"], {"algo.reward_norm.mean": "none"}),
    ],
    "reward_scale": [
        (
            ["algo=ppo", "reward_scale=true", "reward_norm=running"],
            {"algo.reward_norm.mean": "none", "algo.reward_norm.std": "running"},
        )
    ],
    "norm_mean_type": [
        (
            ["algo=reinforce_pp", "norm_mean_type=group", "norm_std_type=batch", GROUPED],
            {"algo.reward_norm.mean": "group", "algo.reward_norm.std": "batch"},
        )
    ],
    "norm_std_type": [(["algo=ppo", "norm_std_type=batch"], {"algo.reward_norm.std": "batch"})],
    "div_std_global": [
        (
            ["algo=grpo", "adv_estimator=grpo", "div_std_global=true"],
            {"algo.advantage_std": "batch", "algo.std_of": "centered"},
        ),
        (["algo=grpo", "div_std_global=true"], {"algo.advantage_std": "batch", "algo.std_of": "centered"}),
        (["algo=lite_ppo", "div_std_global=false"], {"algo.advantage_std": "batch", "algo.std_of": "raw"}),
    ],
    "gamma": [(["algo=ppo", "gamma=0.9"], {"algo.gamma": 0.9})],
    "lambd": [(["algo=ppo", "lambd=0.9"], {"algo.lambda_policy": 0.9, "algo.lambda_critic": 0.9})],
    "lambda": [(["algo=ppo", "algo.lambda=0.8"], {"algo.lambda_policy": 0.8, "algo.lambda_critic": 0.8})],
    "whiten_advantages": [(["whiten_advantages=true"], {"algo.whiten_advantages": True})],
    "advantage_clip": [(["advantage_clip=2.0"], {"algo.advantage_clip": 2.0})],
    "reward_clip": [(["reward_clip=10"], {"algo.reward_clip": 10.0})],
    "max_len_mask": [(["max_len_mask=true"], {"algo.overlong.filter": True})],
    "add_token_level_kl": [(["add_token_level_kl=true"], {"algo.kl.in_reward": True})],
    "kl_penalty": [
        (["algo=reinforce_pp", f"kl_penalty={theirs}"], {"algo.kl.reward_estimator": ours})
        for theirs, ours in (("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("full", "full"))
    ],
    "init_kl_coef": [(["algo=reinforce_pp", "init_kl_coef=0.2"], {"algo.kl.coef": 0.2})],
    "target_kl": [
        (["algo=reinforce_pp", "target_kl=0.1"], {"algo.kl.target": 0.1}),
        (["target_kl=null"], {"algo.kl.target": None}),
    ],
    "kl_horizon": [(["algo=reinforce_pp", "target_kl=0.1", "kl_horizon=500"], {"algo.kl.horizon": 500.0})],
    "use_kl_loss": [(["use_kl_loss=true"], {"algo.kl.in_loss": True, "algo.kl.loss_estimator": "k3"})],
    "kl_loss_coef": [(["use_kl_loss=true", "kl_loss_coef=0.005"], {"algo.kl.loss_coef": 0.005})],
    "pg_clip": [
        (["pg_clip=0.1"], {"algo.clip_low": 0.1, "algo.clip_high": 0.1}),
        (["algo.pg_clip=0.1"], {"algo.clip_low": 0.1, "algo.clip_high": 0.1}),
    ],
    "use_pg_clip_range": [
        (["use_pg_clip_range=true"], {"algo.clip_low": 0.2, "algo.clip_high": 0.2}),
        (["use_pg_clip_range=false", "pg_clip=0.3"], {"algo.clip_low": 0.3, "algo.clip_high": 0.3}),
    ],
    "pg_clip_low": [
        (["use_pg_clip_range=true", "pg_clip_low=0.1"], {"algo.clip_low": 0.1, "algo.clip_high": 0.2}),
    ],
    "pg_clip_high": [
        (["use_pg_clip_range=true", "pg_clip_high=0.28"], {"algo.clip_low": 0.2, "algo.clip_high": 0.28}),
    ],
    "dual_clip_loss": [
        (["dual_clip_loss=true"], {"algo.dual_clip": 1.4}),
        (["dual_clip_loss=true", "pg_clip=0.3"], {"algo.dual_clip": 1.6, "algo.clip_high": 0.3}),
        (["dual_clip_loss=false"], {"algo.dual_clip": None}),
    ],
    "value_clip": [(["value_clip=0.5"], {"algo.value_clip": 0.5}), (["value_clip=null"], {"algo.value_clip": None})],
    "loss_agg_mode": [
        ([f"loss_agg_mode={mode}"], {"algo.loss_agg_mode": mode})
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ],
    "token_level_loss": [
        (["algo=grpo", "token_level_loss=true"], {"algo.loss_agg_mode": "token-mean"}),
        (["token_level_loss=false"], {"algo.loss_agg_mode": "seq-mean-token-mean"}),
        (["token_level_loss=false", "loss_agg_mode=seq-mean-token-sum"], {"algo.loss_agg_mode": "seq-mean-token-sum"}),
    ],
    "entropy_loss_coef": [(["entropy_loss_coef=0.01"], {"algo.entropy_coef": 0.01})],
    "rl_loss_coef": [(["rl_loss_coef=0.5"], {"algo.rl_loss_coef": 0.5})],
    "positive_loss_coef": [(["algo=topr", "positive_loss_coef=0.5"], {"algo.topr.positive_loss_coef": 0.5})],
    "postive_loss_coef": [(["algo=topr", "postive_loss_coef=0.5"], {"algo.topr.positive_loss_coef": 0.5})],
    "use_topr_neg_loss_coef": [
        (["algo=topr", "use_topr_neg_loss_coef=0.7"], {"algo.topr.negative_loss_coef": 0.7}),
        (["algo=grpo", "use_topr_neg_loss_coef=true"], {"algo.topr.negative_loss_coef": 1.0}),
        (["algo=topr", "use_topr_neg_loss_coef=false"], {"algo.topr.negative_loss_coef": 0.0}),
    ],
    "critic_warmup": [
        (["critic_warmup=7"], {"algo.value_pretrain.steps": 7}),
        (["algo=ppo", "critic_warmup=7"], {"algo.value_pretrain.enabled": True, "algo.value_pretrain.steps": 7}),
        (["algo=grpo", "critic_warmup=0"], {"algo.value_pretrain.enabled": False}),
    ],
    "max_grad_norm": [(["max_grad_norm=0.5"], {"policy.optimizer.clip_grad": 0.5})],
    "importance_sampling": [
        (["importance_sampling=token"], {"algo.surrogate": "clip"}),
        (["algo=grpo", "importance_sampling=seq"], {"algo.surrogate": "gspo"}),
    ],
}
REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "adv_estimator": [
        (["adv_estimator=step_reinforce"], "each step of an agent"),
        (["adv_estimator=gigpo"], "steps of agents"),
        (["adv_estimator=agentic_reinforce"], "adv_estimator=reinforce"),
        (["adv_estimator=ppo"], "the choices are gae, reinforce, grpo"),
        (["adv_estimator=grpo", "add_token_level_kl=true"], "norm_mean_type=group norm_std_type=group"),
        (["adv_estimator=grpo", "gamma=0.9"], "no discount"),
        (["adv_estimator=grpo", "reward_norm=batch"], "whatever is given"),
        (["adv_estimator=grpo", "reward_norm=group", "reward_scale=true"], "ROLL ignores it"),
    ],
    "reward_norm": [
        (["reward_norm=all"], "must be batch, group, running or null"),
        (["reward_norm=batch", "norm_mean_type=group"], "which set the same"),
    ],
    "reward_shift": [
        (["reward_norm=batch", "reward_shift=true", "reward_scale=true"], "leave one out"),
        (["reward_shift=true"], "give reward_norm too"),
        (["reward_shift=1"], "must be true or false"),
    ],
    "div_std_global": [
        (["algo=ppo", "adv_estimator=gae", "div_std_global=true"], "adv_estimator=grpo"),
        (["reward_norm=group", "div_std_global=true"], "no reward_norm"),
        (["adv_estimator=grpo", "reward_shift=true", "div_std_global=true"], "divides by nothing"),
    ],
    "kl_penalty": [(["kl_penalty=k4"], "the choices are kl, ")],
    "pg_clip": [
        (["use_pg_clip_range=true", "pg_clip=0.1"], "leave it out"),
        (["pg_clip=0.2", "algo.clip_low=0.1"], "pg_clip=0.2: sets algo.clip_low, which is given itself"),
        (["pg_clip=0.2", "algo.pg_clip=0.3"], "given twice"),
        (["pg_clip=null", "dual_clip_loss=true"], "must be a number"),
    ],
    "pg_clip_low": [(["pg_clip_low=0.1"], "only with use_pg_clip_range=true")],
    "token_level_loss": [(["token_level_loss=true", "loss_agg_mode=seq-mean-token-sum"], "leave one out")],
    "lambda": [(["algo=ppo", "lambda=0.9", "lambd=0.9"], "lambd")],
    "postive_loss_coef": [(["algo=topr", "postive_loss_coef=1", "positive_loss_coef=1"], "leave one out")],
    "use_kl_loss": [(["use_kl_loss=true", "algo.kl={in_loss: true}"], "given itself")],
    **{
        name: [([f"{name}=true"], f"{name}: no such thing here: {alias.text}")]
        for name, alias in ALIASES.items()
        if not alias.targets
    },
}
EVERY = sorted({*WORKING, *REFUSED})


def read(config, key):
    value = reduce(getattr, key.split("."), config)
    return getattr(value, "name", value)


def problems_of(overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def test_every_alias_is_in_this_file():
    assert set(EVERY) == set(ALIASES)


@pytest.mark.parametrize("name", sorted(WORKING))
def test_an_alias_composes_to_the_values_that_its_meaning_says(name):
    for overrides, expected in WORKING[name]:
        config = load_config(overrides)
        assert {key: read(config, key) for key in expected} == expected, overrides
        # Without a value the alias must at least set something, or say that there is nothing to set.
        assert expected or "nothing to set" in rewrite_overrides(overrides).lines[0]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_alias_that_cannot_be_met_is_refused_by_its_name_with_the_reason(name):
    for overrides, reason in REFUSED[name]:
        message = problems_of(overrides)
        assert reason in message, overrides


@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if alias.targets])
def test_an_alias_sets_only_the_keys_that_the_table_says_unless_others_come_with_it(name):
    together = {"algo.reward_norm.mean", "algo.reward_norm.std", "algo.std_of", "algo.advantage_std"}
    for overrides, _ in WORKING[name]:
        own = [text for text in overrides if text.lstrip("+").removeprefix("algo.").split("=")[0] == name]
        if len([text for text in overrides if text.removeprefix("algo.").split("=")[0] in ALIASES]) == 1:
            keys = {text.split("=")[0] for text in rewrite_overrides(own).overrides}
            assert keys <= {*ALIASES[name].targets, *(together if name in ("adv_estimator",) else ())}


@pytest.mark.parametrize("name", [name for name, alias in ALIASES.items() if not alias.targets and alias.off])
def test_what_has_no_counterpart_may_be_switched_off(name):
    for off in ALIASES[name].off:
        assert rewrite_overrides([f"{name}={str(off).lower() if isinstance(off, bool) else off}"]).overrides == []


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
