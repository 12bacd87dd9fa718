"""The probe of a weight sync: the servers' log-probs of a fixed text, compared with the policy's own.

Checksums decide whether a server holds the policy's weights. The probe measures how differently the rollout engine and
the training engine compute with the same weights. Before anything is trained that is rounding alone; if it is more, the
two compute different models.
"""

import math
import statistics
from collections.abc import Sequence

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.run import RolloutConfig
from megarl.interfaces import SyncError, TrainBackend
from megarl.rollout.client import SGLangClient
from megarl.sync.ranks import sync_step
from megarl.types import Prompt, Sequences

LEAST_BOUND = {Dtype.float32: 2.0**-13, Dtype.bfloat16: 2.0**-7}
"""The lowest bounds, in nats: where the estimate is below them, the text tells rounding from nothing else."""
ROUNDING = {Dtype.float32: 2.0**-20, Dtype.bfloat16: 2.0**-8}
"""The relative error of what one layer computes: in float32 that of a sum of some hundred products, in bfloat16 that of
rounding the sum"""
KV_ROUNDING = 2.0**-4
"""The same with keys and values of 8 bits (e4m3)"""
NUM_ESTIMATES = 4
"""Copies of the text whose log-probs are computed with random errors"""
MARGIN = 3.0
"""The bound by the estimate. Gaps of sound engines were 0.4 to 1.1 of it (tiny, tiny_moe and SmolLM2-135M in bfloat16),
that of YaRN on one side alone 4.8 (SmolLM2-135M) to 22 (tiny)"""


def build_probe_tokens(prompts: Sequence[Prompt], vocab_size: int, length: int = 64) -> tuple[int, ...]:
    """A fixed text of `length` tokens: prompts one after the other, then tokens spread over the vocabulary.

    The task's text has likely tokens, whose log-probs change little under bfloat16 rounding; the other tokens are
    multiples of a prime, modulo the vocabulary's size.
    """
    text = [token for prompt in prompts[:length] for token in prompt.token_ids][:length]
    filler = ((7919 * (i + 1)) % vocab_size for i in range(length - len(text)))
    return (*text, *filler)


def compute_gaps(expected: Sequence[float], found: Sequence[float]) -> list[float]:
    """|difference| of each token, in nats; infinite where one is not a number."""
    pairs = zip(expected, found, strict=True)
    return [abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


class Probe:
    """Measures the gap after each sync: the median |difference| of the text's tokens, in nats.

    A median, because a token that goes to another expert, or is very unlikely, differs much by rounding alone.

    The first gap is compared with a bound that does not depend on it: `rollout.max_probe_logprob_gap`, or what random
    errors of the size of rounding do to the policy's own log-probs, times MARGIN. Later gaps are of the same two
    engines, and may grow as training makes the policy surer of its tokens: they are measured, and end nothing.
    """

    def __init__(self, token_ids: Sequence[int], config: RolloutConfig, policy_dtype: Dtype) -> None:
        self.token_ids = tuple(token_ids)
        dtypes = (config.dtype, policy_dtype)
        self._rounding = max(ROUNDING[dtype] for dtype in dtypes)
        if str(config.sglang.get("kv_cache_dtype", "")).startswith("fp"):
            self._rounding = KV_ROUNDING
        self._least = max(LEAST_BOUND[dtype] for dtype in dtypes)
        self._bound = config.max_probe_logprob_gap
        self._is_judged = False
        self._expected: list[float] = []

    def ask(self, policy: TrainBackend) -> None:
        """Compute the policy's log-probs (temperature 1) of the text and, the first time, the bound."""
        self._expected = policy.logprobs(self._repeat(1), 1.0).result()[0].tolist()
        if self._bound is None:
            errors = policy.rounded_logprobs(self._repeat(NUM_ESTIMATES), 1.0, self._rounding).result().tolist()
            gaps = [gap for row in errors for gap in compute_gaps(self._expected, row)]
            estimate = statistics.median(gaps) if gaps else 0.0
            # Where the policy itself computes no number, `measure` says so.
            self._bound = max(self._least, MARGIN * estimate if math.isfinite(estimate) else 0.0)

    def measure(self, clients: Sequence[SGLangClient]) -> float:
        """The largest gap of any server from the log-probs of `ask`.

        Raises SyncError, naming the server, a token and both log-probs, for a gap beyond the bound as the class says
        and for a log-prob that is not a number, and for a server that is lost or late.
        """
        medians = []
        for client in clients:
            with sync_step(client, "measurement on the probe text"):
                found = client.score(self.token_ids)
            medians.append(self._compare(client, found))
        self._is_judged = True
        return max(medians)

    def _repeat(self, num: int) -> Sequences:
        length = len(self.token_ids)
        return Sequences(
            tokens=torch.tensor(self.token_ids * num, dtype=torch.int64),
            lengths=torch.tensor([length] * num),
            prompt_lengths=torch.tensor([1] * num),
        )

    def _compare(self, client: SGLangClient, found: Sequence[float]) -> float:
        gaps = compute_gaps(self._expected, found)
        gap, bound = statistics.median(gaps), self._bound
        assert bound is not None, "ask comes before measure"
        at = max(range(len(gaps)), key=gaps.__getitem__)
        where = (
            f"on the probe text's token {at + 1} (id {self.token_ids[at + 1]}) its log-prob is {found[at]:.6f}, the"
            f" policy's {self._expected[at]:.6f}"
        )
        if not math.isfinite(gaps[at]):
            raise SyncError(f"SGLang server {client.url} or the policy computes no log-probs from its weights: {where}")
        if gap > bound and not self._is_judged:
            size = f"a token of the probe text differs by {gap:.3g} nats (median), where rounding explains {bound:.3g}"
            raise SyncError(
                f"SGLang server {client.url} computes another model than the policy from the same weights, which their"
                f" checksums show it to have: {size}; {where}. Look for what one of them applies and the other does"
                " not: keys of the model's config.json (those of rope, norms, activation and attention), rollout.sglang"
                f" and model.megatron. rollout.max_probe_logprob_gap={1.5 * gap:.2g} accepts the difference"
            )
        return gap
