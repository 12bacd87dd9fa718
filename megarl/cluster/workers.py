"""One role (policy, critic or reference) as a group of Ray actors, one per rank: the `TrainBackend` of the loop.

Each rank is sent the rows of a batch that it computes, not those of other data-parallel ranks. The packing decides
which rows those are, here as in the ranks: it follows from the lengths of all rows, which every rank has. Of an update
the ranks before the last pipeline stage need no targets. A share is made of NumPy arrays without padding, which Ray
writes to its object store without a further copy.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algo.blocks import allocate_zeros
from megarl.algo.tokens import LossCounts, count_minibatch
from megarl.cluster.calls import PendingCall, RayLostError, ask, wait_for
from megarl.cluster.opened import Cluster
from megarl.cluster.process import Gpu, agree_on_nccl, redirect_output, resolve_host, use_gpus, use_interface
from megarl.cluster.watch import (
    CallState,
    CallTracker,
    RankProfiler,
    RankStacks,
    dump_on_signal,
    find_own_peak,
    identify,
)
from megarl.config.placement import DeviceSlot
from megarl.interfaces import Pending, wait_all
from megarl.mcore.microbatches import plan_microbatches
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.ports import is_loopback, pick_free_port
from megarl.timeline import Recording, span
from megarl.types import Metrics, Sequences, TrainingSamples

if TYPE_CHECKING:
    from megarl.mcore.worker import MegatronWorker
    from megarl.sync.sender import WeightSender

P = TypeVar("P", bound=Pending[Any])


class Turns:
    """Lets the roles of a run compute at the same time, or one after the other where they share GPUs."""

    def __init__(self, one_at_a_time: bool = False) -> None:
        self.free_servers: Callable[[], None] = lambda: None
        """Called before each call of a role: has the servers give back memory of GPUs that they share with roles"""
        self._one_at_a_time = one_at_a_time
        self._running: list[tuple[str, Pending[Any]]] = []

    def start(self, role: str, start: Callable[[], P]) -> P:
        """The call that `start` starts; one at a time, once all calls of other roles have ended.

        Raises what one of those raises in the meantime, and what `free_servers` raises; the call is then not started.
        """
        self.free_servers()
        if not self._one_at_a_time:
            return start()
        for entry in list(self._running):
            state = _look(entry[1])
            if state is None and entry[0] == role:
                continue
            if state is None:
                # A signal leaves the call running.
                wait_all([entry[1]])
            # Its results stay in the object store as long as it is held here.
            self._running.remove(entry)
        pending = start()
        self._running.append((role, pending))
        return pending


def _look(pending: Pending[Any]) -> bool | None:
    """Whether the call succeeded; None: it still runs. Of a failed one whoever waits for it learns why, and what saves
    the state after that goes on.
    """
    try:
        return pending.wait(0.0) or None
    except Exception:
        return False


CRITIC_FIELDS = ("mask", "loss_mask", "critic_mask", "old_values", "returns")
"""Targets that a critic's loss reads; a policy's reads those of POLICY_FIELDS"""
POLICY_FIELDS = (
    *("mask", "loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs"),
)
UNPADDED = ("sequences", "positive", "critic_sequences")
"""The fields of TrainingSamples that are not [B, T]"""
OPTIONAL = ("critic_mask", "old_values", "returns", "sampling_logprobs", "ref_logprobs")
"""Where they are not sent, they are None; others are 0"""


@dataclass(frozen=True)
class SequenceShare:
    """K of B sequences."""

    lengths: NDArray[np.int64]
    """[B]"""
    prompt_lengths: NDArray[np.int64]
    """[B]"""
    rows: NDArray[np.int64]
    """[K], ascending"""
    tokens: NDArray[np.int64]
    """[sum of the K lengths]"""
    routed_experts: NDArray[Any] | None
    """[sum of the K lengths, layers, experts of a token]"""

    def unfold(self) -> Sequences:
        """All B sequences; the tokens of the others are 0 and take no memory."""
        held = torch.zeros(len(self.lengths), dtype=torch.bool)
        held[torch.tensor(self.rows)] = True
        experts = None if self.routed_experts is None else self._place(self.routed_experts)
        lengths, prompts = torch.tensor(self.lengths), torch.tensor(self.prompt_lengths)
        return Sequences(self._place(self.tokens), lengths, prompts, experts, held)

    def _place(self, values: NDArray[Any]) -> Tensor:
        """[sum of the K lengths, ...] -> [sum of all lengths, ...]"""
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        placed = allocate_zeros((int(self.lengths.sum()), *values.shape[1:]), dtype)
        view, starts, place = placed.numpy(), self.lengths.cumsum() - self.lengths, 0
        for row in self.rows.tolist():
            start, length = int(starts[row]), int(self.lengths[row])
            view[start : start + length] = values[place : place + length]
            place += length
        return placed


@dataclass(frozen=True)
class SampleShare:
    """K of B samples."""

    sequences: SequenceShare
    positive: NDArray[np.bool_]
    """[B]"""
    width: int
    """T of the padded tensors"""
    targets: Mapping[str, NDArray[Any]]
    """By field of TrainingSamples [sum of the K responses' lengths]; fields that this rank reads"""
    kinds: Mapping[str, str]
    """The dtype of every [B, T] field that the samples have"""

    def unfold(self) -> TrainingSamples:
        """All B samples; the targets of the others are 0 and take no memory."""
        share = self.sequences
        places = {name: self._place(name) for name in self.kinds}
        missing = {field.name: None for field in fields(TrainingSamples)} | places
        return TrainingSamples(
            **(missing | {"sequences": share.unfold(), "positive": torch.tensor(self.positive)})  # type: ignore[arg-type]
        )

    def _place(self, name: str) -> Tensor | None:
        """[B, T]; None: an optional field that this rank does not read."""
        if name not in self.targets and name in OPTIONAL:
            return None
        share = self.sequences
        dtype = torch.from_numpy(np.empty(0, self.kinds[name])).dtype
        placed = allocate_zeros((len(share.lengths), self.width), dtype)
        if name in self.targets:
            view, place = placed.numpy(), 0
            responses = share.lengths - share.prompt_lengths
            for row in share.rows.tolist():
                length = int(responses[row])
                view[row, :length] = self.targets[name][place : place + length]
                place += length
        return placed


class Sharer:
    """Divides batches over the ranks of one role."""

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self._arch = read_architecture(Path(spec.checkpoint))

    def find_kind(self, rank: int) -> tuple[int, bool]:
        """The rank's number among the data-parallel ones, and whether it is of the last pipeline stage. Ranks of one
        kind are sent the same. Megatron numbers the ranks of a stage in a row, those of a replica first.
        """
        parallel = self._spec.parallel
        per_stage = parallel.num_processes // parallel.pp
        return rank % per_stage // (parallel.tp * parallel.cp), rank // per_stage == parallel.pp - 1

    def share_sequences(self, sequences: Sequences) -> list[SequenceShare]:
        """What each data-parallel rank is sent."""
        everything = [torch.arange(sequences.num_samples)]
        return [self._cut(sequences, rows) for rows in self._choose_rows(sequences, everything)]

    def share_samples(
        self, samples: TrainingSamples, minibatches: Sequence[Tensor]
    ) -> dict[tuple[int, bool], SampleShare]:
        """What the ranks of each kind are sent. samples: without critic_sequences."""
        found = {}
        for number, rows in enumerate(self._choose_rows(samples.sequences, minibatches)):
            sequences = self._cut(samples.sequences, rows)
            for is_last in {False, True} if self._spec.parallel.pp > 1 else {True}:
                found[number, is_last] = self._fold(samples, sequences, is_last)
        return found

    def _choose_rows(self, sequences: Sequences, minibatches: Sequence[Tensor]) -> list[Tensor]:
        """Of each data-parallel rank: int64 [K], ascending, the rows of its micro-batches."""
        chosen: list[set[int]] = [set() for _ in range(self.count_ranks())]
        for rows in minibatches:
            shares = plan_microbatches(self._spec, self._arch, sequences.measure(rows), len(chosen))
            for own, share in zip(chosen, shares, strict=True):
                own.update(int(rows[place]) for microbatch in share for place in microbatch)
        return [torch.tensor(sorted(own), dtype=torch.int64) for own in chosen]

    def count_ranks(self) -> int:
        """Data-parallel ranks."""
        parallel = self._spec.parallel
        return parallel.num_processes // (parallel.tp * parallel.pp * parallel.cp)

    def _cut(self, sequences: Sequences, rows: Tensor) -> SequenceShare:
        own = sequences.select(rows)
        experts = own.routed_experts if self._spec.router_replay else None
        return SequenceShare(
            sequences.lengths.numpy(),
            sequences.prompt_lengths.numpy(),
            rows.numpy(),
            own.tokens.numpy(),
            None if experts is None else experts.numpy(),
        )

    def _fold(self, samples: TrainingSamples, sequences: SequenceShare, has_targets: bool) -> SampleShare:
        padded = {field.name: getattr(samples, field.name) for field in fields(samples)}
        padded = {name: each.numpy() for name, each in padded.items() if name not in UNPADDED and each is not None}
        read = CRITIC_FIELDS if self._spec.role is Role.critic else POLICY_FIELDS
        responses = (sequences.lengths - sequences.prompt_lengths).tolist()
        rows = [(row, responses[row]) for row in sequences.rows.tolist()]
        targets = {
            name: np.concatenate([values[row, :length] for row, length in rows] or [values[:0, 0]])
            for name, values in padded.items()
            if has_targets and name in read
        }
        kinds = {name: str(values.dtype) for name, values in padded.items()}
        return SampleShare(sequences, samples.positive.numpy(), samples.mask.shape[1], targets, kinds)


def count_minibatches(samples: TrainingSamples, minibatches: Sequence[Tensor]) -> list[LossCounts]:
    """The counts of every minibatch, by which the ranks, which have a part of it each, divide their losses."""
    return [count_minibatch(samples, rows) for rows in minibatches]


T = TypeVar("T")


def build_environment() -> dict[str, str]:
    """What a rank needs in its environment before its first call of CUDA."""
    # Megatron's order of kernels and communication under tensor parallelism relies on it.
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: os.environ.get(name, "1")}


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"watch": 1})  # type: ignore[call-overload]
class WorkerActor:
    """The process of one rank, with a log file of its own. A separate thread reports the state of the current call."""

    def __init__(self, log_path: str, listen_host: str, gpus: Sequence[Gpu]):
        redirect_output(Path(log_path))
        dump_on_signal()
        self._tracker = CallTracker()
        self._host = resolve_host(listen_host)
        use_interface(self._host)
        use_gpus(gpus)
        agree_on_nccl()
        for name, value in build_environment().items():
            os.environ.setdefault(name, value)
        # Megatron compiles a few small functions: no pool of processes for that in every rank.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._gpu = gpus[0].uuid if gpus else None
        self._worker: MegatronWorker | None = None
        self._sender: WeightSender | None = None
        self._profiler = RankProfiler()

    def find_address(self) -> str:
        """An address with a free port of this process's machine, for the process group's rendezvous."""
        return f"tcp://{self._host}:{pick_free_port(self._host)}"

    def build(self, spec: WorkerSpec, rank: int, world_size: int, init_method: str) -> str:
        """Build the model; returns a description of what computes it."""
        with self._tracker.enter("build"):
            from megarl.mcore.worker import MegatronWorker

            self._worker = MegatronWorker(spec, rank, world_size, init_method, self._gpu)
            return self._worker.describe()

    def call(self, verb: str, *args: Any) -> Any:
        with self._tracker.enter(verb), span(verb):
            whole = [arg.unfold() if isinstance(arg, SequenceShare | SampleShare) else arg for arg in args]
            return getattr(self._worker, verb)(*whole)

    def call_sender(self, verb: str, *args: Any) -> Any:
        with self._tracker.enter(f"{verb} of weights"), span(f"{verb} of weights"):
            from megarl.sync.sender import WeightSender

            if self._sender is None:
                assert self._worker is not None
                self._sender = WeightSender(self._worker)
            return getattr(self._sender, verb)(*args)

    def begin_profile(self, process: str, with_operators: bool) -> None:
        self._profiler.begin(process, with_operators)

    def end_profile(self, path: Path) -> Recording:
        with self._tracker.enter("end_profile"):
            return self._profiler.end(path)

    @ray.method(concurrency_group="watch")
    def find_state(self) -> CallState | None:
        return self._tracker.find_state()

    @ray.method(concurrency_group="watch")
    def identify(self) -> tuple[str, int]:
        return identify()

    @ray.method(concurrency_group="watch")
    def find_peak(self) -> int:
        return find_own_peak()


class WorkerGroup:
    """All ranks of one role. Implements `megarl.interfaces.TrainBackend`."""

    def __init__(
        self,
        spec: WorkerSpec,
        log_dir: Path,
        cluster: Cluster,
        slots: Sequence[DeviceSlot],
        start_deadline_s: float,
        turns: Turns | None = None,
    ):
        """Start the actors, one in each of `slots`; `start()` builds their models.

        turns: shared with the roles that are on the same GPUs; None: there are none.
        """
        self._turns = turns or Turns()
        self.role = spec.role.value
        self.num_ranks = spec.parallel.num_processes
        self._spec, self._sharer = spec, Sharer(spec)
        self._cluster = cluster
        self._start_deadline_s = start_deadline_s
        self._names = tuple(f"{self.role} rank {r}/{self.num_ranks}" for r in range(self.num_ranks))
        logs = [log_dir / f"{self.role}-{rank}.log" for rank in range(self.num_ranks)]
        self._actors: list[Any] = []
        identities = ask(f"start of the {self.role} processes", lambda: self._start_actors(logs, slots))
        self._ranks = RankStacks(self._actors, self._names, identities, logs)

    def _start_actors(self, logs: Sequence[Path], slots: Sequence[DeviceSlot]) -> list[ray.ObjectRef[tuple[str, int]]]:
        for log, slot in zip(logs, slots, strict=True):
            variables = build_environment() if slot.gpus else {}
            options = WorkerActor.options(**self._cluster.options(slot, variables))  # type: ignore[attr-defined]
            self._actors.append(options.remote(str(log), self._cluster.listen_host, self._cluster.find_gpus(slot)))
        return [actor.identify.remote() for actor in self._actors]

    def start(self) -> PendingCall[str]:
        """Build the models on all ranks; the result describes what computes them."""
        address = self._find_rendezvous()

        def build() -> PendingCall[str]:
            own = [(self._spec, rank, self.num_ranks, address) for rank in range(self.num_ranks)]
            return self._send_each("build", own, f"building the {self.role} model", self._start_deadline_s, _take_first)

        return self._turns.start(self.role, build)

    def _find_rendezvous(self) -> str:
        """The ranks' rendezvous: on one machine a file, because torch's TCP store listens on every interface."""
        if is_loopback(self._cluster.host):
            return f"file://{self._cluster.scratch}/{self.role}-rendezvous-{uuid.uuid4().hex}"
        what = f"start of the {self.role} process"
        found = ask(what, self._actors[0].find_address.remote)
        return str(wait_for([found], self._names[:1], what, self._start_deadline_s)[0])

    def logprobs(self, sequences: Sequences, temperature: float) -> PendingCall[Tensor]:
        return self._call("logprobs", merge_rows(sequences), sequences, temperature)

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> PendingCall[Tensor]:
        return self._call("rounded_logprobs", merge_rows(sequences), sequences, temperature, unit)

    def entropies(self, sequences: Sequences, temperature: float) -> PendingCall[Tensor]:
        return self._call("entropies", merge_rows(sequences), sequences, temperature)

    def values(self, sequences: Sequences) -> PendingCall[Tensor]:
        return self._call("values", merge_rows(sequences), sequences)

    def reference_kl(self, sequences: Sequences, temperature: float) -> PendingCall[Tensor]:
        return self._call("reference_kl", merge_rows(sequences), sequences, temperature)

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> PendingCall[list[Metrics]]:
        counts = count_minibatches(samples, minibatches)
        return self._call("update", _take_first, samples, list(minibatches), counts)

    def updated_logprobs(self, sequences: Sequences) -> PendingCall[Tensor]:
        # No weights are touched: it needs no turn.
        return self._send("updated_logprobs", merge_rows(sequences))

    def export_weights(self, directory: Path) -> PendingCall[None]:
        return self._call("export_weights", _take_first, directory)

    def call_senders(
        self, verb: str, arguments: Sequence[tuple[Any, ...]] | None, deadline_s: float
    ) -> PendingCall[list[Any]]:
        own = [(verb, *args) for args in ([()] * self.num_ranks if arguments is None else arguments)]
        return self._send_each("call_sender", own, f"{self.role}: {verb} of weights", deadline_s, list)

    def begin_save(self, directory: Path) -> PendingCall[None]:
        return self._call("begin_save", _take_first, directory)

    def finish_save(self) -> PendingCall[None]:
        # Files alone: it needs no turn.
        return self._send("finish_save", _take_first)

    def load(self, directory: Path) -> PendingCall[None]:
        return self._call("load", _take_first, directory)

    def begin_profile(self) -> PendingCall[list[None]]:
        # Neither this nor the end of it needs a turn: no weights are touched.
        per_stage = self.num_ranks // self._spec.parallel.pp
        own = [(name, rank % per_stage == 0) for rank, name in enumerate(self._names)]
        return self._send_each("begin_profile", own, f"{self.role}.begin_profile", self._spec.deadline_s, list)

    def end_profile(self, directory: Path) -> PendingCall[list[Recording]]:
        paths = [(directory / f"{self.role}-{rank}.json.gz",) for rank in range(self.num_ranks)]
        return self._send_each("end_profile", paths, f"{self.role}.end_profile", self._spec.deadline_s, list)

    def checksum(self) -> PendingCall[list[str]]:
        """SHA-256 of every rank's parameters, in rank order."""
        return self._call("checksum", list)

    def ask_peaks(self) -> list["ray.ObjectRef[int]"]:
        """Bytes of memory, for `measure_peaks`."""
        return [actor.find_peak.remote() for actor in self._actors]

    def close(self) -> None:
        """End the processes at once. Where Ray is lost, its own end is theirs."""
        with contextlib.suppress(RayLostError):
            ask(f"end of the {self.role} processes", lambda: [ray.kill(actor) for actor in self._actors])

    def _call(self, verb: str, merge: Callable[[list[Any]], T], *args: Any) -> PendingCall[T]:
        return self._turns.start(self.role, lambda: self._send(verb, merge, *args))

    def _send(self, verb: str, merge: Callable[[list[Any]], T], *args: Any) -> PendingCall[T]:
        what = f"{self.role}.{verb}"
        own = [(verb, *each) for each in ask(what, lambda: self._put_shares(args))]
        return self._send_each("call", own, what, self._spec.deadline_s, merge)

    def _put_shares(self, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The arguments of each rank. One copy in the object store serves all ranks that compute the same rows."""
        kinds = [self._sharer.find_kind(rank) for rank in range(self.num_ranks)]
        own: list[list[Any]] = [[] for _ in kinds]
        for number, arg in enumerate(args):
            if isinstance(arg, TrainingSamples):
                shares = self._sharer.share_samples(arg, args[number + 1])
                put = {kind: ray.put(share) for kind, share in shares.items()}
                values: list[Any] = [put[kind] for kind in kinds]
            elif isinstance(arg, Sequences):
                parts = [ray.put(part) for part in self._sharer.share_sequences(arg)]
                values = [parts[rank] for rank, _ in kinds]
            else:
                values = [arg] * len(kinds)
            for each, value in zip(own, values, strict=True):
                each.append(value)
        return [tuple(each) for each in own]

    def _send_each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        what: str,
        deadline_s: float,
        merge: Callable[[list[Any]], T],
    ) -> PendingCall[T]:
        """Call a method of every actor with its own arguments."""

        def send() -> tuple[ray.ObjectRef[Any], ...]:
            calls = zip(self._actors, arguments, strict=True)
            return tuple(getattr(actor, method).remote(*args) for actor, args in calls)

        return PendingCall(ask(what, send), self._names, what, deadline_s, merge, explain=self._ranks.explain)


def _take_first(results: list[T]) -> T:
    return results[0]


def merge_rows(sequences: Sequences) -> Callable[[list[Any]], Tensor]:
    """A function that merges the rows of all data-parallel ranks into one float32 [B, T]."""

    def merge(results: list[Any]) -> Tensor:
        lengths = sequences.response_lengths.tolist()
        merged = allocate_zeros((len(lengths), max(lengths, default=0)), torch.float32)
        seen = torch.zeros(sequences.num_samples, dtype=torch.int64)
        for part in results:
            if part is not None:
                for row, values in zip(part.rows.tolist(), part.values, strict=True):
                    merged[row, : lengths[row]] = values[: lengths[row]]
                seen[part.rows] += 1
        if not bool((seen == 1).all()):
            wrong = torch.nonzero(seen != 1).flatten().tolist()
            raise RuntimeError(f"rows {wrong} were not computed once each")
        return merged

    return merge
