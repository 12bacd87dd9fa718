"""An unknown key that is TRL's, verl's or OpenRLHF's is answered with ours."""

import re

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, list_options, load_config
from megarl.config.peer_names import NONE, PEER_NAMES
from megarl.config.roll.aliases import ALIASES
from megarl.config.values import list_values

OF_A_CHOICE = {"data.path", "data.heldout_path", "data.prompt_field", "data.answer_field", "reward.path", "reward.url"}
"""Keys of a source of data or a kind of reward other than the default ones"""
GROUPS = "algo|model|policy|critic|reference|data|reward|rollout|train|evaluate|cluster|checkpoint|logger"


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("num_generations=8", "TRL's num_generations is train.responses_per_prompt here"),
        ("train.num_generations=8", "TRL's num_generations is train.responses_per_prompt here"),
        ("max_completion_length=512", "TRL's max_completion_length is rollout.response_length here"),
        ("learning_rate=1e-6", "TRL's learning_rate is policy.optimizer.lr here"),
        ("critic.optimizer.learning_rate=1", "TRL's learning_rate is critic.optimizer.lr here"),
        ("beta=0.04", "is algo.kl.loss_coef with algo.kl.in_loss=true, or"),
        ("num_iterations=2", "TRL's num_iterations is train.epochs_per_iteration here"),
        ("per_device_train_batch_size=4", "is train.tokens_per_microbatch, counted in tokens here"),
        ("stop=x", "TRL's stop is rollout.stop, for texts of one token here"),
        ("top_p=0.9", "TRL's top_p has no counterpart: training needs log-probs of the full distribution"),
        ("+rollout.top_p=0.9", "TRL's top_p has no counterpart"),
        ("actor_rollout_ref.rollout.n=8", "verl's actor_rollout_ref.rollout.n is train.responses_per_prompt here"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "is train.samples_per_minibatch, in responses where verl"),
        ("data.train_batch_size=64", "verl's data.train_batch_size is train.prompts_per_iteration here"),
        ("data.max_prompt_length=64", "verl's data.max_prompt_length is data.prompt_length here"),
        ("algorithm.adv_estimator=gae", "verl's algorithm.adv_estimator is algo.advantage here"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "verl's algorithm.kl_ctrl.kl_coef is algo.kl.coef here"),
        ("trainer.total_epochs=3", "verl's trainer.total_epochs is train.num_iterations here"),
        ("critic.optim.lr=1e-5", "verl's critic.optim.lr is critic.optimizer.lr here"),
        ("n_samples_per_prompt=8", "OpenRLHF's n_samples_per_prompt is train.responses_per_prompt here"),
        ("algo.kl.init_coef=0.1", "OpenRLHF's algo.kl.init_coef is algo.kl.coef here"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(override, answer):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{override.lstrip('+').split('=')[0]}: no such key; ")
    assert answer in problem


def test_every_answer_names_keys_and_options_that_exist():
    groups = GROUPS.split("|")
    known = {*groups, *OF_A_CHOICE, *(key for key, _ in list_values(compose_config([])))}
    known |= {key.rsplit(".", 1)[0] for key in known if "." in key}
    for name, (_, ours) in PEER_NAMES.items():
        text = ours.replace("rollout.sglang.mem_fraction_static", "rollout.sglang").replace("evaluate.{}", "")
        for key in re.findall(rf"\b(?:{GROUPS})\.[a-z_0-9.]*[a-z_0-9]", text):
            assert key in known, (name, key)
        for group, option in re.findall(r"\b(data|reward)=(\w+)", text):
            assert option in list_options(group), (name, option)


def test_no_name_is_a_key_of_ours_or_accepted_as_rolls():
    own = {key for key, _ in list_values(compose_config([]))}
    assert not own & set(PEER_NAMES)
    assert not set(ALIASES) & set(PEER_NAMES)


def test_no_counterpart_is_said_with_a_reason():
    for name, (project, ours) in PEER_NAMES.items():
        assert project in ("TRL", "verl", "OpenRLHF"), name
        assert ours.removeprefix(NONE), name
        assert ours.startswith(NONE) or not ours.startswith("none"), name


@pytest.mark.parametrize("override", ["quantum_flux=3", "train.zebra=1", "some_setting=2", "max_tool_turns=1"])
def test_a_word_like_none_of_ours_gets_no_suggestion(override):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("clip_hihg=0.3", "algo.clip_high"),
        ("algo.lambda_polcy=1", "algo.lambda_policy"),
        ("policy.optimiser.lr=1", "policy.optimizer.lr"),
        ("rollout.num_server=2", "rollout.num_servers"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_right_one(override, near):
    with pytest.raises(ConfigError, match=f"did you mean {re.escape(near)}\\?"):
        load_config([override])
