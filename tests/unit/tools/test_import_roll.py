"""tools/import_roll.py on files in ROLL's form: what it prints loads, every key has its line, nothing leaks in."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from roll_cases import FILES, import_tree, load_tree, make, run_import, write

from megarl.config.checks.keys import find_unused
from megarl.config.load import load_config
from megarl.config.roll_import import import_roll, list_losses, list_overrides, read_roll_file
from megarl.config.schema.root import Config
from megarl.config.schema.run import ClusterConfig, Placement
from megarl.config.schema.task import JsonlDataConfig, MathRewardConfig
from megarl.config.search_path import CONF_DIR, write_search_path


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not is_dataclass(value):
        return {prefix[:-1]: value}
    return {k: v for f in fields(value) for k, v in flatten(getattr(value, f.name), f"{prefix}{f.name}.").items()}


def test_a_file_of_rolls_loads_with_the_values_that_it_says():
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss")
    assert code == 0, report
    config = load_config(overrides)
    algo, train, policy = config.algo, config.train, config.policy
    assert (algo.advantage, algo.whiten_advantages, algo.advantage_clip, algo.reward_clip) == (
        *("reinforce", True, 2.0, 10.0),
    )
    assert (algo.dual_clip, algo.overlong.filter, algo.kl.in_reward, algo.kl.in_loss) == (1.4, True, False, False)
    assert algo.loss_agg_mode.name == "seq-mean-token-mean"  # ROLL's default
    assert (train.prompts_per_iteration, train.responses_per_prompt, train.num_iterations) == (64, 8, 500)
    # 1 per device, 32 accumulation steps, 16 data-parallel ranks
    assert (train.samples_per_minibatch, policy.parallel.num_processes) == (512, 16)
    assert (policy.optimizer.lr, policy.optimizer.warmup_steps, policy.optimizer.beta2) == (1e-6, 20, 0.999)
    # ROLL's default schedule is linear, over 500 iterations of one optimizer step
    assert (policy.optimizer.decay.name, policy.optimizer.decay_iterations) == ("linear", 500)
    assert (config.rollout.response_length, config.data.prompt_length, config.rollout.temperature) == (4096, 2048, 0.99)
    assert (config.model.path, config.seed) == ("Qwen/Qwen2.5-7B", 42)
    # Of five domains the one with a counterpart, of five files the one that is named after it.
    assert (config.data.path, type(config.reward)) == ("data/math_deepmath_deal.jsonl", MathRewardConfig)


def test_a_file_that_loses_data_and_reward_ends_with_1_and_says_so_in_its_last_line():
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml")
    last = report.splitlines()[-1]
    assert code == 1
    assert overrides
    assert "LOST of what is learned: data (actor_train.data_args.file_name); reward (" in last
    assert all(name in last for name in ("code_sandbox", "llm_judge", "crossthinkqa", "ifeval"))
    assert "--allow-loss" in last


def test_a_ppo_file_of_rolls_loses_nothing_and_has_a_critic_with_its_own_optimizer():
    code, overrides, report = run_import(FILES / "example_ppo.yaml")
    assert code == 0, report
    assert report.splitlines()[-1].endswith("nothing that is learned is lost")
    config = load_config(overrides)
    assert config.algo.advantage == "gae"
    assert config.algo.lambda_policy == config.algo.lambda_critic == 0.95
    source = OmegaConf.load(FILES / "example_ppo.yaml")
    assert config.critic.optimizer.lr == source.critic.training_args.learning_rate
    assert config.critic.init is None


@pytest.mark.parametrize("name", ["rlvr_reinforce.yaml", "example_ppo.yaml"])
def test_every_key_of_the_file_has_a_line_of_the_report(name):
    def walk(tree, prefix=""):
        for key, child in tree.items():
            if isinstance(child, dict) and child:
                yield from walk(child, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    outcomes, _ = import_roll(read_roll_file(FILES / name))
    told = {key for outcome in outcomes for key in outcome.key.split(", ")}
    keys = set(walk(OmegaConf.to_container(OmegaConf.load(FILES / name))))
    assert not keys - told
    assert not [outcome for outcome in outcomes if outcome.verdict == "not known"]


def test_math_data_and_reward_are_those_of_the_file(tmp_path):
    config = load_tree(tmp_path, make(**{"validation.data_args.file_name": ["data/aime.jsonl"]}))
    assert isinstance(config.data, JsonlDataConfig)
    assert (config.data.path, config.data.heldout_path) == ("data/math.jsonl", "data/aime.jsonl")
    assert (config.data.prompt_field, config.data.answer_field) == ("messages", "ground_truth")
    assert isinstance(config.reward, MathRewardConfig)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "grpo"])
def test_nothing_of_the_tiny_task_the_laptop_or_a_preset_is_in_an_imported_job(tmp_path, estimator):
    outcomes, problems = import_tree(tmp_path, make(adv_estimator=estimator))
    assert not problems
    overrides = list_overrides(outcomes)
    config = load_config([f"{key}={text}" for key, text in overrides.items()])
    found = flatten(config)
    expected = {**flatten(Config()), **flatten(JsonlDataConfig(), "data."), **flatten(MathRewardConfig(), "reward.")}
    gpu = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "cluster" / "gpu.yaml"))
    expected |= {f"{room}.{key}": value for room, keys in gpu.items() for key, value in keys.items()}
    expected["model.name"] = "checkpoint"
    expected["cluster.placement"] = Placement[gpu["cluster"]["placement"]]
    strange = {key: value for key, value in found.items() if key not in overrides and value != expected.get(key)}
    without_effect = dict(find_unused(config, strange))
    assert strange.keys() - without_effect.keys() <= {"algo.name"}
    assert found["cluster.object_store_mb"] != ClusterConfig().object_store_mb


def test_what_is_not_learned_is_told_and_no_loss(tmp_path):
    changes = {"track_with": "wandb", "output_dir": "./x", "checkpoint_config.type": "oss", "logging_steps": 5}
    load_tree(tmp_path, make(**changes, enable_reference=True, l2=0.1, use_topr_loss=True))


def test_what_rolls_algorithm_does_not_read_is_told_and_left_out(tmp_path):
    outcomes, _ = import_tree(tmp_path, make(value_clip=0.5, **{"critic.training_args.learning_rate": 1e-5}))
    assert not any(key.startswith(("algo.value_clip", "reference.", "critic.")) for key in list_overrides(outcomes))
    told = next(outcome for outcome in outcomes if outcome.key == "value_clip")
    assert (told.verdict, told.lost) == ("no effect", "")
    assert "has no critic" in told.note


def test_interpolations_are_followed_and_those_that_lead_nowhere_are_told(tmp_path):
    tree = make(response_length="${longest}", longest=100, exp_name="${nowhere.else}", output_dir="out/${pretrain}")
    outcomes, problems = import_tree(tmp_path, tree)
    assert not problems
    assert list_overrides(outcomes)["rollout.response_length"] == "100"
    by_key = {outcome.key: outcome for outcome in outcomes}
    assert by_key["exp_name"].verdict == "not resolved"
    assert by_key["output_dir"].found == "out/Qwen/Qwen2.5-7B"
    assert not list_losses(outcomes)


def test_a_file_whose_values_contradict_one_another_is_told_so_with_code_1(tmp_path):
    tree = make(adv_estimator="grpo", num_return_sequences_in_group=1)
    code, overrides, report = run_import(write(tmp_path / "roll.yaml", yaml.safe_dump(tree)))
    assert code == 1
    assert overrides
    assert "error: train.responses_per_prompt: 1 found" in report
    assert "do not load" in report.splitlines()[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_train.training_args.per_device_train_batch_size": "x"},
        {"actor_train.device_mapping": {"a": 1}},
        {"actor_train.data_args.domain_interleave_probs": 3},
        {"rollout_batch_size": [1, 2]},
        {"num_return_sequences_in_group": "many", "difficulty_mask": True},
        {"max_steps": float("inf"), "actor_train.training_args.warmup_ratio": 0.1},
        {"actor_train.training_args.lr_scheduler_type": ["linear"]},
        {"pretrain": "it's {a} \\ path"},
        {"rewards": 3},
    ],
)
def test_a_value_of_the_wrong_kind_is_told_and_ends_no_import(tmp_path, changes):
    outcomes, problems = import_tree(tmp_path, make(**changes))
    assert all(isinstance(problem, str) for problem in problems)
    assert outcomes


def test_a_written_experiment_composes_to_the_same_configuration(tmp_path):
    options = ("--write", "from_roll", "--config-dir", str(tmp_path))
    assert run_import(FILES / "rlvr_reinforce.yaml", *options)[0] == 1
    assert not (tmp_path / "experiment").exists()
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss", *options)
    assert code == 0, report
    assert load_config([write_search_path([tmp_path]), "experiment=from_roll"]) == load_config(overrides)
    assert run_import(FILES / "rlvr_reinforce.yaml", "--allow-loss", *options)[0] == 2


def test_devices_per_server_become_tp_and_the_number_of_servers_is_the_quotient(tmp_path):
    tree = make(**{"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2})
    rollout = load_tree(tmp_path, tree).rollout
    assert (rollout.num_servers, rollout.tp) == (4, 2)
