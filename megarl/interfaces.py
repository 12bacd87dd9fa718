"""The interfaces of the loop: what the trainer needs from training, servers and weight sync.

Every call that runs in other processes returns a `Pending`: the work has been started, and `result()` waits for it. It
raises `DeadlineError`, naming what it waited for, when the deadline that the implementation was given passes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

# At run time this module, which every process imports, does without torch, whose import takes seconds.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from megarl.types import Metrics, Sequences, TrainingSamples

T_co = TypeVar("T_co", covariant=True)


class DeadlineError(RuntimeError):
    """A wait passed its deadline; the message names the call, the processes that are late, and the deadline."""


class Pending(Protocol[T_co]):
    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; returns whether the work has succeeded. Raises as soon as a part of it has failed."""

    def result(self) -> T_co: ...


def wait_all(pendings: Sequence[Pending[Any]], end: float | None = None) -> None:
    """Wait until all have succeeded; the first failure of any is raised at once, even while others still run.

    Raises DeadlineError at `end` (time.monotonic), where it is before their own deadlines.
    """
    waiting = list(pendings)
    while waiting:
        waiting = [pending for pending in waiting if not pending.wait(0.05)]
        if waiting and end is not None and time.monotonic() > end:
            raise DeadlineError(f"{len(waiting)} of {len(pendings)} calls have not ended before the deadline")


class TrainBackend(Protocol):
    """One role (policy, critic or reference): one object for all ranks of a model."""

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> Pending[Tensor]:
        """float32 [B, T]: log-probs of the response tokens under the temperature-scaled distribution.

        teacher: of the reference, which of its checkpoints scores, 0 for the first.
        """

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Pending[Tensor]:
        """As `logprobs`, with a random relative error of at most `unit` in everything that a layer computes.

        Only for the policy, for the probe of the weight sync.
        """

    def values(self, sequences: Sequences) -> Pending[Tensor]:
        """float32 [B, T]: the critic's value of the state before each response token."""

    def reference_kl(self, sequences: Sequences, temperature: float) -> Pending[Tensor]:
        """float32 [B, T]: KL(policy, reference) over the whole vocabulary at each response token.

        Only for the policy, with a KL term of estimator full: its workers then hold the reference themselves.
        """

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> Pending[list[Metrics]]:
        """One optimizer step per entry of `minibatches` (int64 row numbers); the result has one Metrics per step."""

    def updated_logprobs(self, sequences: Sequences) -> Pending[Tensor]:
        """float32 [B, T]: the log-probs that the last update, whose samples had no old_logprobs, gave before its step.

        Only for the policy, once after such an update, which is of one minibatch. sequences: those of the update.
        """

    def export_weights(self, directory: Path) -> Pending[None]:
        """Write the weights as a Hugging Face checkpoint directory, which appears atomically."""

    def call_senders(
        self, verb: str, arguments: Sequence[tuple[Any, ...]] | None, deadline_s: float
    ) -> Pending[list[Any]]:
        """Call a method of every rank's `megarl.sync.ends.WeightSender`, with its own arguments (None: none)."""

    def begin_save(self, directory: Path) -> Pending[None]:
        """Begin to write the whole training state; once it returns, updates no longer change what is written."""

    def finish_save(self) -> Pending[None]:
        """Wait until the files of `begin_save` are written; raises what writing them raised."""

    def load(self, directory: Path) -> Pending[None]:
        """Load a saved state, whose checksums have been verified."""


@dataclass(frozen=True)
class Truncation:
    """The tokens that are sampled from; rollout_logprobs stay those of the whole distribution, so it is for
    evaluation."""

    top_p: float = 1.0
    """The most likely ones with this total probability; 1: all"""
    top_k: int = -1
    """This many most likely ones; -1: all"""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    temperature: float
    """0 is greedy"""
    urgent: bool = False
    """Ahead of requests that are not"""
    truncation: Truncation | None = None
    """None: the engine's own"""


@dataclass(frozen=True)
class TurnRequest:
    """One turn to be generated."""

    token_ids: NDArray[np.int32]
    """int32 [N], all tokens before the turn"""
    max_new_tokens: int
    sampling: Sampling
    server: int
    """Number of the server that is asked; a sender may choose another"""
    name: str | None = None
    """Names the turn; its random numbers follow from the run's seed and this name, so that it is reproducible. None:
    they are fresh."""


class RolloutServers(Protocol):
    """The processes of the generation servers."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all servers."""

    @property
    def api_key(self) -> str | None:
        """Required of callers; None: of nobody."""

    def start(self) -> Pending[list[str]]:
        """Start the servers that do not run; the result is the urls of all, once they are healthy."""

    def check_alive(self) -> None:
        """Raises RuntimeError where a server is down."""

    def find_lost(self) -> Mapping[str, str]:
        """The reason of each loss, by server: those that are down or do not answer. The others are reset."""

    def end(self, names: Collection[str]) -> None:
        """End all processes of these servers; the next start of the servers starts them again, as `restart` does."""

    def restart(self, names: Collection[str]) -> None:
        """End all processes of these servers and start them again on the same urls; returns when they are healthy.

        They then hold their checkpoint's weights under a version that no trainer's weights have (UNPUBLISHED in
        training). Raises RuntimeError where one does not start.
        """


class WeightSync(Protocol):
    """Moves the policy's weights into the servers and verifies that they arrived."""

    def publish(self, version: int) -> Metrics:
        """After it returns, every server generates with the trainer's weights, as `version`. Returns sync/* metrics.

        Raises `SyncError` when verification fails; no server then serves as `version`. It may be repeated with the
        same version.
        """

    def reconnect(self) -> None:
        """Discard all state about the servers, after some were restarted."""


UNPUBLISHED = -1
"""Weight version of a server without the trainer's weights: it was just started, or is in the middle of a sync. What it
generates is refused."""


class SyncError(RuntimeError):
    """The servers do not hold the trainer's weights; the message names the server, what was compared, what differs."""
