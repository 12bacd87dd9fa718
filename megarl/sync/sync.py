"""Publishing the policy's weights: shards from training ranks to server ranks, or a checkpoint that both see."""

import math
import secrets
import shutil
import statistics
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig, Transport
from megarl.interfaces import SyncError, TrainBackend
from megarl.report.timeline import note
from megarl.rollout.client import ServerOffloader, SGLangClient, run_in_parallel
from megarl.signals import is_loopback
from megarl.sync.ranks import Ranks, Session, explain_lost_servers, replacing_weights, sync_step, withdrawing
from megarl.sync.transport import SHARED_MEMORY
from megarl.types import Metrics, Prompt, Sequences

LEAST_BOUND = {Dtype.float32: 2.0**-13, Dtype.bfloat16: 2.0**-7}
"""The lowest bounds, in nats: where the estimate is below them, the text tells rounding from nothing else."""
ROUNDING = {Dtype.float32: 2.0**-20, Dtype.bfloat16: 2.0**-8}
"""The relative error of what one layer computes: in float32 that of a sum of some hundred products, in bfloat16 that of
rounding the sum"""
KV_ROUNDING = 2.0**-4
"""The same with keys and values of 8 bits (e4m3)"""
PROBE_LENGTH = 64
"""Tokens"""
NUM_ESTIMATES = 4
"""Copies of the text whose log-probs are computed with random errors"""
MARGIN = 3.0
"""The bound by the estimate. Gaps of sound engines were 0.4 to 1.1 of it (tiny, tiny_moe and SmolLM2-135M in bfloat16),
that of YaRN on one side alone 4.8 (SmolLM2-135M) to 22 (tiny)"""


def build_probe_tokens(prompts: Sequence[Prompt], vocab_size: int, length: int = PROBE_LENGTH) -> tuple[int, ...]:
    """A fixed text of `length` tokens: prompts one after the other, then tokens spread over the vocabulary.

    The task's text has likely tokens, whose log-probs change little under bfloat16 rounding; the other tokens are
    multiples of a prime, modulo the vocabulary's size.
    """
    text = [token for prompt in prompts[:length] for token in prompt.token_ids][:length]
    filler = ((7919 * (i + 1)) % vocab_size for i in range(length - len(text)))
    return (*text, *filler)


def compute_gaps(expected: Sequence[float], found: Sequence[float]) -> list[float]:
    """|difference| of each token, in nats; infinite where one is not a number."""
    pairs = zip(expected, found, strict=True)
    return [abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


class Probe:
    """Measures the gap after each sync: the median |difference| of the text's tokens, in nats.

    A median, because a token that goes to another expert, or is very unlikely, differs much by rounding alone.

    The first gap is compared with a bound that does not depend on it: `rollout.max_probe_logprob_gap`, or what random
    errors of the size of rounding do to the policy's own log-probs, times MARGIN. Later gaps are of the same two
    engines, and may grow as training makes the policy surer of its tokens: they are measured, and end nothing.
    """

    def __init__(self, token_ids: Sequence[int], config: RolloutConfig, policy_dtype: Dtype) -> None:
        self.token_ids = tuple(token_ids)
        dtypes = (config.dtype, policy_dtype)
        self._rounding = max(ROUNDING[dtype] for dtype in dtypes)
        if str(config.sglang.get("kv_cache_dtype", "")).startswith("fp"):
            self._rounding = KV_ROUNDING
        self._least = max(LEAST_BOUND[dtype] for dtype in dtypes)
        self._bound = config.max_probe_logprob_gap
        self._is_judged = False
        self._expected: list[float] = []

    def ask(self, policy: TrainBackend) -> None:
        """Compute the policy's log-probs (temperature 1) of the text and, the first time, the bound."""
        self._expected = policy.logprobs(self._repeat(1), 1.0).result()[0].tolist()
        if self._bound is None:
            errors = policy.rounded_logprobs(self._repeat(NUM_ESTIMATES), 1.0, self._rounding).result().tolist()
            gaps = [gap for row in errors for gap in compute_gaps(self._expected, row)]
            estimate = statistics.median(gaps) if gaps else 0.0
            # Where the policy itself computes no number, `measure` says so.
            self._bound = max(self._least, MARGIN * estimate if math.isfinite(estimate) else 0.0)

    def measure(self, clients: Sequence[SGLangClient]) -> float:
        """The largest gap of any server from the log-probs of `ask`.

        Raises SyncError, naming the server, a token and both log-probs, for a gap beyond the bound as the class says
        and for a log-prob that is not a number, and for a server that is lost or late.
        """
        medians = []
        for client in clients:
            with sync_step(client, "measurement on the probe text"):
                found = client.score(self.token_ids)
            medians.append(self._compare(client, found))
        self._is_judged = True
        return max(medians)

    def _repeat(self, num: int) -> Sequences:
        length = len(self.token_ids)
        return Sequences(
            tokens=torch.tensor(self.token_ids * num, dtype=torch.int64),
            lengths=torch.tensor([length] * num),
            prompt_lengths=torch.tensor([1] * num),
        )

    def _compare(self, client: SGLangClient, found: Sequence[float]) -> float:
        gaps = compute_gaps(self._expected, found)
        gap, bound = statistics.median(gaps), self._bound
        assert bound is not None, "ask comes before measure"
        at = max(range(len(gaps)), key=gaps.__getitem__)
        where = (
            f"on the probe text's token {at + 1} (id {self.token_ids[at + 1]}) its log-prob is {found[at]:.6f}, the"
            f" policy's {self._expected[at]:.6f}"
        )
        if not math.isfinite(gaps[at]):
            raise SyncError(f"SGLang server {client.url} or the policy computes no log-probs from its weights: {where}")
        if gap > bound and not self._is_judged:
            size = f"a token of the probe text differs by {gap:.3g} nats (median), where rounding explains {bound:.3g}"
            raise SyncError(
                f"SGLang server {client.url} computes another model than the policy from the same weights, which their"
                f" checksums show it to have: {size}; {where}. Look for what one of them applies and the other does"
                " not: keys of the model's config.json (those of rope, norms, activation and attention), rollout.sglang"
                f" and model.megatron. rollout.max_probe_logprob_gap={1.5 * gap:.2g} accepts the difference"
            )
        return gap


@dataclass
class _Times:
    """Measures the seconds of each step of a sync."""

    last: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mark(self, step: str) -> None:
        now = time.monotonic()
        self.spent[step] += now - self.last
        note(step, self.last, now)
        self.last = now


class _Sync(ABC):
    """A WeightSync: a subclass moves the weights; who is paused, asked and verified meanwhile stands here."""

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        ranks: Ranks,
        probe_tokens: Sequence[int],
        *,
        policy_dtype: Dtype,
        check_processes: Callable[[], None] | None = None,
        offloader: ServerOffloader | None = None,
    ) -> None:
        """ranks: compares checksums of what the servers hold. check_processes: raises RuntimeError with exit status and
        log of a server that is down. offloader: what the servers have given back; None: nothing ever.
        """
        self._policy, self._clients, self._config, self._ranks = policy, list(clients), config, ranks
        self._offloader, self._check_processes = offloader or ServerOffloader(), check_processes
        self._probe = Probe(probe_tokens, config, policy_dtype)

    def publish(self, version: int) -> Metrics:
        """Move, verify, and only then raise the servers' version to `version`.

        Responses in flight wait and resume with the new weights: the version of the servers is raised while they are
        paused, and withdrawn where verification fails.

        Raises SyncError where a server or a rank refuses, is lost or is late, naming it and the step, and where
        verification fails; no server then serves as `version`. A signal that raises in this thread ends the wait.
        """
        times = _Times()
        self._prepare(version, times)
        # Before the servers take their memory again: they give it back for each call of the policy.
        self._probe.ask(self._policy)
        times.mark("probe")
        with withdrawing() as raised, explain_lost_servers(self._check_processes):
            with replacing_weights(self._clients, version, self._offloader, raised):
                times.mark("pause")
                self._move(version, times)
                self._ranks.verify()
                times.mark("checksum")
            times.mark("resume")
            gap = self._probe.measure(self._clients)
            times.mark("probe")
        return {"sync/probe_logprob_gap": gap} | self._describe(version, times.spent)

    @abstractmethod
    def _prepare(self, version: int, times: _Times) -> None:
        """What is done while the servers still generate."""

    @abstractmethod
    def _move(self, version: int, times: _Times) -> None:
        """Have the servers, which are paused, take the weights."""

    @abstractmethod
    def _describe(self, version: int, spent: dict[str, float]) -> Metrics:
        """The metrics of a sync that has succeeded. spent: seconds of each step."""

    def reconnect(self) -> None:
        """Discard the handshake with the servers' ranks; the next sync makes a new one."""
        self._ranks.forget()

    def close(self) -> None:
        self._ranks.close()


class ShardSync(_Sync):
    """Sends shards directly from training ranks to server ranks.

    Servers are paused from the first byte until the checksums are verified.
    """

    def __init__(self, *args: Any, scratch: Path, host: str, **options: Any) -> None:
        """host: the address on which this process listens. scratch: a folder that all ranks see, used where `host` is a
        loopback address.
        """
        super().__init__(*args, **options)
        self._scratch, self._host = scratch, host
        self._directories: list[Path] = []
        self._store: Any = None
        self._num_bytes = 0.0

    def _prepare(self, version: int, times: _Times) -> None:
        """Nothing: weights go from where they are."""

    def _describe(self, version: int, spent: dict[str, float]) -> Metrics:
        assert self._ranks.session is not None, "the weights have moved"
        return {f"sync/seconds_{step}": seconds for step, seconds in spent.items()} | {
            "sync/verify_share": (spent["checksum"] + spent["probe"]) / sum(spent.values()),
            "sync/bytes": self._num_bytes,
            "sync/bytes_over_bound": self._num_bytes / self._ranks.session.bound,
        }

    def _move(self, version: int, times: _Times) -> None:
        """Connect all ranks where they are not, and send all buckets."""
        try:
            if self._ranks.session is None:
                session = self._ranks.handshake()
                spec, (sources, targets) = self._describe_transport(session), session.num_ranks
                self._ranks.call_both_sides("open", "open", [(spec,)] * sources, [{"transport": spec}] * targets)
            times.mark("open")
            _, received = self._ranks.call_both_sides("send", "receive", flush_cache=True)
            self._num_bytes = float(sum(received))
            times.mark("move")
        except BaseException:
            # At once: ranks that still wait for others hold up whatever is asked of their servers.
            self.reconnect()
            raise

    def reconnect(self) -> None:
        super().reconnect()
        self._remove_memory()
        self._store = None

    def close(self) -> None:
        super().close()
        self._remove_memory()

    def _describe_transport(self, session: Session) -> dict[str, Any]:
        """What `open_transport` of all ranks gets."""
        sources, targets = session.num_ranks
        deadline_s = self._config.sync_deadline_s
        spec: dict[str, Any] = {"num_sources": sources, "num_targets": targets, "deadline_s": deadline_s}
        if self._config.transport is Transport.split:
            return spec | {"kind": "group"} | self._describe_group()
        self._remove_memory()
        token = secrets.token_hex(8)
        # By the process that makes it, so that what a killed run leaves is recognised on its node.
        near = {source: SHARED_MEMORY / f"megarl-sync-{session.pids[source]}-{token}" for source, _ in session.near}
        self._directories = list(near.values())
        spec["directories"] = [str(near[source]) if source in near else None for source in range(sources)]
        spec["slot_bytes"] = -(-max(bucket.num_bytes for bucket in session.buckets) // 64) * 64
        return spec | {"kind": "memory", "far": session.far} | (self._describe_group() if session.far else {})

    def _describe_group(self) -> dict[str, Any]:
        if is_loopback(self._host):
            return {"file": f"{self._scratch}/sync-{uuid.uuid4().hex}", "host": self._host}
        from torch.distributed import TCPStore

        self._store = TCPStore(self._host, 0, None, True, wait_for_workers=False)
        return {"file": None, "host": self._host, "port": self._store.port}

    def _remove_memory(self) -> None:
        """Abort the syncs of this node's ranks, which look for their memory; other nodes' ranks follow by the pairs."""
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        self._directories = []


class DiskSync(_Sync):
    """The policy writes a checkpoint, and every server loads it.

    Each version is written to a subdirectory; the last one stays until the next publish or `close`.
    """

    def __init__(self, *args: Any, directory: Path, **options: Any):
        """directory: is visible to policy and servers alike (a run's is in its run directory) and used by nothing
        else.
        """
        super().__init__(*args, **options)
        self._directory = directory

    def _prepare(self, version: int, times: _Times) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._policy.export_weights(self._directory / f"v{version}").result()
        times.mark("export")

    def _move(self, version: int, times: _Times) -> None:
        run_in_parallel([partial(self._load, client, version) for client in self._clients], self._clients)
        times.mark("load")

    def _load(self, client: SGLangClient, version: int) -> None:
        directory = self._directory / f"v{version}"
        with sync_step(client, f"load of the weights in {directory}"):
            client.update_weights_from_disk(directory, deadline_s=self._config.sync_deadline_s)

    def _describe(self, version: int, spent: dict[str, float]) -> Metrics:
        target = self._directory / f"v{version}"
        for old in self._directory.iterdir():
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return {
            "sync/bytes": float(sum(file.stat().st_size for file in target.iterdir() if file.is_file())),
            "sync/seconds_export": spent["export"],
            "sync/seconds_load": spent["pause"] + spent["load"],
            "sync/seconds_verify": spent["checksum"] + spent["resume"] + spent["probe"],
        }

    def close(self) -> None:
        """Remove the exported checkpoints."""
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)
