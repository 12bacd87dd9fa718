"""A `RolloutEngine`, its `RolloutServers` and the `WeightSync` into them, in this process."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fakes.backend import Done, FakeBackend
from fakes.model import EOS, TableModel, build_policy
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.rollout.client import ConnectionLostError
from megarl.rollout.engine import compute_sampling_seed
from megarl.rollout.offload import ServerOffloader
from megarl.types import FinishReason, Metrics, Prompt, Response


@dataclass
class FakeServer:
    name: str
    model: TableModel
    version: int = UNPUBLISHED
    lost: str | None = None
    """why"""
    num_starts: int = 0
    released: set[str] = field(default_factory=set)
    """Memory that it has given back"""


class FakeServers:
    """`RolloutServers`; a server starts with the checkpoint's weights under no version."""

    def __init__(self, num_servers: int, vocab_size: int):
        self.vocab_size = vocab_size
        names = [f"SGLang server {i}/{num_servers}" for i in range(num_servers)]
        self.all = {name: FakeServer(name, build_policy(vocab_size), lost="it was not started") for name in names}

    @property
    def names(self) -> list[str]:
        return list(self.all)

    def start(self) -> Done[list[str]]:
        self.restart([name for name, server in self.all.items() if server.lost])
        return Done(list(self.all))

    def check_alive(self) -> None:
        for server in self.all.values():
            if server.lost:
                raise RuntimeError(f"{server.name}: {server.lost}")

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            list(self.all.values())[number].lost = "it exited with status 137"

    def find_lost(self) -> Mapping[str, str]:
        return {name: server.lost for name, server in self.all.items() if server.lost}

    def end(self, names: Collection[str]) -> None:
        for name in names:
            self.all[name].lost = "it was ended"

    def restart(self, names: Collection[str]) -> None:
        for name in names:
            num_starts = self.all[name].num_starts + 1
            self.all[name] = FakeServer(name, build_policy(self.vocab_size), num_starts=num_starts)


class FakeEngine:
    """`RolloutEngine`: servers take the prompts in turn; all calls go on token by token, so that weights and versions
    may change under them.

    on_token: called before each token of a call with its key and the token's number; it may raise, wait or publish.
    """

    def __init__(
        self,
        servers: FakeServers,
        *,
        seed: int,
        response_length: int,
        decode: Callable[[Sequence[int]], str],
        on_token: Callable[[str | None, int], None] = lambda _key, _number: None,
    ):
        self._servers, self._seed, self._length, self._decode = servers, seed, response_length, decode
        self._on_token = on_token
        self._lock = threading.Lock()
        self._num_unkeyed = 0
        self._num_cancelled = 0
        self.asked: list[tuple[str | None, tuple[str, ...]]] = []
        """Key and prompts of each call"""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_responses: int,
        temperature: float,
        urgent: bool = False,
        key: str | None = None,
    ) -> list[list[Response]]:
        for prompt in prompts:
            outside = [token for token in prompt.token_ids if not 0 <= token < self._servers.vocab_size]
            if outside or not prompt.token_ids:
                raise ValueError(f"prompt {prompt.id}: token id {outside or 'missing'}")
        with self._lock:
            self.asked.append((key, tuple(prompt.id for prompt in prompts)))
            name = f"{self._seed}/{key}" if key is not None else f"fresh-{self._num_unkeyed}"
            self._num_unkeyed += key is None
        call = _Call(prompts, num_responses, temperature, self._length, name)
        num_cancelled = self._num_cancelled
        for number in range(self._length):
            if call.has_ended:
                break
            self._on_token(key, number)
            if self._num_cancelled > num_cancelled:
                raise CancelledError
            call.add_token(list(self._servers.all.values()))
        return call.build_responses(self._decode)

    def cancel(self) -> None:
        self._num_cancelled += 1

    def check_health(self) -> None:
        self._servers.check_alive()


class _Call:
    """The N responses of one call, as far as they have come."""

    def __init__(self, prompts: Sequence[Prompt], num_responses: int, temperature: float, length: int, name: str):
        self.prompts, self.num_responses, self.temperature = prompts, num_responses, temperature
        pairs = [(row, k) for row in range(len(prompts)) for k in range(num_responses)]
        self.rows = torch.tensor([row for row, _ in pairs])
        self.first = torch.tensor([prompts[row].token_ids[0] for row, _ in pairs])
        self.before = torch.tensor([prompts[row].token_ids[-1] for row, _ in pairs])
        self.is_open = torch.ones(len(pairs), dtype=torch.bool)
        self.tokens: list[list[int]] = [[] for _ in pairs]
        self.logprobs: list[list[float]] = [[] for _ in pairs]
        self.versions: list[list[int]] = [[] for _ in pairs]
        seeds = [compute_sampling_seed(f"{name}/{row}/{k}") for row, k in pairs]
        self.draws = torch.from_numpy(np.stack([np.random.Generator(np.random.PCG64(s)).random(length) for s in seeds]))

    @property
    def has_ended(self) -> bool:
        return not bool(self.is_open.any())

    def add_token(self, servers: Sequence[FakeServer]) -> None:
        for number, server in enumerate(servers):
            own = torch.nonzero(self.is_open & (self.rows % len(servers) == number)).flatten()
            if own.numel():
                self._add(server, own)

    @torch.no_grad()
    def _add(self, server: FakeServer, own: Tensor) -> None:
        if server.lost:
            raise ConnectionLostError(f"{server.name}: {server.lost}")
        assert not server.released, f"{server.name} generates without its {server.released}"
        logits = server.model(self.before[own], self.first[own])
        log_p = (logits / (self.temperature or 1.0)).log_softmax(-1)
        drawn = self.draws[own, len(self.tokens[int(own[0])])]
        sampled = (log_p.exp().double().cumsum(-1) < drawn[:, None]).sum(-1).clamp(max=log_p.shape[1] - 1)
        chosen = sampled if self.temperature else log_p.argmax(-1)
        self.before[own] = chosen
        self.is_open[own] = chosen != EOS
        for i, token, value in zip(own.tolist(), chosen.tolist(), log_p[range(len(own)), chosen].tolist(), strict=True):
            self.tokens[i].append(token)
            self.logprobs[i].append(value)
            self.versions[i].append(server.version)

    def build_responses(self, decode: Callable[[Sequence[int]], str]) -> list[list[Response]]:
        made = [
            Response(
                tuple(tokens),
                decode(tokens),
                tuple(logprobs),
                (True,) * len(tokens),
                tuple(versions),
                FinishReason.stop if tokens[-1] == EOS else FinishReason.length,
            )
            for tokens, logprobs, versions in zip(self.tokens, self.logprobs, self.versions, strict=True)
        ]
        n = self.num_responses
        return [made[row * n : (row + 1) * n] for row in range(len(self.prompts))]


class FakeClient:
    """Of a fake server, what `ServerOffloader` calls; as strict as SGLang, which ends where it is asked twice."""

    def __init__(self, servers: FakeServers, name: str):
        self._servers, self._name = servers, name

    @property
    def _server(self) -> FakeServer:
        server = self._servers.all[self._name]
        if server.lost:
            raise ConnectionLostError(f"{server.name}: {server.lost}")
        return server

    def set_weight_version(self, version: int) -> None:
        self._server.version = version

    def abort_requests(self) -> None: ...

    def flush_cache(self) -> None: ...

    def abort(self) -> None: ...

    def release_memory(self, tags: Sequence[str]) -> None:
        assert not self._server.released & set(tags)
        self._server.released |= set(tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        assert self._server.released >= set(tags)
        self._server.released -= set(tags)


class FakeSync:
    """`WeightSync` from a fake policy. `watch` is told of it when the servers serve as no version, and may raise."""

    def __init__(
        self,
        policy: FakeBackend,
        servers: FakeServers,
        watch: Callable[[str, str], None] = lambda _role, _verb: None,
        offloader: ServerOffloader | None = None,
    ):
        self._policy, self._servers, self._watch = policy, servers, watch
        self._offloader = offloader or ServerOffloader()
        self.published: list[int] = []
        self.num_reconnects = 0

    def publish(self, version: int) -> Metrics:
        self.published.append(version)
        for server in self._servers.all.values():
            server.version = UNPUBLISHED
        self._watch("servers", "publish")
        weights = self._policy.copy_weights()
        for server in self._servers.all.values():
            if server.lost:
                raise SyncError(f"{server.name}: {server.lost}")
        self._offloader.resume_weights()
        for server in self._servers.all.values():
            server.model.load_state_dict(weights)
        self._offloader.resume_cache()
        for server in self._servers.all.values():
            server.version = version
        return {"sync/bytes": float(sum(x.nbytes for x in weights.values())), "sync/seconds": 0.0}

    def reconnect(self) -> None:
        self.num_reconnects += 1
