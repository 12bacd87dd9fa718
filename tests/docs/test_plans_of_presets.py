"""docs/planning.md: the table of plans is what the planner says of the presets."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.plan.assumptions import GIB
from megarl.plan.estimate import build_plan
from megarl.plan.jobs import find_models

PLANNING = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
SPLIT = "cluster=h100x16 cluster.placement=split rollout.transport=split"
ONE_H200_NODE = (
    "cluster=h200x8 policy.parallel={num_processes:8,tp:2,pp:4,cp:1} critic.parallel={num_processes:8,tp:2,pp:4,cp:1}"
    " policy.recompute=selective critic.recompute=selective model.megatron.recompute_modules=[mlp]"
    " train.tokens_per_microbatch=17408 rollout.tp=4 rollout.num_servers=2"
)
PLANS = [
    *(f"algo={algo} model={model}" for model in ("qwen32b", "qwen3_235b_a22b") for algo in ("vapo", "dapo", "grpo")),
    f"algo=vapo model=qwen32b {ONE_H200_NODE}",
    *(f"algo={algo} model=qwen3_8b" for algo in ("vapo", "dapo", "grpo")),
    *(f"algo=vapo model={model}" for model in ("qwen2_5_7b", "qwen2_7b", "llama3_8b")),
    "algo=vapo model=qwen3_8b cluster=h200x8",
    f"algo=vapo model=qwen3_8b {SPLIT}",
    *(f"algo={algo} model=qwen3_8b {SPLIT}" for algo in ("dapo",)),
]


def describe(arguments: str) -> str:
    """The row of a table: the arguments, seconds by phase and of an iteration, GiB left on the fullest GPU."""
    config = load_config(arguments.split())
    plan = build_plan(config, find_models(config))
    assert not plan.problems, (arguments, plan.problems)
    seconds = plan.seconds
    parts = (seconds.generation, seconds.scoring, seconds.update, seconds.offload, seconds.sync, seconds.iteration)
    left = config.cluster.hardware.memory_gib - max(max(gpus.phases.values()) for gpus in plan.gpus) / GIB
    numbers = [f"{plan.num_gpus}", *(f"{part:,.0f}" for part in parts), f"{left:.1f}"]
    return f"| `{arguments}` | {' | '.join(numbers)} |"


@pytest.mark.parametrize("arguments", PLANS)
def test_the_docs_have_the_plan_of_every_preset(arguments: str) -> None:
    assert describe(arguments) in PLANNING.read_text().splitlines(), describe(arguments)
