"""Sampling of the CPU stand-ins."""

import sys

import pytest
import torch

from megarl.cpu.serving import STANDINS


@pytest.fixture(scope="module")
def categorical():
    sys.path.insert(0, str(STANDINS))
    try:
        import megarl_categorical

        yield megarl_categorical
    finally:
        sys.path.remove(str(STANDINS))


def splitmix64(state: int):
    """The reference generator (Vigna's splitmix64.c) in Python's own numbers."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        yield word ^ (word >> 31)


def test_random_numbers_are_the_reference_generators(categorical):
    # The first numbers of the state 1234567, as published with the generator.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [next_word for next_word, _ in zip(splitmix64(1234567), published, strict=False)] == published
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        # A first state of which one step gives the mixed seed.
        mixed = next(splitmix64((seed - 0x9E3779B97F4A7C15) % 2**64))
        expected = [word >> 40 for word, _ in zip(splitmix64(mixed), range(5), strict=False)]
        found = categorical.compute_uniforms(torch.full((5,), seed), torch.arange(5)) * 2**24
        assert found.long().tolist() == expected


def test_a_row_samples_the_same_wherever_it_stands_and_whoever_is_beside_it(categorical):
    generator = torch.Generator().manual_seed(2)
    probs = torch.rand(32, 300, generator=generator)
    seeds, positions = torch.randint(2**62, (32,), generator=generator), torch.arange(32) * 3
    together = categorical.sample(probs, seeds, positions)
    order = torch.randperm(32, generator=generator)
    assert torch.equal(categorical.sample(probs[order], seeds[order], positions[order]), together[order])
    for i in range(32):
        row = slice(i, i + 1)
        assert categorical.sample(probs[row], seeds[row], positions[row]).item() == together[i]
    assert not torch.equal(categorical.sample(probs, seeds + 1, positions), together)
    assert not torch.equal(categorical.sample(probs, seeds, positions + 1), together)


def test_a_draw_at_the_very_top_of_the_unit_interval_stays_inside(categorical, monkeypatch):
    top = torch.nextafter(torch.ones(3), torch.zeros(3))
    monkeypatch.setattr(categorical, "compute_uniforms", lambda seeds, positions: top)
    for size in (1, 7, 49152):
        probs = torch.full((3, size + 1), 1.0 / size)
        probs[:, -1] = 0.0
        assert (categorical.sample(probs, None, None) < size).all()


def test_a_draw_of_zero_skips_leading_zeros(categorical, monkeypatch):
    monkeypatch.setattr(categorical, "compute_uniforms", lambda seeds, positions: torch.zeros(1))
    assert categorical.sample(torch.tensor([[0.0, 0.0, 1.0]]), None, None).tolist() == [2]


LIMITS = [
    # top_k, top_p, min_p -> what is left of ROW
    (2**30, 1.0, 0.0, [0.1, 0.4, 0.0, 0.3, 0.2]),
    (1, 1.0, 0.0, [0.0, 0.4, 0.0, 0.0, 0.0]),
    (3, 1.0, 0.0, [0.0, 0.4, 0.0, 0.3, 0.2]),
    (2**30, 0.5, 0.0, [0.0, 0.4, 0.0, 0.3, 0.0]),
    (2**30, 0.39, 0.0, [0.0, 0.4, 0.0, 0.0, 0.0]),
    (2**30, 1.0, 0.6, [0.0, 0.4, 0.0, 0.3, 0.0]),
    (2, 0.8, 0.9, [0.0, 0.4, 0.0, 0.0, 0.0]),
]
ROW = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


def test_each_row_is_sampled_within_its_limits(categorical):
    num = 20000
    top_ks, top_ps, min_ps, kept = zip(*LIMITS, strict=True)
    limits = [torch.tensor(each).repeat_interleave(num) for each in (top_ks, top_ps, min_ps)]
    seeds = torch.arange(num * len(LIMITS))
    drawn = categorical.sample_limited(ROW.repeat(len(seeds), 1), *limits, seeds, seeds % 7)
    assert drawn.dtype == torch.int32
    for line, weights in zip(drawn.view(-1, num).long(), torch.tensor(kept), strict=True):
        shares = torch.bincount(line, minlength=5) / num
        # Four standard errors of a share are at most 4 * 0.5 / sqrt(20000) = 0.0142.
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.0142, rtol=0)
        assert (shares[weights == 0] == 0).all()


def test_a_row_without_limits_is_sampled_alike_beside_limited_ones(categorical):
    """A running sum in float32 passes 1 before such a tail ends, and must cut nothing."""
    probs = torch.softmax(3 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(3)), -1)
    seeds, positions = torch.arange(64), torch.arange(64)
    alone = categorical.sample(probs, seeds, positions)
    top_ks, free = torch.tensor([1, 2**30, 50, 2**30] * 16), slice(1, None, 2)
    found = categorical.sample_limited(probs, top_ks, torch.ones(64), torch.zeros(64), seeds, positions)
    assert torch.equal(found[free], alone[free])
    unlimited = categorical.sample_limited(
        probs, torch.full((64,), 2**30), torch.ones(64), torch.zeros(64), seeds, positions
    )
    assert torch.equal(unlimited, alone)


def test_a_limited_row_is_sampled_alike_beside_wider_ones(categorical):
    probs = torch.softmax(torch.randn(40, 500, generator=torch.Generator().manual_seed(5)), -1)
    keys = (torch.arange(40), torch.full((40,), 9))
    narrow = categorical.sample_limited(probs, torch.full((40,), 6), torch.ones(40), torch.zeros(40), *keys)
    top_ks, top_ps = torch.tensor([6, 2**30] * 20), torch.tensor([1.0, 0.9] * 20)
    mixed = categorical.sample_limited(probs, top_ks, top_ps, torch.zeros(40), *keys)
    assert torch.equal(mixed[::2], narrow[::2])


def test_greedy_is_argmax_where_several_are_the_likeliest(categorical):
    """Logits in bfloat16 are often equal."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)).mul(4).round()
    probs = logits.softmax(-1)
    top_ks = torch.tensor([1, 2**30] * 32)
    keys = (torch.arange(64), torch.arange(64))
    found = categorical.sample_limited(probs, top_ks, torch.ones(64), torch.zeros(64), *keys)
    assert torch.equal(found[::2].long(), probs[::2].argmax(-1))
