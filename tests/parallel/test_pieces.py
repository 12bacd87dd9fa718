"""What each rank says it holds of a model: predicted for the sync's plan, and that part of the checkpoint; what it is
sent of a batch: the rows that it computes, with the same result to the last bit.
"""

import pickle
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import build_spec, collect, evaluate, hash_weights, launch_each, read, read_layout, run_specs
from tiny_checkpoints import build_samples, write_checkpoint
from tool_loading import load_tool

from megarl.algo.losses import count_minibatch
from megarl.cluster.actors import Share, Sharer
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.batch import build_batch
from megarl.mcore.checkpoints import CheckpointReader, list_entries
from megarl.mcore.microbatches import pack
from megarl.mcore.spec import Role, check_layout, read_architecture
from megarl.models.families import FAMILIES
from megarl.sync.plan import Piece, TensorSlice
from megarl.types import TrainingSamples

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
    for name, (family, options) in CHECKPOINTS.items():
        write_checkpoint(root / name, family, **options)
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
    arch = read_architecture(root / name)
    with CheckpointReader(root / name) as reader:
        wholes = {whole: reader.read(whole) for entry in list_entries(arch, False) for whole in entry.hf_names}
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
