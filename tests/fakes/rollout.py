"""An engine, its `RolloutServers` and the `WeightSync` into them, in this process."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from fakes.backend import EOS, Done, FakeBackend, TableModel, build_policy
from megarl.interfaces import UNPUBLISHED, SyncError, TurnRequest
from megarl.rollout.client import CACHE, WEIGHTS, ConnectionLostError, OnEventLoop, ServerOffloader, call_in_thread
from megarl.rollout.engine import compute_sampling_seed
from megarl.types import FinishReason, Metrics, Response


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
        self.generating = threading.RLock()
        """Held while a token is generated, and by a sync while the servers are paused"""
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


class FakeEngine(OnEventLoop):
    """For a `SGLangEngine`: all turns go on token by token, so that weights and versions may change under them.

    on_token: called before each token of a call with the call's key and the token's number; it may raise, wait or
    publish.
    """

    num_slots = 64
    depends_on_batch = True

    def __init__(
        self,
        servers: FakeServers,
        *,
        seed: int,
        decode: Callable[[Sequence[int]], str],
        on_token: Callable[[str | None, int], None] = lambda _key, _number: None,
    ):
        super().__init__()
        self._servers, self._seed, self._decode = servers, seed, decode
        self._on_token = on_token
        self._num_unnamed = 0
        self.asked: list[tuple[str | None, tuple[tuple[int, ...], ...]]] = []
        """Key and prompts, each once, of each call"""

    @property
    def num_servers(self) -> int:
        return len(self._servers.all)

    async def generate_turns(self, requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        for request in requests:
            outside = [token for token in request.token_ids.tolist() if not 0 <= token < self._servers.vocab_size]
            if outside or not len(request.token_ids):
                raise ValueError(f"prompt 0: token id {outside or 'missing'}")
        name = requests[0].name
        key = None if name is None else name.rsplit("/", 2)[0]
        self.asked.append((key, tuple(dict.fromkeys(tuple(request.token_ids.tolist()) for request in requests))))
        turns = [_FakeTurn(request, f"{self._seed}/{request.name or self._draw_name()}") for request in requests]
        for number in range(max(request.max_new_tokens for request in requests)):
            if not any(turn.is_open for turn in turns):
                break
            await call_in_thread(partial(self._on_token, key, number))
            with self._servers.generating:
                for place, server in enumerate(self._servers.all.values()):
                    _add_token(server, [turn for turn in turns if turn.is_open and turn.request.server == place])
            for index, turn in enumerate(turns):
                if not turn.is_open and not turn.is_taken:
                    turn.is_taken = True
                    take(index, turn.build_response(self._decode))

    def _draw_name(self) -> str:
        self._num_unnamed += 1
        return f"fresh-{self._num_unnamed}"

    async def drop_cached_prefixes(self) -> None: ...

    def check_health(self) -> None:
        self._servers.check_alive()


class _FakeTurn:
    """One turn, as far as it has come."""

    def __init__(self, request: TurnRequest, name: str):
        self.request = request
        self.first, self.before = int(request.token_ids[0]), int(request.token_ids[-1])
        self.is_open, self.is_taken = True, False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        seed = compute_sampling_seed(name)
        self.draws = np.random.Generator(np.random.PCG64(seed)).random(request.max_new_tokens)

    def build_response(self, decode: Callable[[Sequence[int]], str]) -> Response:
        finish = FinishReason.stop if self.tokens[-1] == EOS else FinishReason.length
        generated = (True,) * len(self.tokens)
        return Response(self.tokens, decode(self.tokens), self.logprobs, generated, self.versions, finish)


@torch.no_grad()
def _add_token(server: FakeServer, turns: Sequence[_FakeTurn]) -> None:
    if not turns:
        return
    if server.lost:
        raise RuntimeError(f"{server.name}: {server.lost}")
    assert not server.released, f"{server.name} generates without its {server.released}"
    logits = server.model(torch.tensor([t.before for t in turns]), torch.tensor([t.first for t in turns]))
    temperatures = torch.tensor([turn.request.sampling.temperature or 1.0 for turn in turns])
    log_p = (logits / temperatures[:, None]).log_softmax(-1)
    drawn = torch.tensor([turn.draws[len(turn.tokens)] for turn in turns], dtype=torch.float64)
    sampled = (log_p.exp().double().cumsum(-1) < drawn[:, None]).sum(-1).clamp(max=log_p.shape[1] - 1)
    for row, turn in enumerate(turns):
        token = int(sampled[row] if turn.request.sampling.temperature else log_p[row].argmax())
        turn.tokens.append(token)
        turn.logprobs.append(float(log_p[row, token]))
        turn.versions.append(server.version)
        turn.before = token
        turn.is_open = token != EOS and len(turn.tokens) < turn.request.max_new_tokens


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
        with self._servers.generating:
            return self._publish(version)

    def _publish(self, version: int) -> Metrics:
        for server in self._servers.all.values():
            server.version = UNPUBLISHED
        self._watch("servers", "publish")
        weights = self._policy.copy_weights()
        for server in self._servers.all.values():
            if server.lost:
                raise SyncError(f"{server.name}: {server.lost}")
        self._offloader.resume(WEIGHTS)
        for server in self._servers.all.values():
            server.model.load_state_dict(weights)
        self._offloader.resume(CACHE)
        for server in self._servers.all.values():
            server.version = version
        return {"sync/bytes": float(sum(x.nbytes for x in weights.values())), "sync/seconds_move": 0.0}

    def reconnect(self) -> None:
        self.num_reconnects += 1
