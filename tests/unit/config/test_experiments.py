"""conf/experiment/: the LitePPO study's advice, each case with the values that it is about, and other settings."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import list_left_out, list_options, load_config
from megarl.config.overrides import take_config_dirs

ADVICE = {
    "lite_ppo_advice_small_base_model": {"advantage_std": "batch", "loss_agg_mode": "token-mean", "clip_high": 0.2},
    "lite_ppo_advice_aligned_model": {"clip_low": 0.2, "clip_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"},
    "lite_ppo_advice_sparse_rewards": {"advantage": "group", "advantage_std": "none"},
    "lite_ppo_advice_dense_rewards": {"advantage": "group", "advantage_std": "batch", "std_of": "raw"},
    "lite_ppo_advice_short_answers": {"overlong": True, "advantage_std": "batch"},
}


@pytest.mark.parametrize("model", ["tiny", "smollm2_135m"])
@pytest.mark.parametrize("name", [name for name in list_options("experiment") if name.startswith("lite_")])
def test_each_case_is_lite_ppo_with_its_own_values_and_the_sizes_of_the_model(name, model):
    config = load_config([f"experiment={name}", f"model={model}"])
    values = {key: getattr(config.algo, key) for key in ADVICE[name]}
    found = {key: value.filter if key == "overlong" else getattr(value, "name", value) for key, value in values.items()}
    assert found == ADVICE[name]
    assert config.algo.name == "lite_ppo"
    assert (config.train.num_prompts, config.train.responses_per_prompt) == (32, 8)


def test_a_value_of_a_case_without_effect_under_another_algorithm_is_left_out_with_a_word(tmp_path):
    given = ["experiment=lite_ppo_advice_aligned_model", "algo=topr"]
    (line,) = list_left_out(given, load_config(given))
    assert line.startswith("left out: algo.clip_high (from conf/experiment/lite_ppo_advice_aligned_model.yaml): has no")
    # What is typed is meant.
    with pytest.raises(ConfigError, match=r"algo\.clip_high: has no effect"):
        load_config([*given, "algo.clip_high=0.3"])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ncritic: {optimizer: {lr: 1e-5}}\n")
    path = take_config_dirs([f"--config-dir={tmp_path}", "experiment=mine"])
    (line,) = list_left_out([*path, "algo=grpo"], load_config([*path, "algo=grpo"]))
    assert line.startswith("left out: critic.optimizer.lr (from ")
    assert not list_left_out([*path, "algo=ppo"], load_config([*path, "algo=ppo"]))
