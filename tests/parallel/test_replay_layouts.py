"""Given experts against transformers with the same experts and against the routers' own choice; layouts:
test_layouts.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import build_spec, evaluate, give_experts, launch_each, run_specs
from tiny_checkpoints import build_samples, build_sequences, padded_reference_logprobs, write_checkpoint
from torch.nn import functional as F

from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

NUM_LAYERS = 4


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


def test_logprobs_gradient_and_agreement_with_given_experts_are_those_of_transformers_with_them(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", num_hidden_layers=NUM_LAYERS)
    sequences, samples = give_experts(build_sequences(seed=5)), build_samples()
    samples = replace(samples, sequences=give_experts(samples.sequences))
    specs = {
        name: build_spec(Role.policy, tmp_path / "qwen3_moe", router_replay=name == "given")
        for name in ("given", "chosen")
    }
    verbs = "evaluate gradient:gradient update:2"
    runs = run_specs(tmp_path, specs, verbs, samples=samples, sequences=(sequences,))
    rows, counts = [], [0, 0]
    assert sequences.routed_experts is not None
    for number, experts in enumerate(sequences.routed_experts.split(sequences.lengths.tolist())):
        force_experts(model, experts, counts)
        rows.append(padded_reference_logprobs(model, sequences.select(torch.tensor([number])), 0.8)[0])
    expected = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    torch.testing.assert_close(runs["given"]["evaluate"][0], expected, rtol=0, atol=1e-5)
    assert (runs["chosen"]["evaluate"][0] - expected).abs().max() > 0.01
    first, second = runs["given"].metrics
    assert 0 < first["policy/moe_routing_agreement"] == counts[0] / counts[1] < 1
    # The weights of the second step are not those that were evaluated.
    assert "policy/moe_routing_agreement" not in second | runs["chosen"].metrics[0]
    key = "model.layers.0.mlp.gate.weight"
    chosen, given = (runs[name].read("gradient")[key] for name in ("chosen", "given"))
    assert (given - chosen).norm() > 0.1 * chosen.norm()


def train_with_routes(worker: Any, directory: Path, experts: torch.Tensor | None) -> dict[str, Any]:
    """Log-probs and the metrics of two steps, with the routers' own choice or that which is given; and the choice."""
    from megarl.mcore.layers import find_routers

    maps: list[torch.Tensor] = []
    samples = build_samples()
    sequences = replace(samples.sequences, routed_experts=experts)
    hooks = [r.register_forward_hook(lambda *x: maps.append(x[2][1])) for r in find_routers(worker.chunks)]
    logprobs = evaluate(worker, sequences)
    for hook in hooks:
        hook.remove()
    metrics = worker.update(replace(samples, sequences=sequences), [torch.arange(12)] * 2)
    # One micro-batch, longest row first.
    rows = worker._batches(sequences)[0].rows
    packed = 1 + torch.stack([m.nonzero()[:, 1].view(len(m), -1) for m in maps], 1).to(torch.uint8)
    # None are given for the dense layers before them.
    packed = F.pad(packed, (0, 0, worker.arch.num_layers - len(maps), 0))
    pieces = dict(zip(rows.tolist(), packed.split(sequences.lengths[rows].tolist()), strict=True))
    return {"logprobs": logprobs, "metrics": metrics, "experts": torch.cat([pieces[row] for row in range(12)])}


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", {}), ("glm4_moe", {"first_k_dense_replace": 1})])
def test_the_routers_own_choice_given_back_changes_no_bit(family: str, fields: dict[str, int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / family, family, num_hidden_layers=NUM_LAYERS, **fields)
    spec = build_spec(Role.policy, tmp_path / family)
    chosen = launch_each(train_with_routes, {"chosen": (spec, None)})["chosen"]
    replayed = (replace(spec, router_replay=True), chosen["experts"])
    given = launch_each(train_with_routes, {"given": replayed})["given"]
    assert torch.equal(chosen["logprobs"], given["logprobs"])
    # Until an update changes the routers' choice, the only difference is that agreement is logged.
    assert given["metrics"][0] == chosen["metrics"][0] | {"policy/moe_routing_agreement": 1.0}
