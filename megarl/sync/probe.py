"""Verification of a weight sync on a probe text: the servers' log-probs against the policy's own."""

from collections.abc import Sequence

import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import SyncError, TrainBackend
from megarl.rollout.client import SGLangClient
from megarl.sync.steps import sync_step
from megarl.types import Prompt, Sequences

DEFAULT_GAP = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.5}
"""Largest gap on any token where `rollout.max_probe_logprob_gap` is null."""


def build_probe_tokens(prompts: Sequence[Prompt], vocab_size: int, length: int = 64) -> tuple[int, ...]:
    """A fixed text of `length` tokens: prompts one after the other, then tokens spread over the vocabulary.

    The task's text has likely tokens, whose log-probs change little under bfloat16 rounding; the other tokens are
    multiples of a prime, modulo the vocabulary's size.
    """
    text = [token for prompt in prompts[:length] for token in prompt.token_ids][:length]
    filler = ((7919 * (i + 1)) % vocab_size for i in range(length - len(text)))
    return (*text, *filler)


def get_max_gap(config: RolloutConfig, policy_dtype: Dtype) -> float:
    """The configured gap or, where it is null, the default of the coarser dtype of policy and servers."""
    gap = config.max_probe_logprob_gap
    return max(DEFAULT_GAP[config.dtype], DEFAULT_GAP[policy_dtype]) if gap is None else gap


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


def verify_logprobs(client: SGLangClient, token_ids: Sequence[int], expected: Sequence[float], max_gap: float) -> float:
    """The server's largest gap. Raises SyncError naming the server, the token and both log-probs."""
    found = client.score(token_ids)
    gap, at = compute_gap(expected, found)
    if gap > max_gap:
        raise SyncError(
            f"SGLang server {client.url} does not hold the policy's weights: on the probe text's token "
            f"{at + 1} (id {token_ids[at + 1]}) its log-prob is {found[at]:.6f}, "
            f"the policy's {expected[at]:.6f}; gap {gap:.3g}, allowed {max_gap:g} (rollout.max_probe_logprob_gap)"
        )
    return gap


def verify_servers(
    clients: Sequence[SGLangClient], token_ids: Sequence[int], expected: Sequence[float], max_gap: float
) -> float:
    """The largest gap of any server. Raises as `verify_logprobs`, and SyncError for a server that is lost or late."""
    gaps = []
    for client in clients:
        with sync_step(client, "verification of the weights"):
            gaps.append(verify_logprobs(client, token_ids, expected, max_gap))
    return max(gaps)
