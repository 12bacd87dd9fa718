"""Weight sync through a checkpoint directory in shared memory or on a disk that policy and servers share."""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.config.rollout import RolloutConfig
from megarl.rollout.client import RequestError, SGLangClient
from megarl.seams import SyncError, TrainBackend
from megarl.sync.probe import compute_policy_logprobs, get_max_gap, verify_logprobs
from megarl.types import Metrics


class DiskSync:
    """WeightSync: the policy writes a checkpoint, every server loads it and is proved on a probe text."""

    def __init__(
        self,
        policy: TrainBackend,
        clients: Sequence[SGLangClient],
        config: RolloutConfig,
        directory: Path,
        probe_tokens: Sequence[int],
    ):
        """directory: seen by policy and servers alike, for example under /dev/shm, and used by nothing else.

        Each version is a directory of its own in it; the last one stays until the next publish or `close`.
        """
        self._policy = policy
        self._clients = list(clients)
        self._config = config
        self._directory = directory
        self._probe_tokens = tuple(probe_tokens)

    def publish(self, version: int) -> Metrics:
        """Export, load into every server, prove, and only then raise the servers' version to `version`.

        Raises SyncError where a server refuses the weights or the proof fails; none then serves as `version`.
        """
        started = time.monotonic()
        target = self._directory / f"v{version}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._policy.export_weights(target).result()
        exported = time.monotonic()
        self._map(lambda client: self._load(client, target))
        loaded = time.monotonic()
        expected = compute_policy_logprobs(self._policy, self._probe_tokens)
        gap = verify_logprobs(self._clients, self._probe_tokens, expected, get_max_gap(self._config))
        self._map(lambda client: self._raise_version(client, version))
        self._remove_others(target)
        return {
            "sync/bytes": float(sum(file.stat().st_size for file in target.iterdir() if file.is_file())),
            "sync/probe_logprob_gap": gap,
            "sync/seconds_export": exported - started,
            "sync/seconds_load": loaded - exported,
            "sync/seconds_proof": time.monotonic() - loaded,
        }

    def close(self) -> None:
        """Remove the exported checkpoints."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _map(self, action: Callable[[SGLangClient], None]) -> None:
        with ThreadPoolExecutor(len(self._clients)) as pool:
            list(pool.map(action, self._clients))

    def _load(self, client: SGLangClient, directory: Path) -> None:
        client.pause()
        try:
            client.begin_update()
            try:
                client.update_weights_from_disk(directory, deadline_s=self._config.sync_deadline_s)
            finally:
                client.end_update()
        except RequestError as error:
            raise SyncError(f"SGLang server {client.url} did not take the weights in {directory}: {error}") from error
        finally:
            client.resume()

    def _raise_version(self, client: SGLangClient, version: int) -> None:
        client.set_weight_version(version)
        found = client.load_weight_version()
        if found != version:
            raise SyncError(f"SGLang server {client.url} reports weight version {found} after it was set to {version}")

    def _remove_others(self, keep: Path) -> None:
        for old in self._directory.iterdir():
            if old != keep:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(old)
