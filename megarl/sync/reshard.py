"""Weight sync from training shards to serving shards: each server rank gets exactly what it holds, and is proved."""

import contextlib
import shutil
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from megarl.config.roles import Dtype
from megarl.config.rollout import RolloutConfig, Transport
from megarl.mcore.architecture import Architecture
from megarl.rollout.calls import run_side_by_side
from megarl.rollout.client import SGLangClient
from megarl.seams import UNPUBLISHED, SyncError, TrainBackend
from megarl.sync.checksum import MASK, find_words
from megarl.sync.control import ANSWER_GRACE_S, Answers, instruct
from megarl.sync.messages import encode_bucket
from megarl.sync.plan import (
    Bucket,
    LayoutError,
    Plan,
    build_plan,
    compute_bound,
    compute_broadcast,
    cut_buckets,
    format_plan,
)
from megarl.sync.probe import compute_policy_logprobs, get_max_gap, verify_logprobs
from megarl.sync.serving_pieces import check_server_rank, predict_server_rank
from megarl.sync.steps import bracket, explaining_losses, naming_step
from megarl.types import Metrics


@dataclass(frozen=True)
class Session:
    """What both sides have been told, once for all syncs."""

    plan: Plan
    buckets: Sequence[Bucket]
    bound: int
    broadcast: int


class ShardSync:
    """WeightSync over a link between training ranks and server ranks.

    Server rank s * rollout.tp + r is rank r of server s. Servers are paused from the first byte to the proof's end.
    """

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        architecture: Architecture,
        probe_tokens: Sequence[int],
        *,
        scratch: Path,
        host: str,
        policy_dtype: Dtype,
        check_processes: Callable[[], None] | None = None,
        plan_file: Path | None = None,
    ) -> None:
        """scratch: a folder that all ranks see where `host`, on which this process listens, is a loopback address.
        plan_file: where the plan goes as a table.
        check_processes: raises RuntimeError with exit status and log of a server that is down.
        """
        self._policy, self._clients, self._config = policy, list(clients), config
        self._arch, self._probe_tokens = architecture, tuple(probe_tokens)
        self._scratch, self._host, self._plan_file = scratch, host, plan_file
        self._max_gap = get_max_gap(config, policy_dtype)
        self._check_processes = check_processes
        self._answers = Answers(host)
        self._memory: Path | None = None
        self._store: Any = None
        self._session: Session | None = None

    def publish(self, version: int) -> Metrics:
        """Move, prove, and only then raise the servers' version to `version`.

        Raises SyncError where a server or a rank refuses, is lost or is late, naming it and the step, and where the
        proof fails; no server then serves as `version`. A signal that raises in this thread ends the wait.
        """
        times = _Times()
        expected = compute_policy_logprobs(self._policy, self._probe_tokens)
        times.mark("probe")
        with explaining_losses(self._check_processes):
            try:
                with self._paused():
                    with self._updating():
                        self._refuse_tokens()
                        session = self._session or self._open()
                        times.mark("open")
                        self._move(session)
                        times.mark("move")
                        self._prove(session)
                        times.mark("checksum")
                    for client in self._clients:
                        self._raise_version(client, version)
                gap = max(self._probe(client, expected) for client in self._clients)
                times.mark("probe")
            except BaseException:
                self.reconnect()
                raise
        return times.to_metrics() | {
            "sync/bytes": float(session.plan.num_bytes),
            "sync/bytes_over_bound": session.plan.num_bytes / session.bound,
            "sync/probe_logprob_gap": gap,
        }

    def reconnect(self) -> None:
        """Forget what was agreed with the servers' ranks; the next sync agrees anew."""
        self._session = None
        self._remove_memory()

    def close(self) -> None:
        self._answers.close()
        self._remove_memory()

    @property
    def session(self) -> Session | None:
        """Of the last sync; None before the first and after one that failed."""
        return self._session

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for client in self._clients:
                stack.enter_context(bracket(client, "pause", client.pause, client.resume))
            yield

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for client in self._clients:
                stack.enter_context(
                    bracket(client, "begin of the weight update", client.begin_update, client.end_update)
                )
            yield

    def _refuse_tokens(self) -> None:
        """Whatever goes wrong from here on, no server is taken for one that holds some version's weights."""
        for client in self._clients:
            with naming_step(client, "withdrawal of the weight version"):
                client.set_weight_version(UNPUBLISHED)

    def _open(self) -> Session:
        tp, num_servers = self._config.tp, len(self._clients)
        sources = dict(enumerate(self._senders("describe")))
        targets = {s * tp + r: predict_server_rank(self._arch, tp, r) for s in range(num_servers) for r in range(tp)}
        described = self._receivers("describe", [{}] * (num_servers * tp))
        for rank, found in enumerate(described):
            problems = check_server_rank(targets[rank], found, self._arch, tp)
            if problems:
                client = self._clients[rank // tp]
                raise SyncError(f"SGLang server {client.url}, rank {rank % tp}: {'; '.join(problems)}")
        dtypes = {name: dtype for found in described for name, (_, dtype) in found.items()}
        try:
            plan = build_plan(sources, targets, dtypes)
        except LayoutError as error:
            raise SyncError(str(error)) from error
        buckets = cut_buckets(plan, self._config.sync_bucket_mb << 20)
        session = Session(plan, buckets, compute_bound(targets, dtypes), compute_broadcast(sources, targets, dtypes))
        if self._plan_file is not None:
            names = {rank: f"{self._clients[rank // tp].url} rank {rank % tp}" for rank in targets}
            self._plan_file.write_text(format_plan(plan, names, session.bound, session.broadcast) + "\n")
        self._prepare(session, len(sources), len(targets), dtypes)
        self._session = session
        return session

    def _prepare(self, session: Session, num_sources: int, num_targets: int, dtypes: Mapping[str, str]) -> None:
        """Tell each rank its buckets, and connect them."""
        to_send, to_receive = defaultdict(list), defaultdict(list)
        for bucket in session.buckets:
            to_send[bucket.source].append(bucket)
            to_receive[bucket.target].append(bucket)
        words = {
            target: find_words(copy for bucket in own for copy in bucket.copies) for target, own in to_receive.items()
        }
        all_words = {(target, name): word for target, own in words.items() for name, word in own.items()}
        self._senders("prepare", [(rank, to_send[rank], all_words, dtypes) for rank in range(num_sources)])
        receivers = [
            {"rank": rank, "buckets": [encode_bucket(bucket) for bucket in to_receive[rank]], "words": words[rank]}
            for rank in range(num_targets)
        ]
        self._receivers("prepare", receivers)
        link = self._describe_link(session, num_sources, num_targets)
        self._side_by_side("open", [(link,)] * num_sources, [{"link": link}] * num_targets)

    def _describe_link(self, session: Session, num_sources: int, num_targets: int) -> dict[str, Any]:
        common = {"num_sources": num_sources, "num_targets": num_targets, "deadline_s": self._config.sync_deadline_s}
        if self._config.transport is Transport.colocated:
            self._remove_memory()
            self._memory = Path(tempfile.mkdtemp(prefix="megarl-sync-", dir="/dev/shm"))
            largest = max(bucket.num_bytes for bucket in session.buckets)
            return common | {"kind": "memory", "directory": str(self._memory), "slot_bytes": -(-largest // 64) * 64}
        if ip_address(self._host).is_loopback:
            return common | {"kind": "group", "file": f"{self._scratch}/sync-{uuid.uuid4().hex}", "host": self._host}
        from torch.distributed import TCPStore

        self._store = TCPStore(self._host, 0, None, True, wait_for_workers=False)
        return common | {"kind": "group", "file": None, "host": self._host, "port": self._store.port}

    def _move(self, session: Session) -> None:
        num_targets = len(self._clients) * self._config.tp
        self._side_by_side("send", None, [{}] * num_targets, receiving="receive", flush_cache=True)

    def _prove(self, session: Session) -> None:
        """What each server rank holds adds up to what the training ranks make of their own parameters."""
        num_targets = len(self._clients) * self._config.tp
        parts, found = self._side_by_side("checksum", None, [{}] * num_targets)
        expected: dict[tuple[int, str], int] = defaultdict(int)
        for part in parts:
            for key, value in part.items():
                expected[key] = (expected[key] + value) & MASK
        held = {(rank, name): value for rank, own in enumerate(found) for name, value in own.items()}
        wrong = sorted(key for key in expected if held.get(key) != expected[key])
        if wrong:
            rank, name = wrong[0]
            client = self._clients[rank // self._config.tp]
            raise SyncError(
                f"SGLang server {client.url}, rank {rank % self._config.tp}: the checksum of {name} is not that of the"
                f" policy's weights; of {len(expected)} tensors of all server ranks {len(wrong)} differ"
            )

    def _probe(self, client: SGLangClient, expected: Sequence[float]) -> float:
        with naming_step(client, "proof of the weights"):
            try:
                return verify_logprobs(client, self._probe_tokens, expected, self._max_gap)
            except SyncError:
                client.set_weight_version(UNPUBLISHED)
                raise

    def _raise_version(self, client: SGLangClient, version: int) -> None:
        with naming_step(client, f"raise of the weight version to {version}"):
            client.set_weight_version(version)
            found = client.load_weight_version()
        if found != version:
            raise SyncError(f"SGLang server {client.url} reports weight version {found} after it was set to {version}")

    def _senders(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        return self._policy.call_senders(verb, arguments, self._deadline_s).result()

    def _receivers(self, verb: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        return self._side_by_side(None, None, arguments, receiving=verb)[1]

    def _side_by_side(
        self,
        sending: str | None,
        to_senders: Sequence[tuple[Any, ...]] | None,
        to_receivers: Sequence[Mapping[str, Any]],
        receiving: str | None = None,
        flush_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Results of all training ranks and of all server ranks; the first failure of any is raised."""
        verb, tp = receiving or sending or "", self._config.tp

        def call_server(number: int) -> list[Any]:
            client, own = self._clients[number], to_receivers[number * tp : (number + 1) * tp]
            with naming_step(client, f"{verb} of weights"):
                return instruct(client, self._answers, verb, own, self._deadline_s, flush_cache)

        jobs: list[Callable[[Any], list[Any]]] = [
            lambda _stop, number=number: call_server(number) for number in range(len(self._clients))
        ]
        if sending:
            jobs.append(lambda _stop: self._senders(sending, to_senders))
        results = run_side_by_side(jobs, self._abort)
        sent = results.pop() if sending else []
        return sent, [found for server in results for found in server]

    @property
    def _deadline_s(self) -> float:
        """Of a call; the link's own deadline passes before."""
        return self._config.sync_deadline_s + ANSWER_GRACE_S

    def _abort(self) -> None:
        for client in self._clients:
            client.abort()

    def _remove_memory(self) -> None:
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
            self._memory = None


@dataclass
class _Times:
    """Seconds of each step of a sync."""

    last: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mark(self, step: str) -> None:
        now = time.monotonic()
        self.spent[step] += now - self.last
        self.last = now

    def to_metrics(self) -> Metrics:
        total = sum(self.spent.values())
        proof = self.spent["checksum"] + self.spent["probe"]
        return {f"sync/seconds_{step}": seconds for step, seconds in self.spent.items()} | {
            "sync/proof_share": proof / total
        }
