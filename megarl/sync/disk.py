"""Weight sync through a checkpoint directory that policy and servers share."""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import TrainBackend
from megarl.rollout.calls import StopFlag, run_in_parallel
from megarl.rollout.client import SGLangClient, abort_all
from megarl.rollout.offload import ServerOffloader
from megarl.sync.probe import Probe
from megarl.sync.ranks import Ranks
from megarl.sync.steps import explain_lost_servers, sync_step
from megarl.sync.versions import VersionBump, replacing_weights
from megarl.timeline import span
from megarl.types import Metrics


class DiskSync:
    """WeightSync: the policy writes a checkpoint, every server loads it and is verified."""

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        directory: Path,
        probe_tokens: Sequence[int],
        *,
        policy_dtype: Dtype,
        check_processes: Callable[[], None] | None = None,
        ranks: Ranks | None = None,
        offloader: ServerOffloader | None = None,
    ):
        """Arguments that need a word:

        ranks: compares checksums of what the servers hold, as in every run; None, for servers that cannot be asked for
        them: the probe text alone decides.
        directory: is visible to policy and servers alike (a run's is in its run directory) and used by nothing else.
        check_processes: raises RuntimeError with exit status and log of a server that is down.
        offloader: what the servers have given back; None: nothing ever.

        Each version is written to a subdirectory; the last one stays until the next publish or `close`.
        """
        self._policy = policy
        self._offloader = offloader or ServerOffloader()
        self._clients = list(clients)
        self._config = config
        self._directory = directory
        self._probe = Probe(probe_tokens, config, policy_dtype, has_checksums=ranks is not None)
        self._check_processes = check_processes
        self._ranks = ranks

    def publish(self, version: int) -> Metrics:
        """Export, load into every server as `version`, and verify.

        Responses in flight wait for the load and resume with the new weights: the version of the servers is raised
        while they are paused, and withdrawn where verification fails.

        Raises SyncError where a server refuses the weights, is lost or is late, naming server and step, and where
        verification fails; no server then serves as `version`. A signal that raises in this thread ends the wait.
        """
        started = time.monotonic()
        target = self._directory / f"v{version}"
        self._directory.mkdir(parents=True, exist_ok=True)
        with span("export"):
            self._policy.export_weights(target).result()
        # Before the servers take their memory again: they give it back for each call of the policy.
        with span("probe"):
            self._probe.ask(self._policy)
        exported = time.monotonic()
        with VersionBump(version) as bump, explain_lost_servers(self._check_processes):
            with replacing_weights(self._clients, bump, self._offloader):
                with span("load"):
                    self._load_all(target)
                loaded = time.monotonic()
                if self._ranks is not None:
                    with span("checksum"):
                        self._ranks.verify(self._ranks.session or self._ranks.handshake())
            with span("probe"):
                gap = self._probe.measure(self._clients)
        self._remove_others(target)
        return {
            "sync/bytes": float(sum(file.stat().st_size for file in target.iterdir() if file.is_file())),
            "sync/probe_logprob_gap": gap,
            "sync/seconds_export": exported - started,
            "sync/seconds_load": loaded - exported,
            "sync/seconds_verify": time.monotonic() - loaded,
        }

    def reconnect(self) -> None:
        """Discard the handshake with the servers' ranks; the next sync makes a new one."""
        if self._ranks is not None:
            self._ranks.forget()

    def close(self) -> None:
        """Remove the exported checkpoints."""
        if self._ranks is not None:
            self._ranks.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _load_all(self, directory: Path) -> None:
        jobs = [partial(self._load, client, directory) for client in self._clients]
        run_in_parallel(jobs, partial(abort_all, self._clients))

    def _load(self, client: SGLangClient, directory: Path, _stop: StopFlag) -> None:
        with sync_step(client, f"load of the weights in {directory}"):
            client.update_weights_from_disk(directory, deadline_s=self._config.sync_deadline_s)

    def _remove_others(self, keep: Path) -> None:
        for old in self._directory.iterdir():
            if old != keep:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(old)
