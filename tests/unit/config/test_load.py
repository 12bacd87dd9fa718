"""Every preset composes; what is refused before anything starts is listed completely and apart."""

import pickle

import pytest

from megarl.config.checks import ALLOWED_VALUES, REFUSED_OPTIONS, TOYS
from megarl.config.errors import ConfigError
from megarl.config.load import list_options, load_config
from megarl.config.overrides import CONF_DIR
from megarl.rollout.server import load_options


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


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
    if model in ("tiny", "smollm2_135m"):
        assert config.train.num_samples == 256
        assert config.train.num_optimizer_steps == (1 if algo == "rloo" else 4)
        assert config.algo.value_pretrain.num_steps <= 4


def test_the_toys_are_the_presets_with_random_weights():
    texts = {path.stem: path.read_text() for path in (CONF_DIR / "model").glob("*.yaml")}
    random = {name for name, text in texts.items() if "source: random" in text}
    built_on = {name for name, text in texts.items() if any(f"\n  - {toy}\n" in text for toy in random)}
    assert random | built_on == set(TOYS)


def test_every_refused_server_argument_is_one_of_the_installed_sglang():
    not_its_own = {"top_p", "top_k", "min_p"}
    assert {*REFUSED_OPTIONS, *ALLOWED_VALUES} - not_its_own <= load_options().keys()
    assert any(name.startswith("speculative_") for name in load_options())


def test_all_problems_are_reported_at_once_and_stay_apart_in_another_process():
    message = problems_of("train.samples_per_minibatch=100", "policy.optimizer.min_lr=1", "algo.rl_loss_coef=0")
    assert all(key in message for key in ("samples_per_minibatch", "optimizer.min_lr", "algo.rl_loss_coef"))
    assert pickle.loads(pickle.dumps(ConfigError(["a: one", "b: two"]))).problems == ("a: one", "b: two")


@pytest.mark.parametrize(("model", "tokens"), [("tiny", 6), ("smollm2_135m", 2), ("qwen3_8b", 1638), ("qwen32b", 3277)])
def test_dapos_penalty_grows_over_a_share_of_the_length_limit(model, tokens):
    config = load_config(["algo=dapo", f"model={model}"])
    assert config.algo.overlong.count_buffer(config.rollout.response_length) == tokens
