"""The probe text of a weight sync: what it measures, when it warns, and when it ends a run."""

import math
import statistics
import warnings

import pytest

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.interfaces import SyncError
from megarl.sync.probe import Probe, build_probe_tokens, compute_bound, compute_gap
from megarl.types import Prompt

SMOLLM2 = (0.24, 0.16, 0.44, 0.10, 0.20, 0.58, 0.12, 0.11, 0.20)
"""Gaps of the first syncs of a run of SmolLM2-135M in bfloat16, whose checksums were all right."""
EXPECTED = (-0.5, -0.25, -1.0)


class Client:
    """A server whose log-prob of the last token is `gap` away from the policy's."""

    url = "http://server"

    def __init__(self) -> None:
        self.gap = 0.0

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return [*EXPECTED[:-1], EXPECTED[-1] - self.gap]


def build_probe(has_checksums: bool = True, dtype: Dtype = Dtype.bfloat16, bound: float | None = None) -> Probe:
    config = RolloutConfig(dtype=dtype, max_probe_logprob_gap=bound)
    return Probe((5, 6, 7, 8), config, dtype, has_checksums=has_checksums)


def measure(probe: Probe, gap: float) -> tuple[float, list[str]]:
    """The gap found, and the warnings."""
    client = Client()
    client.gap = gap
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = probe.measure([Client(), client], EXPECTED)
    return found, [str(each.message) for each in caught]


def test_the_largest_gap_is_found_at_its_position():
    gap, at = compute_gap([-0.5, -2.0, -3.0], [-0.6, -2.5, -3.1])
    assert gap == pytest.approx(0.25)  # 0.5 / 2
    assert at == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_an_infinite_gap(bad):
    assert compute_gap([-1.0, -2.0], [-1.0, bad]) == (math.inf, 1)


def test_the_bound_is_the_dtypes_least_or_six_deviations_above_the_mean_of_the_earlier_gaps():
    assert compute_bound(1.0, ()) == 1.0
    # Mean 2, standard deviation 1.
    assert compute_bound(1.0, (1.0, 3.0)) == 8.0
    assert compute_bound(1.0, (0.1, 0.3)) == 1.0


def test_the_bound_is_of_the_coarser_dtype_unless_it_is_given():
    half, full = RolloutConfig(dtype=Dtype.bfloat16), RolloutConfig(dtype=Dtype.float32)
    for config, policy in ((half, Dtype.float32), (full, Dtype.bfloat16)):
        assert Probe((5, 6), config, policy, has_checksums=True).bound == 1.0
    assert build_probe(dtype=Dtype.float32).bound == 2.0**-13
    assert build_probe(bound=0.3).bound == 0.3


def test_the_noise_of_a_run_in_bfloat16_neither_warns_nor_ends_it():
    for has_checksums in (True, False):
        probe = build_probe(has_checksums)
        assert [measure(probe, gap) for gap in SMOLLM2] == [(pytest.approx(gap), []) for gap in SMOLLM2]


def test_with_checksums_a_gap_beyond_the_bound_is_a_warning_that_names_the_server_and_the_token():
    probe = build_probe()
    found, (text,) = measure(probe, 3.0)
    assert found == 3.0
    assert text.startswith(
        "SGLang server http://server holds the policy's weights, as their checksums show, but computes other"
    )
    assert "token 3 (id 8) its log-prob is -4.000000, the policy's -1.000000; gap 3, bound 1 " in text


def test_larger_noise_warns_only_until_its_spread_is_known():
    probe = build_probe()
    gaps = [scale * 4 for scale in SMOLLM2 * 3]
    num_warnings = [len(measure(probe, gap)[1]) for gap in gaps]
    assert sum(num_warnings[:6]) > 0
    assert sum(num_warnings[6:]) == 0
    assert probe.bound == pytest.approx(statistics.fmean(gaps) + 6 * statistics.pstdev(gaps))


def test_without_checksums_a_gap_beyond_the_bound_is_an_error_and_does_not_raise_the_bound():
    probe = build_probe(has_checksums=False)
    measure(probe, 0.2)
    for _ in range(2):
        with pytest.raises(SyncError, match=r"http://server does not hold the policy's weights: .*gap 3, bound 1 "):
            measure(probe, 3.0)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_server_that_computes_no_number_ends_the_run(has_checksums):
    with pytest.raises(SyncError, match=r"its log-prob is nan"):
        measure(build_probe(has_checksums), math.nan)


def test_the_probe_text_begins_with_the_prompts_and_visits_the_vocabulary():
    prompts = [Prompt("p", "ab", (5, 6), ""), Prompt("q", "c", (7,), "")]
    tokens = build_probe_tokens(prompts, 55)
    assert tokens == build_probe_tokens(prompts, 55)
    assert tokens[:3] == (5, 6, 7)
    assert len(tokens) == 64
    assert all(0 <= token < 55 for token in tokens)
    assert len(set(tokens)) > 40
