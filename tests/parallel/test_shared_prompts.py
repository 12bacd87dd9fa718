"""Prompts computed once for several responses: loss, gradients, updates and log-probs are those of whole rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_conversations, build_spec, evaluate, launch
from test_equal_layouts import ALGO, OPTIMIZER, WHOLE_RESPONSES
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype, ParallelConfig, Recompute
from megarl.mcore.compare_layouts import LayoutRun, compare_runs, describe_layout, run_layouts
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples

LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(num_processes=2, tp=2, sp=True),
    ParallelConfig(num_processes=2, pp=2),
    ParallelConfig(num_processes=2),
    ParallelConfig(num_processes=4, pp=2),
]
ROLES = {"policy": (Role.policy, ALGO), "means": (Role.policy, WHOLE_RESPONSES), "critic": (Role.critic, ALGO)}


def build_grouped(prompts_of: tuple[int, ...] = (0, 0, 1, 1, 1, 2, 0, 3, 3, 3, 3, 1)) -> TrainingSamples:
    """The conversations' samples, each with one of four prompts; the third has one response alone."""
    samples = build_conversations(seed=0)
    sequences = samples.sequences
    own = [row[prompt:] for row, prompt in zip(*split(sequences), strict=True)]
    texts = [torch.tensor(text) for text in ([5, 9, 3, 30, 7], [5, 9], [11], [40, 2, 2, 17, 8, 1, 33])]
    rows = [torch.cat([texts[number], response]) for number, response in zip(prompts_of, own, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    prompt_lengths = torch.tensor([len(texts[number]) for number in prompts_of])
    grouped = Sequences(torch.cat(rows), lengths, prompt_lengths, prompts=torch.tensor(prompts_of))
    return replace(samples, sequences=grouped)


def split(sequences: Sequences) -> tuple[list[torch.Tensor], list[int]]:
    return list(sequences.tokens.split(sequences.lengths.tolist())), sequences.prompt_lengths.tolist()


def build_specs(checkpoint: Path) -> dict[str, WorkerSpec]:
    specs = {}
    for name, (role, algo) in ROLES.items():
        one = build_spec(role, checkpoint, algo=algo, optimizer=OPTIMIZER, parallel=ParallelConfig())
        shared = replace(one, share_prompts=True, tokens_per_microbatch=60)
        specs |= {name: one, f"{name}-all": replace(shared, tokens_per_microbatch=10_000)}
        specs |= {f"{name}-{describe_layout(layout)}": replace(shared, parallel=layout) for layout in LAYOUTS}
    specs["policy-recompute"] = replace(specs["policy-all"], recompute=Recompute.full)
    return specs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "qwen3"
    write_checkpoint(path, num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def runs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutRun]:
    directory = tmp_path_factory.mktemp("runs")
    return run_layouts(build_specs(checkpoint), build_grouped(), 3, directory, deadline_s=60.0)


@pytest.mark.parametrize(
    "name",
    [f"{role}-{layout}" for role in ROLES for layout in ("all", *map(describe_layout, LAYOUTS))] + ["policy-recompute"],
)
def test_a_step_with_shared_prompts_is_that_of_whole_rows(name: str, runs: dict[str, LayoutRun]) -> None:
    difference = compare_runs(runs[name], runs[name.partition("-")[0]])
    assert difference.find_problems() == [], difference


def test_fewer_operations_are_counted_where_prompts_are_shared(runs: dict[str, LayoutRun]) -> None:
    whole, shared = runs["policy"].metrics[0], runs["policy-all"].metrics[0]
    assert shared["policy/real_tokens_frac"] == whole["policy/real_tokens_frac"] == 1.0
    assert 0.5 < shared["policy/model_tflop_sum"] / whole["policy/model_tflop_sum"] < 0.95


def score(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """Log-probs or values of the grouped samples under each spec."""
    from megarl.mcore.worker import MegatronWorker

    found = {}
    for name, spec in specs.items():
        worker = MegatronWorker(spec, rank, world_size, f"file://{scratch}/{name}.init")
        try:
            found[name] = evaluate(worker, build_grouped().sequences)[0]
        finally:
            worker.close()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(Dtype.float32, 1e-5), (Dtype.bfloat16, 0.1)])
@pytest.mark.parametrize("role", [Role.policy, Role.critic])
def test_logprobs_and_values_with_shared_prompts_are_those_of_whole_rows(
    role: Role, dtype: Dtype, tolerance: float, checkpoint: Path
) -> None:
    whole = build_spec(role, checkpoint, dtype=dtype)
    found = launch(1, score, {"whole": whole, "shared": replace(whole, share_prompts=True)})
    torch.testing.assert_close(found["shared"], found["whole"], atol=tolerance, rtol=tolerance)
