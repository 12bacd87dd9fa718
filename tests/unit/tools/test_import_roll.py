"""tools/import_roll.py on a file of ROLL's: what it prints loads, every key has its line, nothing leaks in."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megarl.config.checks import find_unused
from megarl.config.load import load_config
from megarl.config.overrides import CONF_DIR
from megarl.config.schema.mix import list_sources
from megarl.config.schema.roles import ModelPlan
from megarl.config.schema.root import Config, Placement
from megarl.config.schema.task import CodeRewardConfig, JsonlDataConfig, MathRewardConfig

ROOT, EXAMPLE = Path(__file__).resolve().parents[3], Path(__file__).with_name("roll_example.yaml")
CODE = "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"


def run_import(file: Path) -> tuple[int, list[str], str]:
    command = [sys.executable, str(ROOT / "tools" / "import_roll.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.splitlines(), done.stderr


def change(tmp_path: Path, **changes: Any) -> Path:
    tree = OmegaConf.load(EXAMPLE)
    for key, value in changes.items():
        OmegaConf.update(tree, key, value, force_add=True)
    OmegaConf.save(tree, tmp_path / "roll.yaml")
    return tmp_path / "roll.yaml"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not is_dataclass(value):
        return {prefix[:-1]: value}
    return {k: v for f in fields(value) for k, v in flatten(getattr(value, f.name), f"{prefix}{f.name}.").items()}


def test_a_file_loads_with_what_it_says():
    code, overrides, report = run_import(EXAMPLE)
    assert (code, report.splitlines()[-1].split("; ")[-1]) == (0, "to decide by hand: nothing"), report
    config = load_config(overrides)
    algo, train, policy, critic = config.algo, config.train, config.policy, config.critic
    assert (algo.advantage, algo.lambda_policy, algo.lambda_critic, algo.dual_clip) == ("gae", 0.95, 0.95, 1.4)
    assert (algo.kl.in_loss, algo.kl.loss_estimator.name, algo.kl.in_reward) == (True, "k3", False)
    assert (train.prompts_per_iteration, train.num_iterations, train.samples_per_minibatch) == (512, 500, 2 * 32 * 4)
    assert (policy.optimizer.lr, policy.optimizer.decay.name, critic.optimizer.lr) == (1e-6, "linear", 1e-5)
    assert (policy.parallel.tp, policy.parallel.num_processes, policy.recompute.name) == (2, 8, "full")
    assert (config.rollout.num_servers, config.rollout.tp, config.rollout.temperature) == (8, 2, 0.99)
    assert (config.rollout.response_length, config.data.path) == (4096, "data/math_deepmath_deal.jsonl")
    assert (config.data.prompt_field, config.data.answer_field) == ("messages", "ground_truth")
    assert (type(config.reward), config.critic.init) == (MathRewardConfig, "my/reward")
    keys = {key for key, _ in walk(OmegaConf.to_container(OmegaConf.load(EXAMPLE)), "")}
    assert not keys - {line.split(": ")[0] for line in report.splitlines()}
    assert "no key of ROLL's" not in report


def walk(tree, prefix):
    for name, child in tree.items():
        yield from (
            walk(child, f"{prefix}{name}.") if isinstance(child, dict) and child else [(f"{prefix}{name}", child)]
        )


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "grpo"])
def test_nothing_of_the_tiny_task_the_laptop_or_a_preset_is_in_an_imported_job(tmp_path, estimator):
    file = change(tmp_path, adv_estimator=estimator, num_return_sequences_in_group=8)
    code, overrides, report = run_import(file)
    assert code == 0, report
    config = load_config(overrides)
    given, found = dict(text.split("=", 1) for text in overrides), flatten(config)
    expected = {**flatten(Config()), **flatten(JsonlDataConfig(), "data."), **flatten(MathRewardConfig(), "reward.")}
    gpu = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "cluster" / "gpu.yaml"))
    expected |= {f"{room}.{key}": value for room, keys in gpu.items() for key, value in keys.items()}
    expected |= {"model.name": "checkpoint", "model.plan": ModelPlan.fastest}
    expected |= {"cluster.placement": Placement[gpu["cluster"]["placement"]]}
    strange = {key for key, value in found.items() if key not in given and value != expected.get(key)}
    assert strange - dict(find_unused(config, strange)).keys() <= {"algo.name"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards.pictures.worker_cls": "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"},
        {"actor_train.model_args.lora_target": "q_proj"},
        {"adv_estimator": "gigpo"},
        {"actor_train.pg_variant": "kimi15"},
        {"actor_train.worker_cls": "mine.Worker"},
        {"actor_train.data_args.file_name": ["a.jsonl", "b.csv"]},
        {"critic.training_args.per_device_train_batch_size": 8},
        {"clip_loss_of_next_year": 1},
    ],
)
def test_what_is_not_converted_is_to_be_decided_by_hand_with_code_1(tmp_path, changes):
    file = change(tmp_path, **changes)
    code, _, report = run_import(file)
    assert (code, report.splitlines()[-1].split(": ")[-1]) == (1, *changes)


def test_domains_with_a_reward_each_are_sources_with_their_shares_and_tags(tmp_path):
    prefix = "roll.pipeline.rlvr.rewards."
    judge = {"judge_prompt": "any", "model_args": {"model_name_or_path": "some/judge"}, "tag_included": ["RLVR"]}
    rewards = {
        "rewards.code.worker_cls": CODE,
        "rewards.code.tag_included": ["KodCode"],
        "rewards.judged": {"worker_cls": f"{prefix}llm_judge_reward_worker.LLMJudgeRewardWorker", **judge},
        "rewards.choice.worker_cls": f"{prefix}crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
        "rewards.choice.reward_type": "strict",
        "rewards.unused.worker_cls": f"{prefix}ifeval_rule_reward_worker.GeneralRuleRewardWorker",
        "rewards.math_rule.tag_included": ["deepmath_103k", "aime"],
    }
    shares = {"math_rule": 0.4, "code": 0.3, "judged": 0.2, "choice": 0.1}
    file = change(
        tmp_path,
        **{**rewards, "actor_train.data_args.domain_interleave_probs": shares},
        **{"actor_train.data_args.file_name": ["a.jsonl", "b.jsonl"], "difficulty_mask": True, "pg_variant": "ppo"},
        **{"difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.9, "num_return_sequences_in_group": 8},
        **{"actor_train.model_args.lora_rank": 8, "actor_train.model_args.lora_target": "all-linear"},
    )
    code, overrides, report = run_import(file)
    assert code == 0, report
    config = load_config(overrides)
    sources = list_sources(config)
    assert {name: source.share for name, source in sources.items()} == shares
    data = {name: source.config.data for name, source in sources.items()}
    assert {name: each.select["tag"] for name, each in data.items()} == {
        **{"math_rule": ["deepmath_103k", "aime"], "code": ["KodCode"], "judged": ["RLVR"], "choice": ["choice"]}
    }
    assert {(*each.path, each.prompt_field) for each in data.values()} == {("a.jsonl", "b.jsonl", "messages")}
    fields = {name: each.answer_field for name, each in data.items()}
    assert fields == {**dict.fromkeys(shares, "ground_truth"), "code": "test_cases"}
    assert sources["choice"].config.reward.path == "megarl.examples.roll.rewards:choice_strict"
    assert sources["judged"].config.reward.model == "some/judge"
    assert "serve some/judge at reward.url" in report
    sampling = config.algo.dynamic_sampling
    assert (sampling.low, sampling.high, config.policy.lora.rank) == (0.1, 0.9, 8)


def test_a_single_domain_has_the_runs_own_reward(tmp_path):
    code, overrides, _ = run_import(change(tmp_path, **{"rewards.math_rule.worker_cls": CODE}))
    config = load_config(overrides)
    assert (code, type(config.reward), config.data.answer_field) == (0, CodeRewardConfig, "test_cases")


def test_a_file_without_a_reward_here_never_loads_and_another_kind_of_file_ends_with_code_2(tmp_path):
    code, _, report = run_import(change(tmp_path, **{"rewards.math_rule.worker_cls": "mine.Worker"}))
    assert (code, "error: reward.path" in report) == (1, True)
    for number, text in enumerate(("", "a: [1\n", "- a", "seed: 1", "actor_train: {}\nactor_infer: ${oc.env:HOME}\n")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        code, overrides, report = run_import(file)
        assert (code, overrides, "Traceback" in report) == (2, [], False)
        assert report.startswith(f"error: {file}: ")
