"""conf/experiment/: the LitePPO study's advice, each case with the values that it is about, and other settings."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import list_left_out, list_options, load_config
from megarl.config.overrides import take_config_dirs
from megarl.config.schema.task import ClassEnvironmentConfig, EnvironmentRewardConfig, FunctionDataConfig

ADVICE = {
    "lite_ppo_advice_small_base_model": {"advantage_std": "batch", "loss_agg_mode": "token-mean", "clip_high": 0.2},
    "lite_ppo_advice_aligned_model": {"clip_low": 0.2, "clip_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"},
    "lite_ppo_advice_sparse_rewards": {"advantage": "group", "advantage_std": "none"},
    "lite_ppo_advice_dense_rewards": {"advantage": "group", "advantage_std": "batch", "std_of": "raw"},
    "lite_ppo_advice_short_answers": {"overlong": True, "advantage_std": "batch"},
}


def test_the_cases_are_those_of_the_advice():
    assert set(ADVICE) == {name for name in list_options("experiment") if name.startswith("lite_")}


@pytest.mark.parametrize("model", ["tiny", "smollm2_135m"])
@pytest.mark.parametrize("name", ADVICE)
def test_each_case_is_lite_ppo_with_its_own_values_and_the_sizes_of_the_model(name, model):
    config = load_config([f"experiment={name}", f"model={model}"])
    found = {
        key: value.filter if key == "overlong" else getattr(value, "name", value)
        for key, value in ((key, getattr(config.algo, key)) for key in ADVICE[name])
    }
    assert found == ADVICE[name]
    assert config.algo.name == "lite_ppo"
    assert (config.train.num_prompts, config.train.responses_per_prompt) == (32, 8)


def test_an_algorithm_of_the_command_line_wins_over_the_case_and_keeps_its_values():
    config = load_config(["experiment=lite_ppo_advice_sparse_rewards", "algo=grpo"])
    assert (config.algo.name, config.algo.advantage_std.name) == ("grpo", "none")
    assert config.algo.kl.in_loss


def test_guess_is_the_tiny_model_with_its_environment_data_and_reward():
    config = load_config(["experiment=guess", "algo=grpo"])
    kinds = (config.environment, config.data, config.reward)
    assert [type(kind) for kind in kinds] == [ClassEnvironmentConfig, FunctionDataConfig, EnvironmentRewardConfig]
    assert (config.model.name, config.algo.name) == ("tiny", "grpo")
    # One token for each thing that is written or read.
    options = config.environment.options
    assert set("1-7") | {options["higher"], options["lower"]} <= set(config.model.random.alphabet)


def test_a_value_of_a_case_without_effect_under_another_algorithm_is_left_out_with_a_word():
    given = ["experiment=lite_ppo_advice_aligned_model", "algo=topr"]
    (line,) = list_left_out(given, load_config(given))
    assert line.startswith("left out: algo.clip_high (from conf/experiment/lite_ppo_advice_aligned_model.yaml): has no")
    # What is typed is meant.
    with pytest.raises(ConfigError, match=r"algo\.clip_high: has no effect"):
        load_config([*given, "algo.clip_high=0.3"])


def test_an_experiment_with_a_critics_key_goes_with_an_algorithm_without_one(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ncritic: {optimizer: {lr: 1e-5}}\n")
    path = take_config_dirs([f"--config-dir={tmp_path}", "experiment=mine"])
    (line,) = list_left_out([*path, "algo=grpo"], load_config([*path, "algo=grpo"]))
    assert line.startswith("left out: critic.optimizer.lr (from ")
    assert not list_left_out([*path, "algo=ppo"], load_config([*path, "algo=ppo"]))
