"""Has some responses of each iteration written token by token, with what roles and algorithm computed of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.interfaces import TrainBackend, wait_all
from megarl.report.token_file import TokenFile, collect_fields
from megarl.types import Experience, Rollout, TrainingSamples


@dataclass(frozen=True)
class TokenRecord:
    """The responses of an iteration that are to be written, before its update."""

    rollout: Rollout
    rows: Tensor
    """int64 [K]"""
    entropies: Tensor | None
    """float32 [K, T]; None without logger.token_passes"""
    logprobs: Tensor | None
    """float32 [K, T], by the policy; None without logger.token_passes"""


class TokenRecorder:
    """Writes tokens.jsonl; without a file, nothing."""

    def __init__(self, file: TokenFile | None = None, policy: TrainBackend | None = None, temperature: float = 1.0):
        """policy: reads the responses before and after the update (logger.token_passes); None: it does not.
        temperature: rollout.temperature.
        """
        self._file, self._policy, self._temperature = file, policy, temperature

    def begin(self, rollout: Rollout, experience: Experience) -> TokenRecord | None:
        """Choose the responses of this iteration; before the update."""
        if self._file is None:
            return None
        rows = torch.tensor(self._file.choose(rollout), dtype=torch.int64)
        if self._policy is None:
            return TokenRecord(rollout, rows, None, None)
        sequences = experience.sequences.select(rows)
        entropies = self._policy.entropies(sequences, self._temperature)
        logprobs = self._policy.logprobs(sequences, self._temperature)
        wait_all([entropies, logprobs])
        return TokenRecord(rollout, rows, entropies.result(), logprobs.result())

    def finish(
        self, record: TokenRecord | None, experience: Experience, samples: TrainingSamples, iteration: int
    ) -> None:
        """Write them, after the update on `samples`. experience: as in `begin`, but for old_logprobs of the update."""
        if self._file is None or record is None:
            return
        fields = collect_fields(experience, samples, record.rows)
        if self._policy is not None and record.entropies is not None and record.logprobs is not None:
            sequences = experience.sequences.select(record.rows)
            logprobs = self._policy.logprobs(sequences, self._temperature).result()
            fields |= {"entropies": record.entropies, "log_changes": logprobs - record.logprobs}
        self._file.write(iteration, record.rollout, record.rows.tolist(), fields)

    def write_heldout(self, rollout: Rollout, iteration: int) -> None:
        """Write some responses of an evaluation."""
        if self._file is not None:
            self._file.write_heldout(iteration, rollout)
