"""What each rank is sent of a batch: the rows that it computes, with the same result to the last bit."""

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import build_spec, collect, evaluate, hash_weights, launch_each
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.algo.losses import count_minibatch
from megarl.cluster.actors import Share, Sharer
from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.batch import build_batch
from megarl.mcore.microbatches import pack
from megarl.mcore.spec import Role
from megarl.types import TrainingSamples

pytestmark = pytest.mark.slow

TRAINED = (Role.policy, Role.critic)
MINIBATCHES = [torch.tensor([5, 0, 11, 3, 8, 2]), torch.tensor([1, 10, 4, 9, 7, 6]), torch.arange(12)]
DP4_PP2 = ParallelConfig(num_processes=8, pp=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares") / "qwen3"
    write_checkpoint(path, vocab_size=64, num_hidden_layers=2)
    return path


def count_bytes(share: Share) -> int:
    """As Ray writes it: what is pickled, and the arrays beside it."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
    return len(text) + sum(len(buffer.raw()) for buffer in buffers)


def train_share(worker: Any, directory: Path, samples: TrainingSamples, minibatches: Any) -> list[dict[str, Any]]:
    """With all rows, then with this rank's share: log-probs or values, the updates' metrics and all checksums."""
    sharer, start = Sharer(worker.spec), directory / "start"
    number = sharer.find_share(torch.distributed.get_rank())
    worker.begin_save(start)
    worker.finish_save()
    results = []
    for is_share in (False, True):
        worker.load(start)
        given, sequences, counts = samples, samples.sequences, []
        if is_share:
            given = sharer.share(samples, minibatches)[number].unfold()
            sequences = sharer.share(samples.sequences)[number].unfold()
            counts = [count_minibatch(samples, rows) for rows in minibatches]
        evaluation = evaluate(worker, sequences)
        metrics = worker.update(given, minibatches, counts)
        results.append({"evaluation": evaluation, "metrics": metrics, "checksums": collect(hash_weights(worker))})
    return results


@pytest.mark.parametrize("role", TRAINED)
def test_a_rank_with_its_share_computes_what_it_does_with_all_rows_bit_for_bit(role: Role, checkpoint: Path) -> None:
    specs = {name: build_spec(role, checkpoint, name, tokens_per_microbatch=40) for name in ("dp2", "pp2", "cp2")}
    found: dict[str, Any] = launch_each(train_share, specs, build_samples(), MINIBATCHES)
    for whole, share in found.values():
        assert share["metrics"] == whole["metrics"]
        assert f"{role.value}/grad_norm" in share["metrics"][0]
        assert share["checksums"] == whole["checksums"]
        assert torch.equal(share["evaluation"], whole["evaluation"])


def share_all(checkpoint: Path, samples: TrainingSamples, minibatches: list[torch.Tensor]) -> tuple[Sharer, Any]:
    sharer = Sharer(build_spec(Role.policy, checkpoint, parallel=DP4_PP2, tokens_per_microbatch=200))
    return sharer, sharer.share(samples, minibatches)


def test_of_one_pass_each_row_is_sent_to_one_data_parallel_rank_in_full(checkpoint: Path) -> None:
    samples = build_samples(48)
    sharer, shares = share_all(checkpoint, samples, list(torch.randperm(48).split(16)))
    assert [sharer.find_share(rank) for rank in range(8)] == [*range(4)] * 2
    assert sorted(np.concatenate([share.rows for share in shares]).tolist()) == list(range(48))
    for share in shares:
        own, rows = share.unfold(), torch.tensor(share.rows)
        for name in ("mask", "loss_mask", "advantages", "old_logprobs", "ref_logprobs"):
            assert torch.equal(getattr(own, name)[rows], getattr(samples, name)[rows]), name
        assert torch.equal(own.sequences.select(rows).tokens, samples.sequences.select(rows).tokens)
        assert torch.equal(own.sequences.lengths, samples.sequences.lengths)
        assert all(getattr(own, each.name) is None for each in fields(own) if getattr(samples, each.name) is None)


def test_the_bytes_for_a_rank_are_those_of_its_rows(checkpoint: Path) -> None:
    samples = build_samples(480)
    _, shares = share_all(checkpoint, samples, list(torch.randperm(480).split(160)))
    for share in shares:
        of_rows = 8 * len(share.tokens) + 17 * 480 + 8 * len(share.rows) + sum(x.nbytes for x in share.targets.values())
        assert of_rows <= count_bytes(share) < of_rows + 2000
        assert len(share.tokens) < 1.1 / 4 * len(samples.sequences.tokens)
        num_tokens = int(samples.sequences.response_lengths[torch.tensor(share.rows)].sum())
        assert {len(values) for values in share.targets.values()} == {num_tokens}


def test_a_row_that_was_not_sent_is_refused(checkpoint: Path) -> None:
    samples = build_samples(48)
    _, shares = share_all(checkpoint, samples, [torch.arange(48)])
    sequences = shares[1].unfold().sequences
    foreign = int(shares[0].rows[0])
    with pytest.raises(ValueError, match=f"row {foreign} was not sent to this rank"):
        build_batch(sequences, [foreign])
    own = pack(samples.sequences.lengths.tolist(), 200, 1)[0][0]
    assert build_batch(samples.sequences, own).num_rows == len(own)
