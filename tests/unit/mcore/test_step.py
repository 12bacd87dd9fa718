"""What a step makes of its micro-batches, and the targets of their tokens: one process without another; what a
checkpoint holds of a model and its random states, and storages in host memory and back.
"""

import contextlib
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_samples, build_sequences, build_spec, write_checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

import megarl.mcore  # noqa: F401
from megarl.algo.losses import LossOutput, TokenTargets
from megarl.config.schema.roles import Offload, OptimizerConfig, Recompute
from megarl.files import CheckpointError
from megarl.mcore import batch as batch_module
from megarl.mcore import optimizer as offload
from megarl.mcore import worker as worker_module
from megarl.mcore.batch import build_batch
from megarl.mcore.layers import MoEAuxLossAutoScaler, Router, find_routers, start_minibatch
from megarl.mcore.optimizer import OffloadManager, StorageOffloader, drop_fp8_weights, find_storages
from megarl.mcore.spec import Role
from megarl.mcore.state import _put_random_state, _put_weights, _take_random_state, shard_weights
from megarl.mcore.worker import MegatronWorker, accumulate, add_rounding, build_targets, collect_rows, run_schedule

ROWS = [3, 11, 4]
"""Of `build_samples`: 3 has no loss, and others of its tokens are not generated"""
LOOSE = {"critic_mask", "num_rows", "row_lengths", "rows", "samples", "positive"}


def test_each_token_has_the_targets_of_its_own_place() -> None:
    samples = build_samples()
    batch = build_batch(samples.sequences, ROWS)
    targets, at = build_targets(samples, batch), (batch.rows[batch.token_rows], batch.columns)
    names = {field.name for field in fields(TokenTargets)} - LOOSE
    for name in names:
        assert torch.equal(getattr(targets, name), getattr(samples, name)[at]), name
    assert torch.equal(targets.positive, samples.positive[at[0]])
    assert torch.equal(targets.rows, batch.token_rows)
    assert torch.equal(targets.samples, at[0])
    assert targets.num_rows == 3
    assert targets.row_lengths.tolist() == samples.mask[batch.rows].sum(1).tolist()
    # What is left to a loss by its name differs, so that none stands for another.
    values = [tuple(getattr(targets, name).tolist()) for name in names]
    assert len(set(values)) == len(values)


def test_the_critic_has_a_mask_of_its_own_and_targets_that_an_algorithm_lacks_are_lacking() -> None:
    samples = build_samples()
    critic_mask = samples.mask & (torch.arange(samples.mask.shape[1]) % 2 == 0)
    batch = build_batch(samples.sequences, ROWS)
    found = build_targets(replace(samples, critic_mask=critic_mask), batch).critic_mask
    assert torch.equal(found, critic_mask[batch.rows[batch.token_rows], batch.columns])
    assert build_targets(samples, batch).critic_mask is None
    names = ("old_logprobs", "sampling_logprobs", "ref_logprobs", "old_values", "returns")
    for name in names:
        targets = build_targets(replace(samples, **{name: None}), batch)
        assert [other for other in names if getattr(targets, other) is None] == [name]


def test_sums_are_added_and_maxima_kept_over_micro_batches_that_may_lack_one() -> None:
    def output(sums: dict[str, float], maxima: dict[str, float]) -> LossOutput:
        made = [{name: torch.tensor(value) for name, value in each.items()} for each in (sums, maxima)]
        return LossOutput(torch.zeros(()), *made)

    outputs = [output({"a": 1.0, "b": 2.0}, {"m": -3.0}), output({"a": 4.0}, {"m": -5.0, "n": -1.0}), output({}, {})]
    assert accumulate(outputs) == ({"a": 5.0, "b": 2.0}, {"m": -3.0, "n": -1.0})


def test_rows_come_back_in_their_own_order_whatever_micro_batch_they_were_in() -> None:
    sequences = build_sequences()
    batches = [build_batch(sequences, rows, multiple=8) for rows in ([6, 1], [], [0, 8])]
    outputs = [100.0 * batch.rows[batch.token_rows] + batch.columns for batch in batches]
    found = collect_rows(sequences, batches, outputs)
    assert found.rows.tolist() == [0, 1, 6, 8]
    lengths, longest = sequences.response_lengths, int(sequences.response_lengths.max())
    columns = torch.arange(longest)
    expected = torch.stack([(100.0 * row + columns) * (columns < lengths[row]) for row in (0, 1, 6, 8)])
    assert torch.equal(found.values, expected)


def test_random_errors_are_within_their_unit_and_of_their_seed_and_go_with_their_block() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.0)), torch.rand(1000) + 1
    model.weight = torch.nn.Parameter(torch.zeros(()))
    outputs = []
    for seed in (1, 1, 2):
        with add_rounding([model], 0.01, seed):
            outputs.append(model(x))
    errors = outputs[0] / x - 1
    # Of each of the two modules without children, and none of the one that holds them.
    assert 0.01 < float(errors.abs().max()) <= 0.0202
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(model(x), x)
    with add_rounding([model], 0.01, 1):
        assert torch.equal(model(x.double()), x.double())  # as angles of positions, of another dtype


def test_weights_that_no_verb_has_changed_are_not_copied_to_the_host_again() -> None:
    weight = torch.nn.Linear(3, 2, bias=False)
    before = weight.weight.detach().clone()
    manager = OffloadManager(Offload.all, [weight], [weight], None)
    for training, expected in ((False, 0.0), (True, 1.0), (False, 1.0)):
        with manager.during(training), torch.no_grad():
            weight.weight += 1.0  # Of a verb that only reads nothing comes back: the host's copy has stayed.
        with manager.during(training=False):
            assert torch.equal(weight.weight, before + expected)
        assert weight.weight.untyped_storage().nbytes() == 0
    manager.is_changed = True
    with manager.during(training=False), torch.no_grad():
        weight.weight += 1.0
    with manager.during(training=False):
        assert torch.equal(weight.weight, before + 2.0)


class OnlyOneWay(TorchFunctionMode):
    """Forbids what waits for the device: an index by truth values, and a copy to it but by `send`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = args[1] if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) else args[1:2]
        if func in (torch.Tensor.nonzero, torch.nonzero, torch.Tensor.item, torch.Tensor.tolist):
            raise AssertionError(func)
        if func is torch.Tensor.__getitem__ and any(torch.is_tensor(x) and x.dtype == torch.bool for x in parts):
            raise AssertionError("an index by truth values")
        return func(*args, **(kwargs or {}))


def test_what_a_micro_batch_needs_of_the_host_goes_to_the_device_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if meta were the device: a tensor that did not go by `send` would still be the CPU's."""
    sent: list[torch.Tensor] = []

    def send(x: torch.Tensor) -> torch.Tensor:
        sent.append(x)
        return x.to("meta")

    for module in (batch_module, worker_module):
        monkeypatch.setattr(module, "send", send)
    samples = build_samples()
    batch = build_batch(samples.sequences, ROWS)
    targets = build_targets(samples, batch)
    moved = [*vars(targets).values(), batch.tokens, batch.positions, batch.targets, *vars(batch.params).values()]
    tensors = [x for x in moved if torch.is_tensor(x)]
    assert {x.device.type for x in tensors} == {"meta"}
    assert len(sent) >= len(tensors) - 1  # One tensor of lengths is both queries' and keys'.


def test_the_routers_terms_need_no_number_that_only_the_device_knows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "moe", "qwen3_moe")
    coefficients = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
    spec = build_spec(tmp_path / "moe", Role.policy, optimizer=OptimizerConfig(), megatron=coefficients)
    with contextlib.closing(MegatronWorker(spec, 0, 1, f"file://{tmp_path}/init")) as worker:
        (router, *_) = find_routers(worker.chunks)
        (batch,) = worker._batches(build_samples().sequences)
        start_minibatch(worker.chunks, 9, 100)
        router.train()
        router.packed = batch.params
        logits = torch.randn(batch.tokens.shape[1], 1, router.num_experts, requires_grad=True)
        with OnlyOneWay():
            Router.routing(router, logits)[0].sum().backward()
        assert router.load is not None
        assert int(router.load.tokens.sum()) == router.topk * int((batch.params.sequence_numbers >= 0).sum())


def test_recomputed_layers_of_experts_let_go_of_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron keeps what the test above left, of another shape than its schedule's.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    write_checkpoint(tmp_path / "moe", "qwen3_moe")
    spec = build_spec(tmp_path / "moe", Role.policy, optimizer=OptimizerConfig(), recompute=Recompute.full)
    with contextlib.closing(MegatronWorker(spec, 0, 1, f"file://{tmp_path}/init")) as worker:
        inputs: list[Any] = []

        def remember(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
            inputs.append(weakref.ref(args[0] if args else kwargs["hidden_states"]))

        layers = worker.chunks[0].decoder.layers
        for layer in layers:
            layer.register_forward_pre_hook(remember, with_kwargs=True)
        samples = build_samples()
        worker.update(samples, [torch.arange(samples.sequences.num_samples)])
        # Each layer computes forward and once more.
        assert len(inputs) >= 2 * len(layers)
        assert [each() for each in inputs if each() is not None] == []


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("worker")
    write_checkpoint(path / "qwen3")
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=1.0)
    made = MegatronWorker(build_spec(path / "qwen3", Role.policy, optimizer=optimizer), 0, 1, f"file://{path}/init")
    yield made
    made.close()


def test_gradients_are_the_undivided_sum_over_micro_batches_and_outputs_keep_their_order(worker: Any) -> None:
    """The schedule would divide by the number of micro-batches, or by that of tokens."""
    sequences = build_sequences()

    def find_gradient(*rows: list[int]) -> tuple[dict[str, torch.Tensor], list[Any]]:
        for chunk in worker.model:
            chunk.train()
            chunk.zero_grad_buffer()
        batches = [build_batch(sequences, each) for each in rows]
        kept = run_schedule(
            worker.model,
            batches,
            lambda out, batch: ((out.float() * torch.arange(out.shape[-1])).sum() / 1e3, batch.rows.tolist()),
            forward_only=False,
        )
        return {name: x.main_grad.clone() for name, x in worker.chunks[0].named_parameters()}, kept

    run_schedule(worker.model, [build_batch(sequences, [0])], lambda out, _: (out.sum(), None), forward_only=True)
    assert not any(bool(x.main_grad.any()) for x in worker.chunks[0].parameters())
    first, _ = find_gradient([0, 1])
    second, _ = find_gradient([2])
    both, kept = find_gradient([2], [1, 0])
    assert kept == [[2], build_batch(sequences, [0, 1]).rows.tolist()]
    for name, gradient in both.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradient, first[name] + second[name], rtol=1e-4, atol=1e-4)


class Linear(nn.Module):
    """As Transformer Engine's: it refuses any extra state that is a pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"a pickle"), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


class Experts(Linear):
    """As Megatron's TEGroupedLinear with FP8 products of a recipe that has no state."""

    num_gemms = 3

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def _split_extra_state(self, state: torch.Tensor) -> list[Any]:
        raise TypeError("'NoneType' object is not subscriptable")


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = Linear(), Experts()

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        state = dict(self.state_dict(keep_vars=True))
        split = self.experts._split_extra_state(state.pop("experts._extra_state"))
        return state | {f"experts._extra_state{number or ''}": each for number, each in enumerate(split)}


def test_a_checkpoint_has_no_state_of_fp8_products_and_none_is_read_from_one() -> None:
    chunk = Chunk()
    sharded = shard_weights(chunk, metadata={})
    assert sorted(sharded) == ["experts.weight", "linear.weight"]
    _put_weights(Path("c"), [chunk], {"0": {key: torch.ones(2) for key in sharded}})
    assert chunk.linear.weight.tolist() == [1, 1]


def test_weights_that_a_checkpoint_lacks_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"c: does not hold what the model has: experts\.weight"):
        _put_weights(Path("c"), [Chunk()], {"0": {"linear.weight": torch.ones(2)}})


def test_on_a_cpu_the_states_of_a_gpus_generator_are_left_out() -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 3)
    own = _take_random_state()
    # A GPU's state is a seed and an offset.
    foreign = torch.zeros(16, dtype=torch.uint8)
    other = {"torch": own["torch"], "tracker": dict.fromkeys(own["tracker"], foreign), "cuda": foreign}
    kind = other if not torch.cuda.is_available() else {key: other[key] for key in ("torch", "tracker")}
    _put_random_state(kind)
    found = tracker.get_states()
    assert all(torch.equal(found[name], state) for name, state in own["tracker"].items())
    with tracker.fork():
        torch.rand(1)


@pytest.mark.parametrize("sizes", [(7,), (16, 16, 16), (100, 3, 64), (1, 0, 2000)])
def test_storages_come_back_bit_by_bit_whatever_the_pieces(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    offloader = StorageOffloader()
    for extra in (0, 5, 0):
        tensors = [torch.randn(size) for size in [*sizes, *[9] * extra]]
        expected = [tensor.clone() for tensor in tensors]
        offloader.park(find_storages(tensors))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        offloader.bring()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, expected, strict=True))
    # torch rounds pinned memory up to powers of two: 70 GiB in one piece would be 128.
    hosts = [host.numel() for host in offloader._hosts]
    assert sum(hosts) == 4 * (sum(sizes) + 45)
    assert max(hosts) <= 64


def test_what_is_not_kept_comes_back_as_zeros_without_host_memory() -> None:
    offloader, tensor = StorageOffloader(keep=False), torch.randn(5)
    offloader.park(find_storages([tensor]))
    offloader.bring()
    assert torch.equal(tensor, torch.zeros(5))
    assert not offloader._hosts


def test_the_fp8_copies_that_transformer_engine_keeps_of_weights_are_dropped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    # The name and the place of Transformer Engine's cache (transformer_engine/pytorch/module/base.py).
    model[0]._fp8_workspaces = {"weight": torch.zeros(2, 2, dtype=torch.uint8)}
    drop_fp8_weights([model])
    assert model[0]._fp8_workspaces == {}
