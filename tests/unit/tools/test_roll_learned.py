"""What is learned (data, reward, objective, model) is imported from ROLL's file, or is lost with code 1."""

import pytest
from roll_cases import CODE, PG_WORKER, STRATEGY, import_tree, load_tree, make

from megarl.config.roll_import import get_exit_code, list_losses


def test_topr_of_the_policy_gradient_worker_is_topr_here_with_its_token_ratio(tmp_path):
    variant = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "topr", "norm_mean_type": "batch"}
    config = load_tree(tmp_path, make(**variant, **{"actor_train.topr_negative_weight": 0.5}))
    assert (config.algo.name, config.algo.rl_loss_coef, config.algo.advantage) == ("topr", 0.0, "reinforce")
    topr = config.algo.topr
    assert (topr.positive_loss_coef, topr.negative_loss_coef, topr.ratio_level.name) == (1.0, 0.5, "token")


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"adv_estimator": "grpo", "whiten_advantages": True}, True),
        ({"adv_estimator": "grpo"}, False),
        ({"add_token_level_kl": True}, None),
        ({"adv_estimator": "gae"}, None),
    ],
)
def test_topr_is_lost_where_a_score_above_0_is_not_an_advantage_above_0(tmp_path, changes, lost):
    variant = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "topr"}
    outcomes, problems = import_tree(tmp_path, make(**variant, **changes))
    assert ("actor_train.pg_variant" in list_losses(outcomes).get("objective", [])) is (lost is not False)
    assert bool(problems) is (lost is None)  # the topr terms want one advantage for all tokens
    assert get_exit_code(outcomes, problems) == (lost is not False)


def test_a_policy_gradient_variant_is_read_with_its_worker_alone(tmp_path):
    assert load_tree(tmp_path, make(**{"actor_train.pg_variant": "topr"})).algo.rl_loss_coef == 1.0
    vanilla = {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "vanilla", "rollout_batch_size": 32}
    assert load_tree(tmp_path, make(**vanilla)).algo.surrogate == "logprob"


@pytest.mark.parametrize("variant", ["tis", "cispo", "kimi15", None])
def test_a_loss_without_a_counterpart_is_lost(tmp_path, variant):
    tree = make(**{"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": variant})
    key = "actor_train.worker_cls" if variant is None else "actor_train.pg_variant"
    outcomes, _ = import_tree(tmp_path, tree)
    assert key in list_losses(outcomes)["objective"]


def test_a_difficulty_mask_of_groups_of_equal_rewards_becomes_dynamic_sampling(tmp_path):
    mask = {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95}
    assert load_tree(tmp_path, make(**mask)).algo.dynamic_sampling.enabled
    # One right of eight is 0.125.
    wider = {**mask, "difficulty_low_threshold": 0.2}
    assert not load_tree(tmp_path, make(**wider), objective=["difficulty_mask"]).algo.dynamic_sampling.enabled
    alone = make(**wider, num_return_sequences_in_group=1, rollout_batch_size=256)
    assert not load_tree(tmp_path, alone).algo.dynamic_sampling.enabled


@pytest.mark.parametrize(
    ("kind", "arguments", "same"),
    [
        ("std_filter", {"std_threshold": 0}, True),
        ("std_filter", {"std_threshold": 0.36}, False),  # one right of eight: 0.354
        ("mean_filter", {"threshold_up": 0.9, "threshold_down": 0.1}, True),
        ("mean_filter", {"threshold_up": 0.8, "threshold_down": 0.1}, False),
    ],
)
def test_a_filter_of_groups_of_equal_rewards_becomes_dynamic_sampling(tmp_path, kind, arguments, same):
    tree = make(**{"rewards.math_rule.query_filter_config": {"type": kind, "filter_args": arguments}})
    lost = {} if same else {"data": ["rewards.math_rule.query_filter_config.type"]}
    assert load_tree(tmp_path, tree, **lost).algo.dynamic_sampling.enabled is same


def test_layouts_and_recomputation_are_kept(tmp_path):
    sizes = {
        **{"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3, "context_parallel_size": 2},
        **{"expert_model_parallel_size": 4, "recompute_granularity": "selective", "sequence_parallel": True},
    }
    policy = load_tree(tmp_path, make(**{f"{STRATEGY}.{name}": value for name, value in sizes.items()})).policy
    layout = policy.parallel
    assert (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.sp) == (2, 2, 3, 2, 4, True)
    assert policy.recompute.name == "selective"
    no_vpp = load_tree(tmp_path, make(**{f"{STRATEGY}.virtual_pipeline_model_parallel_size": None}))
    assert no_vpp.policy.parallel.vpp == 1
    experts = load_tree(tmp_path, make(**{f"{STRATEGY}.moe_layer_recompute": True}))
    assert experts.policy.recompute.name == "full"


def test_fsdp_becomes_megatron_with_context_parallelism_and_the_same_minibatch(tmp_path):
    tree = make(**{"actor_train.model_args.ulysses_size": 2, "actor_train.strategy_args.strategy_name": "fsdp2_train"})
    del tree["actor_train"]["strategy_args"]["strategy_config"]
    config = load_tree(tmp_path, tree)
    assert (config.policy.parallel.cp, config.policy.recompute.name) == (2, "full")
    assert config.train.samples_per_minibatch == 1 * 32 * 8


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"rewards.math_rule.worker_cls": CODE}, {"data": ["actor_train.data_args.file_name"]}),
        ({"actor_train.model_args.lora_target": "all-linear"}, {"model": ["actor_train.model_args.lora_target"]}),
        ({"whiten_rewards": True}, {"objective": ["whiten_rewards"]}),
        ({"length_loss_weight": True}, {"objective": ["length_loss_weight"]}),
        ({"error_max_len_clip": True}, {"objective": ["error_max_len_clip"]}),
        ({"actor_train.data_args.template": "base"}, {"data": ["actor_train.data_args.template"]}),
        ({"actor_train.data_args.image_folder": "i"}, {"data": ["actor_train.data_args.image_folder"]}),
        ({"actor_train.data_args.file_name": ["a.jsonl", "b.jsonl"]}, {"data": ["actor_train.data_args.file_name"]}),
        ({"actor_train.data_args.file_name": "a.csv"}, {"data": ["actor_train.data_args.file_name"]}),
        ({"pretrain": "${oc.env:HOME}/m"}, {"model": ["pretrain"]}),
        ({"clip_loss_of_next_year": 1}, {"objective": ["clip_loss_of_next_year"]}),
        ({"defaults": ["../other"]}, {"objective": ["defaults"]}),
        ({"adv_estimator": "gigpo"}, {"objective": ["adv_estimator"]}),
        ({"rollout_batch_size": "${nowhere}"}, {"objective": ["rollout_batch_size"]}),
        ({"actor_train.model_update_frequency": 4}, {"objective": ["actor_train.model_update_frequency"]}),
    ],
)
def test_what_is_learned_and_has_no_counterpart_is_lost_with_code_1(tmp_path, changes, lost):
    outcomes, problems = import_tree(tmp_path, make(**changes))
    assert {kind: keys for kind, keys in list_losses(outcomes).items() if kind in lost} == lost
    assert get_exit_code(outcomes, problems) == 1


@pytest.mark.parametrize("changes", [{"rewards": {"code": {"worker_cls": CODE}}}, {"pretrain": None}])
def test_a_job_without_a_reward_or_model_here_does_not_load_even_with_allow_loss(tmp_path, changes):
    tree = make(**changes)
    if "rewards" in changes:
        tree["rewards"] = changes["rewards"]
        tree["actor_train"]["data_args"]["domain_interleave_probs"] = {"code": 1.0}
    outcomes, problems = import_tree(tmp_path, tree)
    assert problems
    assert get_exit_code(outcomes, problems, allow_loss=True) == 1


def test_samples_ahead_of_the_update_and_their_correction_are_kept(tmp_path):
    weight = {"train_infer_correction.is_weight": {"enabled": True, "weight_type": "geometric", "upper_bound": 1.5}}
    config = load_tree(tmp_path, make(async_generation_ratio=1, **weight))
    assert config.rollout.max_staleness == 1
    assert (config.algo.mismatch.level.name, config.algo.mismatch.high) == ("geometric", 1.5)
    assert config.algo.mismatch.correction.name in ("tis", "clip")
    # Without a weight ROLL corrects nothing, which is refused here.
    config = load_tree(tmp_path, make(async_generation_ratio=1), objective=["async_generation_ratio"])
    assert config.algo.mismatch.correction.name in ("tis", "clip")


def test_the_ratio_of_the_response_is_gspo(tmp_path):
    assert load_tree(tmp_path, make(importance_sampling="seq")).algo.surrogate == "gspo"
    assert load_tree(tmp_path, make(importance_sampling="token")).algo.surrogate == "clip"


def test_the_critic_starts_from_a_model_of_its_own_and_its_minibatch_must_be_the_policys(tmp_path):
    critic = {
        **{"adv_estimator": "gae", "reward_pretrain": "my/reward"},
        "critic.training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32},
        "critic.device_mapping": "list(range(0,8))",
    }
    assert load_tree(tmp_path, make(**critic)).critic.init == "my/reward"
    other = make(**critic, **{"critic.training_args.gradient_accumulation_steps": 16})
    load_tree(tmp_path, other, objective=["critic.training_args.per_device_train_batch_size"])


def test_the_response_is_what_the_sequence_leaves_of_the_prompt(tmp_path):
    tree = make(sequence_length=5000)
    assert load_tree(tmp_path, tree).rollout.response_length == 5000 - 2048
