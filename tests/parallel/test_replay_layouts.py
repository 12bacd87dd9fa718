"""Given experts in every layout, against transformers with the same experts and against the routers' own choice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, give_experts, launch, launch_each, replay, replay_own_routes
from tiny_checkpoints import build_sequences, padded_reference_logprobs, write_checkpoint

from megarl.config.schema.roles import ParallelConfig, Recompute
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "cut": {},
    "dp2_ep2": {"parallel": ParallelConfig(num_processes=2, ep=2)},
    "cp2_ep2": {"parallel": ParallelConfig(num_processes=2, cp=2, ep=2)},
    "tp2_sp_ep2": {"parallel": ParallelConfig(num_processes=2, tp=2, sp=True, ep=2)},
    # The router meets each micro-batch again, when later ones have passed it.
    "pp2_recompute": {"parallel": ParallelConfig(num_processes=2, pp=2), "recompute": Recompute.full},
    "vpp2": {"parallel": ParallelConfig(num_processes=2, pp=2, vpp=2)},
    "vpp2_recompute": {"parallel": ParallelConfig(num_processes=2, pp=2, vpp=2), "recompute": Recompute.full},
    "cp2_recompute": {"parallel": ParallelConfig(num_processes=2, cp=2), "recompute": Recompute.full},
}
NUM_LAYERS = 4
DENSE_FIRST = {"num_hidden_layers": NUM_LAYERS, "first_k_dense_replace": 1}
"""Of glm4_moe: the first layer has no experts, so that the stages have different numbers of routers"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("experts") / "qwen3_moe"
    return path, write_checkpoint(path, "qwen3_moe", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense_first") / "glm4_moe"
    write_checkpoint(path, "glm4_moe", **DENSE_FIRST)
    return path


@pytest.fixture(scope="module")
def runs(start: tuple[Path, Any]) -> dict[str, Any]:
    def build(**changes: Any) -> Any:
        return build_spec(Role.policy, start[0], **{"router_replay": True, "tokens_per_microbatch": 60, **changes})

    single = {"one": build(tokens_per_microbatch=10_000), "cut": build(), "chosen": build(router_replay=False)}
    pairs = {name: build(**changes) for name, changes in LAYOUTS.items() if changes}
    return launch_each(1, replay, single) | launch_each(2, replay, pairs)


def force_experts(model: Any, experts: torch.Tensor, counts: list[int]) -> None:
    """Have transformers' routers take these experts [tokens, layers, k] of the row at hand, and count in `counts` how
    many sets are also their own and how many are given.
    """
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp.gate, "handle"):
            block.mlp.gate.handle.remove()

        def force(gate: Any, _: Any, out: tuple[torch.Tensor, ...], layer: int = layer) -> tuple[torch.Tensor, ...]:
            logits, _, own = out
            given = experts[:, layer].long() - 1
            exists = given[:, :1] >= 0
            counts[0] += int(((given.sort().values == own.sort().values).all(1) & exists[:, 0]).sum())
            counts[1] += int(exists.sum())
            chosen = torch.where(exists, given, own)
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        block.mlp.gate.handle = block.mlp.gate.register_forward_hook(force)


@pytest.fixture(scope="module")
def expected(start: tuple[Path, Any]) -> tuple[torch.Tensor, float]:
    """By transformers, one sequence at a time: log-probs [B, T] at temperature 0.8, and the routers' agreement."""
    sequences, counts, rows = give_experts(build_sequences(seed=5), NUM_LAYERS), [0, 0], []
    assert sequences.routed_experts is not None
    for number, experts in enumerate(sequences.routed_experts.split(sequences.lengths.tolist())):
        force_experts(start[1], experts, counts)
        rows.append(padded_reference_logprobs(start[1], sequences.select(torch.tensor([number])), 0.8)[0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), counts[0] / counts[1]


@pytest.mark.parametrize("name", ["one", *LAYOUTS])
def test_logprobs_with_given_experts_are_those_of_transformers_with_them(
    name: str, runs: dict[str, Any], expected: tuple[torch.Tensor, float]
) -> None:
    torch.testing.assert_close(runs[name]["logprobs"], expected[0], rtol=0, atol=1e-5)
    assert (runs["chosen"]["logprobs"] - expected[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["one", *LAYOUTS])
def test_the_agreement_of_the_routers_is_logged_alike_in_every_layout(
    name: str, runs: dict[str, Any], expected: tuple[torch.Tensor, float]
) -> None:
    first, second = runs[name]["metrics"]
    assert first["policy/moe_routing_agreement"] == expected[1]
    assert 0 < expected[1] < 1
    # The weights of the second step are not those that were evaluated.
    assert "policy/moe_routing_agreement" not in second
    assert "policy/moe_routing_agreement" not in runs["chosen"]["metrics"][0]


def assert_equal(found: dict[str, Any], one: dict[str, Any]) -> None:
    assert one["gradient"].keys() == found["gradient"].keys()
    for key, gradient in one["gradient"].items():
        assert (found["gradient"][key] - gradient).norm() <= 1e-5 * gradient.norm(), key
    assert one["gradient"]["model.layers.1.mlp.gate.weight"].norm() > 1e-4
    for step, other in zip(found["metrics"], one["metrics"], strict=True):
        for metric in ("policy/loss", "policy/grad_norm", "policy/moe_max_load"):
            assert step[metric] == pytest.approx(other[metric], rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_experts_give_the_same_gradient_in_every_layout(name: str, runs: dict[str, Any]) -> None:
    one = runs["one"]
    assert_equal(runs[name], one)
    # The experts do matter.
    key = "model.layers.0.mlp.gate.weight"
    chosen = runs["chosen"]["gradient"][key]
    assert (one["gradient"][key] - chosen).norm() > 0.1 * chosen.norm()


def test_experts_stay_with_their_layers_where_the_first_ones_are_dense(dense_first: Path) -> None:
    def build(**changes: Any) -> Any:
        return build_spec(Role.policy, dense_first, router_replay=True, tokens_per_microbatch=60, **changes)

    names = ("pp2_recompute", "vpp2", "cp2_recompute")
    (one,) = launch_each(1, replay, {"one": build()}).values()
    for found in launch_each(2, replay, {name: build(**LAYOUTS[name]) for name in names}).values():
        torch.testing.assert_close(found["logprobs"], one["logprobs"], rtol=0, atol=1e-5)
        assert_equal(found, one)
        assert found["metrics"][0]["policy/moe_routing_agreement"] == one["metrics"][0]["policy/moe_routing_agreement"]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_the_routers_own_choice_given_back_changes_no_bit(
    family: str, start: tuple[Path, Any], dense_first: Path
) -> None:
    checkpoint = {"qwen3_moe": start[0], "glm4_moe": dense_first}[family]
    runs = launch(1, replay_own_routes, build_spec(Role.policy, checkpoint))
    chosen, given = runs["chosen"], runs["given"]
    assert torch.equal(chosen["logprobs"], given["logprobs"])
    # Until an update changes the routers' choice, the only difference is that agreement is logged.
    assert given["metrics"][0] == chosen["metrics"][0] | {"policy/moe_routing_agreement": 1.0}
