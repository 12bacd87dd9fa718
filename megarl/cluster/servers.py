"""The SGLang servers of a run, each started and watched by a Ray actor on the machine where it serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from megarl.cluster.waiting import PendingCall, wait_for
from megarl.cluster.workers import redirect_output
from megarl.config.rollout import RolloutConfig
from megarl.rollout.server import SGLangServer

POLL_DEADLINE_S = 10.0


@ray.remote(num_cpus=1, max_restarts=0)
class ServerActor:
    """Owns one server process, which ends when this actor does."""

    def __init__(self, config: RolloutConfig, checkpoint: Path, log_dir: Path, index: int, seed: int, host: str):
        redirect_output(log_dir / f"server-{index}-owner.log")
        log_file = log_dir / f"server-{index}.log"
        self._server = SGLangServer(config, checkpoint, log_file=log_file, seed=seed, host=host, tp=config.tp)

    def start(self, deadline_s: float) -> str:
        """Start the server, wait until it is healthy; its url."""
        self._server.start()
        self._server.wait_healthy(deadline_s)
        return self._server.url

    def check_alive(self) -> None:
        self._server.check_alive()

    def stop(self, deadline_s: float) -> None:
        self._server.stop(deadline_s)


@dataclass(frozen=True)
class Servers:
    """Servers being started; `urls` gives their addresses once all of them are healthy."""

    actors: tuple[ray.actor.ActorHandle, ...]
    names: tuple[str, ...]
    urls: PendingCall[list[str]]

    def check_alive(self) -> None:
        """Raise WorkerError with the exit status and the end of the log where a server is down."""
        refs = [actor.check_alive.remote() for actor in self.actors]
        wait_for(refs, self.names, "health of the SGLang servers", POLL_DEADLINE_S)


@contextmanager
def running_servers(
    config: RolloutConfig, checkpoint: Path, log_dir: Path, seed: int, host: str, stop_deadline_s: float
) -> Iterator[Servers]:
    """Start `rollout.num_servers` servers without waiting for them; end them on leaving."""
    names = tuple(f"SGLang server {i}/{config.num_servers}" for i in range(config.num_servers))
    actors = tuple(
        ServerActor.remote(config, checkpoint, log_dir, i, seed + i, host) for i in range(config.num_servers)
    )
    starting = tuple(actor.start.remote(config.startup_deadline_s) for actor in actors)
    # The server's own deadline passes first, with the end of its log in the message.
    deadline_s = config.startup_deadline_s + POLL_DEADLINE_S
    try:
        yield Servers(actors, names, PendingCall(starting, names, "start of the SGLang servers", deadline_s, list))
    finally:
        # A start still under way keeps `stop` waiting until the deadline; the server then ends with its owner.
        refs = [actor.stop.remote(stop_deadline_s) for actor in actors]
        ray.wait(refs, num_returns=len(refs), timeout=stop_deadline_s)
