"""The ranks on both sides of a weight sync: their handshake, the plan between them, their calls and verification.

Errors name the step, and a step at a server is undone where a later one fails. The servers' weight version is raised
while they are paused, and withdrawn where the sync fails.
"""

import base64
import contextlib
import json
import pickle
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import UNPUBLISHED, DeadlineError, SyncError, TrainBackend
from megarl.models.architecture import Architecture
from megarl.rollout.client import (
    CACHE,
    WEIGHTS,
    ConnectionLostError,
    RequestError,
    ServerOffloader,
    SGLangClient,
    find_cause,
    run_in_parallel,
)
from megarl.rollout.server import WEIGHT_LOADER
from megarl.sync.ends import REQUEST
from megarl.sync.pieces import check_server_rank, predict_server_rank
from megarl.sync.plan import (
    MASK,
    Bucket,
    LayoutError,
    Plan,
    build_plan,
    compute_bound,
    cut_buckets,
    encode_bucket,
    find_words,
)

CLEAN_UP_DEADLINE_S = 10.0
"""The deadline of each clean-up call after a failed step"""


@contextlib.contextmanager
def explain_lost_servers(check_processes: Callable[[], None] | None) -> Iterator[None]:
    """Adds exit status and log of a server that is down to a SyncError of an unanswered call within the block."""
    try:
        yield
    except SyncError as error:
        unanswered = isinstance(error.__cause__, (ConnectionLostError, DeadlineError))
        cause = find_cause(check_processes) if unanswered else None
        if cause is None:
            raise
        raise SyncError(f"{error}\n{cause}") from error


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turns a refused, lost or late call within the block into a SyncError that begins so and names its cause."""
    try:
        yield
    except (RequestError, ConnectionLostError, DeadlineError) as error:
        raise SyncError(f"{what}: {error}") from error


def sync_step(client: SGLangClient, step: str) -> contextlib.AbstractContextManager[None]:
    """The same, with a SyncError that names server and step."""
    return explaining(f"SGLang server {client.url} failed at the {step}")


@contextlib.contextmanager
def bracket(
    clients: Sequence[SGLangClient], step: str, opening: Callable[..., None], closing: Callable[..., None]
) -> Iterator[None]:
    """Calls `opening` of each server before the block and `closing` after it, in the other order, whatever happens; a
    failure of `closing` never hides an earlier one.
    """
    if not clients:
        yield
        return
    first, *others = clients
    with sync_step(first, step):
        opening(first)
    try:
        with bracket(others, step, opening, closing):
            yield
    except BaseException:
        with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
            closing(first, deadline_s=CLEAN_UP_DEADLINE_S)
        raise
    with sync_step(first, f"end of the {step}"):
        closing(first)


@contextlib.contextmanager
def withdrawing() -> Iterator[list[SGLangClient]]:
    """Where the block fails, the servers that it has put in the list serve no version afterwards."""
    raised: list[SGLangClient] = []
    try:
        yield raised
    except Exception:  # After a signal the servers end.
        for client in raised:
            with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
                client.set_weight_version(UNPUBLISHED, deadline_s=CLEAN_UP_DEADLINE_S)
        raise


@contextlib.contextmanager
def replacing_weights(
    clients: Sequence[SGLangClient], version: int, offloader: ServerOffloader, raised: list[SGLangClient]
) -> Iterator[None]:
    """Within the block the servers are paused in a weight update and serve no version; afterwards `version`. raised:
    takes those whose version was set.

    They take the memory of their weights again before it, and that of their KV cache after it. SGLang records in each
    response in flight after which token the version changed. Between pause and resume that is the token after which the
    weights changed; set later, tokens of the new weights would count as old ones.
    """
    # Requests in flight wait.
    with bracket(clients, "pause", SGLangClient.pause, SGLangClient.resume):
        for client in clients:
            with sync_step(client, "withdrawal of the weight version"):
                client.set_weight_version(UNPUBLISHED)
        with explaining("a server did not take the memory of the weights again"):
            offloader.resume(WEIGHTS)
        with bracket(clients, "weight update", SGLangClient.begin_update, SGLangClient.end_update):
            yield
        with explaining("a server did not take the memory of the KV cache again"):
            offloader.resume(CACHE)
        for client in clients:
            with sync_step(client, f"update of the weight version to {version}"):
                raised.append(client)
                client.set_weight_version(version)
                found = client.load_weight_version()
            if found != version:
                raise SyncError(
                    f"SGLang server {client.url} reports weight version {found} after it was set to {version}"
                )


ANSWER_GRACE_S = 10.0
"""How long after the server's own answer those of its ranks may arrive."""
MAX_ANSWER_BYTES = 1 << 28


class ReplyListener:
    """Collects the receivers' answers on a port of its own; each carries the token of its request."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener = socket.create_server((host, 0))
        self._expected: dict[str, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._listen, name="megarl-answers", daemon=True).start()

    @contextlib.contextmanager
    def expecting(self, number: int) -> Iterator[dict[str, Future[dict[str, Any]]]]:
        """Within the block so many answers are taken, each by a token that its request names."""
        own = {secrets.token_hex(16): Future[dict[str, Any]]() for _ in range(number)}
        self._expected |= own
        try:
            yield own
        finally:
            for token in own:
                del self._expected[token]

    def address(self, token: str) -> dict[str, Any]:
        """Where the answer goes."""
        return {"host": self._host, "port": self._listener.getsockname()[1], "token": token}

    def close(self) -> None:
        # Only a shutdown wakes a thread that is blocked in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Read one answer; without the token of a request that waits for its first one it is ignored."""
        wrong = (OSError, ValueError, KeyError, TypeError, InvalidStateError)
        with connection, contextlib.suppress(*wrong):
            connection.settimeout(ANSWER_GRACE_S)
            data = bytearray()
            while len(data) < MAX_ANSWER_BYTES and (part := connection.recv(1 << 16)):
                data += part
            answer = json.loads(bytes(data))
            self._expected[answer["token"]].set_result(answer)


def call_ranks(
    client: SGLangClient,
    listener: ReplyListener,
    verb: str,
    arguments: Sequence[Mapping[str, Any]],
    deadline_s: float,
    flush_cache: bool = False,
) -> list[Any]:
    """Have every rank of a server execute a verb; returns their results. arguments: of each rank.

    Raises SyncError that names server, rank and verb where one fails or gives no answer, RequestError where the server
    refuses the call, and what the client raises for a server that is lost or late.
    """
    with listener.expecting(len(arguments)) as expected:
        payloads = []
        for own, token in zip(arguments, expected, strict=True):
            request = json.dumps({"verb": verb, "arguments": dict(own), "reply": listener.address(token)})
            data = torch.frombuffer(bytearray(request.encode()), dtype=torch.uint8)
            # As SGLang takes tensors from other processes.
            payloads.append(base64.b64encode(pickle.dumps([(REQUEST, data)])).decode())
        end = time.monotonic() + deadline_s + ANSWER_GRACE_S
        client.update_weights_from_tensor(payloads, WEIGHT_LOADER, flush_cache=flush_cache, deadline_s=deadline_s)
        results = []
        for rank, future in enumerate(expected.values()):
            try:
                answer = future.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                answer = {}
            if "result" not in answer:
                why = f"answered: {answer['error']}" if answer else "gave no answer"
                raise SyncError(f"SGLang server {client.url}, rank {rank}, asked to {verb} weights, {why}")
            results.append(answer["result"])
        return results


@dataclass(frozen=True)
class Session:
    """What both sides agreed on in the handshake; it holds for all syncs that follow."""

    plan: Plan
    buckets: Sequence[Bucket]
    """The plan as messages, in the order in which all ranks send and receive"""
    bound: int
    """The least number of bytes that must move"""
    num_ranks: tuple[int, int]
    """Training ranks and server ranks"""
    nodes: tuple[Sequence[str], Sequence[str]]
    """The node of each training rank and of each server rank, as `megarl.sync.transport.find_node` names it"""
    pids: Sequence[int]
    """The process id of each training rank"""

    @property
    def near(self) -> list[tuple[int, int]]:
        """The pairs (training rank, server rank) that exchange weights within a node."""
        sources, targets = self.nodes
        return [(source, target) for source, target in self.plan if sources[source] == targets[target]]

    @property
    def far(self) -> list[list[tuple[int, int]]]:
        """Those that do so from one node to another, in a list for each node of server ranks: of the ranks in it no two
        share a GPU, although each GPU may have a training rank and a server rank.
        """
        sources, targets = self.nodes
        lists: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for source, target in self.plan:
            if sources[source] != targets[target]:
                lists[targets[target]].append((source, target))
        return list(lists.values())


class Ranks:
    """The policy's training ranks and the servers' ranks; server rank s * rollout.tp + r is rank r of server s.

    The servers must be in a weight update (begin_weight_update) whenever their ranks are called.
    """

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        architecture: Architecture,
        host: str,
    ) -> None:
        """host: the address on which this process listens for answers."""
        self._policy, self._clients, self._config = policy, list(clients), config
        self._arch, self._listener = architecture, ReplyListener(host)
        self.session: Session | None = None
        """None before `handshake` and after `forget`"""

    def forget(self) -> None:
        """Discard the handshake; the next sync makes a new one."""
        self.session = None

    def close(self) -> None:
        self._listener.close()

    def handshake(self) -> Session:
        """Ask all ranks what they hold, and tell each what it sends or receives.

        Raises SyncError naming both sides where their layouts do not fit together.
        """
        tp, num_servers = self._config.tp, len(self._clients)
        sources = dict(enumerate(self.call_senders("describe")))
        targets = {s * tp + r: predict_server_rank(self._arch, tp, r) for s in range(num_servers) for r in range(tp)}
        described = self.call_receivers("describe")
        for rank, found in enumerate(described):
            problems = check_server_rank(targets[rank], found, self._arch, tp)
            if problems:
                client = self._clients[rank // tp]
                raise SyncError(f"SGLang server {client.url}, rank {rank % tp}: {'; '.join(problems)}")
        dtypes = self._join_dtypes(described)
        located = self.call_senders("locate")
        nodes, pids = ([node for node, _ in located], self.call_receivers("locate")), [pid for _, pid in located]
        try:
            plan = build_plan(sources, targets, dtypes, lambda source, target: nodes[0][source] == nodes[1][target])
        except LayoutError as error:
            raise SyncError(str(error)) from error
        buckets = cut_buckets(plan, self._config.sync_bucket_mb << 20)
        session = Session(plan, buckets, compute_bound(targets, dtypes), (len(sources), len(targets)), nodes, pids)
        self._prepare(session, dtypes)
        self.session = session
        return session

    def _join_dtypes(self, described: Sequence[Mapping[str, tuple[Sequence[int], str]]]) -> dict[str, str]:
        dtypes: dict[str, str] = {}
        for rank, found in enumerate(described):
            for name, (_, dtype) in found.items():
                if dtypes.setdefault(name, dtype) != dtype:
                    urls = self._clients[0].url, self._clients[rank // self._config.tp].url
                    raise SyncError(f"SGLang servers {urls[0]} and {urls[1]} hold {name} in {dtypes[name]} and {dtype}")
        return dtypes

    def _prepare(self, session: Session, dtypes: Mapping[str, str]) -> None:
        """Tell each rank which buckets it sends or receives."""
        to_send, to_receive = defaultdict(list), defaultdict(list)
        for bucket in session.buckets:
            to_send[bucket.source].append(bucket)
            to_receive[bucket.target].append(bucket)
        words = {
            target: find_words(copy for bucket in own for copy in bucket.copies) for target, own in to_receive.items()
        }
        all_words = {(target, name): word for target, own in words.items() for name, word in own.items()}
        self.call_senders("prepare", [(rank, to_send[rank], all_words, dtypes) for rank in range(session.num_ranks[0])])
        receivers = [
            {"rank": rank, "buckets": [encode_bucket(bucket) for bucket in to_receive[rank]], "words": words[rank]}
            for rank in range(session.num_ranks[1])
        ]
        self.call_receivers("prepare", receivers)

    def verify(self) -> None:
        """Compare the checksum of every tensor of every server rank with that of the training ranks' parameters; shakes
        hands first where nobody has.

        Raises SyncError naming server, rank and tensor where they differ.
        """
        if self.session is None:
            self.handshake()
        parts, found = self.call_both_sides("checksum", "checksum")
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

    def call_senders(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The results of a verb on all training ranks; arguments: of each rank (None: none)."""
        try:
            return self._policy.call_senders(verb, arguments, self._deadline_s).result()
        except RuntimeError as error:
            raise SyncError(f"the policy's ranks, asked to {verb} weights: {error}") from error

    def call_receivers(self, verb: str, arguments: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """The results of a verb on all server ranks; arguments: of each rank (None: none)."""
        return _join(run_in_parallel(self._build_calls(verb, arguments), self._clients))

    def call_both_sides(
        self,
        sending: str,
        receiving: str,
        to_senders: Sequence[tuple[Any, ...]] | None = None,
        to_receivers: Sequence[Mapping[str, Any]] | None = None,
        flush_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """The results of training ranks and of server ranks, called in parallel; the first failure of any is raised."""
        calls = self._build_calls(receiving, to_receivers, flush_cache)
        calls.append(lambda: self.call_senders(sending, to_senders))
        *received, sent = run_in_parallel(calls, self._clients)
        return sent, _join(received)

    def _build_calls(
        self, verb: str, arguments: Sequence[Mapping[str, Any]] | None, flush_cache: bool = False
    ) -> list[Callable[[], list[Any]]]:
        """One call for each server."""
        tp = self._config.tp

        def call(number: int) -> list[Any]:
            client = self._clients[number]
            own = [{}] * tp if arguments is None else arguments[number * tp : (number + 1) * tp]
            with sync_step(client, f"{verb} of weights"):
                return call_ranks(client, self._listener, verb, own, self._deadline_s, flush_cache)

        return [partial(call, number) for number in range(len(self._clients))]

    @property
    def _deadline_s(self) -> float:
        """The deadline of a call, later than the transport's own."""
        return self._config.sync_deadline_s + ANSWER_GRACE_S


def _join(servers: Sequence[list[Any]]) -> list[Any]:
    """The results of the ranks of all servers in one list."""
    return [found for server in servers for found in server]
