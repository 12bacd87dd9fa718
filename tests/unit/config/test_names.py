"""ROLL's names work or are refused with the reason; other trainers' names and our own of before are answered."""

import re

import pytest
from test_load import COMPOSED, problems_of

from megarl.config import names
from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, compose_config
from megarl.config.names import ALIASES, NONE, PEER_NAMES, TABLE, rewrite_overrides
from megarl.config.overrides import find_choices_with, list_open_keys, list_options, list_values, write_search_path

OF_A_CHOICE = {"data.path", "data.heldout_path", "data.prompt_field", "data.answer_field", "reward.path", "reward.url"}
"""Keys of a source of data or a kind of reward other than the default ones"""
GROUPS = "algo|model|policy|critic|reference|data|reward|rollout|train|evaluate|cluster|checkpoint|logger"
OLD = {
    "train.eval_often": "train.eval_every",
    "critic.optim": "critic.optimizer",
    "logger.fax": "Nobody reads faxes; logger.wandb sends the same.",
    "reward=oracle": "reward=math",
    "rollout.transport=pigeon": "Birds are no transport; rollout.transport=disk needs no network.",
}


@pytest.mark.parametrize("name", ALIASES)
def test_each_of_rolls_names_is_in_the_table_of_overrides_or_refused_with_its_reason(name):
    if ALIASES[name].ours:
        assert name in {str(text).split("=")[0].removeprefix("algo.") for row in COMPOSED for text in row.values[1]}
    else:
        assert f"{name}: no such thing here: {ALIASES[name].text}" in problems_of(f"{name}=x")
        for off in ALIASES[name].off:
            assert rewrite_overrides([f"{name}={off}"]).overrides == []


def test_a_word_like_none_of_ours_gets_no_suggestion():
    assert "did you mean" not in problems_of("quantum_flux=3", "train.zebra=1", "some_setting=2", "max_tool_turns=1")


def test_the_rewriting_is_told_in_one_line_and_our_own_keys_are_left_as_they_are():
    own = ["algo.gamma=0.9", "algo.reward_norm={mean: batch}", "algo.reward_norm.std=batch", "-m", "algo=ppo"]
    rewritten = rewrite_overrides([*own, "pg_clip=0.2", "seed=3"])
    assert rewritten.overrides == [*own, "algo.clip_low=0.2", "algo.clip_high=0.2", "seed=3"]
    assert rewritten.lines == ["pg_clip=0.2 -> algo.clip_low=0.2 algo.clip_high=0.2 (ROLL's pg_clip sets both)"]
    assert "algo.lambda_policy (from lambd=0.9): has no effect" in problems_of("algo=grpo", "lambd=0.9")


@pytest.mark.parametrize(
    ("overrides", "rewritten"),
    [
        ("algo=ppo lambd=0.9,1.0", "algo=ppo algo.lambda_policy=0.9,1.0 algo.lambda_critic=${algo.lambda_policy}"),
        ("dual_clip_loss=true,false pg_clip=0.3", "algo.clip_low=0.3 algo.clip_high=0.3 algo.dual_clip=1.6,null"),
        ("ppo_epochs=range(1,4)", "train.epochs_per_iteration=1,2,3"),
        ("pg_clip=0.2,0.3 dual_clip_loss=true", "a sweep would have to change"),
        ("pg_clip=0.2,0.3 dual_clip_loss=false,true", "a sweep would have to change"),
        ("gamma=interval(0.9,1.0)", "list its values"),
    ],
)
def test_a_sweep_over_a_name_of_rolls_has_one_run_per_value_or_is_refused(overrides, rewritten):
    if "=" in rewritten:
        assert rewrite_overrides(overrides.split()).overrides == rewritten.split()
        check_overrides(rewritten.split())
    else:
        with pytest.raises(ConfigError, match=rewritten):
            rewrite_overrides(overrides.split())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("+train.eval_often=3", "train.eval_often: no such key; it is train.eval_every now"),
        ("critic.optim.lr=1e-5", "critic.optim.lr: no such key; it is critic.optimizer.lr now"),
        ("logger.fax=1", "logger.fax: no such key; it was removed: Nobody reads faxes; logger.wandb sends the same"),
        ("reward=oracle", "reward: found 'oracle'; it is reward=math now"),
        ("rollout.transport=pigeon", "it was removed: Birds are no transport; rollout.transport=disk needs no network"),
        ("experiment=mine", "train.eval_often: no such key, in experiment/mine; it is train.eval_every now"),
    ],
)
def test_an_old_name_is_answered_with_what_it_is_now_in_a_file_too(monkeypatch, tmp_path, override, problem):
    monkeypatch.setattr(names, "TABLE", {**TABLE, "megarl": OLD})
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  eval_often: 3\n")
    assert problems_of(write_search_path([tmp_path]), override).endswith(problem)


def test_what_names_are_answered_with_exists_and_the_names_themselves_are_none_of_ours():
    own = {key for key, _ in list_values(compose_config([]))}
    own |= {key.rsplit(".", depth)[0] for key in own for depth in range(1, key.count(".") + 1)}
    assert not own & PEER_NAMES.keys()
    assert not ALIASES.keys() & PEER_NAMES.keys()
    for old, ours in TABLE["megarl"].items():
        group, _, option = old.partition("=")
        assert old not in own, old
        assert option not in list_options(group) if option else not find_choices_with(old), old
        if re.fullmatch(r"[\w.]+", ours) and not ours.endswith("."):
            assert ours in own or find_choices_with(ours) or ours.rpartition(".")[0] in list_open_keys(), (old, ours)
        else:
            assert "=" in ours or ours.endswith("."), (old, ours)
    known = {*GROUPS.split("|"), *OF_A_CHOICE, *own}
    for name, (_, ours) in PEER_NAMES.items():
        assert ours.startswith(NONE) or not ours.startswith("none"), name
        text = ours.replace("rollout.sglang.mem_fraction_static", "rollout.sglang")
        for key in re.findall(rf"\b(?:{GROUPS})\.[a-z_0-9.]*[a-z_0-9]", text):
            assert key in known, (name, key)
        for group, option in re.findall(r"\b(data|reward)=(\w+)", text):
            assert option in list_options(group), (name, option)
