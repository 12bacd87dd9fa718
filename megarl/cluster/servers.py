"""The SGLang servers of a run, each started and monitored by a Ray actor on its machine."""

import contextlib
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray

from megarl.cluster.calls import PendingCall, RayLostError, ask, wait_for
from megarl.cluster.opened import Cluster
from megarl.cluster.process import (
    Gpu,
    agree_on_nccl,
    find_peak_of_tree,
    identify,
    redirect_output,
    resolve_host,
    use_gpus,
    use_interface,
)
from megarl.config.placement import DeviceSlot
from megarl.config.schema.run import RolloutConfig
from megarl.rollout.server import CALL_DEADLINE_S, NUM_CALLS, SGLangServer, find_loss

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
            refs = {number: getattr(self._actors[number], method).remote() for number in others}
            if refs:
                ray.wait(list(refs.values()), num_returns=len(refs), timeout=deadline_s)
            for number, ref in refs.items():
                try:
                    loss = ray.get(ref, timeout=0)
                    loss = loss if method == "find_loss" else None
                except ray.exceptions.GetTimeoutError:
                    loss = f"the process that owns it gave no answer within {deadline_s:g} s"
                except ray.exceptions.RayActorError:
                    loss = "the process that owns it has died"
                except ray.exceptions.RayError as error:
                    loss = f"the process that owns it failed: {' '.join(str(error).split())}"
                if loss is not None:
                    lost[number] = loss
        return {name: lost[number] for number, name in enumerate(self.names) if number in lost}

    def end(self, names: Collection[str]) -> None:
        """As in `RolloutServers`; a restarted server appends to its log. Does nothing before the first start."""
        if self._urls is None or not names:
            return
        urls = self._urls.result()
        numbers = [number for number, name in enumerate(self.names) if name in names]
        self._stop(numbers)
        for number in numbers:
            port = urlsplit(urls[number]).port
            ask(f"another owner of {self.names[number]}", partial(self._replace, number, port))
        self._ended = sorted({*self._ended, *numbers})

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
        self.start()

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
