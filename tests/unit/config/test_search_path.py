"""--config-dir: a user's own configuration files, beside megarl's; conf/experiment/: the LitePPO study's advice, each
case with the values that it is about, and other settings.
"""

import json
import re

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, expand_sweep, list_left_out, list_options, load_config
from megarl.config.overrides import CONF_DIR, list_config_dirs, take_config_dirs
from megarl.run.command import save_run, take_resume


@pytest.fixture
def mine(tmp_path):
    files = {
        "algo/mine.yaml": "# @package _global_\ndefaults: [vapo]\nalgo: {name: mine, clip_high: 0.4}\n",
        "model/mine.yaml": "# @package _global_\ndefaults: [tiny]\nmodel: {name: mine}\n",
        "data/mine.yaml": "defaults: [letter_count, _self_]\noptions: {letters: xyz}\n",
        "experiment/mine.yaml": "# @package _global_\nalgo: {clip_high: 0.3}\n",
    }
    for name, text in files.items():
        (tmp_path / "it's mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "it's mine" / name).write_text(text)
    return tmp_path / "it's mine"


def test_the_option_becomes_an_override_that_names_the_directory_wherever_it_stands(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    forms = (["--config-dir", mine.name], [f"--config-dir={mine.name}"], ["-cd", str(mine)])
    found = {tuple(take_config_dirs(["-m", "algo=mine", *form])) for form in forms}
    assert len(found) == 1
    path, *rest = found.pop()
    assert rest == ["-m", "algo=mine"]
    assert list_config_dirs([path]) == [CONF_DIR, mine]
    assert take_config_dirs(["algo=vapo"]) == ["algo=vapo"]


def test_errors_name_the_choices_of_both_directories_and_the_users_file(mine):
    path = take_config_dirs([f"--config-dir={mine}"])
    with pytest.raises(ConfigError, match=r"algo: found 'their'; the choices are bpco, .*, lite_ppo, mine, ppo"):
        load_config([*path, "algo=their"])
    with pytest.raises(ConfigError, match=r"algo\.clip_hihg: no such key; did you mean algo\.clip_high"):
        load_config([*path, "algo=mine", "algo.clip_hihg=1"])
    given = [*path, "experiment=mine", "algo=rloo"]
    (line,) = list_left_out(given, load_config(given))
    assert re.match(r"left out: algo\.clip_high \(from .*mine/experiment/mine\.yaml\): has no effect", line)


def test_a_directory_that_cannot_be_or_hides_a_file_of_megarls_is_an_error(mine):
    (mine / "algo" / "vapo.yaml").write_text("# @package _global_\nalgo: {clip_high: 0.9}\n")
    for arguments, expected in (
        (["--config-dir", "/nowhere"], "--config-dir: found /nowhere; it must be a directory"),
        (["--config-dir"], "--config-dir: found nothing"),
        (["-cd=/tmp", "hydra.searchpath=[/x]"], "hydra.searchpath: found beside --config-dir"),
        ([f"--config-dir={mine}"], r"algo/vapo\.yaml: megarl has a algo/vapo\.yaml too.*rename yours"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_config(take_config_dirs(arguments))


def test_every_group_has_the_users_files_and_an_experiment_may_choose_them(mine):
    (mine / "reward").mkdir()
    (mine / "environment").mkdir()
    (mine / "reward" / "mine.yaml").write_text("defaults: [function]\npath: r.py:score\n")
    (mine / "environment" / "mine.yaml").write_text("defaults: [guess]\nmax_turns: 2\n")
    groups = ("algo", "data", "environment", "model", "reward")
    chosen = "".join(f"  - override /{group}: mine\n" for group in groups)
    (mine / "experiment" / "all.yaml").write_text(f"# @package _global_\ndefaults:\n{chosen}seed: 3\n")
    for typed in (["experiment=all", "reward=mine"], [f"{group}=mine" for group in groups]):
        overrides = take_config_dirs([f"--config-dir={mine}", *typed])
        config = load_config(overrides)
        assert (config.algo.name, config.model.name, config.data.options["letters"]) == ("mine", "mine", "xyz")
        assert (config.reward.path, config.environment.max_turns) == ("r.py:score", 2)
        assert (config.algo.clip_high, config.train.num_prompts) == (0.4, 16)
    assert {"mine", "vapo"} <= set(list_options("algo", overrides))
    assert "mine" not in list_options("algo")


def test_an_experiment_may_have_keys_that_only_another_command_reads(mine):
    (mine / "experiment" / "both.yaml").write_text("# @package _global_\ntrain: {num_iterations: 7}\n")
    given = [*take_config_dirs([f"--config-dir={mine}"]), "experiment=both"]
    assert load_config(given, "evaluate").train.num_iterations == 7
    with pytest.raises(ConfigError, match="has no effect in an evaluation"):
        load_config([*given, "train.num_iterations=7"], "evaluate")


def test_sweeps_and_resumed_runs_keep_the_directory(mine, tmp_path):
    overrides = take_config_dirs([f"--config-dir={mine}", "algo=mine", "algo.clip_high=0.3,0.4", "hydra.run.dir=x"])
    path = overrides[0]
    assert expand_sweep(overrides) == [[path, "algo=mine", f"algo.clip_high={clip}"] for clip in ("0.3", "0.4")]
    check_overrides(overrides)
    config = load_config([path, "algo=mine"])
    save_run(tmp_path / "run", config, [path, "algo=mine"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["overrides"] == [path, "algo=mine"]
    arguments, _ = take_resume([f"resume={tmp_path / 'run'}"])
    assert arguments[:2] == [path, "algo=mine"]


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
