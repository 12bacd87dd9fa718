"""The ranks on both sides of a weight sync: what they hold, the plan between them, what they are told, the proof."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import SyncError, TrainBackend
from megarl.mcore.model.architecture import Architecture
from megarl.rollout.calls import StopFlag, run_side_by_side
from megarl.rollout.client import SGLangClient, abort_all
from megarl.sync.checksum import MASK, find_words
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
from megarl.sync.rpc import ANSWER_GRACE_S, ReplyListener, call_ranks
from megarl.sync.serving_pieces import check_server_rank, predict_server_rank
from megarl.sync.steps import naming_step


@dataclass(frozen=True)
class Session:
    """What both sides have been told, once for all syncs."""

    plan: Plan
    buckets: Sequence[Bucket]
    """the plan's, in the order in which all ranks send and receive"""
    bound: int
    """bytes, the least that must move"""
    broadcast: int
    """bytes that gather and broadcast would move"""
    num_ranks: tuple[int, int]
    """training ranks, server ranks"""


class Ranks:
    """The policy's training ranks and the servers' ranks; server rank s * rollout.tp + r is rank r of server s.

    The servers must be in a weight update (begin_weight_update) whenever their ranks are told something.
    """

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        architecture: Architecture,
        host: str,
        plan_file: Path | None = None,
    ) -> None:
        """host: on which this process listens for answers. plan_file: where the plan goes as a table."""
        self._policy, self._clients, self._config = policy, list(clients), config
        self._arch, self._plan_file = architecture, plan_file
        self._answers = ReplyListener(host)
        self.session: Session | None = None
        """None before `handshake` and after `forget`"""

    def forget(self) -> None:
        """The handshake is void."""
        self.session = None

    def close(self) -> None:
        self._answers.close()

    def handshake(self) -> Session:
        """Ask all ranks what they hold, and tell each what it sends or receives. Raises SyncError naming both sides."""
        tp, num_servers = self._config.tp, len(self._clients)
        sources = dict(enumerate(self.senders("describe")))
        targets = {s * tp + r: predict_server_rank(self._arch, tp, r) for s in range(num_servers) for r in range(tp)}
        described = self.receivers("describe")
        for rank, found in enumerate(described):
            problems = check_server_rank(targets[rank], found, self._arch, tp)
            if problems:
                client = self._clients[rank // tp]
                raise SyncError(f"SGLang server {client.url}, rank {rank % tp}: {'; '.join(problems)}")
        dtypes = self._join_dtypes(described)
        try:
            plan = build_plan(sources, targets, dtypes)
        except LayoutError as error:
            raise SyncError(str(error)) from error
        buckets = cut_buckets(plan, self._config.sync_bucket_mb << 20)
        bound, broadcast = compute_bound(targets, dtypes), compute_broadcast(sources, targets, dtypes)
        session = Session(plan, buckets, bound, broadcast, (len(sources), len(targets)))
        if self._plan_file is not None:
            names = {rank: f"{self._clients[rank // tp].url} rank {rank % tp}" for rank in targets}
            self._plan_file.write_text(format_plan(plan, names, session.bound, session.broadcast) + "\n")
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
        """Tell each rank its buckets."""
        to_send, to_receive = defaultdict(list), defaultdict(list)
        for bucket in session.buckets:
            to_send[bucket.source].append(bucket)
            to_receive[bucket.target].append(bucket)
        words = {
            target: find_words(copy for bucket in own for copy in bucket.copies) for target, own in to_receive.items()
        }
        all_words = {(target, name): word for target, own in words.items() for name, word in own.items()}
        self.senders("prepare", [(rank, to_send[rank], all_words, dtypes) for rank in range(session.num_ranks[0])])
        receivers = [
            {"rank": rank, "buckets": [encode_bucket(bucket) for bucket in to_receive[rank]], "words": words[rank]}
            for rank in range(session.num_ranks[1])
        ]
        self.receivers("prepare", receivers)

    def verify(self, session: Session) -> None:
        """What each server rank holds adds up to what the training ranks make of their own parameters.

        Raises SyncError naming server, rank and tensor where it does not.
        """
        parts, found = self.side_by_side("checksum", "checksum")
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

    def senders(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Results of all training ranks, each with its own arguments (None: none)."""
        try:
            return self._policy.call_senders(verb, arguments, self._deadline_s).result()
        except RuntimeError as error:
            raise SyncError(f"the policy's ranks, asked to {verb} weights: {error}") from error

    def receivers(self, verb: str, arguments: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """Results of all server ranks, each with its own arguments (None: none)."""
        return _join(run_side_by_side(self._build_calls(verb, arguments), partial(abort_all, self._clients)))

    def side_by_side(
        self,
        sending: str,
        receiving: str,
        to_senders: Sequence[tuple[Any, ...]] | None = None,
        to_receivers: Sequence[Mapping[str, Any]] | None = None,
        flush_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Results of both, called at the same time; the first failure of any is raised."""
        calls = self._build_calls(receiving, to_receivers, flush_cache)
        calls.append(lambda _stop: self.senders(sending, to_senders))
        *received, sent = run_side_by_side(calls, partial(abort_all, self._clients))
        return sent, _join(received)

    def _build_calls(
        self, verb: str, arguments: Sequence[Mapping[str, Any]] | None, flush_cache: bool = False
    ) -> list[Callable[[Any], list[Any]]]:
        """One for each server."""
        tp = self._config.tp

        def call(number: int, _stop: StopFlag) -> list[Any]:
            client = self._clients[number]
            own = [{}] * tp if arguments is None else arguments[number * tp : (number + 1) * tp]
            with naming_step(client, f"{verb} of weights"):
                return call_ranks(client, self._answers, verb, own, self._deadline_s, flush_cache)

        return [partial(call, number) for number in range(len(self._clients))]

    @property
    def _deadline_s(self) -> float:
        """Of a call; the transport's own deadline passes before."""
        return self._config.sync_deadline_s + ANSWER_GRACE_S


def _join(servers: Sequence[list[Any]]) -> list[Any]:
    """Results of each server's ranks -> of all."""
    return [found for server in servers for found in server]
