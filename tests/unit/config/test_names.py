"""A name that is none of ours, megarl's own of before or TRL's, verl's or OpenRLHF's, is answered with ours."""

import re

import pytest

from megarl.config import names
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.names import ALIASES, NONE, PEER_NAMES
from megarl.config.overrides import find_choices_with, list_open_keys
from megarl.config.search_path import list_options, write_search_path
from megarl.config.values import list_values

OF_A_CHOICE = {"data.path", "data.heldout_path", "data.prompt_field", "data.answer_field", "reward.path", "reward.url"}
"""Keys of a source of data or a kind of reward other than the default ones"""
GROUPS = "algo|model|policy|critic|reference|data|reward|rollout|train|evaluate|cluster|checkpoint|logger"
OLD = {
    "train.eval_often": "train.eval_every",
    "rollout.retry": "rollout.max_server_restarts",
    "critic.optim": "critic.optimizer",
    "logger.fax": "Nobody reads faxes; logger.wandb sends the same.",
    "reward=oracle": "reward=math",
    "rollout.transport=pigeon": "Birds are no transport; rollout.transport=disk needs no network.",
}


@pytest.fixture
def old(monkeypatch):
    monkeypatch.setattr(names, "read_names", lambda: {"megarl": OLD})


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.eval_often=3", "train.eval_often: no such key; it is train.eval_every now"),
        ("+train.eval_often=3", "train.eval_often: no such key; it is train.eval_every now"),
        ("critic.optim.lr=1e-5", "critic.optim.lr: no such key; it is critic.optimizer.lr now"),
        ("logger.fax=1", "logger.fax: no such key; it was removed: Nobody reads faxes; logger.wandb sends the same"),
        ("reward=oracle", "reward: found 'oracle'; it is reward=math now"),
        (
            "rollout.transport=pigeon",
            "rollout.transport: Invalid value 'pigeon', expected one of [colocated, split, disk]; it was removed:"
            " Birds are no transport; rollout.transport=disk needs no network",
        ),
    ],
)
def test_an_old_name_is_answered_with_what_it_is_now(override, problem):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert caught.value.problems == (problem,)


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("key", "answer"),
    [("eval_often", "; it is train.eval_every now"), ("eval_evry", "; did you mean train.eval_every?")],
)
def test_an_unknown_key_of_a_file_is_answered_too(tmp_path, key, answer):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ntrain:\n  {key}: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config([write_search_path([tmp_path]), "experiment=mine"])
    assert caught.value.problems == (f"train.{key}: no such key, in experiment/mine{answer}",)


def test_old_names_are_no_keys_and_the_new_ones_are():
    own = {key for key, _ in list_values(compose_config([]))}
    own |= {key.rsplit(".", depth)[0] for key in own for depth in range(1, key.count(".") + 1)}
    for old, ours in names.read_names()["megarl"].items():
        assert old not in own, old
        group, _, option = old.partition("=")
        assert option not in list_options(group) if option else not find_choices_with(old), old
        if re.fullmatch(r"[\w.]+", ours) and not ours.endswith("."):
            is_option = ours.rpartition(".")[0] in list_open_keys()
            assert ours in own or find_choices_with(ours) or is_option, (old, ours)
        else:
            assert "=" in ours or ours.endswith("."), (old, ours)


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
