"""Keys, options and values that megarl had before are answered with what they are now (names.yaml)."""

import re

import pytest

from megarl.config import names
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.open_keys import find_choices_with
from megarl.config.search_path import list_options, write_search_path
from megarl.config.values import list_values

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
            assert ours in own or find_choices_with(ours), (old, ours)
        else:
            assert "=" in ours or ours.endswith("."), (old, ours)
