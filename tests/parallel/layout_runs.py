"""How tests run the training engine: a worker of each specification after the other, in the processes of its layout."""

import gc
import hashlib
import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from tiny_checkpoints import build_samples, build_sequences
from torch import Tensor

import megarl.mcore  # noqa: F401
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.files import CheckpointError, write_manifest
from megarl.mcore.checkpoints import VALUE_HEAD, CheckpointReader, describe_role, write_safetensors
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import Metrics, Sequences, TrainingSamples

FLOAT32 = {"loss": 1e-6, "gradient norm": 1e-5, "gradient": 1e-5, "update": 1e-3, "evaluation": 2e-5}
"""Up to which a relative difference is rounding: of mean |L_t|, of the norm before clipping, of a tensor's gradient in
the first step, of what all steps together changed; an absolute one of log-probs and values after them"""
BOUNDS = {Dtype.float32: FLOAT32, Dtype.bfloat16: dict.fromkeys(FLOAT32, 1e-1) | {"loss": 2e-2, "update": 5e-1}}
VERBS = "weights:before gradient:gradient update:3 weights:after evaluate details"
"""Three optimizer steps over all samples, and what a layout must not change of them"""


def describe_layout(parallel: ParallelConfig) -> str:
    """A short name: tp2-sp-pp2, one."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    parts = ["sp" if name == "sp" else f"{name}{size}" for name, size in sizes.items() if size is True or size > 1]
    return "-".join(parts) or "one"


def read_layout(name: str) -> ParallelConfig:
    """The layout that `describe_layout` calls so."""
    found = dict(re.fullmatch(r"([a-z]+)(\d*)", part).groups() for part in name.split("-"))  # type: ignore[union-attr]
    sizes = {key: int(size) for key, size in found.items() if size}
    number = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.pop("dp", 1)
    return ParallelConfig(num_processes=number, sp="sp" in found, **sizes)


def build_spec(role: Role, checkpoint: Path, layout: str = "one", **changes: Any) -> WorkerSpec:
    trained = role is not Role.reference
    fields = {
        "role": role,
        "checkpoint": str(checkpoint),
        "parallel": read_layout(layout),
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


def launch(world_size: int, function: Any, *arguments: Any, scratch: Path | None = None, imports: bool = False) -> Any:
    """Run function(rank, world_size, *arguments, scratch directory) in `world_size` processes; rank 0's result. They
    are forked from one that has the imports, ten seconds of a processor; CUDA forbids it, and so does `imports`.
    """
    method = "spawn" if imports or torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["layout_runs", "torch._dynamo", "megarl.mcore.worker"])
    with tempfile.TemporaryDirectory() as own:
        given = (world_size, function, (*arguments, scratch or Path(own)), f"{own}/out.pt")
        torch.multiprocessing.start_processes(run_rank, given, nprocs=world_size, start_method=method)
        return torch.load(f"{own}/out.pt", weights_only=True)


def run_rank(rank: int, world_size: int, function: Any, arguments: tuple[Any, ...], out: str) -> None:
    torch.set_num_threads(1)
    result = function(rank, world_size, *arguments)
    if rank == 0:
        torch.save(result, out)


def launch_each(function: Any, specs: Mapping[str, Any], *arguments: Any, scratch: Path | None = None) -> Any:
    """function(worker, SCRATCH/name, ...) for a worker of each spec, or of the first of a tuple of a spec and further
    arguments; rank 0's results by name. Those of as many processes run in one group of processes.
    """
    given = {name: spec if isinstance(spec, tuple) else (spec,) for name, spec in specs.items()}
    found: dict[str, Any] = {}
    for size in sorted({spec.parallel.num_processes for spec, *_ in given.values()}):
        group = {name: each for name, each in given.items() if each[0].parallel.num_processes == size}
        with tempfile.TemporaryDirectory() as meeting:
            found |= launch(size, run_each, function, group, arguments, meeting, scratch=scratch)
    return {name: found[name] for name in specs}


def run_each(
    rank: int, world_size: int, function: Any, specs: dict[str, Any], arguments: tuple[Any, ...], *folders: Any
) -> dict[str, Any]:
    import torch._dynamo  # noqa: F401  # an optimizer imports it

    import megarl.mcore.worker  # noqa: F401

    # What is imported stays: searching it after each worker would take longer than most of them.
    gc.freeze()
    results, (meeting, scratch) = {}, map(Path, folders)
    for name, (spec, *own) in specs.items():
        with working(spec, rank, world_size, meeting / name) as worker:
            results[name] = function(worker, scratch / name, *own, *arguments)
        # Each of gloo's groups has threads, which end with the last reference to it; Megatron's models are cyclic.
        del worker
        # Twice: the gradients' hooks are cycles through autograd's own nodes, which the first pass only cuts.
        gc.collect()
        gc.collect()
    return results


@contextmanager
def working(spec: WorkerSpec, rank: int, world_size: int, init: Path) -> Iterator[Any]:
    """A worker, warm as that of an actor, whose processes meet at the file INIT.init."""
    from megarl.mcore.worker import MegatronWorker

    worker = MegatronWorker(spec, rank, world_size, f"file://{init}.init")
    try:
        worker.warm_up()
        yield worker
    finally:
        worker.close()


def collect(own: Any) -> list[Any]:
    """What each rank has."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return parts


def gather(result: Any, sequences: Sequences) -> Tensor:
    """All rows [B, T] of what each rank computed."""
    padded = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
    for part in collect(result):
        if part is not None:
            padded[part.rows] = part.values
    return padded


def hash_weights(worker: Any) -> str:
    """SHA-256 of this rank's weights, by name."""
    digest, weights = hashlib.sha256(), worker.shards()
    with worker.offload.during(training=False):
        for name in sorted(weights):
            digest.update(name.encode())
            digest.update(weights[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def evaluate(worker: Any, sequences: Sequences) -> Tensor:
    """Log-probs at temperature 0.8, or values, of all rows [B, T]."""
    critic = worker.spec.role is Role.critic
    return gather(worker.values(sequences) if critic else worker.logprobs(sequences, 0.8), sequences)


class Player:
    """Has a worker do what words of the form VERB or VERB:NAME say; `found` has what each verb gave, in order."""

    def __init__(
        self, worker: Any, directory: Path, samples: TrainingSamples | None, sequences: tuple[Sequences, ...]
    ) -> None:
        self.worker, self.directory, self.found = worker, directory, dict[str, list[Any]]()
        samples = samples or build_samples()
        self.samples = replace(samples, sequences=self.fit(samples.sequences))
        self.sequences = [self.fit(each) for each in sequences or (build_sequences(seed=5),)]

    def fit(self, sequences: Sequences) -> Sequences:
        """Tokens within the model's vocabulary."""
        return replace(sequences, tokens=sequences.tokens % self.worker.arch.vocab_size)

    def add(self, verb: str, *given: Any) -> None:
        self.found.setdefault(verb, []).extend(given)

    def evaluate(self, name: str) -> None:
        """Log-probs or values of the given sequences."""
        self.add("evaluate", *(evaluate(self.worker, each) for each in self.sequences))

    def scores(self, name: str) -> None:
        """The same of the samples."""
        self.add("scores", evaluate(self.worker, self.samples.sequences))

    def details(self, name: str) -> None:
        """The KL from the reference, of a role that has one."""
        worker, sequences = self.worker, self.sequences[0]
        if worker.reference is not None:
            self.add("reference_kl", gather(worker.reference_kl(sequences, 0.8), sequences))

    def update(self, num_steps: str, reverse: bool = False) -> None:
        """So many steps, or one, on all samples."""
        rows = torch.arange(len(self.samples.mask))
        self.add(
            "metrics", *self.worker.update(self.samples, [rows.flip(0) if reverse else rows] * int(num_steps or 1))
        )

    def reversed(self, num_steps: str) -> None:
        """The same with the rows in reversed order."""
        self.update(num_steps, reverse=True)

    def updated(self, name: str) -> None:
        """The old_logprobs of the last update that was given none; they are there once."""
        self.add("updated", gather(self.worker.updated_logprobs(), self.samples.sequences))
        assert self.worker.updated_logprobs() is None

    def weights(self, name: str) -> None:
        """Export them to DIRECTORY/NAME."""
        self.worker.export_weights(self.directory / name)

    def gradient(self, name: str) -> None:
        """Export that of all samples to DIRECTORY/NAME."""
        self.worker.export_gradient(self.samples, self.directory / name)

    def save(self, name: str) -> None:
        """As a training checkpoint of iteration 7 has it, to SCRATCH/NAME."""
        self.begin(name)
        self.finish(name)

    def begin(self, name: str) -> None:
        self.worker.begin_save(self.directory.parent / name)

    def finish(self, name: str) -> None:
        self.worker.finish_save()
        if torch.distributed.get_rank() == 0:
            spec = self.worker.spec
            write_manifest(self.directory.parent / name, describe_role(spec.role, spec.dtype, spec.parallel, 7))

    def load(self, name: str) -> None:
        self.worker.load(self.directory.parent / name)

    def load_weights(self, name: str) -> None:
        """Take the weights alone, as a conversion does."""
        from megarl.mcore.state import load_weights

        load_weights(self.directory.parent / name, self.worker.chunks)
        self.worker.optimizer.reload_model_params()

    def refused(self, name: str) -> None:
        """Why SCRATCH/NAME is not loaded."""
        try:
            self.load(name)
        except CheckpointError as error:
            self.add("refused", str(error))

    def checksum(self, name: str) -> None:
        self.add("checksum", hash_weights(self.worker))

    def held(self, name: str) -> None:
        self.add("held", measure(self.worker))

    def describe(self, name: str) -> None:
        output = self.worker.chunks[-1].output_layer
        self.add("describe", self.worker.describe())
        self.add("num_buckets", len(self.worker.model[0].bucket_groups))
        fuses = getattr(output, "gradient_accumulation_fusion", None)
        self.add("fuses", self.worker.config.gradient_accumulation_fusion, fuses)


def play(worker: Any, directory: Path, given: dict[str, Any]) -> dict[str, list[Any]]:
    player = Player(worker, directory, given.get("samples"), given.get("sequences", ()))
    for word in given["verbs"].split():
        verb, _, name = word.partition(":")
        getattr(player, verb)(name)
    return player.found


@dataclass(frozen=True)
class Run:
    """What a worker of a spec did."""

    spec: WorkerSpec
    directory: Path
    found: dict[str, list[Any]]

    def __getitem__(self, verb: str) -> list[Any]:
        return self.found[verb]

    @property
    def metrics(self) -> list[Metrics]:
        """By optimizer steps"""
        return self.found["metrics"]

    def list_metrics(self, name: str, default: str = "") -> list[float]:
        role = self.spec.role.value
        return [step.get(f"{role}/{name}", step.get(f"{role}/{default}")) for step in self.metrics]

    def read(self, name: str) -> dict[str, Tensor]:
        """What `weights:NAME` or `gradient:NAME` wrote."""
        return read(self.directory / name)


def read(directory: Path) -> dict[str, Tensor]:
    with CheckpointReader(directory) as reader:
        return {name: reader.read(name) for name in sorted(reader.names)}


def run_specs(scratch: Path, specs: Mapping[str, Any], verbs: str = "", **common: Any) -> dict[str, Run]:
    """What a worker of each spec did: `verbs`, in which NAME stands for the spec's, with `samples` and `sequences`. A
    spec may come in a pair with a dict of its own ones of these.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    pairs = {name: given if isinstance(given, tuple) else (given, {}) for name, given in specs.items()}
    given = {x: (spec, {"verbs": verbs.replace("NAME", x), **common, **own}) for x, (spec, own) in pairs.items()}
    found = launch_each(play, given, scratch=scratch)
    return {name: Run(pairs[name][0], scratch / name, found[name]) for name in specs}


def run_layouts(
    scratch: Path, specs: Mapping[str, Any], samples: TrainingSamples, verbs: str = VERBS
) -> dict[str, Run]:
    """The same under each spec, as `run_specs` runs them. A critic whose checkpoint has no value head gets a random
    one: its own head of zeros would leave all other gradients at zero.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    given = {name: spec if isinstance(spec, tuple) else (spec, {}) for name, spec in specs.items()}
    given = {name: (_start_with_value_head(spec, scratch), own) for name, (spec, own) in given.items()}
    return run_specs(scratch, given, verbs, samples=samples, sequences=(samples.sequences,))


def _start_with_value_head(spec: WorkerSpec, scratch: Path) -> WorkerSpec:
    """The spec; of a critic without a value head, with a copy of its checkpoint that has one."""
    source = Path(spec.checkpoint).resolve()
    if spec.role is not Role.critic or VALUE_HEAD in (tensors := read(source)):
        return spec
    directory = scratch / f"critic-{source.name}"
    if not directory.exists():
        skipped = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(source, directory, ignore=skipped)
        size = read_architecture(source).hidden_size
        generator = torch.Generator().manual_seed(spec.seed)
        tensors[VALUE_HEAD] = torch.randn(1, size, generator=generator) / size**0.5
        write_safetensors(directory, tensors.items())
    return replace(spec, checkpoint=str(directory))


def compare_runs(run: Run, reference: Run) -> dict[str, float]:
    """The largest differences, by the names of `FLOAT32`; with the name of the tensor whose gradient differs most."""
    losses, norms = (
        torch.tensor([one.list_metrics(name) for one in (run, reference)], dtype=torch.float64)
        for name in ("loss", "grad_norm")
    )
    # Terms of either sign cancel in a loss, not in this. A critic's are never negative.
    sizes = torch.tensor(reference.list_metrics("loss_size", "loss"), dtype=torch.float64)
    gradients, expected = run.read("gradient"), reference.read("gradient")
    assert gradients.keys() == expected.keys(), "runs of other models"
    each = {name: _compare(gradients[name], tensor) for name, tensor in expected.items()}
    worst = max(each, key=each.__getitem__)
    changes = []
    for one in (run, reference):
        before, after = one.read("before"), one.read("after")
        changes.append(torch.cat([(after[name].double() - before[name].double()).flatten() for name in after]))
    evaluations = [
        (found - other).abs().max()
        for kind in ("evaluate", "reference_kl")
        for found, other in zip(run.found.get(kind, []), reference.found.get(kind, []), strict=True)
    ]
    differences = {
        "loss": ((losses[0] - losses[1]).abs() / sizes).max().item(),
        "gradient norm": ((norms[0] - norms[1]).abs() / norms[1]).max().item(),
        f"gradient of {worst}": each[worst],
        "update": _compare(*changes),
        "evaluation": torch.stack(evaluations).max().item(),
    }
    return {what: difference if difference == difference else float("inf") for what, difference in differences.items()}


def _compare(found: Tensor, expected: Tensor) -> float:
    """||difference|| / ||expected||; 0 where both are 0, infinite where there is no number."""
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    if difference == size == 0:
        return 0.0
    return difference / size if size and difference == difference else float("inf")


def find_problems(differences: Mapping[str, float], bounds: Mapping[str, float] = FLOAT32) -> list[str]:
    """What is beyond its bound; empty: the layout computes the same."""
    found = {what: (difference, bounds[what.partition(" of ")[0]]) for what, difference in differences.items()}
    return [f"{what}: differs by {x:.2g}; the bound is {bound:.2g}" for what, (x, bound) in found.items() if x > bound]


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def measure(worker: Any) -> dict[str, int]:
    """Bytes that weights, gradients and optimizer hold on the device between two calls; and of the GPU's memory those
    by which more is allocated during an update than between the calls.
    """
    from megarl.mcore.optimizer import list_gradient_buffers, list_optimizer_tensors

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


def give_experts(sequences: Sequences, num_layers: int = 4, num_experts: int = 4, top_k: int = 2) -> Sequences:
    """The same with random experts for all tokens but the last of each row and all of row 2, where routers choose."""
    generator = torch.Generator().manual_seed(11)
    scores = torch.rand(len(sequences.tokens), num_layers, num_experts, generator=generator)
    experts = 1 + scores.argsort(-1)[..., :top_k].to(torch.uint8)
    rows = experts.split(sequences.lengths.tolist())
    for number, row in enumerate(rows):
        row[slice(None) if number == 2 else -1] = 0
    return replace(sequences, routed_experts=experts)
