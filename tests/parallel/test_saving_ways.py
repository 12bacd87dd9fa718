"""Megarl's and Megatron's ways to save time and memory change when numbers travel, where they are and where they are
rounded, and nothing else. The optimizer's state in a checkpoint: before the first step, and from one Adam to another.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import lazy_adam
import pytest
import torch
from layout_runs import build_spec, collect, hash_weights, launch, play, working
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.roles import Dtype, Offload, OptimizerConfig
from megarl.mcore.spec import Role, WorkerSpec

pytestmark = pytest.mark.slow

VERBS = (
    "held evaluate update gradient:first update held evaluate save:NAME-state load:NAME-state update gradient:second"
    " evaluate held checksum describe"
)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
KINDS: dict[str, tuple[Role, str, str, dict[str, Any]]] = {
    "policy": (Role.policy, "qwen2", "dp2", {}),
    "critic": (Role.critic, "qwen2", "dp2", {}),
    "moe": (Role.policy, "qwen3_moe", "dp2-ep2", {}),
    "bfloat16": (Role.policy, "qwen2", "dp2", {"dtype": Dtype.bfloat16}),
}
PLAIN_FIELDS = {"apply_rope_fusion": False, "bias_activation_fusion": False}
WAYS: dict[str, tuple[tuple[str, ...], dict[str, bool], dict[str, Any]]] = {
    "plain": (tuple(KINDS), {}, {}),
    "overlap": (("policy", "critic", "moe"), OVERLAP, {}),
    "buckets": (("policy", "moe"), OVERLAP, {}),
    "offloaded_buckets": (("critic",), OVERLAP, {"offload": Offload.all}),
    "reduce": (("policy",), {"overlap_grad_reduce": True}, {}),
    "optimizer": (("critic", "bfloat16"), {}, {"offload": Offload.optimizer}),
    "all": (("critic", "bfloat16"), {}, {"offload": Offload.all}),
    "te": (("policy",), {}, {"megatron": PLAIN_FIELDS}),
}
"""Of which roles, the optimizer's overlap, and what else"""
EXACT = [(kind, way) for way, (kinds, *_) in WAYS.items() for kind in kinds if way not in ("plain", "te")]
BUCKET_SIZE = 4000
"""Parameters; Megatron's default of 40 million holds each of these models"""


def run_ways(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: Path) -> dict[str, Any]:
    from megarl.mcore import model

    results = {}
    for name, spec in specs.items():
        with pytest.MonkeyPatch.context() as patch:
            if name.endswith("buckets"):
                config = functools.partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
                patch.setattr(model, "DistributedDataParallelConfig", config)
            if name.endswith("-te"):
                # A machine that has Transformer Engine and no Apex, as far as the choice of fields goes.
                kernels = replace(model.find_kernels(), gpu=True, te=True, apex=False)
                patch.setattr(model, "find_kernels", lambda kernels=kernels: kernels)
            with working(spec, rank, world_size, scratch / name) as worker:
                results[name] = play(worker, scratch / "runs" / name, {"verbs": VERBS.replace("NAME", name)})
    return results


def load_states(rank: int, world_size: int, names: list[str], scratch: Path) -> list[dict[str, torch.Tensor]]:
    """All tensors of what these runs have saved."""
    from megatron.core import dist_checkpointing

    init = f"file://{scratch}/.states"
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    found = [dist_checkpointing.load_plain_tensors(str(scratch / "runs" / f"{name}-state")) for name in names]
    torch.distributed.destroy_process_group()
    return [{key: x for key, x in state.items() if isinstance(x, torch.Tensor)} for state in found]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Any]:
    for family in ("qwen2", "qwen3_moe"):
        write_checkpoint(root / family, family, tied=family == "qwen2")
    specs = {}
    for way, (kinds, overlap, fields) in WAYS.items():
        # No clipping: other buckets are other shards, whose squares add up to the norm in another order.
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.0, **overlap)
        for kind in kinds:
            role, family, layout, own = KINDS[kind]
            common = {"optimizer": optimizer, "tokens_per_microbatch": 60, **own, **fields}
            specs[f"{kind}-{way}"] = build_spec(role, root / family, layout, **common)
    return launch(2, run_ways, specs, scratch=root)


@pytest.mark.parametrize(("kind", "way"), EXACT)
def test_overlapped_communication_and_offloading_change_no_bit(runs: dict[str, Any], kind: str, way: str) -> None:
    found, expected = runs[f"{kind}-{way}"], runs[f"{kind}-plain"]
    assert found["checksum"] == expected["checksum"]
    assert all(map(torch.equal, found["evaluate"], expected["evaluate"]))
    for step, right in zip(found["metrics"], expected["metrics"], strict=True):
        norm = next(key for key in step if key.endswith("/grad_norm"))
        assert step[norm] == pytest.approx(right[norm], rel=1e-6 if "buckets" in way else 0)
        assert {**step, norm: 0} == {**right, norm: 0}
    is_on = "on: overlap_grad_reduce, overlap_param_gather" in found["describe"][0]
    assert is_on == (WAYS[way][1] == OVERLAP)
    assert (found["num_buckets"][0] > 3) == way.endswith("buckets")


def test_a_checkpoint_is_the_same_whatever_the_buckets_of_gradients(root: Path, runs: dict[str, Any]) -> None:
    one, many = launch(1, load_states, ["policy-plain", "policy-buckets"], scratch=root)
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[key]) for key, tensor in one.items())
    for key in {key for key in one if not key.startswith("optimizer.")}:
        # In float32 the optimizer's copy is the weight itself.
        assert torch.equal(many[f"optimizer.state.param.{key}"], many[key]), key
        assert many[f"optimizer.state.exp_avg.{key}"].abs().max() > 0, key


@pytest.mark.parametrize("kind", ["bfloat16", "critic"])
def test_between_calls_nothing_of_what_is_offloaded_is_held(runs: dict[str, Any], kind: str) -> None:
    plain, optimizer, everything = (runs[f"{kind}-{way}"]["held"] for way in ("plain", "optimizer", "all"))
    assert all(held["weights"] and held["gradients"] for held in plain)
    assert all(held["optimizer"] for held in plain[1:])
    assert [held["weights"] for held in optimizer] == [held["weights"] for held in plain]
    assert all(held["gradients"] == held["optimizer"] == 0 for held in optimizer)
    assert all(not any(held.values()) for held in everything)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the layers may be Transformer Engine's")
def test_an_output_layer_is_built_where_transformer_engine_fuses_gradients_and_apex_is_missing(
    runs: dict[str, Any],
) -> None:
    """Megatron's ColumnParallelLinear raises for the field without Apex; local layers compute as without it."""
    assert runs["policy-te"]["fuses"] == [True, False]
    assert runs["policy-plain"]["fuses"] == [False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="other layers and another Adam may be there")
@pytest.mark.parametrize(("kind", "dtype"), [("policy", "float32"), ("bfloat16", "bfloat16")])
def test_a_worker_says_which_layers_and_which_adam_it_computes_with(
    runs: dict[str, Any], kind: str, dtype: str
) -> None:
    assert runs[f"{kind}-plain"]["describe"] == [f"local layers in {dtype}, torch's fused AdamW"]


ADAMS = ["torch", "lazy"]
ROWS = [torch.arange(12)]


def find_storages(worker: Any) -> set[int]:
    """Addresses of the optimizer's tensors, without torch's step counts."""
    from megarl.mcore.optimizer import list_optimizer_tensors

    return {tensor.data_ptr() for tensor in list_optimizer_tensors(worker.optimizer) if tensor.ndim}


def save_and_load(rank: int, world_size: int, spec: WorkerSpec, is_lazy: bool, root: Path) -> dict[str, Any]:
    """A save before the first step and one after the second; what a new worker makes of each, as checksums of the
    weights after one more step. Files of the runs before in `root` are continued too, under "other".
    """
    if is_lazy:
        lazy_adam.install()
    name = "lazy" if is_lazy else "torch"
    others = [folder for folder in root.glob("*-stepped") if folder.name != f"{name}-stepped"]
    states = {key: root / f"{name}-{key}" for key in ("fresh", "stepped")}
    result: dict[str, Any] = {"other": {}}
    with working(spec, rank, world_size, root / name) as worker:
        for key, num_steps in (("fresh", 0), ("stepped", 2)):
            worker.update(build_samples(), ROWS * num_steps)
            saved = hash_weights(worker)
            worker.begin_save(states[key])
            worker.finish_save()
            metrics = worker.update(build_samples(), ROWS)
            result[key] = {"saved": saved, "stepped": hash_weights(worker), "metrics": metrics}
            worker.load(states[key])
            result[key]["again"] = hash_weights(worker)
        result["written"] = collect(sum(path.stat().st_size for path in states["stepped"].glob(f"__{rank}_*")))
        result["kind"] = type(worker.optimizer.chained_optimizers[0].optimizer).__name__
    for key, folder in [*states.items(), *[("other", folder) for folder in others]]:
        with working(spec, rank, world_size, root / f"{name}-{key}") as worker:
            places = find_storages(worker)
            worker.load(folder)
            loaded, kept = hash_weights(worker), places == find_storages(worker)
            metrics = worker.update(build_samples(), ROWS)
            result[key] |= {"loaded": loaded, "kept": kept, "continued": hash_weights(worker), "after": metrics}
    return result


@pytest.fixture(scope="module")
def adams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Experts have an optimizer of their own, which Megatron chains to the other."""
    path = tmp_path_factory.mktemp("adam")
    write_checkpoint(path / "qwen3_moe", "qwen3_moe")
    spec = build_spec(Role.policy, path / "qwen3_moe", "dp2", dtype=Dtype.bfloat16)
    runs = path / "runs"
    runs.mkdir()
    found = {name: launch(2, save_and_load, spec, name == "lazy", scratch=runs, imports=True) for name in ADAMS}
    assert {name: found[name]["kind"] for name in ADAMS} == {"torch": "AdamW", "lazy": "FusedAdam"}
    return found


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("key", ["fresh", "stepped"])
def test_a_state_is_saved_and_continued_bit_by_bit_also_before_the_first_step(
    adams: dict[str, Any], adam: str, key: str
) -> None:
    found = adams[adam][key]
    assert found["saved"] == found["again"] == found["loaded"]
    assert found["stepped"] == found["continued"] != found["saved"]
    assert found["metrics"] == found["after"]


@pytest.mark.parametrize("adam", ADAMS)
def test_a_load_keeps_the_tensors_that_are_there(adams: dict[str, Any], adam: str) -> None:
    """A second set of moments beside the first would be 8 bytes of GPU memory for each parameter."""
    assert all(adams[adam][key]["kept"] for key in ("fresh", "stepped"))


def test_each_data_parallel_rank_writes_a_part_of_the_optimizers_state(adams: dict[str, Any]) -> None:
    # The first has the weights too: 8 bytes of each parameter, the other 6.
    first, second = adams["torch"]["written"]
    assert second / first == pytest.approx(6 / 8, rel=0.15)


def test_one_adam_continues_what_the_other_wrote(adams: dict[str, Any]) -> None:
    found, expected = adams["lazy"]["other"], adams["torch"]["stepped"]
    assert found["loaded"] == expected["saved"]
    assert found["after"] == [pytest.approx(expected["metrics"][0], rel=1e-4)]
