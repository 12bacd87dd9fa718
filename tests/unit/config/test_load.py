"""Composition and its errors: each names the key, what was found, and what would be right."""

import pytest

from megarl.config.check import describe_sizes, num_optimizer_steps
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.load import check_overrides, load_config


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def test_the_default_configuration_is_valid_and_complete():
    config = load_config([])
    assert (config.algo.lambda_policy, config.model.name) == ("adaptive", "tiny")
    assert type(config.data).__name__ == "AboutDataConfig"
    assert type(config.reward).__name__ == "AboutRewardConfig"


def test_a_model_preset_brings_its_data_and_reward_and_the_command_line_wins():
    assert type(load_config(["model=smollm2_135m"]).data).__name__ == "AdditionDataConfig"
    config = load_config(["model=smollm2_135m", "data=jsonl", "data.path=x.jsonl", "reward=math"])
    assert type(config.data).__name__ == "JsonlDataConfig"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algo.clip_hihg=0.3", "algo.clip_high"),
        ("clip_high=0.3", "algo.clip_high"),
        ("train.prompts_per_iter=4", "train.prompts_per_iteration"),
        ("critic.optimizer.learning_rate=1", "critic.optimizer"),
        ("rolout.temperature=1", "rollout.temperature"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_right_one(override, nearest):
    message = problems_of(override)
    assert override.split("=")[0] in message
    assert nearest in message


def test_a_key_of_another_data_source_is_unknown():
    assert "data.letters" in problems_of("data=jsonl", "data.path=x", "data.letters=ab")


def test_an_appended_unknown_key_is_refused_too():
    assert "algo.foo" in problems_of("+algo.foo=1")


def test_an_unknown_choice_of_a_group_lists_the_choices():
    message = problems_of("algo=vapoo")
    assert "vapoo" in message
    assert "vapo" in message.replace("vapoo", "")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.num_iterations=many", "train.num_iterations"),
        ("algo.advantage=gaee", "algo.advantage"),
        ("policy.dtype=fp12", "policy.dtype"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_its_key(override, key):
    message = problems_of(override)
    assert key in message
    assert override.split("=")[1] in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.samples_per_minibatch=100"], "train.samples_per_minibatch: found 100"),
        (["train.num_iterations=0"], "train.num_iterations: found 0"),
        (["policy.parallel.tp=2"], "policy.parallel.num_processes: found 1"),
        (["policy.parallel.sp=true"], "policy.parallel.sp"),
        (["rollout.temperature=0"], "rollout.temperature: found 0"),
        (["+rollout.sglang.top_p=0.9"], "rollout.sglang.top_p"),
        (["rollout.kv_cache_tokens=10"], "rollout.kv_cache_tokens: found 10"),
        (["policy.optimizer.decay_steps=null"], "policy.optimizer.decay_steps"),
        (["algo.lambda_policy=fast"], "algo.lambda_policy"),
    ],
)
def test_values_that_contradict_one_another_end_before_anything_starts(overrides, expected):
    assert expected in problems_of(*overrides)


def test_all_problems_are_reported_at_once():
    message = problems_of("train.samples_per_minibatch=100", "policy.optimizer.lr=-1")
    assert "samples_per_minibatch" in message
    assert "policy.optimizer.lr" in message


def test_the_nearest_divisor_is_suggested():
    config = [
        "train.prompts_per_iteration=6",
        "train.responses_per_prompt=4",
        "train.samples_per_minibatch=7",
    ]
    assert "the nearest that does is 6" in problems_of(*config) or "the nearest that does is 8" in problems_of(*config)


def test_sizes_read_as_one_sentence():
    config = load_config(
        ["train.prompts_per_iteration=8", "train.responses_per_prompt=4", "train.samples_per_minibatch=16"]
    )
    assert num_optimizer_steps(config) == 2
    sentence = describe_sizes(config)
    assert "8 prompts x 4 responses = 32 samples" in sentence
    assert "16 samples per minibatch" in sentence
    assert "= 2 optimizer steps" in sentence


def test_every_value_of_a_sweep_is_checked_before_any_run_starts():
    with pytest.raises(ConfigError, match=r"algo\.lambda_policy"):
        check_overrides(["algo.lambda_policy=0.95,adaptive,quick"])
    check_overrides(["algo.clip_high=0.24,0.28", "algo.lambda_policy=0.95,adaptive"])


def test_the_nearest_key_prefers_the_same_last_part():
    known = ["algo", "algo.clip_high", "algo.kl.coef", "train.num_iterations"]
    assert find_nearest_key("kl.coef", known) == "algo.kl.coef"
    assert find_nearest_key("algo.clip_hi", known) == "algo.clip_high"
    assert find_nearest_key("zzz.qqq", known) is None
