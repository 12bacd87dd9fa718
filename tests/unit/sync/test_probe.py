"""The probe text of a weight sync: what it measures, and when it ends a run."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.backend import Done
from torch import Tensor

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import SyncError
from megarl.sync.sync import Probe
from megarl.types import Sequences

TOKENS = tuple(range(5, 69))
EXPECTED = torch.linspace(-0.1, -12.0, len(TOKENS) - 1)


class Policy:
    """Its log-probs change by `rounding` nats where layers compute with random errors."""

    def __init__(self, rounding: float) -> None:
        self.rounding = rounding
        self.units: list[float] = []

    def logprobs(self, sequences: Sequences, temperature: float) -> Done[Tensor]:
        return Done(EXPECTED[None])

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Done[Tensor]:
        assert sequences.lengths.tolist() == [len(TOKENS)] * sequences.num_samples
        self.units.append(unit)
        return Done(EXPECTED + self.rounding * draw_noise(sequences.num_samples))


def draw_noise(num: int, seed: int = 0) -> Tensor:
    """[num, tokens]: normal, the median of its size 1."""
    return torch.randn(num, len(EXPECTED), generator=torch.Generator().manual_seed(seed)) / 0.6745


def build_probe(**fields: Any) -> Probe:
    return Probe(TOKENS, RolloutConfig(dtype=Dtype.bfloat16, **fields), Dtype.bfloat16)


def publish(probe: Probe, policy: Policy, *found: Tensor) -> float:
    """A sync with a server for each of these log-probs; the gap."""
    probe.ask(policy)  # type: ignore[arg-type]
    return probe.measure([SimpleNamespace(url="http://server", score=lambda _, x=each: x.tolist()) for each in found])


def test_what_rounding_explains_passes_with_a_few_tokens_far_away_and_a_text_of_unlikely_tokens():
    # Half of the change by random errors to all of it was found; routing flips move single tokens by a nat and more.
    flips = torch.zeros(len(EXPECTED))
    flips[::8] = 2.0
    for seed in range(20):
        noise = draw_noise(1, seed + 1)[0]
        for scale in (0.5, 1.0):
            gap = publish(build_probe(), Policy(0.1), EXPECTED + 0.1 * scale * noise + flips)
            assert gap == pytest.approx(0.1 * scale, rel=0.7)


@pytest.mark.parametrize("rounding", [1e-4, 0.01, 0.06])
def test_a_mismatch_at_the_first_sync_ends_the_run_and_says_what_to_look_at_and_which_key_accepts_it(rounding: float):
    # The median of YaRN on one side alone (SmolLM2-135M) and what random errors did to it: 0.31 and 0.066.
    yarn = EXPECTED + 0.31 * draw_noise(1, 9)[0]
    sound = EXPECTED + rounding * draw_noise(1, 8)[0]
    with pytest.raises(SyncError) as error:
        publish(build_probe(), Policy(rounding), sound, yarn)
    text = str(error.value)
    start = "SGLang server http://server computes another model than the policy from the same weights"
    numbers = r".*differs by 0\.\d+ nats \(median\), where rounding explains 0\.\d+; on the probe text's token"
    assert re.match(start + numbers, text)
    assert "keys of the model's config.json" in text
    (accepted,) = re.findall(r"rollout.max_probe_logprob_gap=(\S+) accepts", text)
    policy = Policy(rounding)
    publish(build_probe(max_probe_logprob_gap=float(accepted)), policy, sound, yarn)
    assert policy.units == []


def test_a_gap_that_grows_after_the_first_sync_is_measured_and_ends_nothing_but_one_without_a_number_does():
    probe, policy = build_probe(), Policy(0.01)
    found = [publish(probe, policy, EXPECTED + gap) for gap in (0.01, 0.1, 3.0)]
    assert found == pytest.approx([0.01, 0.1, 3.0], rel=1e-3)
    # The estimate costs one pass, at the first sync alone.
    assert len(policy.units) == 1
    broken = EXPECTED.clone()
    broken[7] = math.nan
    with pytest.raises(SyncError, match=r"token 8 \(id 13\) its log-prob is nan"):
        publish(probe, policy, broken)
    # Nor is it accepted as rounding where the policy's are none.
    with pytest.raises(SyncError, match="or the policy computes no log-probs"):
        publish(build_probe(), Policy(math.nan), EXPECTED * math.nan)


@pytest.mark.parametrize(
    ("server", "policy_dtype", "unit"),
    [
        ({"dtype": Dtype.float32}, Dtype.float32, 2.0**-20),
        ({"dtype": Dtype.bfloat16}, Dtype.float32, 2.0**-8),
        ({"dtype": Dtype.float32}, Dtype.bfloat16, 2.0**-8),
        ({"dtype": Dtype.bfloat16, "sglang": {"kv_cache_dtype": "fp8_e4m3"}}, Dtype.bfloat16, 2.0**-4),
    ],
)
def test_random_errors_have_the_size_of_the_coarser_dtype_and_of_an_fp8_cache(server, policy_dtype, unit):
    policy = Policy(0.0)
    publish(Probe(TOKENS, RolloutConfig(**server), policy_dtype), policy, EXPECTED)
    assert policy.units == [unit]
