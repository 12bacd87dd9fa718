"""The probe of a weight sync: the servers' log-probs of a fixed text, compared with the policy's own.

Checksums decide whether a server holds the policy's weights. The probe measures how differently the rollout engine and
the training engine compute with the same weights, which is rounding and, in bfloat16, not small.
"""

import math
import statistics
import warnings
from collections.abc import Sequence

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import SyncError, TrainBackend
from megarl.rollout.client import SGLangClient
from megarl.sync.steps import sync_step
from megarl.types import Prompt, Sequences

LEAST_BOUND = {Dtype.float32: 2.0**-13, Dtype.bfloat16: 1.0}
"""The lowest bounds, several times the largest gaps that SmolLM2-135M had (2.6e-5 and 0.58): 2048 and 256 times the
largest relative error of rounding one number"""
DEVIATIONS = 6
"""Standard deviations above the mean of the run's earlier gaps that a gap may have."""


def build_probe_tokens(prompts: Sequence[Prompt], vocab_size: int, length: int = 64) -> tuple[int, ...]:
    """A fixed text of `length` tokens: prompts one after the other, then tokens spread over the vocabulary.

    The task's text has likely tokens, whose log-probs change little under bfloat16 rounding; the other tokens are
    multiples of a prime, modulo the vocabulary's size.
    """
    text = [token for prompt in prompts[:length] for token in prompt.token_ids][:length]
    filler = ((7919 * (i + 1)) % vocab_size for i in range(length - len(text)))
    return (*text, *filler)


def compute_policy_logprobs(policy: TrainBackend, token_ids: Sequence[int]) -> list[float]:
    """The policy's log-probs (temperature 1) of token_ids[1:], each given the tokens before it."""
    sequences = Sequences(
        tokens=torch.tensor(token_ids, dtype=torch.int64),
        lengths=torch.tensor([len(token_ids)]),
        prompt_lengths=torch.tensor([1]),
    )
    return [float(x) for x in policy.logprobs(sequences, 1.0).result()[0, : len(token_ids) - 1]]


def compute_gap(expected: Sequence[float], found: Sequence[float]) -> tuple[float, int]:
    """Largest |difference| / max(1, |expected|) and its position; NaN counts as infinite.

    Relative below -1: a very unlikely token's log-prob comes from a large logit, whose rounding error is relative.
    """
    wanted, got = torch.tensor(expected, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    gaps = (wanted - got).abs() / wanted.abs().clamp(min=1.0)
    gaps = gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(gaps.max()), int(gaps.argmax())


def compute_bound(least: float, gaps: Sequence[float]) -> float:
    """The largest gap that rounding explains: max(least, mean + 6 standard deviations of the earlier gaps).

    least: that of the dtype that is computed in. gaps: of the earlier syncs.
    """
    spread = statistics.fmean(gaps) + DEVIATIONS * statistics.pstdev(gaps) if gaps else 0.0
    return max(least, spread)


class Probe:
    """Measures the gap after each sync; a gap beyond its bound is a warning or, without checksums, an error."""

    def __init__(
        self, token_ids: Sequence[int], config: RolloutConfig, policy_dtype: Dtype, *, has_checksums: bool
    ) -> None:
        """has_checksums: the checksums of all tensors have been compared before `measure` is called."""
        self.token_ids = tuple(token_ids)
        self._given = config.max_probe_logprob_gap
        self._least = max(LEAST_BOUND[config.dtype], LEAST_BOUND[policy_dtype])
        self._has_checksums = has_checksums
        self._gaps: list[float] = []

    @property
    def bound(self) -> float:
        """`rollout.max_probe_logprob_gap` where it is given, else that of `compute_bound`."""
        return compute_bound(self._least, self._gaps) if self._given is None else self._given

    def measure(self, clients: Sequence[SGLangClient], expected: Sequence[float]) -> float:
        """The largest gap of any server; expected: the policy's log-probs of the text.

        A gap beyond the bound is a RuntimeWarning where checksums have shown that the weights are right. Raises
        SyncError, naming the server, the token and both log-probs, for such a gap without checksums and for a log-prob
        that is not a number, and for a server that is lost or late.
        """
        bound, gaps = self.bound, []
        for client in clients:
            with sync_step(client, "measurement on the probe text"):
                found = client.score(self.token_ids)
            gap, at = compute_gap(expected, found)
            if gap > bound:
                self._report(client, at, expected[at], found[at], gap, bound)
            gaps.append(gap)
        self._gaps.append(max(gaps))
        return self._gaps[-1]

    def _report(self, client: SGLangClient, at: int, expected: float, found: float, gap: float, bound: float) -> None:
        where = (
            f"on the probe text's token {at + 1} (id {self.token_ids[at + 1]}) its log-prob is {found:.6f}, the"
            f" policy's {expected:.6f}; gap {gap:.3g}, bound {bound:.3g} (rollout.max_probe_logprob_gap)"
        )
        if not self._has_checksums:
            raise SyncError(f"SGLang server {client.url} does not hold the policy's weights: {where}")
        if not math.isfinite(gap):
            raise SyncError(f"SGLang server {client.url} computes no log-probs from the policy's weights: {where}")
        warnings.warn(
            f"SGLang server {client.url} holds the policy's weights, as their checksums show, but computes other"
            f" log-probs than the policy: {where}",
            RuntimeWarning,
            stacklevel=2,
        )
