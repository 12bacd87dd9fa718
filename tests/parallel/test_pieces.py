"""What the ranks of real Megatron models hold of the whole model, against the prediction from the layout alone."""

from pathlib import Path

import pytest
from layout_runs import build_spec, launch
from piece_runs import Held, describe_layouts, flatten
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint
from tool_loading import load_tool

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.spec import Role, read_architecture
from megarl.sync.plan import TensorSlice

predict_ranks = load_tool("bench/policy_pieces.py").predict_ranks

DENSE = {
    "tp2-pp2": ParallelConfig(num_processes=4, tp=2, sp=True, pp=2),
    "pp2-vpp2-dp2": ParallelConfig(num_processes=4, pp=2, vpp=2),
    "tp4": ParallelConfig(num_processes=4, tp=4, sp=True),
    "tp2-cp2": ParallelConfig(num_processes=4, tp=2, cp=2, sp=True),
}
EXPERTS = {
    "pp2-ep2": ParallelConfig(num_processes=4, pp=2, ep=2),
    "tp2-ep2-etp2": ParallelConfig(num_processes=4, tp=2, sp=True, ep=2, etp=2),
    "tp2-ep4": ParallelConfig(num_processes=4, tp=2, sp=True, ep=4),
}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pieces")
    for family, tied in (("qwen2", True), ("qwen3_moe", False)):
        write_checkpoint(root / family, family, tied=tied, num_hidden_layers=4)
    return {"dense": root / "qwen2", "experts": root / "qwen3_moe"}


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path]) -> dict[str, dict[int, Held]]:
    specs = {name: build_spec(Role.reference, checkpoints["dense"], parallel=x) for name, x in DENSE.items()}
    specs |= {name: build_spec(Role.reference, checkpoints["experts"], parallel=x) for name, x in EXPERTS.items()}
    uneven = ParallelConfig(num_processes=4, pp=2)
    specs["uneven"] = build_spec(Role.reference, checkpoints["dense"], parallel=uneven, megatron=UNEVEN)
    return launch(4, describe_layouts, specs)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, "uneven"])
def test_every_rank_holds_what_is_predicted_and_that_part_of_the_checkpoint(
    name: str, checkpoints: dict[str, Path], found: dict[str, dict[int, Held]]
) -> None:
    checkpoint = checkpoints["experts" if name in EXPERTS else "dense"]
    wholes = load_file(checkpoint / "model.safetensors")
    parallel = (DENSE | EXPERTS | {"uneven": ParallelConfig(num_processes=4, pp=2)})[name]
    predicted = predict_ranks(read_architecture(checkpoint), parallel, UNEVEN if name == "uneven" else {})
    assert found[name].keys() == predicted.keys()
    for rank, held in found[name].items():
        assert {piece for piece, _ in held} == {flatten(piece) for piece in predicted[rank]}, rank
        for (*_, whole, region), numbers in held:
            assert numbers.equal(TensorSlice(*region).of(wholes[whole])), (rank, whole, region)
