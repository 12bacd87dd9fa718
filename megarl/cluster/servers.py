"""The SGLang servers of a run, each started and monitored by a Ray actor on its machine."""

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from megarl.cluster.address import agree_on_nccl, resolve_host, use_gpus, use_interface
from megarl.cluster.nodes import Cluster
from megarl.cluster.waiting import PendingCall, wait_for
from megarl.cluster.workers import redirect_output
from megarl.config.placement import DeviceSlot
from megarl.config.schema.rollout import RolloutConfig
from megarl.rollout.liveness import CALL_DEADLINE_S, NUM_CALLS, find_loss
from megarl.rollout.server import SGLangServer

POLL_DEADLINE_S = 10.0
LOSS_DEADLINE_S = NUM_CALLS * CALL_DEADLINE_S + POLL_DEADLINE_S
PORT_DEADLINE_S = 15.0
"""How long the processes of a server may still hold its port after its owner was killed."""


@dataclass(frozen=True)
class ServerSpec:
    """The settings that a server is started with."""

    config: RolloutConfig
    checkpoint: Path
    log_dir: Path
    index: int
    seed: int
    slot: DeviceSlot
    weight_version: int
    api_key: str
    """Required of callers"""
    shares_gpus: bool
    """Whether training roles use the same GPUs"""


@ray.remote(num_cpus=0, max_restarts=0)
class ServerActor:
    """Owns one server process, which ends when this actor does."""

    def __init__(self, spec: ServerSpec, listen_host: str, port: int | None):
        redirect_output(spec.log_dir / f"server-{spec.index}-owner.log")
        host = resolve_host(listen_host)
        # These set environment variables, which the server's processes inherit.
        use_interface(host)
        use_gpus(spec.slot.gpus)
        agree_on_nccl()
        self._server = SGLangServer(
            spec.config,
            spec.checkpoint,
            log_file=spec.log_dir / f"server-{spec.index}.log",
            seed=spec.seed,
            host=host,
            port=port,
            weight_version=spec.weight_version,
            api_key=spec.api_key,
            shares_gpus=spec.shares_gpus,
        )

    def start(self, port_deadline_s: float, deadline_s: float) -> str:
        """Start the server and wait until it is healthy; returns its url."""
        self._server.start(port_deadline_s)
        self._server.wait_healthy(deadline_s)
        return self._server.url

    def check_alive(self) -> None:
        self._server.check_alive()

    def find_loss(self) -> str | None:
        return find_loss(self._server)

    def stop(self, deadline_s: float) -> None:
        self._server.stop(deadline_s)


class Servers:
    """The servers of a run and the actors that own them. Implements `megarl.interfaces.RolloutServers`."""

    def __init__(self, specs: Collection[ServerSpec], cluster: Cluster, stop_deadline_s: float):
        self._specs = tuple(specs)
        self._cluster = cluster
        self._stop_deadline_s = stop_deadline_s
        self.api_key = self._specs[0].api_key
        """Required of callers"""
        self.names = tuple(f"SGLang server {spec.index}/{len(specs)}" for spec in specs)
        self._actors: list[Any] = [self._own(spec, None) for spec in specs]
        self._urls: PendingCall[list[str]] | None = None
        self._ended: list[int] = []

    def start(self) -> PendingCall[list[str]]:
        """Start the servers that do not run; the result is the urls of all, once they are healthy.

        It waits for the restart of those that were ended, and raises WorkerError with the end of the log.
        """
        if self._urls is None:
            self._urls = self._start(range(len(self._specs)), 0.0, "start")
        elif self._ended:
            self._start(self._ended, PORT_DEADLINE_S, "restart").result()
            self._ended = []
        return self._urls

    def _own(self, spec: ServerSpec, port: int | None) -> Any:
        options = self._cluster.options(spec.slot)
        actor = ServerActor.options(**options)  # type: ignore[attr-defined]  # Ray's types leave the class as it was
        return actor.remote(spec, self._cluster.listen_host, port)

    def _start(self, numbers: Collection[int], port_deadline_s: float, what: str) -> PendingCall[list[str]]:
        start_s = self._specs[0].config.startup_deadline_s
        # The server's own deadline passes first, with the end of its log in the message.
        deadline_s = start_s + port_deadline_s + POLL_DEADLINE_S
        refs = tuple(self._actors[i].start.remote(port_deadline_s, start_s) for i in numbers)
        names = tuple(self.names[i] for i in numbers)
        return PendingCall(refs, names, f"{what} of the SGLang servers", deadline_s, list)

    def check_alive(self) -> None:
        """Raise WorkerError with the exit status and the end of the log where a server is down."""
        refs = [actor.check_alive.remote() for actor in self._actors]
        wait_for(refs, self.names, "health of the SGLang servers", POLL_DEADLINE_S)

    def find_lost(self) -> Mapping[str, str]:
        if self._urls is None:
            return {}
        refs = [actor.find_loss.remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=LOSS_DEADLINE_S)
        lost: dict[str, str] = {}
        for name, ref in zip(self.names, refs, strict=True):
            try:
                loss = ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError:
                loss = f"the process that owns it gave no answer within {LOSS_DEADLINE_S:g} s"
            except ray.exceptions.RayActorError:
                loss = "the process that owns it has died"
            except ray.exceptions.RayError as error:
                loss = f"the process that owns it failed: {' '.join(str(error).split())}"
            if loss is not None:
                lost[name] = loss
        return lost

    def end(self, names: Collection[str]) -> None:
        """As in `RolloutServers`; a restarted server appends to its log. Does nothing before the first start."""
        if self._urls is None or not names:
            return
        urls = self._urls.result()
        numbers = [number for number, name in enumerate(self.names) if name in names]
        self._stop(numbers)
        for number in numbers:
            # The guard ends its server, should it still run.
            ray.kill(self._actors[number])
            self._actors[number] = self._own(self._specs[number], urlsplit(urls[number]).port)
        self._ended = sorted({*self._ended, *numbers})

    def restart(self, names: Collection[str]) -> None:
        """As in `RolloutServers`. Raises WorkerError with the end of the log."""
        self.end(names)
        self.start()

    def close(self) -> None:
        # A start in progress keeps `stop` waiting until the deadline; the server then ends with its owner.
        self._stop(range(len(self._actors)))

    def _stop(self, numbers: Collection[int]) -> None:
        refs = [self._actors[number].stop.remote(self._stop_deadline_s) for number in numbers]
        ray.wait(refs, num_returns=len(refs), timeout=self._stop_deadline_s)


@contextmanager
def running_servers(
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
) -> Iterator[Servers]:
    """Servers, one in each of `slots`, which `Servers.start` starts; they are shut down on leaving.

    weight_version: of the checkpoint's weights, which a server holds after each start. shares_gpus: whether training
    roles use the same GPUs.
    """
    api_key = secrets.token_hex(32)
    specs = [
        ServerSpec(config, checkpoint, log_dir, i, seed + i, slot, weight_version, api_key, shares_gpus)
        for i, slot in enumerate(slots)
    ]
    servers = Servers(specs, cluster, stop_deadline_s)
    try:
        yield servers
    finally:
        servers.close()
