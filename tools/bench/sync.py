"""Seconds and bytes of the weight sync beside full gather and broadcast and beside a checkpoint on disk.

Four training processes (TP2 x PP2, bfloat16) and an SGLang server of two ranks, real ones, on this machine. Full gather
and broadcast is the peers' way, written here as they write it: rank 0 gathers whole tensors and broadcasts them in
buckets to every server rank (/update_weights_from_distributed), and nothing is verified. Disk: a checkpoint is written
and every server rank reads it. Ours includes verification. The ratio is ours over gather and broadcast.
"""

import argparse
import multiprocessing as mp
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import httpx
import torch
import torch.distributed as dist
from speed import Result, describe_range, find_medians, take_turns
from torch import Tensor

from megarl.cluster.actors import merge_rows
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import RolloutConfig, Transport
from megarl.interfaces import DeadlineError, TrainBackend
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.rollout.client import SGLangClient
from megarl.rollout.server import SGLangServer
from megarl.signals import pick_free_port
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync
from megarl.types import Sequences

GOAL = 0.6
TP, NUM_RANKS = 2, 4
BUCKET = 64 << 20
GROUP = "gather-and-broadcast"
DEADLINE_S = 300.0
VOCAB = 32000
CHARACTERS = 40


def run_rank(rank: int, spec: WorkerSpec, init_method: str, connection: Connection) -> None:
    """Follows (target, verb, arguments) until the connection ends."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from megarl.mcore.worker import MegatronWorker
    from megarl.sync.ends import WeightSender

    worker = MegatronWorker(spec, rank, NUM_RANKS, init_method)
    targets = {"worker": worker, "sender": WeightSender(worker), "broadcast": Broadcaster(worker)}
    connection.send(None)
    while True:
        try:
            target, verb, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(targets[target], verb)(*arguments))
        except Exception as error:
            connection.send(RuntimeError(f"rank {rank}, {verb}: {error}"))


class Broadcaster:
    """Full gather and broadcast."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._group: dist.ProcessGroup | None = None

    def join(self, port: int) -> None:
        """Rank 0 and the server's ranks, as SGLang's init_custom_process_group makes the group."""
        from torch.distributed import distributed_c10d as c10d

        if dist.get_rank() != 0:
            return
        timeout = timedelta(seconds=DEADLINE_S)
        store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1 + TP, timeout=timeout))
        self._group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(GROUP, store),
            group_name=c10d.GroupName(GROUP),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def send(self, url: str, api_key: str) -> None:
        from megarl.mcore.state import export_hf

        size = 0
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in export_hf(self._worker.chunks, self._worker.arch):
            if bucket and size + tensor.nbytes > BUCKET:
                self._broadcast(url, api_key, bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            self._broadcast(url, api_key, bucket)
        dist.barrier()

    def _broadcast(self, url: str, api_key: str, bucket: list[tuple[str, Tensor]]) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(x.dtype).removeprefix("torch.") for _, x in bucket],
            "shapes": [list(x.shape) for _, x in bucket],
            "group_name": GROUP,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        call = start_post(f"{url}/update_weights_from_distributed", api_key, body)
        dist.broadcast(torch.cat([x.flatten().view(torch.uint8) for _, x in bucket]), src=0, group=self._group)
        call.join()


@dataclass(frozen=True)
class Answers:
    """What all ranks answer; a `Pending`."""

    connections: Sequence[Connection]
    merge: Callable[[list[Any]], Any]

    def result(self) -> Any:
        found = []
        for connection in self.connections:
            if not connection.poll(DEADLINE_S):
                raise DeadlineError(f"a training rank gave no answer within {DEADLINE_S:g} s")
            found.append(connection.recv())
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return self.merge(found)


class Policy:
    """The verbs of a TrainBackend that a weight sync needs."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def call(self, target: str, verb: str, arguments: Sequence[tuple[Any, ...]] | None, merge: Any = list) -> Answers:
        own = [()] * NUM_RANKS if arguments is None else arguments
        for connection, args in zip(self._connections, own, strict=True):
            connection.send((target, verb, args))
        return Answers(self._connections, merge)

    def call_senders(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None, deadline_s: float) -> Answers:
        return self.call("sender", verb, arguments)

    def logprobs(self, sequences: Sequences, temperature: float) -> Answers:
        return self.call("worker", "logprobs", [(sequences, temperature)] * NUM_RANKS, merge_rows(sequences))

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Answers:
        own = [(sequences, temperature, unit)] * NUM_RANKS
        return self.call("worker", "rounded_logprobs", own, merge_rows(sequences))

    def export_weights(self, directory: Path) -> Answers:
        return self.call("worker", "export_weights", [(directory,)] * NUM_RANKS)


@contextmanager
def open_policy(checkpoint: Path, scratch: Path) -> Iterator[Policy]:
    spec = WorkerSpec(
        role=Role.reference,
        checkpoint=str(checkpoint),
        parallel=ParallelConfig(num_processes=NUM_RANKS, tp=2, sp=True, pp=2),
        optimizer=None,
        dtype=Dtype.bfloat16,
        algo=AlgoConfig(),
        temperature=1.0,
        response_length=CHARACTERS,
        tokens_per_microbatch=128,
        deadline_s=DEADLINE_S,
    )
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(NUM_RANKS)]
    processes = [
        context.Process(target=run_rank, args=(rank, spec, f"file://{scratch}/init", pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    connections = [pipe[0] for pipe in pipes]
    Answers(connections, list).result()
    yield Policy(connections)
    for process in processes:
        process.kill()


def write_checkpoint(directory: Path, args: argparse.Namespace) -> int:
    """A Qwen3 with random weights in bfloat16; its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(param.numel() for param in model.parameters())


def broadcast_once(policy: Policy, client: SGLangClient, api_key: str) -> dict[str, float]:
    client.pause()
    client.begin_update()
    policy.call("broadcast", "send", [(client.url, api_key)] * NUM_RANKS).result()
    client.end_update()
    client.resume()
    return {}


def start_post(url: str, api_key: str, body: dict[str, Any]) -> threading.Thread:
    """A thread that posts `body` to a server, and prints a refusal."""

    def post() -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S, trust_env=False).raise_for_status()

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def join_broadcast(policy: Policy, client: SGLangClient, api_key: str) -> None:
    port = pick_free_port("127.0.0.1")
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + TP}
    body |= {"group_name": GROUP, "backend": "gloo"}
    call = start_post(f"{client.url}/init_weights_update_group", api_key, body)
    policy.call("broadcast", "join", [(port,)] * NUM_RANKS).result()
    call.join()


def measure(
    policy: Policy,
    server: SGLangServer,
    config: RolloutConfig,
    checkpoint: Path,
    args: Any,
    scratch: Path,
) -> Result:
    client = SGLangClient(server.url, vocab_size=VOCAB, deadline_s=DEADLINE_S, api_key=server.api_key)
    probe, host = list(range(3, 3 + CHARACTERS)), "127.0.0.1"
    backend = cast(TrainBackend, policy)  # of whose verbs a sync needs these alone
    ranks = Ranks(backend, [client], config, read_architecture(checkpoint), host)
    ours = ShardSync(backend, [client], config, ranks, probe, scratch=scratch, host=host, policy_dtype=Dtype.bfloat16)
    away: dict[str, Any] = {"directory": scratch / "disk", "policy_dtype": Dtype.bfloat16}
    disk = DiskSync(backend, [client], config, ranks, probe, **away)
    join_broadcast(policy, client, server.api_key)
    versions = iter(range(1, 1000))
    name = f"ours ({args.transport})"
    ways: dict[str, Callable[[], Any]] = {
        name: lambda: ours.publish(next(versions)),
        "gather and broadcast": lambda: broadcast_once(policy, client, server.api_key),
        "disk": lambda: disk.publish(next(versions)),
    }
    calls = take_turns(ways, args.repeats, args.warm_up)
    session = ranks.session
    assert session is not None
    whole = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    gathered = whole * (NUM_RANKS - 1) / NUM_RANKS
    moved = dict(zip(ways, (session.bound, gathered + TP * whole, whole + TP * whole), strict=True))
    rows = [
        {
            "way": way,
            "MB moved": moved[way] / 1e6,
            "over the least possible": moved[way] / session.bound,
            "seconds": find_medians(found)["seconds"],
            "least to most": describe_range([call["seconds"] for call in found]),
        }
        for way, found in calls.items()
    ]
    steps = ("move", "checksum", "probe", "pause", "resume")
    medians = find_medians(calls[name])
    parts = ", ".join(f"{step} {medians[f'sync/seconds_{step}']:.3f}" for step in steps)
    wire = sum(bucket.num_bytes for bucket in session.buckets) / session.bound
    ours.close()
    disk.close()
    notes = [f"ours, seconds: {parts}; messages over the least possible: {wire:.4f}"]
    return Result(rows, rows[0]["seconds"] / rows[1]["seconds"], GOAL, notes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--transport", choices=["colocated", "split"], default="colocated")


def run(args: argparse.Namespace) -> Result:
    config = RolloutConfig(
        response_length=CHARACTERS,
        dtype=Dtype.bfloat16,
        tp=TP,
        kv_cache_tokens=4096,
        max_running_requests=8,
        sync_deadline_s=120.0,
        transport=Transport(args.transport),
    )
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as directory:
        scratch = Path(directory)
        num_parameters = write_checkpoint(scratch / "model", args)
        print(f"{num_parameters / 1e6:.0f}M parameters, bfloat16, TP2 x PP2 to a server of {TP} ranks", flush=True)
        server = SGLangServer(config, scratch / "model", log_file=Path("/tmp/bench-sync-server.log"), seed=1)
        server.start()
        try:
            with open_policy(scratch / "model", scratch) as policy:
                server.wait_healthy(DEADLINE_S)
                return measure(policy, server, config, scratch / "model", args, scratch)
        finally:
            server.stop()
