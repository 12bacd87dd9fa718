"""Composition and its errors: each names the key, what was found, and what would be right."""

import pickle

import pytest

from megarl.config.checks.config import ALLOWED_VALUES, REFUSED_OPTIONS, TOYS
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.load import check_overrides, list_options, load_config
from megarl.config.overrides import CONF_DIR, list_open_keys
from megarl.config.schema.roles import LrDecay
from megarl.rollout.server import load_options


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


def test_the_default_configuration_is_valid_and_complete():
    config = load_config([])
    assert (config.algo.lambda_policy, config.model.name) == ("adaptive", "tiny")
    assert type(config.data).__name__ == "FunctionDataConfig"
    assert type(config.reward).__name__ == "LetterCountRewardConfig"


def test_a_model_preset_brings_its_data_and_reward_and_the_command_line_wins():
    assert type(load_config(["model=smollm2_135m"]).data).__name__ == "FunctionDataConfig"
    config = load_config(["model=smollm2_135m", "data=jsonl", "data.path=x.jsonl", "reward=math"])
    assert type(config.data).__name__ == "JsonlDataConfig"


@pytest.mark.parametrize("override", ["experiment=foo", "+experiment=foo", "+nogroup=foo"])
def test_a_mistyped_option_of_any_group_is_refused_without_an_empty_list_of_choices(override):
    message = problems_of(override)
    assert message.startswith(f"{override.lstrip('+').split('=')[0]}: ")
    assert not message.rstrip().endswith("are")


@pytest.mark.parametrize("model", list_options("model"))
@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_algorithm_composes_with_every_model(algo, model):
    path = ["model.path=mine"] if model == "checkpoint" else []
    config = load_config([f"algo={algo}", f"model={model}", *path])
    assert (config.algo.name, config.model.name) == (algo, model)


def test_a_checkpoint_of_ones_own_needs_a_path_and_has_nothing_of_the_tiny_task():
    assert "model.path" in problems_of("model=checkpoint")
    config = load_config(["model=checkpoint", "model.path=mine", "algo=grpo"])
    assert config.rollout.kv_cache_tokens is None
    assert type(config.data).__name__ == "JsonlDataConfig"
    assert type(config.reward).__name__ == "MathRewardConfig"


@pytest.mark.parametrize("model", ["tiny", "smollm2_135m"])
@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_algorithm_composes_with_the_laptop_models_at_256_samples_per_iteration(algo, model):
    config = load_config([f"algo={algo}", f"model={model}"])
    assert (config.algo.name, config.model.name) == (algo, model)
    assert config.train.num_samples == 256
    assert config.train.num_optimizer_steps == (1 if algo == "rloo" else 4)
    assert config.algo.value_pretrain.num_steps <= 4
    if config.policy.optimizer.decay is LrDecay.linear:
        n = config.train.num_iterations
        assert config.policy.optimizer.resolve_schedule(4, n).decay_steps == 4 * n


def test_the_open_fields_of_the_schema_are_found():
    assert list_open_keys() == (
        *("data.args", "data.options", "environment.args", "environment.options", "evaluate.paths", "model.megatron"),
        *("reward.parts", "reward.request", "rollout.sglang", "train.eval_sets"),
    )


def test_keys_of_open_fields_are_set_without_a_plus_one_by_one_or_together():
    config = load_config(["rollout.sglang={a: 1, b: [1, 2]}", "rollout.sglang.c=x", "model.megatron.d=0.5"])
    assert config.rollout.sglang == {"a": 1, "b": [1, 2], "c": "x"}
    assert config.model.megatron == {"d": 0.5}
    gym = ["data=reasoning_gym", "reward=reasoning_gym", "data.options.max_terms=3"]
    assert load_config(gym).data.options == {"max_terms": 3}


def test_the_numbers_that_a_preset_leaves_in_model_random_do_not_bar_another_source():
    own = ["model=tiny", "model.name=mine", "model.source=path", "model.path=/x"]
    assert load_config(own).model.path == "/x"


def test_the_toys_are_the_presets_with_random_weights():
    texts = {path.stem: path.read_text() for path in (CONF_DIR / "model").glob("*.yaml")}
    random = {name for name, text in texts.items() if "source: random" in text}
    built_on = {name for name, text in texts.items() if any(f"\n  - {toy}\n" in text for toy in random)}
    assert random | built_on == set(TOYS)


def test_every_refused_server_argument_is_one_of_the_installed_sglang():
    not_its_own = {"top_p", "top_k", "min_p"}
    assert {*REFUSED_OPTIONS, *ALLOWED_VALUES} - not_its_own <= load_options().keys()
    assert any(name.startswith("speculative_") for name in load_options())


def test_the_problems_of_another_process_stay_apart():
    assert pickle.loads(pickle.dumps(ConfigError(["a: one", "b: two"]))).problems == ("a: one", "b: two")


@pytest.mark.parametrize(("model", "tokens"), [("tiny", 6), ("smollm2_135m", 2), ("qwen3_8b", 1638), ("qwen32b", 3277)])
def test_dapos_penalty_grows_over_a_share_of_the_length_limit(model, tokens):
    config = load_config(["algo=dapo", f"model={model}"])
    assert config.algo.overlong.count_buffer(config.rollout.response_length) == tokens


def test_every_value_of_a_sweep_is_checked_before_any_run_starts():
    with pytest.raises(ConfigError, match=r"algo\.lambda_policy"):
        check_overrides(["algo.lambda_policy=0.95,adaptive,quick"])
    check_overrides(["algo.clip_high=0.24,0.28", "algo.lambda_policy=0.95,adaptive"])


def test_all_problems_are_reported_at_once():
    message = problems_of("train.samples_per_minibatch=100", "policy.optimizer.min_lr=1", "algo.rl_loss_coef=0")
    assert all(key in message for key in ("samples_per_minibatch", "optimizer.min_lr", "algo.rl_loss_coef"))


def test_the_nearest_key_prefers_the_same_last_part():
    known = ["algo", "algo.clip_high", "algo.kl.coef", "train.num_iterations"]
    assert find_nearest_key("kl.coef", known) == "algo.kl.coef"
    assert find_nearest_key("algo.clip_hi", known) == "algo.clip_high"
    assert find_nearest_key("zzz.qqq", known) is None
