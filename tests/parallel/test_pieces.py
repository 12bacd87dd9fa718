"""What each rank says it holds of a model: predicted for the sync's plan, and that part of the checkpoint."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, collect, launch_each, read, read_layout, run_specs
from tiny_checkpoints import write_checkpoint
from tool_loading import load_tool

from megarl.config.schema.roles import Dtype
from megarl.mcore.spec import Role, check_layout, read_architecture
from megarl.models.families import FAMILIES
from megarl.sync.plan import Piece, TensorSlice

pytestmark = pytest.mark.slow

predict_ranks = load_tool("bench/policy_pieces.py").predict_ranks

TWO = ("tp2", "tp2-sp", "pp2", "dp2", "dp2-ep2", "tp2-sp-ep2")
FOUR = {
    "deep": ("tp2-sp-pp2", "pp2-vpp2-dp2", "tp4-sp", "tp2-sp-cp2", "pp2-dp2"),
    "qwen3_moe": ("pp2-dp2-ep2", "tp2-sp-dp2-ep2-etp2", "tp2-sp-dp2-ep4"),
}
UNEVEN = {"deep-pp2-dp2": {"num_layers_in_first_pipeline_stage": 1}}
# Of the dense stage, the first of two, no expert is held.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "dense_stage": ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 2}),
    "deep": ("qwen2", {"tied": True, "num_hidden_layers": 4}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name, (family, fields) in CHECKPOINTS.items():
        write_checkpoint(root / name, family, **fields)
    return root


def flatten(piece: Piece) -> tuple[Any, ...]:
    return piece.tensor, piece.row, piece.col, piece.whole, astuple(piece.region)


def hold_pieces(worker: Any, directory: Path) -> list[Any]:
    """Of each rank: the pieces that it says it holds, and the numbers that lie there."""
    from megarl.sync.ends import WeightSender

    tensors, held = worker.shards(), []
    for piece in WeightSender(worker).describe():
        at = TensorSlice(piece.row, piece.col, piece.region.num_rows, piece.region.num_cols)
        held.append((flatten(piece), at.of(tensors[piece.tensor]).clone()))
    return collect(held)


@pytest.fixture(scope="module")
def held(root: Path) -> dict[str, list[Any]]:
    layouts = {
        f"{name}-{layout}": (root / name, read_layout(layout))
        for name in CHECKPOINTS
        for layout in (*TWO, *FOUR.get(name, ()))
        if not check_layout(read_architecture(root / name), read_layout(layout), "layout")
    }
    specs = {
        name: build_spec(Role.reference, path, parallel=layout, megatron=UNEVEN.get(name, {}))
        for name, (path, layout) in layouts.items()
    }
    return launch_each(hold_pieces, specs)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_rank_holds_what_is_predicted_and_that_part_of_the_checkpoint(
    name: str, root: Path, held: dict[str, list[Any]]
) -> None:
    wholes, arch = read(root / name), read_architecture(root / name)
    own = {key: ranks for key, ranks in held.items() if key.partition("-")[0] == name}
    assert len(own) >= 4 + len(FOUR.get(name, ()))
    for key, ranks in own.items():
        predicted = predict_ranks(arch, read_layout(key.partition("-")[2]), UNEVEN.get(key, {}))
        assert dict(enumerate(ranks)).keys() == predicted.keys()
        for rank, pieces in enumerate(ranks):
            assert {piece for piece, _ in pieces} == {flatten(piece) for piece in predicted[rank]}, (key, rank)
            for (*_, whole, region), numbers in pieces:
                assert numbers.equal(TensorSlice(*region).of(wholes[whole])), (key, rank, whole)


def test_the_correction_bias_stays_in_float32_and_as_it_is_in_a_bfloat16_model(root: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = read(root / "glm4_moe")[name]
    assert not bias.equal(bias.bfloat16().float())
    spec = build_spec(Role.policy, root / "glm4_moe", dtype=Dtype.bfloat16)
    run = run_specs(tmp_path, {"bfloat16": spec}, "weights:before update weights:after")["bfloat16"]
    for found in (run.read("before"), run.read("after")):
        assert found[name].equal(bias)
        assert found["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
