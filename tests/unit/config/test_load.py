"""Composition and its errors: each names the key, what was found, and what would be right."""

import pickle

import pytest

from megarl.config.checks.config import ALLOWED_VALUES, REFUSED_OPTIONS, TOYS, describe_sizes
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.load import check_overrides, list_options, load_config
from megarl.config.open_keys import list_open_keys, open_overrides
from megarl.config.schema.roles import LrDecay
from megarl.config.search_path import CONF_DIR
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


def test_only_overrides_of_open_fields_are_rewritten_and_once():
    given = ["rollout.sglang.a=1", "rollout.sglangg.a=1", "+rollout.sglang.b=1", "~rollout.sglang.c", "seed=2", "-m"]
    opened = ["++rollout.sglang.a=1", *given[1:]]
    assert open_overrides(given) == opened
    assert open_overrides(opened) == opened


def test_an_open_field_is_none_of_another_data_source():
    assert "data.options: no such key" in problems_of("data=jsonl", "data.path=x", "data.options.x=1")


def test_an_unknown_key_is_never_suggested_itself():
    assert "did you mean data.letters?" not in problems_of("data=jsonl", "data.path=x", "data.letters=ab")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.path=x"], "whose learning rate, lengths, float32 and data are those of a toy"),
        (["model.source=path", "model.path=x"], "a toy with random weights; type model=checkpoint model.path=x"),
        (["model=tiny_moe", "model.source=path", "model.path=x"], "found 'x' with model=tiny_moe, whose"),
        (["model=smollm2_135m", "model.path=x"], "model.path: found 'x'; it has no effect"),
        (["model.source=path"], "model.path: found null"),
        (["model=smollm2_135m", "model.random.seed=2"], "model.random.seed: has no effect under model.source=smollm2"),
    ],
)
def test_a_model_key_that_its_source_does_not_read_is_refused(overrides, expected):
    assert expected in problems_of(*overrides)


def test_the_numbers_that_a_preset_leaves_in_model_random_do_not_bar_another_source():
    own = ["model=tiny", "model.name=mine", "model.source=path", "model.path=/x"]
    assert load_config(own).model.path == "/x"


def test_the_toys_are_the_presets_with_random_weights():
    texts = {path.stem: path.read_text() for path in (CONF_DIR / "model").glob("*.yaml")}
    random = {name for name, text in texts.items() if "source: random" in text}
    built_on = {name for name, text in texts.items() if any(f"\n  - {toy}\n" in text for toy in random)}
    assert random | built_on == set(TOYS)


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "cluster.object_store_mb=0",
        "cluster.shutdown_deadline_s=0",
        "cluster.call_deadline_s=-1",
        "cluster.worker_start_deadline_s=inf",
        "cluster.cpu_threads_per_worker=0",
        "rollout.startup_deadline_s=nan",
        "rollout.request_deadline_s=0",
        "rollout.sync_deadline_s=0",
        "rollout.max_running_requests=0",
        "rollout.num_threads=0",
        "rollout.num_servers=0",
        "rollout.max_staleness=-1",
        "rollout.temperature=nan",
        "rollout.max_probe_logprob_gap=0",
        "train.max_minutes=0",
        "train.stop_at_heldout_reward=nan",
        "logger.num_logged_samples=-1",
        "critic.updates_per_policy_update=0",
        "policy.optimizer.lr=nan",
        "critic.optimizer.lr=inf",
        "policy.optimizer.clip_grad=-1",
        "policy.optimizer.eps=0",
        "policy.optimizer.weight_decay=-0.1",
        "policy.optimizer.warmup_steps=-1",
        "policy.optimizer.beta1=nan",
        "policy.optimizer.decay_steps=0",
    ],
)
def test_a_number_out_of_its_range_is_an_error_that_names_its_key(override):
    key, value = override.split("=")
    message = problems_of(override)
    assert f"{key}: found {value}" in message
    assert len([line for line in message.splitlines() if line.startswith(key)]) == 1


def test_a_decay_that_ends_within_the_warm_up_is_an_error():
    expected = "policy.optimizer.decay_iterations: found 80, which is 320 optimizer steps; it must be above"
    assert expected in problems_of("policy.optimizer.warmup_steps=320")
    expected = "policy.optimizer.decay_steps: found 20; it must be above policy.optimizer.warmup_steps (20)"
    assert expected in problems_of("policy.optimizer.warmup_steps=20", "policy.optimizer.decay_steps=20")
    load_config(["policy.optimizer.warmup_steps=319"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.num_iterations=many", "train.num_iterations"),
        ("algo.advantage=gaee", "algo.advantage"),
        ("policy.dtype=fp12", "policy.dtype"),
        ("train.deterministic=2", "train.deterministic"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_its_key(override, key):
    message = problems_of(override)
    assert key in message
    assert override.split("=")[1] in message


@pytest.mark.parametrize(
    ("override", "choices"),
    [
        ("train.deterministic=maybe", "; it must be true or false"),
        ("train.deterministic=2", "; it must be true or false"),
        ("policy.optimizer.overlap_grad_reduce=maybe", "; it must be true or false, or null"),
        ("rollout.offload=weights", "expected one of [kv_cache, all], or null"),
        ("policy.recompute=some", "expected one of [none, selective, full]"),
    ],
)
def test_a_value_that_is_no_choice_is_an_error_with_all_choices(override, choices):
    assert problems_of(override).endswith(choices)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.samples_per_minibatch=100"], "train.samples_per_minibatch: found 100"),
        (["train.num_iterations=0", "algo=grpo"], "train.num_iterations: found 0"),
        (["policy.parallel.tp=2"], "policy.parallel.num_processes: found 1"),
        (["policy.parallel.sp=true"], "policy.parallel.sp"),
        (["rollout.temperature=0"], "rollout.temperature: found 0"),
        (["+rollout.sglang.top_p=0.9"], "rollout.sglang.top_p"),
        (["rollout.kv_cache_tokens=10"], "rollout.kv_cache_tokens: found 10"),
        (["algo.lambda_policy=fast"], "algo.lambda_policy"),
    ],
)
def test_values_that_contradict_one_another_end_before_anything_starts(overrides, expected):
    assert expected in problems_of(*overrides)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.dtype=fp8",
        "rollout.sglang.quantization=fp8",
        "rollout.sglang.quantize_and_serve=true",
        "rollout.sglang.load_format=flash_rl",
    ],
)
def test_quantized_weights_of_servers_are_refused_with_the_reason(override):
    message = problems_of(override)
    assert message.startswith(override.partition("=")[0])
    assert override.partition("=")[2].lower() in message.lower()
    assert "which a weight sync cannot write and its checksums cannot verify" in message


@pytest.mark.parametrize(
    "override",
    [
        "rollout.sglang.preferred_sampling_params={repetition_penalty: 1.5}",
        "rollout.sglang.enable_custom_logit_processor=true",
        "rollout.sglang.enable_watermark=true",
        "rollout.sglang.speculative_algorithm=NGRAM",
        "rollout.sglang.speculative_accept_threshold_single=0.5",
        "rollout.sglang.json_model_override_args={sliding_window: 16}",
        "rollout.sglang.lora_paths=[x]",
        "rollout.sglang.trust_remote_code=true",
        "rollout.sglang.forward_hooks=[x]",
        "rollout.sglang.load_format=dummy",
        "rollout.sglang.model_impl=transformers",
        "rollout.sglang.hicache_storage_backend=file",
        "rollout.sglang.delete_ckpt_after_loading=true",
        "rollout.sglang.context_length=8",
    ],
)
def test_server_arguments_by_which_responses_are_no_samples_of_the_policy_are_refused(override):
    assert problems_of(override).startswith(f"{override.partition('=')[0]}: found ")


def test_every_refused_server_argument_is_one_of_the_installed_sglang():
    not_its_own = {"top_p", "top_k", "min_p"}
    assert {*REFUSED_OPTIONS, *ALLOWED_VALUES} - not_its_own <= load_options().keys()
    assert any(name.startswith("speculative_") for name in load_options())


def test_an_fp8_kv_cache_is_none_of_the_weights_and_is_passed_through():
    assert load_config(["rollout.sglang.kv_cache_dtype=fp8_e4m3"]).rollout.sglang == {"kv_cache_dtype": "fp8_e4m3"}


def test_the_problems_of_another_process_stay_apart():
    assert pickle.loads(pickle.dumps(ConfigError(["a: one", "b: two"]))).problems == ("a: one", "b: two")


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


@pytest.mark.parametrize(
    ("overrides", "prompts", "minibatch"),
    [
        (["algo=vapo"], 16, 64),
        (["algo=vapo", "train.responses_per_prompt=1"], 256, 64),
        (["algo=vapo", "train.samples_per_iteration=512"], 32, 64),
        (["algo=vapo", "train.prompts_per_iteration=8"], 8, 64),
        (["algo=vapo", "train.num_minibatches=2"], 16, 128),
        (["algo=rloo", "train.prompts_per_iteration=6"], 6, 24),
        (["algo=vapo", "train.samples_per_iteration=null"], 512, 64),
    ],
)
def test_sizes_follow_from_each_other(overrides, prompts, minibatch):
    train = load_config([*overrides, "model=tiny"]).train
    assert (train.num_prompts, train.minibatch_size) == (prompts, minibatch)
    assert train.num_samples == prompts * train.responses_per_prompt
    assert train.num_optimizer_steps == train.num_samples // minibatch


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.responses_per_prompt=24"], "samples_per_iteration: found 256, which train.responses_per_prompt (24)"),
        (["train.responses_per_prompt=24"], "the nearest that it does is 264, of 11 prompts"),
        (["train.responses_per_prompt=0"], "train.responses_per_prompt: found 0; it must be 1 or more"),
        (["train.num_minibatches=0"], "train.num_minibatches: found 0; it must be 1 or more"),
        (["train.num_minibatches=3"], "train.num_minibatches: found 3, which does not divide the 16 prompts x 16"),
        (["train.samples_per_iteration=64", "train.prompts_per_iteration=16"],
         "train.samples_per_iteration: has no effect with train.prompts_per_iteration=16, which makes 256 samples"),
        (["algo=rloo", "train.samples_per_minibatch=64"],
         "train.samples_per_minibatch: has no effect with train.num_minibatches=1, which makes minibatches of 256"),
        (["policy.optimizer.decay_iterations=9", "policy.optimizer.decay_steps=9"], "decay_iterations: has no effect"),
        (["policy.optimizer.decay=constant", "policy.optimizer.decay_iterations=9"], "decay_iterations: has no effect"),
        (["algo=dapo", "algo.overlong.buffer_frac=0.1", "algo.overlong.buffer=9"], "buffer_frac: has no effect"),
        (["algo=dapo", "algo.overlong.buffer_frac=0.001"], "algo.overlong.buffer_frac: found 0.001, which is less"),
        (["algo=ppo", "algo.value_pretrain.steps=9"], "it counts with algo.value_pretrain.enabled=true"),
    ],
)  # fmt: skip
def test_sizes_that_contradict_one_another_are_errors_with_what_would_be_right(overrides, expected):
    assert expected in problems_of(*overrides, "model=tiny")


@pytest.mark.parametrize(("model", "tokens"), [("tiny", 6), ("smollm2_135m", 2), ("qwen3_8b", 1638), ("qwen32b", 3277)])
def test_dapos_penalty_grows_over_a_share_of_the_length_limit(model, tokens):
    config = load_config(["algo=dapo", f"model={model}"])
    assert config.algo.overlong.count_buffer(config.rollout.response_length) == tokens
    given = load_config(["algo=dapo", f"model={model}", "algo.overlong.buffer=3"])
    assert given.algo.overlong.count_buffer(given.rollout.response_length) == 3


def test_a_constant_rate_needs_nothing_undone_of_the_models_decay():
    load_config(["model=tiny", "policy.optimizer.decay=constant"])


def test_sizes_read_as_one_sentence():
    config = load_config(
        ["train.prompts_per_iteration=8", "train.responses_per_prompt=4", "train.samples_per_minibatch=16"]
    )
    assert config.train.num_optimizer_steps == 2
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
