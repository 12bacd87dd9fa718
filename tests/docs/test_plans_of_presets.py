"""docs/planning.md: the table of plans is what the planner says of the presets. The presets' saves, and the signals and
hours of the Slurm jobs that texts show, are such as their plans ask for.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.plan.job import build_plan, find_models
from megarl.plan.memory import GIB
from megarl.plan.tables import LONGEST_UNSAVED_S, SIGNAL_S, describe_losses, find_signal

ROOT = Path(__file__).resolve().parents[2]
PLANNING = ROOT / "docs" / "planning.md"
ALGOS = ("vapo", "dapo", "grpo")
SPLIT = "cluster=h100x16 cluster.placement=split rollout.transport=split"
ONE_H200_NODE = (
    "cluster=h200x8 policy.parallel={num_processes:8,tp:2,pp:4,cp:1} critic.parallel={num_processes:8,tp:2,pp:4,cp:1}"
    " policy.recompute=selective critic.recompute=selective model.megatron.recompute_modules=[mlp]"
    " train.tokens_per_microbatch=17408 rollout.tp=4 rollout.num_servers=2"
)
MODELS = ("qwen32b", "qwen3_235b_a22b", "qwen3_8b")
OTHERS = ("qwen2_5_7b", "qwen2_7b", "llama3_8b")
PLANS = [
    *((f"`algo={algo} model={model}`", f"algo={algo} model={model}") for model in MODELS for algo in ALGOS),
    *((f"`algo=vapo model={model}`", f"algo=vapo model={model}") for model in OTHERS),
    ("`algo=vapo model=qwen3_8b cluster=h200x8`", "algo=vapo model=qwen3_8b cluster=h200x8"),
    ("`algo=vapo model=qwen3_8b`, SPLIT", f"algo=vapo model=qwen3_8b {SPLIT}"),
    ("`algo=vapo model=qwen32b`, one node of H200s", f"algo=vapo model=qwen32b {ONE_H200_NODE}"),
]
"""What the row says, and the arguments"""


def describe(label: str, arguments: str) -> str:
    """The row of a table: the label, GPUs, seconds by phase and of an iteration, GiB left on the fullest GPU."""
    config = load_config(arguments.split())
    plan = build_plan(config, find_models(config))
    assert not plan.problems, (arguments, plan.problems)
    seconds = plan.seconds
    parts = (seconds.generation, seconds.scoring, seconds.update, seconds.offload, seconds.sync, seconds.iteration)
    left = config.cluster.hardware.memory_gib - max(max(gpus.phases.values()) for gpus in plan.gpus) / GIB
    numbers = [f"{plan.num_gpus}", *(f"{part:,.0f}" for part in parts), f"{left:.1f}"]
    return f"| {label} | {' | '.join(numbers)} |"


@pytest.mark.parametrize(("label", "arguments"), PLANS)
def test_the_docs_have_the_plan_of_every_preset(label: str, arguments: str) -> None:
    assert describe(label, arguments) in PLANNING.read_text().splitlines(), describe(label, arguments)


def list_slurm_jobs() -> Iterator[tuple[str, list[str], list[str]]]:
    """(what a text shows, sbatch's options, what stands behind the script) of each training job of a planned model."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "slurm").glob("*.sh"))):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            found = re.match(r"(?:# )?(sbatch|slurm/train\.sh --submit)\b(.*)", line)
            if found is None:
                continue
            words = [word for word in shlex.split(found[2], comments=True) if re.match(r"--\w|[\w.]+=\w", word)]
            if not any(word.startswith("model=") for word in words) or "--command=evaluate" in words:
                continue
            options = [word for word in words if word.startswith("--")]
            yield f"{path.name}: {line}", options, [word for word in words if word not in options]


def read_option(options: list[str], name: str) -> str | None:
    return next((option.partition("=")[2] for option in options if option.startswith(f"--{name}=")), None)


def count_seconds(text: str) -> int:
    """Of HOURS:MINUTES:SECONDS."""
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def test_slurm_jobs_in_texts_have_the_signal_and_the_hours_that_their_plan_asks_for() -> None:
    script = (ROOT / "slurm" / "train.sh").read_text()
    nodes, signal = (re.search(rf"^#SBATCH --{name}=(\S+)$", script, re.MULTILINE)[1] for name in ("nodes", "signal"))
    jobs = list(list_slurm_jobs())
    assert len(jobs) >= 5
    for label, options, arguments in jobs:
        number = read_option(options, "nodes") or nodes
        config = load_config(["cluster=h100x16", *arguments, f"cluster.num_nodes={number}", "cluster.ray_address=a:1"])
        plan = build_plan(config, find_models(config))
        assert not plan.problems, (label, plan.problems)
        lead = int((read_option(options, "signal") or signal).partition("@")[2])
        assert lead >= (find_signal(config, plan.seconds) or SIGNAL_S), label
        limit = read_option(options, "time")
        # Each start trains, past its signal, until at least one checkpoint more is written.
        needed = max(2 * lead, lead + config.checkpoint.save_every * plan.seconds.iteration)
        assert limit is None or count_seconds(limit) >= needed, label


ONE_GPU = (
    "cluster.hardware={gpu: RTX 4090, memory_gib: 23.5, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s:"
    " 32, network_gb_s: 3, host_memory_gib: 64}"
)
"""As in docs/one-node.md"""
SAVED = [
    *(arguments.split() for _, arguments in PLANS if ONE_H200_NODE not in arguments),
    ["algo=vapo", "model=qwen3_0_6b", "cluster=gpu", ONE_GPU],
]
"""The presets on the clusters that they name"""


@pytest.mark.parametrize("arguments", SAVED, ids=lambda words: " ".join(words[:3]))
def test_every_preset_saves_about_hourly(arguments: list[str]) -> None:
    config = load_config(arguments)
    plan = build_plan(config, find_models(config))
    assert config.checkpoint.save_every * plan.seconds.iteration <= LONGEST_UNSAVED_S
    assert list(describe_losses(config, plan)) == []


def test_a_preset_that_saved_every_five_iterations_is_told_the_number_that_mends_it() -> None:
    config = load_config(["algo=vapo", "model=qwen3_8b", "checkpoint.save_every=5"])
    (line,) = describe_losses(config, build_plan(config, find_models(config)))
    assert line.startswith("a checkpoint every 5.0 hours (checkpoint.save_every=5)")
    assert "checkpoint.save_every=1 writes one every 1.0" in line
