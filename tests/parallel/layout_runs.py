"""What the processes of the parallel tests run: a worker of each specification after the other, in its layout."""

import functools
import gc
import json
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from tiny_checkpoints import build_samples, build_sequences
from torch import Tensor
from torch.nn import functional as F

import megarl.mcore  # noqa: F401
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig, Recompute
from megarl.files import CheckpointError, write_manifest
from megarl.mcore.checkpoint_format import describe_role
from megarl.mcore.spec import Role, WorkerSpec
from megarl.sync.plan import Piece, TensorSlice
from megarl.types import Sequences, TrainingSamples

NUM_STEPS = 3
ALL_ROWS = list(range(12))
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(num_processes=2, tp=2),
    "tp2_sp": ParallelConfig(num_processes=2, tp=2, sp=True),
    "pp2": ParallelConfig(num_processes=2, pp=2),
    "vpp2": ParallelConfig(num_processes=2, pp=2, vpp=2),
    "dp2": ParallelConfig(num_processes=2),
    "cp2": ParallelConfig(num_processes=2, cp=2),
}
Held = list[tuple[tuple[Any, ...], Tensor]]
"""(tensor, row, column, whole tensor, its rectangle) of each piece, and the numbers that lie there"""


def build_spec(role: Role, checkpoint: Path, layout: str = "one", **changes: Any) -> WorkerSpec:
    trained = role is not Role.reference
    fields = {
        "role": role,
        "checkpoint": str(checkpoint),
        "parallel": LAYOUTS[layout],
        # A large epsilon: Adam's first steps would otherwise turn rounding in tiny gradients into whole steps.
        "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=1.0) if trained else None,
        "dtype": Dtype.float32,
        "algo": AlgoConfig(entropy_coef=0.01, positive_lm_coef=0.1),
        "temperature": 0.8,
        "response_length": 32,
        "tokens_per_microbatch": 10_000,
        "deadline_s": 60.0,
        **changes,
    }
    return WorkerSpec(**fields)


def launch(world_size: int, function: Any, *arguments: Any) -> Any:
    """Run function(rank, world_size, *arguments, scratch directory) in `world_size` processes; rank 0's result."""
    with tempfile.TemporaryDirectory() as scratch:
        return launch_in(scratch, world_size, function, *arguments)


def launch_in(scratch: str, world_size: int, function: Any, *arguments: Any) -> Any:
    out = f"{scratch}/{function.__name__}.pt"
    torch.multiprocessing.spawn(run_rank, (world_size, function, (*arguments, scratch), out), nprocs=world_size)
    return torch.load(out, weights_only=True)


def run_rank(rank: int, world_size: int, function: Any, arguments: tuple[Any, ...], out: str) -> None:
    torch.set_num_threads(1)
    try:
        result = function(rank, world_size, *arguments)
    except BaseException:
        Path(f"{out}.{rank}.error").write_text(traceback.format_exc())
        raise
    if rank == 0:
        torch.save(result, out)


def launch_each(world_size: int, function: Any, specs: dict[str, Any], *arguments: Any, scratch: str = "") -> Any:
    """function(worker, SCRATCH/name, ...) for a worker of each spec, or of the first of a tuple of a spec and further
    arguments; rank 0's results by name.
    """
    if scratch:
        return launch_in(scratch, world_size, run_each, function, specs, arguments)
    return launch(world_size, run_each, function, specs, arguments)


def run_each(
    rank: int, world_size: int, function: Any, specs: dict[str, Any], arguments: tuple[Any, ...], scratch: str
) -> dict[str, Any]:
    results = {}
    for name, given in specs.items():
        spec, *own = given if isinstance(given, tuple) else (given,)
        with working(spec, rank, world_size, f"{scratch}/{function.__name__}-{name}") as worker:
            results[name] = function(worker, Path(scratch) / name, *own, *arguments)
        # Each of gloo's groups has threads, which end with the last reference to it; Megatron's models are cyclic.
        del worker
        # Twice: the gradients' hooks are cycles through autograd's own nodes, which the first pass only cuts.
        gc.collect()
        gc.collect()
    return results


@contextmanager
def working(spec: WorkerSpec, rank: int, world_size: int, init: str | Path) -> Iterator[Any]:
    """A worker, whose processes meet at the file INIT.init."""
    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{init}.init")
    try:
        yield worker
    finally:
        worker.close()


def read(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def within_vocabulary(sequences: Sequences, worker: Any) -> Sequences:
    return replace(sequences, tokens=sequences.tokens % worker.arch.vocab_size)


def own_samples(worker: Any) -> TrainingSamples:
    samples = build_samples()
    return replace(samples, sequences=within_vocabulary(samples.sequences, worker))


def update(worker: Any, num_steps: int = 1) -> list[Any]:
    return worker.update(own_samples(worker), [torch.arange(12)] * num_steps)


def evaluate(worker: Any, sequences: Sequences) -> tuple[Tensor, int]:
    """Log-probs at temperature 0.8, or values, of all rows [B, T]; and how many ranks reported rows."""
    critic = worker.spec.role is Role.critic
    return gather(worker.values(sequences) if critic else worker.logprobs(sequences, 0.8), sequences)


def evaluate_once(worker: Any, directory: Path) -> Tensor:
    return evaluate(worker, build_sequences(seed=5))[0]


def gather(result: Any, sequences: Sequences) -> tuple[Tensor, int]:
    """All rows [B, T] of what each rank computed, and how many ranks reported rows."""
    parts = collect(result)
    padded = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
    for part in parts:
        if part is not None:
            padded[part.rows] = part.values
    return padded, sum(part is not None for part in parts)


def collect(own: Any) -> list[Any]:
    """What each rank has."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return parts


def describe(worker: Any, directory: Path) -> dict[str, Any]:
    """What the model says of fixed sequences, and its exported weights."""
    sequences = within_vocabulary(build_sequences(seed=5), worker)
    padded, num_reports = evaluate(worker, sequences)
    is_critic = worker.spec.role is Role.critic
    entropies = {} if is_critic else {"entropies": gather(worker.entropies(sequences, 0.8), sequences)[0]}
    kl = {} if worker.reference is None else {"reference_kl": gather(worker.reference_kl(sequences, 0.8), sequences)[0]}
    worker.export_weights(directory)
    return {"evaluation": padded, "num_reports": num_reports, "weights": read(directory), **kl, **entropies}


def train(worker: Any, directory: Path, rows: list[int]) -> dict[str, Any]:
    """Describe the model, train it for three steps on these rows in this order, describe it again."""
    before = describe(worker, directory / "before")
    metrics = worker.update(own_samples(worker), [torch.tensor(rows)] * NUM_STEPS)
    return {"before": before, "metrics": metrics, "after": describe(worker, directory / "after")}


def train_reusing(worker: Any, directory: Path, rows: list[int], reuses: bool) -> dict[str, Any]:
    """One step on these rows in this order: with old_logprobs of a pass before it, or the update's own (reuses).

    The log-probs of the pass, those of the update (None without reuse), the gradient and the metrics.
    """
    samples = own_samples(worker)
    before, _ = gather(worker.logprobs(samples.sequences, worker.spec.temperature), samples.sequences)
    samples = replace(samples, old_logprobs=None if reuses else before)
    worker.export_gradient(samples, directory)
    (metrics,) = worker.update(samples, [torch.tensor(rows)])
    own = gather(worker.updated_logprobs(), samples.sequences)[0] if reuses else None
    assert worker.updated_logprobs() is None
    return {"before": before, "own": own, "gradient": read(directory), "metrics": metrics}


def build_conversations(seed: int = 3) -> TrainingSamples:
    """Samples whose responses alternate between three tokens of the policy and two of the environment, which hold
    poison wherever a number is kept per token. Odd rows begin with the environment; row 5 has failed.
    """
    samples = build_samples(seed=seed)
    rows, places = torch.arange(len(samples.mask))[:, None], torch.arange(samples.mask.shape[1])
    own = ((places + 3 * (rows % 2)) % 5 < 3) & (rows != 5)
    exists = places < samples.sequences.response_lengths[:, None]
    mask = exists & own
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values", "returns")
    poisoned = {
        name: torch.where(exists & ~own, torch.nan, getattr(samples, name)) for name in (*names, "sampling_logprobs")
    }
    return replace(samples, mask=mask, loss_mask=mask & samples.loss_mask.any(1)[:, None], **poisoned)


def find_gradients(worker: Any, directory: Path) -> dict[str, Any]:
    """After one step on the conversations: the weights, and the metrics and gradient of the next, by the names of a
    Hugging Face checkpoint; and the metrics of a step on a minibatch in which all samples have failed.
    """
    samples, rows = build_conversations(), [torch.arange(12)]
    worker.update(samples, rows)
    worker.export_weights(directory / "weights")
    worker.export_gradient(samples, directory / "gradient")
    (metrics,) = worker.update(samples, rows)
    nothing = torch.zeros_like(samples.mask)
    (empty,) = worker.update(replace(samples, mask=nothing, loss_mask=nothing), rows)
    tensors = {key: read(directory / key) for key in ("weights", "gradient")}
    return {"metrics": metrics, "empty": empty, **tensors}


def train_and_save(worker: Any, directory: Path) -> dict[str, Any]:
    """Two steps, save, one more step while the files are being written."""
    update(worker, 2)
    checksum = worker.checksum()
    worker.begin_save(directory.parent / "state")
    metrics = update(worker)
    worker.finish_save()
    return {"checksum": checksum, "metrics": metrics, "after": describe(worker, directory / "saved")}


def load_and_train(worker: Any, directory: Path) -> dict[str, Any]:
    """Load what `train_and_save` saved, one more step."""
    fresh = worker.checksum()
    worker.load(directory.parent / "state")
    checksum, metrics = worker.checksum(), update(worker)
    after = describe(worker, directory / "loaded")
    return {"fresh": fresh, "checksum": checksum, "metrics": metrics, "after": after}


def round_probe(worker: Any, directory: Path, texts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """By text: the log-probs [1, T], those of copies with random errors of 2^-8, and the former again."""
    from megarl.sync.probe import NUM_ESTIMATES

    found = {}
    for text, tokens in texts.items():
        one, copies = (
            Sequences(torch.tensor(tokens * num), torch.tensor([len(tokens)] * num), torch.tensor([1] * num))
            for num in (1, NUM_ESTIMATES)
        )
        before, _ = gather(worker.logprobs(one, 1.0), one)
        rounded, _ = gather(worker.rounded_logprobs(copies, 1.0, 2.0**-8), copies)
        found[text] = before, rounded, gather(worker.logprobs(one, 1.0), one)[0]
    return found


def flatten(piece: Piece) -> tuple[Any, ...]:
    return piece.tensor, piece.row, piece.col, piece.whole, astuple(piece.region)


def hold_pieces(worker: Any, directory: Path) -> dict[int, Held]:
    """Rank -> the pieces that it says it holds."""
    from megarl.sync.sender import WeightSender

    tensors, held = worker.shards(), []
    for piece in WeightSender(worker).describe():
        at = TensorSlice(piece.row, piece.col, piece.region.num_rows, piece.region.num_cols)
        held.append((flatten(piece), at.of(tensors[piece.tensor]).clone()))
    return dict(enumerate(collect(held)))


def train_on(worker: Any, directory: Path, samples: TrainingSamples, sequences: dict[str, Sequences]) -> dict[str, Any]:
    """The log-probs of a policy; the gradient, two steps and the weights after them; then log-probs or values of the
    given sequences.
    """
    before = evaluate(worker, samples.sequences)[0] if worker.spec.role is Role.policy else None
    worker.export_gradient(samples, directory / "gradient")
    metrics = worker.update(samples, [torch.arange(samples.sequences.num_samples)] * 2)
    worker.export_weights(directory / "weights")
    found = {key: read(directory / key) for key in ("gradient", "weights")}
    evaluations = {key: evaluate(worker, given)[0] for key, given in sequences.items()}
    config = json.loads((directory / "weights" / "config.json").read_text())
    text = {"has_text": "megarl_critic_prompt" in config, "text": config.get("megarl_critic_prompt")}
    return {"before": before, "metrics": metrics, **found, "values": evaluations, **text}


# Mixtures of experts


def give_experts(sequences: Sequences, num_layers: int, num_experts: int = 4, top_k: int = 2) -> Sequences:
    """The same with random experts for all tokens but the last of each row and all of row 2, where routers choose."""
    generator = torch.Generator().manual_seed(11)
    scores = torch.rand(len(sequences.tokens), num_layers, num_experts, generator=generator)
    experts = 1 + scores.argsort(-1)[..., :top_k].to(torch.uint8)
    rows = experts.split(sequences.lengths.tolist())
    for number, row in enumerate(rows):
        row[slice(None) if number == 2 else -1] = 0
    return replace(sequences, routed_experts=experts)


def replay(worker: Any, directory: Path) -> dict[str, Any]:
    """With given experts: log-probs of fixed sequences, the gradient of fixed samples, the metrics of two steps."""
    samples, experts = build_samples(), worker.arch.experts
    sizes = (worker.arch.num_layers, experts.num_experts, experts.top_k)
    samples = replace(samples, sequences=give_experts(samples.sequences, *sizes))
    logprobs = evaluate(worker, give_experts(build_sequences(seed=5), *sizes))[0]
    worker.export_gradient(samples, directory)
    metrics = worker.update(samples, [torch.arange(12)] * 2)
    return {"logprobs": logprobs, "gradient": read(directory), "metrics": metrics}


def replay_own_routes(rank: int, world_size: int, spec: WorkerSpec, scratch: str) -> dict[str, Any]:
    """Log-probs and the metrics of two steps, with the routers' own choice and with that choice given."""
    from megarl.mcore.router import find_routers

    results: dict[str, Any] = {}
    maps: list[Tensor] = []
    samples, experts = build_samples(), None
    for name in ("chosen", "given"):
        with working(replace(spec, router_replay=name == "given"), rank, world_size, f"{scratch}/{name}") as worker:
            sequences = replace(samples.sequences, routed_experts=experts)
            hooks = [r.register_forward_hook(lambda *x: maps.append(x[2][1])) for r in find_routers(worker.chunks)]
            logprobs = evaluate(worker, sequences)[0]
            for hook in hooks:
                hook.remove()
            metrics = worker.update(replace(samples, sequences=sequences), [torch.arange(12)] * 2)
            results[name] = {"logprobs": logprobs, "metrics": metrics}
            if name == "chosen":
                # One micro-batch, longest row first.
                rows = worker._batches(sequences)[0].rows
                packed = 1 + torch.stack([m.nonzero()[:, 1].view(len(m), -1) for m in maps], 1).to(torch.uint8)
                # None are given for the dense layers before them.
                packed = F.pad(packed, (0, 0, worker.arch.num_layers - len(maps), 0))
                pieces = dict(zip(rows.tolist(), packed.split(sequences.lengths[rows].tolist()), strict=True))
                experts = torch.cat([pieces[row] for row in range(12)])
    return results


# Adapters and converted checkpoints


def save_state(worker: Any, directory: Path) -> None:
    """As a training checkpoint of iteration 7 has it."""
    worker.save(directory)
    if torch.distributed.get_rank() == 0:
        spec = worker.spec
        write_manifest(directory, describe_role(spec.role, spec.dtype, spec.parallel, 7))


def train_adapters(worker: Any, directory: Path) -> dict[str, Any]:
    """What it says and exports before and after two steps; the state that it saves, and a step after that."""
    before, metrics = describe(worker, directory / "before"), update(worker, 2)
    after = describe(worker, directory / "after")
    worker.export_gradient(own_samples(worker), directory / "gradient")
    save_state(worker, directory / "state")
    return {
        "before": before,
        "after": after,
        "metrics": [*metrics, *update(worker)],
        "gradient": read(directory / "gradient"),
        "adapter": load_file(directory / "after" / "adapter" / "adapter_model.safetensors"),
        "checksum": worker.checksum(),
    }


def continue_state(worker: Any, directory: Path, saved: str) -> dict[str, Any]:
    """Load SAVED/state and make one step."""
    worker.load(Path(saved) / "state")
    loaded = describe(worker, directory / "loaded")
    (metrics,) = update(worker)
    return {"loaded": loaded, "metrics": metrics, "checksum": worker.checksum()}


def find_gradient(worker: Any, directory: Path) -> dict[str, Tensor]:
    """The gradient of all weights for the samples of `train_adapters`."""
    worker.export_gradient(own_samples(worker), directory)
    return read(directory)


def save_and_export(worker: Any, directory: Path) -> None:
    """One step, then DIRECTORY/state as a training checkpoint has it, and DIRECTORY/export."""
    update(worker)
    worker.export_weights(directory / "export")
    save_state(worker, directory / "state")


def load_converted(worker: Any, directory: Path, is_converted: bool) -> dict[str, Any]:
    """Checksums before and after a step of a worker that loads DIRECTORY/converted, or that starts as it is."""
    found: dict[str, Any] = {"sums": [worker.checksum()]}
    if is_converted:
        try:
            worker.load(directory / "converted")
        except CheckpointError as error:
            found["refusal"] = str(error)
        worker.load_weights(directory / "converted")
    found["sums"].append(worker.checksum())
    update(worker)
    found["sums"].append(worker.checksum())
    return found


# Ways to compute the same

BUCKET_SIZE = 4000
"""Parameters of a bucket where a name ends in -buckets; Megatron's default of 40 million holds each of these models"""


def run_ways(rank: int, world_size: int, specs: dict[str, WorkerSpec], scratch: str) -> dict[str, Any]:
    """Evaluation, two updates of two steps, the gradient and an evaluation between them, save and load, an update."""
    from megarl.mcore import model

    results = {}
    for name, spec in specs.items():
        with pytest.MonkeyPatch.context() as patch:
            if name.endswith("-buckets"):
                config = functools.partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
                patch.setattr(model, "DistributedDataParallelConfig", config)
            if name.endswith("-te"):
                # A machine that has Transformer Engine and no Apex, as far as the choice of fields goes.
                kernels = replace(model.find_kernels(), gpu=True, te=True, apex=False)
                patch.setattr(model, "find_kernels", lambda kernels=kernels: kernels)
            with working(spec, rank, world_size, f"{scratch}/{name}") as worker:
                results[name] = _run_way(worker, Path(scratch) / name)
    return results


def _run_way(worker: Any, directory: Path) -> dict[str, Any]:
    samples, sequences, rows = build_samples(), build_sequences(seed=5), [torch.arange(6), torch.arange(6, 12)]
    before, metrics = evaluate(worker, sequences)[0], worker.update(samples, rows)
    worker.export_gradient(samples, directory / "gradient")
    between, _ = evaluate(worker, sequences)
    metrics += worker.update(samples, rows)
    worker.save(directory / "state")
    worker.load(directory / "state")
    metrics += worker.update(samples, rows)
    fuses = getattr(worker.chunks[0].output_layer, "gradient_accumulation_fusion", None)
    return {
        "evaluations": [before, between, evaluate(worker, sequences)[0]],
        "metrics": metrics,
        "checksum": worker.checksum(),
        "num_buckets": len(worker.model[0].bucket_groups),
        "fuses": [worker.config.gradient_accumulation_fusion, fuses],
        "swiglu": worker.config.bias_activation_fusion,
        "description": worker.describe(),
    }


def train_share(worker: Any, directory: Path, samples: TrainingSamples, minibatches: Any) -> list[dict[str, Any]]:
    """With all rows, then with this rank's share: log-probs or values, the updates' metrics and all checksums."""
    from megarl.cluster.workers import Sharer, count_minibatches

    sharer, start = Sharer(worker.spec), directory / "start"
    kind = sharer.find_kind(torch.distributed.get_rank())
    worker.save(start)
    results = []
    for is_share in (False, True):
        worker.load(start)
        given, sequences, counts = samples, samples.sequences, []
        if is_share:
            given = sharer.share_samples(samples, minibatches)[kind].unfold()
            sequences = sharer.share_sequences(samples.sequences)[kind[0]].unfold()
            counts = count_minibatches(samples, minibatches)
        evaluation = evaluate(worker, sequences)[0]
        metrics = worker.update(given, minibatches, counts)
        results.append({"evaluation": evaluation, "metrics": metrics, "checksums": collect(worker.checksum())})
    return results


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measure(worker: Any) -> dict[str, int]:
    """Bytes that weights, gradients and optimizer hold on the device between two calls; and of the GPU's memory those
    by which more is allocated during an update than between the calls.
    """
    from megarl.mcore.offload import list_gradient_buffers, list_optimizer_tensors

    weights = [param for chunk in worker.chunks for param in chunk.parameters()]
    own = {x.untyped_storage()._cdata for x in weights}
    training = [x for x in list_optimizer_tensors(worker.optimizer) if x.untyped_storage()._cdata not in own]
    held = {"weights": weights, "gradients": list_gradient_buffers(worker.model), "optimizer": training}
    freed = 0
    if torch.cuda.is_available():
        between = torch.cuda.memory_allocated()
        with worker.offload.during(training=True):
            freed = torch.cuda.memory_allocated() - between
    return {name: count_bytes(tensors) for name, tensors in held.items()} | {"freed": freed}


def run_role(worker: Any, directory: Path) -> dict[str, Any]:
    """Evaluation, an update, the gradient then, an update, save and load, an update, evaluation; what was held between
    the calls. Saving takes seconds and is left out where activations are recomputed.
    """
    samples, sequences, rows = build_samples(), build_sequences(seed=5), [torch.arange(12)]
    held = [measure(worker)]
    before, _ = evaluate(worker, sequences)
    metrics = worker.update(samples, rows)
    # A critic's first gradient is in its new head alone.
    worker.export_gradient(samples, directory / "gradient")
    metrics += worker.update(samples, rows)
    held.append(measure(worker))
    if worker.spec.recompute is Recompute.none:
        worker.save(directory / "state")
        worker.load(directory / "state")
    metrics += worker.update(samples, rows)
    after, _ = evaluate(worker, sequences)
    held.append(measure(worker))
    return {
        "before": before,
        "gradient": read(directory / "gradient"),
        "metrics": metrics,
        "after": after,
        "checksum": worker.checksum(),
        "held": held,
        "description": worker.describe(),
    }
