"""The three seams of the loop: what the trainer needs from training, generation and weight movement.

Every verb that runs elsewhere returns a `Pending`: the work has been started, `result()` waits for it under the
deadline that the implementation was given and raises `DeadlineError` (saying what it waited for) when it passes.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from megarl.types import Metrics, Prompt, Response, Sequences, TrainingSamples

T_co = TypeVar("T_co", covariant=True)


class DeadlineError(RuntimeError):
    """A wait passed its deadline; the message names what was waited for, who it is, and for how long."""


class Pending(Protocol[T_co]):
    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; whether the work has ended well. Raises as soon as a part of it has failed."""
        ...

    def result(self) -> T_co: ...


def wait_all(pendings: Sequence[Pending[Any]], slice_s: float = 0.05, end: float | None = None) -> None:
    """Wait until all have ended well; the first failure of any is raised at once, whoever is still working.

    Raises DeadlineError at `end` (time.monotonic), where it comes before their own deadlines.
    """
    waiting = list(pendings)
    while waiting:
        waiting = [pending for pending in waiting if not pending.wait(slice_s)]
        if waiting and end is not None and time.monotonic() > end:
            raise DeadlineError(f"{len(waiting)} of {len(pendings)} calls have not ended in the time given for them")


class TrainBackend(Protocol):
    """One role (policy, critic or reference): a model, all its ranks, behind one object."""

    def logprobs(self, sequences: Sequences, temperature: float) -> Pending[Tensor]:
        """float32 [B, T]: log-probs of the response tokens under the temperature-scaled distribution."""
        ...

    def values(self, sequences: Sequences) -> Pending[Tensor]:
        """float32 [B, T]: the critic's value of the state in which each response token is chosen."""
        ...

    def reference_kl(self, sequences: Sequences, temperature: float) -> Pending[Tensor]:
        """float32 [B, T]: KL(policy, reference) over the whole vocabulary where each response token is chosen.

        Of the policy only, under a KL term of estimator full: its workers then hold the reference themselves.
        """
        ...

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> Pending[list[Metrics]]:
        """One optimizer step per entry of `minibatches` (int64 row numbers); one Metrics per step."""
        ...

    def export_weights(self, directory: Path) -> Pending[None]:
        """Write the weights as an ordinary Hugging Face checkpoint directory, published atomically."""
        ...

    def call_senders(
        self, verb: str, arguments: Sequence[tuple[Any, ...]] | None, deadline_s: float
    ) -> Pending[list[Any]]:
        """A verb of every rank's `megarl.sync.sender.WeightSender`, each with its own arguments (None: none)."""
        ...

    def begin_save(self, directory: Path) -> Pending[None]:
        """Begin to write the whole training state; once it returns, updates no longer touch what is written."""
        ...

    def finish_save(self) -> Pending[None]:
        """Wait for the files of `begin_save`; raises what writing them raised."""
        ...

    def load(self, directory: Path) -> Pending[None]:
        """Continue from a saved state, whose checksums have been verified."""
        ...


class RolloutEngine(Protocol):
    """The generation servers."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_responses: int,
        temperature: float,
        urgent: bool = False,
        key: str | None = None,
    ) -> list[list[Response]]:
        """`num_responses` responses for each prompt, in order. temperature 0 is greedy. Thread-safe.

        urgent: before what other threads have asked for without it. key: the random numbers follow the run's seed and
        this name of the call, so that it can be repeated; None: they are fresh.
        """
        ...

    def cancel(self) -> None:
        """End the calls under way in other threads: each raises CancelledError (concurrent.futures)."""
        ...

    def check_health(self) -> None:
        """Raise `RuntimeError` that names the server, its exit status and the end of its log where one is down."""
        ...


class RolloutServers(Protocol):
    """The processes of the generation servers, where they are this run's own."""

    def find_lost(self) -> Mapping[str, str]:
        """Server -> what became of it, of those that are down or do not answer; the others are brought to rest."""
        ...

    def end(self, names: Collection[str]) -> None:
        """End what is left of these servers; whoever starts the servers the next time starts them too, as `restart`."""
        ...

    def restart(self, names: Collection[str]) -> None:
        """End what is left of these servers and start them again on the same urls; they are healthy when it returns.

        They then hold their checkpoint's weights under a version that no trainer's weights have. Raises RuntimeError
        where one does not start.
        """
        ...


class WeightSync(Protocol):
    """Moves the policy's weights into the servers and proves that they arrived."""

    def publish(self, version: int) -> Metrics:
        """After it returns, every server generates with the trainer's weights, as `version`. Returns sync/* metrics.

        Raises `SyncError` when the proof fails; no server is then left serving as `version`. May be repeated with
        the same version.
        """
        ...

    def reconnect(self) -> None:
        """Servers were started again: nothing that was known of them or set up with them holds any more."""
        ...


UNPUBLISHED = -1
"""Weight version of a server that holds none of the trainer's: it was just started, or is in the middle of a sync. What
it generates is refused."""


class SyncError(RuntimeError):
    """The servers do not hold the trainer's weights; the message says which server, what was compared, what differs."""
