"""The processes of a run as Ray actors: a role (policy, critic or reference) as a group of them, one per rank, which is
the `TrainBackend` of the loop; and the SGLang servers, each started and monitored by an actor on its machine.

Each rank is sent the rows of a batch that it computes, not those of other data-parallel ranks. The packing decides
which rows those are, here as in the ranks: it follows from the lengths of all rows, which every rank has. A share is
made of NumPy arrays without padding, which Ray writes to its object store without a further copy.
"""

import contextlib
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import psutil
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algo.losses import count_minibatch
from megarl.algo.statistics import allocate_zeros
from megarl.cluster.calls import PendingCall, RayLostError, WorkerError, ask, collect, wait_for
from megarl.cluster.opened import Cluster
from megarl.cluster.process import (
    CallState,
    CallTracker,
    Gpu,
    RankProfiler,
    RankStacks,
    agree_on_nccl,
    dump_on_signal,
    find_own_peak,
    find_peak_of_tree,
    identify,
    redirect_output,
    resolve_host,
    use_gpus,
    use_interface,
)
from megarl.config.placement import DeviceSlot
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import DeadlineError, Pending, wait_all
from megarl.mcore.device import find_processor
from megarl.mcore.microbatches import plan_microbatches
from megarl.mcore.spec import WorkerSpec, read_architecture
from megarl.report.timeline import Recording, span
from megarl.rollout.server import CALL_DEADLINE_S, NUM_CALLS, SGLangServer, find_loss
from megarl.signals import is_loopback, pick_free_port
from megarl.types import Metrics, Sequences, TrainingSamples

if TYPE_CHECKING:
    from megarl.mcore.worker import MegatronWorker
    from megarl.sync.ends import WeightSender

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
            other, running = entry
            try:
                has_ended = running.wait(0.0)
            except Exception:
                # Whoever waits for it learns why, and what saves the state after that goes on.
                has_ended = True
            if not has_ended and other == role:
                continue
            if not has_ended:
                # A signal leaves the call running.
                wait_all([running])
            # Its results stay in the object store as long as it is held here.
            self._running.remove(entry)
        pending = start()
        self._running.append((role, pending))
        return pending


UNPADDED = ("sequences", "positive", "critic_sequences")
"""The fields of TrainingSamples that are not [B, T]"""


@dataclass(frozen=True)
class Share:
    """K of B sequences, or of B samples."""

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
    positive: NDArray[np.bool_] | None = None
    """[B]; None: sequences without targets"""
    targets: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of samples, by field of TrainingSamples: [sum of the K responses' lengths]"""

    def unfold(self) -> Sequences | TrainingSamples:
        """All B; tokens and targets of the others are 0 and take no memory."""
        ends, rows = self.lengths.cumsum(), self.rows.tolist()
        flat = [slice(int(ends[row] - self.lengths[row]), int(ends[row])) for row in rows]
        held = torch.zeros(len(self.lengths), dtype=torch.bool)
        held[torch.tensor(self.rows)] = True
        tokens, experts = (
            None if x is None else _place(x, (int(self.lengths.sum()), *x.shape[1:]), flat)
            for x in (self.tokens, self.routed_experts)
        )
        assert tokens is not None
        lengths, prompt_lengths = torch.tensor(self.lengths), torch.tensor(self.prompt_lengths)
        sequences = Sequences(tokens, lengths, prompt_lengths, experts, held)
        if self.positive is None:
            return sequences
        responses = self.lengths - self.prompt_lengths
        cells = [(row, slice(int(responses[row]))) for row in rows]
        shape = (len(self.lengths), int(responses.max(initial=0)))
        given: dict[str, Any] = {each.name: None for each in fields(TrainingSamples)}
        given |= {name: _place(values, shape, cells) for name, values in self.targets.items()}
        return TrainingSamples(**(given | {"sequences": sequences, "positive": torch.tensor(self.positive)}))


def _place(values: NDArray[Any], shape: tuple[int, ...], places: Sequence[Any]) -> Tensor:
    """Zeros of this shape, with the values one after the other at these places."""
    placed = allocate_zeros(shape, torch.from_numpy(np.empty(0, values.dtype)).dtype)
    view, start = placed.numpy(), 0
    for place in places:
        part = view[place]
        part[...] = values[start : start + len(part)]
        start += len(part)
    return placed


class Sharer:
    """Divides batches over the data-parallel ranks of one role."""

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self._arch = read_architecture(Path(spec.checkpoint))
        self._model = spec.parallel.tp * spec.parallel.cp
        """Ranks of a stage that compute the same rows"""
        self.num_shares = spec.parallel.num_processes // (self._model * spec.parallel.pp)

    def find_share(self, rank: int) -> int:
        """The rank's number among the data-parallel ones. Megatron numbers the ranks of a stage in a row, those of a
        replica first.
        """
        return rank % (self._spec.parallel.num_processes // self._spec.parallel.pp) // self._model

    def share(self, given: Sequences | TrainingSamples, minibatches: Sequence[Tensor] | None = None) -> list[Share]:
        """What each data-parallel rank is sent. minibatches: of an update's samples; None: all rows in one.

        Samples are without critic_sequences.
        """
        samples = given if isinstance(given, TrainingSamples) else None
        sequences = given if isinstance(given, Sequences) else given.sequences
        chosen: list[set[int]] = [set() for _ in range(self.num_shares)]
        for rows in [torch.arange(sequences.num_samples)] if minibatches is None else minibatches:
            planned = plan_microbatches(self._spec, self._arch, sequences.measure(rows), len(chosen))
            for own, microbatches in zip(chosen, planned, strict=True):
                own.update(int(rows[place]) for microbatch in microbatches for place in microbatch)
        return [self._cut(sequences, samples, sorted(rows)) for rows in chosen]

    def _cut(self, sequences: Sequences, samples: TrainingSamples | None, rows: Sequence[int]) -> Share:
        own = sequences.select(torch.tensor(rows, dtype=torch.int64))
        experts = own.routed_experts if self._spec.router_replay else None
        share = Share(
            sequences.lengths.numpy(),
            sequences.prompt_lengths.numpy(),
            np.array(rows, dtype=np.int64),
            own.tokens.numpy(),
            None if experts is None else experts.numpy(),
        )
        if samples is None:
            return share
        padded = {each.name: getattr(samples, each.name) for each in fields(samples) if each.name not in UNPADDED}
        lengths = own.response_lengths.tolist()
        targets = {
            name: np.concatenate([x[row, :n].numpy() for row, n in zip(rows, lengths, strict=True)] or [x[:0, 0]])
            for name, x in padded.items()
            if x is not None
        }
        return replace(share, positive=samples.positive.numpy(), targets=targets)


T = TypeVar("T")


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron's order of kernels and communication under tensor parallelism relies on it, before the first call of CUDA"""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"watch": 1})  # type: ignore[call-overload]
class WorkerActor:
    """The process of one rank, with a log file of its own. A separate thread reports the state of the current call."""

    def __init__(self, log_path: str, listen_host: str, gpus: Sequence[Gpu], joins_servers: bool = True):
        redirect_output(Path(log_path))
        dump_on_signal()
        self._tracker = CallTracker()
        self._host = resolve_host(listen_host)
        use_interface(self._host)
        use_gpus(gpus)
        if joins_servers:  # Else NCCL chooses, which adds up in the switch (NVLS) where there is one.
            agree_on_nccl()
        os.environ.setdefault(CONNECTIONS, "1")
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
            self._worker.warm_up()
            return self._worker.describe()

    def call(self, verb: str, *args: Any) -> Any:
        with self._tracker.enter(verb), span(verb):
            whole = [arg.unfold() if isinstance(arg, Share) else arg for arg in args]
            return getattr(self._worker, verb)(*whole)

    def call_sender(self, verb: str, *args: Any) -> Any:
        with self._tracker.enter(f"{verb} of weights"), span(f"{verb} of weights"):
            from megarl.sync.ends import WeightSender

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

    @ray.method(concurrency_group="watch")
    def find_free(self) -> int:
        return find_processor().count_free()


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
            variables = {CONNECTIONS: os.environ.get(CONNECTIONS, "1")} if slot.gpus else {}
            options = WorkerActor.options(**self._cluster.options(slot, variables))  # type: ignore[attr-defined]
            given = str(log), self._cluster.listen_host, self._cluster.find_gpus(slot), self._cluster.joins_servers
            self._actors.append(options.remote(*given))
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

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> PendingCall[Tensor]:
        return self._call("logprobs", merge_rows(sequences), sequences, temperature, teacher)

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> PendingCall[Tensor]:
        return self._call("rounded_logprobs", merge_rows(sequences), sequences, temperature, unit)

    def values(self, sequences: Sequences) -> PendingCall[Tensor]:
        return self._call("values", merge_rows(sequences), sequences)

    def reference_kl(self, sequences: Sequences, temperature: float) -> PendingCall[Tensor]:
        return self._call("reference_kl", merge_rows(sequences), sequences, temperature)

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> PendingCall[list[Metrics]]:
        # By these the ranks, which have a part of each minibatch, divide their losses.
        counts = [count_minibatch(samples, rows) for rows in minibatches]
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

    def ask_peaks(self) -> list["ray.ObjectRef[int]"]:
        """Bytes of memory, for `measure_peaks`."""
        return [actor.find_peak.remote() for actor in self._actors]

    def measure_free(self) -> list[int]:
        """Bytes that are free on each rank's GPU; 0 without one. Raises DeadlineError and WorkerError."""
        what = f"free memory of the {self.role} GPUs"
        refs = ask(what, lambda: [actor.find_free.remote() for actor in self._actors])
        return list(wait_for(refs, self._names, what, POLL_DEADLINE_S))

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
        columns = []
        for number, arg in enumerate(args):
            if isinstance(arg, TrainingSamples | Sequences):
                minibatches = args[number + 1] if isinstance(arg, TrainingSamples) else None
                put = [ray.put(share) for share in self._sharer.share(arg, minibatches)]
                columns.append([put[self._sharer.find_share(rank)] for rank in range(self.num_ranks)])
            else:
                columns.append([arg] * self.num_ranks)
        return list(zip(*columns, strict=True)) or [()] * self.num_ranks

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


POLL_DEADLINE_S = 10.0
LOSS_DEADLINE_S = NUM_CALLS * CALL_DEADLINE_S + POLL_DEADLINE_S
OWNER_DEADLINE_S = 60.0
"""How long an owner may take to say who it is: a thread of its own does nothing else"""
PORT_DEADLINE_S = 15.0
"""How long the processes of a server may still hold its port after its owner was killed."""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"watch": 1})  # type: ignore[call-overload]
class ServerActor:
    """Owns one server process, which ends when this actor does. A separate thread answers whether the actor runs."""

    def __init__(self, log: Path, listen_host: str, gpus: Sequence[Gpu], options: Mapping[str, Any]):
        """options: of `SGLangServer`."""
        redirect_output(log)
        host = resolve_host(listen_host)
        # These set environment variables, which the server's processes inherit.
        use_interface(host)
        use_gpus(gpus)
        agree_on_nccl()
        self._server = SGLangServer(**options, host=host)

    def start(self, port_deadline_s: float, deadline_s: float) -> str:
        """Start the server and wait until it is healthy; returns its url."""
        self._server.start(port_deadline_s)
        self._server.wait_healthy(deadline_s)
        return self._server.url

    @ray.method(concurrency_group="watch")
    def identify(self) -> tuple[str, float, int]:
        """The machine, this process's start in seconds of its clock, and the process id."""
        host, pid = identify()
        return host, psutil.Process().create_time(), pid

    @ray.method(concurrency_group="watch")
    def find_peak(self) -> int:
        pid = self._server.pid
        return 0 if pid is None else find_peak_of_tree(pid)

    def check_alive(self) -> None:
        self._server.check_alive()

    def find_loss(self) -> str | None:
        return find_loss(self._server)

    def stop(self, deadline_s: float) -> None:
        self._server.stop(deadline_s)


class Servers:
    """The servers of a run and the actors that own them. Implements `megarl.interfaces.RolloutServers`."""

    def __init__(
        self,
        config: RolloutConfig,
        checkpoint: Path,
        log_dir: Path,
        seed: int,
        cluster: Cluster,
        slots: Sequence[DeviceSlot],
        stop_deadline_s: float,
        *,
        weight_version: int = 0,
        shares_gpus: bool = False,
    ):
        """Start their owners, one in each of `slots`.

        weight_version: of the checkpoint's weights, which a server holds after each start. shares_gpus: whether
        training roles use the same GPUs.
        """
        self._config, self._log_dir, self._cluster, self._slots = config, log_dir, cluster, slots
        self._stop_deadline_s = stop_deadline_s
        self.api_key = secrets.token_hex(32)
        """Required of callers"""
        self.names = tuple(f"SGLang server {index}/{len(slots)}" for index in range(len(slots)))
        common = {"config": config, "checkpoint": checkpoint, "weight_version": weight_version}
        common |= {"api_key": self.api_key, "shares_gpus": shares_gpus}
        logs = [log_dir / f"server-{index}.log" for index in range(len(slots))]
        self._options = [{**common, "seed": seed + index, "log_file": log} for index, log in enumerate(logs)]
        self._actors: list[Any] = []
        self._owners: list[Any] = []
        """References of each actor's `identify`"""
        ask("start of the servers' owners", lambda: self._own(range(len(slots))))
        self._urls: PendingCall[list[str]] | None = None
        self._ended: list[int] = []

    def start(self) -> PendingCall[list[str]]:
        """Start the servers that do not run; the result is the urls of all, once they are healthy.

        It waits for the restart of those that were ended, and raises WorkerError with the end of the log.
        """
        if self._urls is None:
            self._urls = self._start(range(len(self._slots)), 0.0, "start")
        elif self._ended:
            self._start(self._ended, PORT_DEADLINE_S, "restart").result()
            self._ended = []
        return self._urls

    def _own(self, numbers: Collection[int], port: int | None = None) -> None:
        """Start the owners of these servers, in the place of those that they had."""
        for number in numbers:
            slot = self._slots[number]
            options = self._cluster.options(slot)
            kind = ServerActor.options(**options)  # type: ignore[attr-defined]  # Ray's types leave the class as it was
            given = self._cluster.listen_host, self._cluster.find_gpus(slot), {**self._options[number], "port": port}
            actor = kind.remote(self._log_dir / f"server-{number}-owner.log", *given)
            self._actors[number : number + 1] = [actor]
            self._owners[number : number + 1] = [actor.identify.remote()]

    def _start(self, numbers: Collection[int], port_deadline_s: float, what: str) -> PendingCall[list[str]]:
        start_s = self._config.startup_deadline_s
        # The server's own deadline passes first, with the end of its log in the message.
        deadline_s = start_s + port_deadline_s + POLL_DEADLINE_S
        text = f"{what} of the SGLang servers"
        refs = ask(text, lambda: tuple(self._actors[i].start.remote(port_deadline_s, start_s) for i in numbers))
        return PendingCall(refs, tuple(self.names[i] for i in numbers), text, deadline_s, list)

    def ask_peaks(self) -> list["ray.ObjectRef[int]"]:
        """Bytes of memory, for `measure_peaks`."""
        return [actor.find_peak.remote() for actor in self._actors]

    def check_alive(self) -> None:
        """Raise WorkerError with the exit status and the end of the log where a server is down."""
        what = "health of the SGLang servers"
        refs = ask(what, lambda: [actor.check_alive.remote() for actor in self._actors])
        wait_for(refs, self.names, what, POLL_DEADLINE_S)

    def find_lost(self) -> Mapping[str, str]:
        if self._urls is None:
            return {}
        return ask("which SGLang servers are lost", self._find_lost, OWNER_DEADLINE_S + LOSS_DEADLINE_S)

    def _find_lost(self) -> Mapping[str, str]:
        lost: dict[int, str] = {}
        # The first asks whether the owner runs at all, in a thread that does nothing else.
        for method, deadline_s in (("identify", OWNER_DEADLINE_S), ("find_loss", LOSS_DEADLINE_S)):
            others = [number for number in range(len(self._actors)) if number not in lost]
            answers = collect([getattr(self._actors[number], method).remote() for number in others], deadline_s)
            for number, answer in zip(others, answers, strict=True):
                if isinstance(answer, ray.exceptions.GetTimeoutError):
                    lost[number] = f"the process that owns it gave no answer within {deadline_s:g} s"
                elif isinstance(answer, ray.exceptions.RayActorError):
                    lost[number] = "the process that owns it has died"
                elif isinstance(answer, ray.exceptions.RayError):
                    lost[number] = f"the process that owns it failed: {' '.join(str(answer).split())}"
                elif method == "find_loss" and answer is not None:
                    lost[number] = answer
        return {name: lost[number] for number, name in enumerate(self.names) if number in lost}

    def end(self, names: Collection[str]) -> None:
        """As in `RolloutServers`; a restarted server appends to its log. Does nothing before the first start."""
        if self._urls is None:
            return
        try:
            urls = self._urls.result()
        except (WorkerError, DeadlineError):
            # The first start failed: the next one is the first again, of all servers.
            self._urls, names, urls = None, self.names, [""] * len(self.names)
        numbers = [number for number, name in enumerate(self.names) if name in names]
        if not numbers:
            return
        self._stop(numbers)
        for number in numbers:
            port = urlsplit(urls[number]).port
            ask(f"another owner of {self.names[number]}", partial(self._replace, number, port))
        self._ended = sorted({*self._ended, *numbers}) if self._urls else []

    def _replace(self, number: int, port: int | None) -> None:
        """Another owner in place of this one. The guard ends its server, should it still run."""
        ray.kill(self._actors[number])
        ready, _ = ray.wait([self._owners[number]], timeout=0)
        with contextlib.suppress(ray.exceptions.RayError, psutil.NoSuchProcess):
            # One that is stopped does not obey Ray. Its start tells it from a later process of this number.
            host, started, pid = ray.get(ready[0]) if ready else ("", 0.0, 0)
            if host == socket.gethostname() and psutil.Process(pid).create_time() == started:
                psutil.Process(pid).kill()
        self._own([number], port)

    def restart(self, names: Collection[str]) -> None:
        """As in `RolloutServers`. Raises WorkerError with the end of the log."""
        self.end(names)
        self.start().result()

    def close(self) -> None:
        # A start in progress keeps `stop` waiting until the deadline; the server then ends with its owner. Where Ray is
        # lost, its own end is theirs.
        with contextlib.suppress(RayLostError):
            self._stop(range(len(self._actors)))

    def _stop(self, numbers: Collection[int]) -> None:
        def stop() -> None:
            refs = [self._actors[number].stop.remote(self._stop_deadline_s) for number in numbers]
            ray.wait(refs, num_returns=len(refs), timeout=self._stop_deadline_s)

        ask("end of the SGLang servers", stop, self._stop_deadline_s)
