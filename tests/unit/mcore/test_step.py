"""What a step makes of its micro-batches, and the targets of their tokens: one process without another."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_samples, build_sequences, build_spec, write_checkpoint

from megarl.algo.losses import LossOutput, TokenTargets
from megarl.config.schema.roles import OptimizerConfig
from megarl.mcore.batch import build_batch
from megarl.mcore.spec import Role
from megarl.mcore.worker import MegatronWorker, accumulate, add_rounding, build_targets, collect_rows, run_schedule

ROWS = [3, 11, 4]
"""Of `build_samples`: 3 has no loss, and others of its tokens are not generated"""
LOOSE = {"critic_mask", "num_rows", "row_lengths", "rows", "positive"}


def test_each_token_has_the_targets_of_its_own_place() -> None:
    samples = build_samples()
    batch = build_batch(samples.sequences, ROWS)
    targets, at = build_targets(samples, batch), (batch.rows[batch.token_rows], batch.columns)
    names = {field.name for field in fields(TokenTargets)} - LOOSE
    for name in names:
        assert torch.equal(getattr(targets, name), getattr(samples, name)[at]), name
    assert torch.equal(targets.positive, samples.positive[at[0]])
    assert torch.equal(targets.rows, batch.token_rows)
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
