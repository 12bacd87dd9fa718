"""Many GPUs on two cores: the ranks of a job run their real model, schedule and optimizer on tensors without memory.

    python tests/simulate.py algo=ppo model=qwen32b [key=value] ... [--role policy] [--out FILE]

One rank for each place (stage, tensor, context and expert rank) scores and is updated with uneven sequences; its
collectives are recorded where torch dispatches them, and then all ranks are played through with them: a collective ends
once its whole group is there with the same kind, shape and type, a message once the neighbour has it. The first rank of
each stage does so again with full micro-batches, whose bytes torch's MemTracker counts. The layers are those of
megarl/cpu, so that the bytes are compared with the plan of these (RoleJob.on_gpu), nothing is offloaded, and experts
get equally many tokens. The exit code is 1 where something is out of order or a phase more than a tenth off its plan.
"""

import argparse
import csv
import itertools
import sys
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import lcm
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megarl.mcore  # noqa: F401  # Before Megatron.

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.cpu import cuda, layers
from megarl.mcore import process_groups, state, worker
from megarl.mcore.batch import PackedBatch
from megarl.mcore.device import find_processor
from megarl.mcore.layers import resolve_overlap
from megarl.mcore.spec import Role
from megarl.plan.job import build_jobs, count_job, find_models
from megarl.plan.memory import RoleJob, estimate_stages
from megarl.run.inputs import build_specs
from megarl.types import Sequences, TrainingSamples

META = torch.device("meta")
_RESULTS: dict[Any, partial[Tensor]] = {}
"""Makes a tensor as an operator has returned, by it and what it was given"""
WORLD = "default_pg"
SPLIT = ("alltoall_base_",)


@dataclass(frozen=True)
class Call:
    """A collective as a rank makes it, or one message of a batch."""

    kind: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    """Of what goes in and what comes out"""
    dtype: str
    peer: int | None = None
    """Of a message: the other's rank in the group"""
    batch: int | None = None
    """Of a message: those of one batch are there at the same time; None: nobody waits for it"""
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Of an exchange: rows for each rank of the group, and from each"""
    waits: bool = True


@dataclass
class Run:
    """What one rank did."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes of its tensors by phase: held between the calls, log-probs (or values), update"""
    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Name and ranks of every group in the order in which they were made"""
    num_batches: int = 0


class Devices(TorchFunctionMode):
    """What asks for a device gets the one without memory; what is to move stays."""

    real = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and args[0].is_meta:
            return [1] * args[0].numel()
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace(".meta.", ".")
        if func is torch.tensor and (leaves := [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]):
            return torch.stack(leaves)
        if func in (Tensor.cuda, Tensor.cpu) and args[0].is_meta:
            return args[0]
        if func is Tensor.to and args[0].is_meta:
            others = [*args[1:], kwargs.get("dtype")]
            dtypes = [getattr(each, "dtype", each) for each in others]
            dtype = next((each for each in dtypes if isinstance(each, torch.dtype)), args[0].dtype)
            return func(args[0], dtype, copy=bool(kwargs.get("copy")))
        if kwargs.get("device") is not None and not self.real:
            kwargs["device"] = META
        return func(*args, **kwargs)


class Meter(MemTracker):  # type: ignore[no-untyped-call]
    """Counts bytes, records collectives instead of making them, and says what tensors without memory cannot."""

    def __init__(self, run: Run, top_k: int, num_experts: int, counts: bool) -> None:
        super().__init__()
        self.run, self.top_k, self.num_experts, self.counts = run, top_k, num_experts, counts
        self.names: dict[str, str] = {}
        self.batch: int | None = None
        self.batches = 0

    def __enter__(self) -> "Meter":
        # Not torch's: its hooks of modules take each for called once.
        self._fake_mode_on_entry = None
        self._track_resize()
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *args)  # type: ignore[no-untyped-call]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._peak_mem[META] = self.held
        yield
        if self.counts:
            self.run.peaks[name] = self._peak_mem[META]

    @property
    def held(self) -> int:
        return self._curr_mem_snap.get(META, {}).get("Total", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return (
                self.record(func, args) if func.namespace == "c10d" else self.compute(func, types, args, kwargs or {})
            )

    def compute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is aten.masked_select.default and args[0].is_meta:
            return self.track(aten.new_empty.default, types, (args[0], [self.count(args[1])]), {})
        if func is aten.index.Tensor and any(each is not None and each.dtype is torch.bool for each in args[1]):
            (mask,), rest = args[1], args[0].shape[args[1][0].dim() :]
            if mask.is_meta:
                sizes = [self.count(mask), *rest]
                return self.track(aten.new_empty.default, types, (args[0], sizes), {})
        return self.track(func, types, args, kwargs)

    def track(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.counts:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not _makes_one(func):
            return func(*args, **kwargs)
        # Torch finds most shapes of results in Python, which was half of a rank's time.
        key = (func, _describe((args, kwargs)))
        if key in _RESULTS:
            return _RESULTS[key]()
        result = func(*args, **kwargs)
        if result.is_meta:
            _RESULTS[key] = partial(torch.empty_strided, result.shape, result.stride(), dtype=result.dtype, device=META)
        return result

    def count(self, mask: Tensor) -> int:
        """How much of a mask is true: of tokens by experts top_k for each token, of others all."""
        if mask.dim() == 2 and self.num_experts in mask.shape:
            return mask.numel() // self.num_experts * self.top_k
        return mask.numel()

    def record(self, func: Any, args: Any) -> Any:
        """Record a collective; tensors with memory get what they would if all members had the same."""
        kind, schema = func._schema.name.removeprefix("c10d::"), func._schema
        place = next(number for number, arg in enumerate(schema.arguments) if arg.name == "process_group")
        group = ProcessGroup.unbox(args[place])
        given = [tree_leaves(arg) for arg in args[:place]]
        tensors = [each for each in itertools.chain(*given) if isinstance(each, Tensor)]
        names = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)}
        is_message = kind in ("send", "recv_")
        if kind == "_allgather_base_" and not args[0].is_meta:
            args[0].copy_(torch.cat([args[1]] * group.size()).view_as(args[0]))
        call = Call(
            kind,
            self.names.get(group.group_name, group.group_desc),
            tuple(tuple(each.shape) for each in tensors),
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            peer=args[place + 1] if is_message else None,
            batch=self.batch if is_message else None,
            splits=(tuple(names["input_split_sizes"]), tuple(names["output_split_sizes"]))
            if kind in SPLIT
            else ((), ()),
            waits=not names.get("asyncOp", False),
        )
        self.run.calls.append(call)
        work = FakeWork().boxed()
        return work if len(schema.returns) == 1 else (args[0], work)


@cache
def _makes_one(func: Any) -> bool:
    """Whether an operator returns a tensor of its own and nothing else."""
    arguments, returns = func._schema.arguments, func._schema.returns
    is_own = all(each.alias_info is None for each in (*arguments, *returns))
    return is_own and [str(each.type) for each in returns] == ["Tensor"]


def _describe(given: Any) -> Any:
    """What the shape of a result depends on; of a tensor with memory something that never comes again."""
    if isinstance(given, Tensor):
        return (given.shape, given.stride(), given.dtype) if given.is_meta else object()
    given = tuple(given.items()) if isinstance(given, dict) else given
    return tuple(map(_describe, given)) if isinstance(given, list | tuple) else (type(given), given)


def build_samples(rows: Sequence[int]) -> TrainingSamples:
    """Sequences of these lengths with a prompt of one token each."""
    lengths = torch.tensor(rows)
    responses = lengths - 1
    mask = torch.arange(int(responses.max())) < responses[:, None]
    tokens, ones = torch.ones(int(lengths.sum()), dtype=torch.int64), mask.float()
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values", "returns")
    return TrainingSamples(
        sequences=Sequences(tokens, lengths, torch.ones_like(lengths)),
        mask=mask,
        loss_mask=mask,
        positive=torch.ones(len(rows), dtype=torch.bool),
        sampling_logprobs=None,
        **dict.fromkeys(names, ones),  # type: ignore[arg-type]
    )


def list_rows(job: RoleJob) -> tuple[list[int], list[int]]:
    """Lengths of the sequences of two minibatches: of full micro-batches, as many as fill the pipeline and one more,
    and of uneven ones. The data-parallel ranks have the same.
    """
    longest, pp = job.batch.longest, job.parallel.pp
    budget = job.batch.num_tokens * job.parallel.cp
    one = [longest] * (budget // longest) + [budget % longest] * (budget % longest > 1)
    full = one * min(job.num_microbatches, pp + 1)
    # As many tokens for each expert.
    unit = 2 * job.parallel.cp * job.parallel.tp * (job.arch.experts.num_experts if job.arch.experts else 1)
    shorter = [row * (20 - 3 * (number % 4)) // 20 for number in range(pp + 1) for row in one]
    uneven = [max(2, row // unit * unit) for row in shorter]
    return full * job.parallel.dp, [row for row in uneven for _ in range(job.parallel.dp)]


def take_shapes(built: worker.MegatronWorker, batches: Sequence[PackedBatch]) -> Any:
    """In place of a pipeline's exchange of shapes: the same messages, and the shapes of a neighbour's tensors. Of every
    pp micro-batches each piece of a stage gets all, one piece after the other, and their gradients the other way round
    (megatron/core/pipeline_parallel/schedules.py, get_schedule_table).
    """
    stock, parallel = P2PCommunicator._communicate_shapes, built.spec.parallel
    pp, stage = parallel.pp, parallel_state.get_pipeline_model_parallel_rank()
    pieces, end = range(parallel.vpp), (pp - 1, parallel.vpp - 1)
    lengths = [batch.tokens.shape[1] // (parallel.tp if parallel.sp else 1) for batch in batches]
    shapes = [[length, 1, built.arch.hidden_size] for length in lengths]
    parts = [shapes[first : first + pp] for first in range(0, len(shapes), pp)]
    arrived = (shape for part in parts for piece in pieces if (stage, piece) != (0, 0) for shape in part)
    returned = (shape for part in parts for piece in pieces[::-1] if (stage, piece) != end for shape in part)

    def exchange(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        stock(self, send_next, send_prev, recv_prev, recv_next)
        return next(arrived) if recv_prev else [0, 0, 0], next(returned) if recv_next else [0, 0, 0]

    return patch.object(P2PCommunicator, "_communicate_shapes", exchange)


def run_rank(config: Config, role: Role, rank: int, counts: bool = True) -> Run:
    """Build the model of one rank of a role, score, and update where the role is trained: full micro-batches where
    bytes are counted, else uneven sequences.
    """
    models = find_models(config)
    job = build_jobs(config, models, on_gpu=False)[role.value]
    spec = replace(build_specs(config, Path())[role], offload=None)
    if spec.optimizer is not None:
        # As on a GPU.
        spec = replace(spec, optimizer=resolve_overlap(spec.optimizer, spec.parallel, gpu=True))
    arch, run = getattr(models, role.value), Run(rank)
    experts = arch.experts
    meter = Meter(run, experts.top_k if experts else 1, experts.num_experts if experts else 0, counts)
    devices = Devices()
    stock_group = parallel_state.create_group
    stock_preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def create_group(ranks: Any = None, **kwargs: Any) -> Any:
        group = stock_group(ranks=ranks, **kwargs | {"backend": "fake"})
        run.groups.append((str(kwargs["group_desc"]), tuple(ranks)))
        if rank in ranks:
            meter.names[group.group_name] = str(kwargs["group_desc"])
        return group

    def batch_messages(messages: Any) -> Any:
        meter.batch, meter.batches = meter.batches, meter.batches + 1
        try:
            ends = {dist.isend: "group_dst", dist.irecv: "group_src"}
            return [each.op(each.tensor, group=each.group, **{ends[each.op]: each.group_peer}) for each in messages]
        finally:
            meter.batch = None

    def preprocess(self: Any, routing_map: Tensor) -> Any:
        """With as many tokens for each expert."""
        devices.real = True
        try:
            tokens, top_k = torch.arange(routing_map.shape[0])[:, None], self.config.moe_router_topk
            routes = torch.zeros(routing_map.shape, dtype=torch.bool)
            routes[tokens, (tokens * top_k + torch.arange(top_k)) % routes.shape[1]] = True
            return stock_preprocess(self, routes)
        finally:
            devices.real = False

    def initialize(
        parallel: Any, rank: int, world_size: int, init_method: str, seed: int, *rest: Any, **gpu: Any
    ) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        process_groups.initialize_groups(parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def broadcast_objects(objects: list[Any], group: Any, **kwargs: Any) -> None:
        run.calls.append(Call("broadcast_object_list", meter.names[group.group_name], (), ""))
        objects[0] = objects[0] or defaultdict(lambda: 1.0)

    def gather_objects(objects: list[Any], own: Any, group: Any = None) -> None:
        run.calls.append(Call("all_gather_object", meter.names[group.group_name] if group else WORLD, (), ""))
        objects[:] = [own] * len(objects)

    with ExitStack() as stack:
        for owner, name, new in (
            (dist, "all_gather_object", gather_objects),
            (worker, "read_architecture", lambda directory: arch),
            (state, "load_hf", lambda *args: None),
            (worker, "collect_rows", lambda *args: None),
            (process_groups, "initialize", initialize),
            (parallel_state, "create_group", create_group),
            (dist, "batch_isend_irecv", batch_messages),
            (dist, "broadcast_object_list", broadcast_objects),
            (MoEAlltoAllTokenDispatcher, "preprocess", preprocess),
            (MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
            (type(find_processor()), "device", lambda self: META),
            (type(find_processor()), "send", lambda self, x: x.to(META)),
            (cuda, "current_device", lambda: torch.device("cpu") if devices.real else META),
            (torch.nn.functional, "scaled_dot_product_attention", attend),
            (layers, "attend", attend_to_some),
            # Else it would leave `Devices` aside, for what is recomputed too.
            (torch.autograd, "has_torch_function", lambda tensors: False),
        ):
            stack.enter_context(patch.object(owner, name, new))
        modes = ExitStack()
        modes.enter_context(meter)
        modes.enter_context(devices)
        try:
            built = worker.MegatronWorker(spec, rank, spec.parallel.num_processes, "")
            run.peaks |= {"held": meter.held} if counts else {}
            samples = build_samples(list_rows(job)[not counts])
            modes.close()
            batches = built._batches(samples.sequences)
            run.num_batches = len(batches)
            modes.enter_context(meter)
            modes.enter_context(devices)
            with patch.object(built, "_batches", partial(_take, batches)):
                for phase, verb in list_verbs(built, samples):
                    with meter.phase(phase), take_shapes(built, batches):
                        verb()
        finally:
            modes.close()
            process_groups.destroy()
    return run


def _take(batches: Sequence[PackedBatch], sequences: Sequences) -> Sequence[PackedBatch]:
    return batches


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **unused: Any) -> Tensor:
    """What F.scaled_dot_product_attention has for tensors with memory, without a mask of the keys."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(query, key, value, 0.0, True, scale=scale)[0]
    return out


def attend_to_some(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """megarl.cpu's for windows and sinks without the masks of all heads, which no GPU makes."""
    return attend(query if sinks is None else query + sinks.view(1, -1, 1, 1), key, value, scale=scale)


def list_verbs(built: worker.MegatronWorker, samples: TrainingSamples) -> Iterator[tuple[str, Any]]:
    sequences = samples.sequences
    if built.spec.role is Role.critic:
        yield "log-probs", partial(built.values, sequences)
    else:
        yield "log-probs", partial(built.logprobs, sequences, 1.0)
    if built.spec.optimizer is not None:
        yield "update", partial(built.update, samples, [torch.arange(sequences.num_samples)])


def list_places(job: RoleJob) -> list[int]:
    """A rank for each place: in each stage those that differ in tensor, context or expert rank."""
    parallel = job.parallel
    per_stage = parallel.num_processes // parallel.pp
    own = lcm(parallel.tp * parallel.cp, parallel.etp * parallel.ep)
    return [stage * per_stage + number for stage in range(parallel.pp) for number in range(min(own, per_stage))]


def find_place(job: RoleJob, rank: int) -> int:
    """The rank of `list_places` in whose place a rank is."""
    parallel = job.parallel
    per_stage = parallel.num_processes // parallel.pp
    own = lcm(parallel.tp * parallel.cp, parallel.etp * parallel.ep)
    return rank - rank % per_stage + rank % per_stage % own


class Playback:
    """All ranks with the calls of their places, one after the other as far as each comes."""

    def __init__(self, runs: Mapping[int, Run], places: Sequence[int]) -> None:
        """runs: by place. places: of each rank."""
        self.calls = [runs[place].calls for place in places]
        groups = runs[places[0]].groups
        self.members = {(name, rank): ranks for name, ranks in groups for rank in ranks}
        self.members |= {(WORLD, rank): tuple(range(len(places))) for rank in range(len(places))}
        self.there: dict[tuple[str, tuple[int, ...], int], dict[int, Call]] = defaultdict(dict)
        self.turns: Counter[tuple[int, str]] = Counter()
        self.messages: dict[tuple[str, int, int, str], list[Call]] = defaultdict(list)
        self.waiting: list[list[Any]] = [[] for _ in places]
        self.positions = [0] * len(places)
        self.problems: list[str] = []

    def play(self) -> list[str]:
        """What is out of order or does not fit, by name."""
        pending, idle = deque(range(len(self.calls))), 0
        while pending and idle <= len(pending) and not self.problems:
            rank = pending.popleft()
            before = self.positions[rank]
            while self.positions[rank] < len(self.calls[rank]) and self.is_free(rank):
                self.start_next(rank)
            if self.positions[rank] < len(self.calls[rank]):
                pending.append(rank)
            idle = 0 if self.positions[rank] > before else idle + 1
        return self.problems or list(self.list_waiting())

    def list_waiting(self) -> Iterator[str]:
        """The first call of each group, and message, that not all have made."""
        seen = set()
        for (name, ranks, turn), calls in self.there.items():
            if len(calls) < len(ranks) and (name, ranks) not in seen:
                seen.add((name, ranks))
                missing = sorted(set(ranks) - calls.keys())
                yield f"{name} of {ranks[0]}..{ranks[-1]}: rank {missing[0]} never makes call {turn}, " + (
                    f"for which rank {min(calls)} is there: {describe(calls[min(calls)])}"
                )
        for (name, source, target, kind), sent in self.messages.items():
            if kind == "send" and len(sent) != len(self.messages.get((name, source, target, "recv_"), ())):
                yield f"{name}: {len(sent)} messages from {source} to {target} are sent, and not as many received"

    def is_free(self, rank: int) -> bool:
        return all(
            len(self.there[key]) == len(key[1]) if len(key) == 3 else len(self.messages[key[0]]) > key[1]
            for key in self.waiting[rank]
        )

    def start_next(self, rank: int) -> None:
        calls, number = self.calls[rank], self.positions[rank]
        first, last = calls[number], number + 1
        while first.batch is not None and last < len(calls) and calls[last].batch == first.batch:
            last += 1
        self.positions[rank] = last
        keys = [
            self.meet(rank, call) if call.peer is None else self.exchange(rank, call) for call in calls[number:last]
        ]
        self.waiting[rank] = keys if first.batch is not None or (first.peer is None and first.waits) else []

    def meet(self, rank: int, call: Call) -> Any:
        """Come to a collective of a group; what to wait for."""
        ranks = self.members[call.group, rank]
        key = (call.group, ranks, self.turns[rank, call.group])
        self.turns[rank, call.group] += 1
        there = self.there[key]
        there[rank] = call
        other = next(iter(there))
        if describe(there[other]) != describe(call):
            texts = (f"rank {who} has {describe(there[who])} (its call {self.positions[who]})" for who in (other, rank))
            self.problems.append(f"{call.group} of {ranks[0]}..{ranks[-1]}: {', '.join(texts)}")
        if len(there) == len(ranks) and call.kind in SPLIT:
            check_splits(call.group, [there[each] for each in ranks], self.problems)
        return key

    def exchange(self, rank: int, call: Call) -> Any:
        """Send or receive a message; what to wait for."""
        assert call.peer is not None
        other = self.members[call.group, rank][call.peer]
        ends, kinds = (rank, other), ("send", "recv_")
        if call.kind != "send":
            ends, kinds = (other, rank), ("recv_", "send")
        own, theirs = ((call.group, *ends, kind) for kind in kinds)
        place = len(self.messages[own])
        self.messages[own].append(call)
        if len(self.messages[theirs]) > place:
            found = self.messages[theirs][place]
            if (found.shapes, found.dtype) != (call.shapes, call.dtype):
                text = f"{call.kind} {describe(call)[1:]} at {rank}, {found.kind} {describe(found)[1:]} at {other}"
                self.problems.append(f"{call.group}, message {place} from {ends[0]} to {ends[1]}: {text}")
        return theirs, place


def check_order(runs: Mapping[int, Run], places: Sequence[int]) -> list[str]:
    """What is out of order or does not fit among all ranks, by name. runs: by place. places: of each rank."""
    groups = runs[places[0]].groups
    for run in runs.values():
        if run.groups != groups:
            number = next(i for i, pair in enumerate(zip(run.groups, groups, strict=False)) if pair[0] != pair[1])
            return [f"rank {run.rank} makes group {number} as {run.groups[number]}, others as {groups[number]}"]
    return Playback(runs, places).play()


def describe(call: Call) -> tuple[Any, ...]:
    """What all members of a group must have in common."""
    # The first rank alone has what a gather brings; an exchange has as many rows in as out for each pair of ranks.
    shapes = call.shapes[-1:] if call.kind == "gather_" else call.shapes
    return (call.kind, tuple(shape[1:] for shape in shapes) if call.kind in SPLIT else shapes, call.dtype)


def check_splits(group: str, calls: Sequence[Call], problems: list[str]) -> None:
    for one, call in enumerate(calls):
        for other, rows in enumerate(call.splits[0]):
            if calls[other].splits[1] and calls[other].splits[1][one] != rows:
                found = f"{other} expects {calls[other].splits[1][one]}"
                problems.append(f"{group}: {one} sends {rows} rows to {other} of its group, {found}")


@dataclass(frozen=True)
class Found:
    """One role of a preset."""

    role: str
    num_ranks: int
    runs: Mapping[int, Run]
    planned: Mapping[int, Mapping[str, int]]
    """Bytes by phase, of each rank that counted its own"""
    problems: Sequence[str]

    @property
    def ratios(self) -> list[tuple[str, int, int]]:
        """For each phase the planned and counted bytes of the rank where they differ most."""
        return [
            max(((phase, self.planned[rank][phase], self.runs[rank].peaks[phase]) for rank in self.planned), key=_off)
            for phase in self.runs[0].peaks
        ]


def _off(pair: tuple[str, int, int]) -> float:
    return abs(pair[1] / pair[2] - 1)


def plan_bytes(config: Config, role: Role) -> tuple[RoleJob, list[dict[str, int]]]:
    """The role's job with nothing offloaded, as simulated, and the planned bytes of a rank of each stage by phase."""
    job = build_jobs(config, find_models(config), on_gpu=False)[role.value]
    job = replace(job, node=replace(job.node, offload=None))
    stages = estimate_stages(job, count_job(config, job))
    names = {"held": "resident", "log-probs": "forward"} | ({"update": "update"} if job.is_trained else {})
    return job, [{phase: getattr(stage, name) for phase, name in names.items()} for stage in stages]


def simulate(config: Config, role: Role, pool: Any = None) -> Found:
    """Run a rank for each place of a role, compare the bytes of the first of each stage, and play all ranks through."""
    job, stages = plan_bytes(config, role)
    places, parallel = list_places(job), job.parallel
    per_stage = parallel.num_processes // parallel.pp
    counted = [stage * per_stage for stage in range(parallel.pp)]
    arguments = [(config, role, rank, False) for rank in places] + [(config, role, rank, True) for rank in counted]
    found = list((pool.map if pool else map)(run_rank, *zip(*arguments, strict=True)))
    runs = {run.rank: run for run in found[: len(places)]}
    for run in found[len(places) :]:
        runs[run.rank].peaks = run.peaks
    problems = check_order(runs, [find_place(job, rank) for rank in range(parallel.num_processes)])
    planned = {number * per_stage: stage for number, stage in enumerate(stages)}
    return Found(role.value, parallel.num_processes, runs, planned, [*problems, *check_bytes(runs, planned)])


WITHIN = 0.10


def check_bytes(runs: Mapping[int, Run], planned: Mapping[int, Mapping[str, int]]) -> Iterator[str]:
    """The phases whose planned bytes are more than a tenth off the counted ones."""
    for rank, phases in planned.items():
        for phase, plan in phases.items():
            counted = runs[rank].peaks[phase]
            if abs(plan / counted - 1) > WITHIN:
                yield f"rank {rank}, {phase}: {plan / 2**30:.2f} GiB planned, {counted / 2**30:.2f} counted"


COLUMNS = (
    "preset",
    "role",
    "ranks",
    "places",
    "micro-batches",
    "collectives",
    "phase",
    "planned GiB",
    "counted GiB",
    "ratio",
)


def list_lines(name: str, found: Found) -> Iterator[tuple[str, ...]]:
    first = found.runs[0]
    most = max(len(run.calls) for run in found.runs.values())
    for phase, planned, counted in found.ratios:
        numbers = (f"{planned / 2**30:.3f}", f"{counted / 2**30:.3f}", f"{planned / counted:.3f}")
        sizes = (found.num_ranks, len(found.runs), first.num_batches, most)
        yield (name, found.role, *map(str, sizes), phase, *numbers)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--role", choices=[role.value for role in Role], action="append", help="else policy and critic")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a CSV file that the lines are added to")
    options, words = parser.parse_known_args(arguments)
    config, problems = load_config(words), list[str]()
    lines: list[tuple[str, ...]] = []
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for role in map(Role, options.role or ("policy", "critic")):
            found = simulate(config, role, pool)
            lines += list_lines(config.model.name, found)
            problems += [f"{role.value}: {problem}" for problem in found.problems]
    print("\n".join(",".join(line) for line in [COLUMNS, *lines]))
    print("\n".join(problems) or "every rank in order, every shape fits, every phase within a tenth")
    if options.out:
        is_new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines] if is_new else lines)
    return int(bool(problems))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
