"""tools/import_roll.py on real files of ROLL's: what it prints loads, and every key has its line."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megarl.config.load import load_config
from megarl.config.search_path import write_search_path

ROOT = Path(__file__).resolve().parents[3]
FILES = Path(__file__).parent / "roll"


def run_import(file: Path, *options: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "import_roll.py"), str(file), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_reinforce_file_of_rolls_loads_with_the_values_that_it_says():
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml")
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


def test_a_ppo_file_of_rolls_has_a_critic_with_its_own_optimizer():
    code, overrides, report = run_import(FILES / "example_ppo.yaml")
    assert code == 0, report
    config = load_config(overrides)
    assert config.algo.advantage == "gae"
    assert config.algo.lambda_policy == config.algo.lambda_critic == 0.95
    source = OmegaConf.load(FILES / "example_ppo.yaml")
    assert config.critic.optimizer.lr == source.critic.training_args.learning_rate


@pytest.mark.parametrize("name", ["rlvr_reinforce.yaml", "example_ppo.yaml"])
def test_every_key_of_the_file_has_a_line_of_the_report(name):
    def walk(tree, prefix=""):
        for key, child in tree.items():
            if isinstance(child, dict) and child:
                yield from walk(child, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    _, _, report = run_import(FILES / name)
    told = {key for line in report.splitlines() for key in line.partition(": ")[0].split(", ")}
    keys = set(walk(OmegaConf.to_container(OmegaConf.load(FILES / name))))
    assert not keys - told


def test_what_rolls_algorithm_does_not_read_is_told_and_left_out():
    _, overrides, report = run_import(FILES / "rlvr_reinforce.yaml")
    assert not any(text.startswith(("algo.value_clip", "reference.", "critic.")) for text in overrides)
    line = next(line for line in report.splitlines() if line.startswith("value_clip: "))
    assert "no effect" in line
    assert "has no critic" in line
    assert "nothing here" in next(line for line in report.splitlines() if line.startswith("difficulty_mask: "))


def test_interpolations_are_followed_and_those_that_lead_nowhere_are_told(tmp_path):
    file = write(
        tmp_path / "roll.yaml",
        "response_length: ${longest}\nlongest: 100\npretrain: ${oc.env:HOME}\nexp_name: ${nowhere.else}\n"
        "adv_estimator: grpo\nnum_return_sequences_in_group: 4\nrollout_batch_size: 16\nbogus_key: 1\n",
    )
    code, overrides, report = run_import(file)
    assert code == 0, report
    assert "rollout.response_length=100" in overrides
    assert not any("model.path" in text for text in overrides)
    assert "pretrain: ${oc.env:HOME}  not resolved" in report
    assert "exp_name: null" in report or "exp_name: ${nowhere.else}  not resolved" in report
    assert "bogus_key: 1  not known" in report


def test_a_file_whose_values_contradict_one_another_is_told_so_with_code_1(tmp_path):
    file = write(tmp_path / "roll.yaml", "adv_estimator: grpo\nnum_return_sequences_in_group: 1\nresponse_length: 50\n")
    code, overrides, report = run_import(file)
    assert code == 1
    assert overrides
    assert "error: train.responses_per_prompt: 1 found" in report
    assert "do not load" in report


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "!!python/object/apply:os.system ['touch pwned']\n"])
def test_a_file_that_is_no_configuration_ends_with_code_2_and_its_name(tmp_path, text):
    code, overrides, report = run_import(write(tmp_path / "roll.yaml", text))
    assert (code, overrides) == (2, [])
    assert "roll.yaml" in report
    assert "Traceback" not in report


def test_a_written_experiment_composes_to_the_same_configuration(tmp_path):
    options = ("--write", "from_roll", "--config-dir", str(tmp_path))
    code, overrides, report = run_import(FILES / "rlvr_reinforce.yaml", *options)
    assert code == 0, report
    assert load_config([write_search_path([tmp_path]), "experiment=from_roll"]) == load_config(overrides)
    assert run_import(FILES / "rlvr_reinforce.yaml", *options)[0] == 2


def test_devices_per_server_become_tp_and_the_number_of_servers_is_the_quotient(tmp_path):
    text = "actor_infer:\n  device_mapping: list(range(0,8))\n"
    text += "  strategy_args: {strategy_config: {tensor_parallel_size: 2}}\n"
    _, overrides, _ = run_import(write(tmp_path / "roll.yaml", text))
    assert {"rollout.num_servers=4", "rollout.tp=2"} <= set(overrides)
