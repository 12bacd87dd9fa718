"""Files in ROLL's form, and their import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from megarl.config.load import load_config
from megarl.config.roll_import import Outcome, get_exit_code, import_roll, list_losses, list_overrides, read_roll_file
from megarl.config.schema.root import Config

ROOT = Path(__file__).resolve().parents[3]
FILES = Path(__file__).parent / "roll"
WORKERS = "roll.pipeline.rlvr.rewards"
MATH = f"{WORKERS}.math_rule_reward_worker.MathRuleRewardWorker"
CODE = f"{WORKERS}.code_sandbox_reward_worker.CodeSandboxRewardWorker"
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
STRATEGY = "actor_train.strategy_args.strategy_config"


def make(**changes: Any) -> dict[str, Any]:
    """A small job in ROLL's form, which loses nothing; the changes by dotted key, None to leave one out."""
    tree = {
        **{"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "adv_estimator": "reinforce"},
        **{"prompt_length": 2048, "response_length": 4096, "pretrain": "Qwen/Qwen2.5-7B"},
        "actor_train": {
            "training_args": {
                "learning_rate": 1e-6,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 32,
            },
            "data_args": {
                **{"template": "qwen2_5", "file_name": ["data/math.jsonl"], "messages": "messages"},
                "domain_interleave_probs": {"math_rule": 1.0},
            },
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
            "device_mapping": "list(range(0,16))",
        },
        "actor_infer": {"generating_args": {"temperature": 0.99}, "device_mapping": "list(range(0,8))"},
        "rewards": {"math_rule": {"worker_cls": MATH, "tag_included": ["deepmath_103k"]}},
    }
    config = OmegaConf.create(tree)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return OmegaConf.to_container(config)


def import_tree(tmp_path: Path, tree: Any) -> tuple[list[Outcome], list[str]]:
    file = write(tmp_path / "roll.yaml", tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return import_roll(read_roll_file(file))


def load_tree(tmp_path: Path, tree: Any, **lost: list[str]) -> Config:
    """The imported job, which loads; what is lost of what is learned is exactly `lost`."""
    outcomes, problems = import_tree(tmp_path, tree)
    assert not problems
    assert list_losses(outcomes) == lost
    assert get_exit_code(outcomes, problems) == bool(lost)
    return load_config([f"{key}={text}" for key, text in list_overrides(outcomes).items()])


def run_import(file: Path, *options: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "import_roll.py"), str(file), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
