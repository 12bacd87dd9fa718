"""The CPU stand-ins: sampling, attention and products against references, and what SGLang imports of them."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.cpu.serving import STANDINS
from megarl.cpu.standins import megarl_categorical as categorical
from megarl.cpu.standins import megarl_grouped_attention as attention
from megarl.cpu.standins import megarl_products as products

FREE = 2**30
"""The top_k of a row without that limit"""


def splitmix64(state: int):
    """The reference generator (Vigna's splitmix64.c) in Python's own numbers."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        yield word ^ (word >> 31)


def test_random_numbers_are_the_reference_generators():
    # The first numbers of the state 1234567, as published with the generator.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [next_word for next_word, _ in zip(splitmix64(1234567), published, strict=False)] == published
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        # A first state of which one step gives the mixed seed.
        mixed = next(splitmix64((seed - 0x9E3779B97F4A7C15) % 2**64))
        expected = [word >> 40 for word, _ in zip(splitmix64(mixed), range(5), strict=False)]
        found = categorical.compute_uniforms(torch.full((5,), seed), torch.arange(5)) * 2**24
        assert found.long().tolist() == expected


def test_a_row_samples_the_same_wherever_it_stands_and_whatever_is_beside_it():
    generator = torch.Generator().manual_seed(2)
    # A running sum of so many in float32 passes 1 before the tail ends, and must cut nothing.
    probs = torch.softmax(3 * torch.randn(64, 49152, generator=generator), -1)
    seeds, positions = torch.randint(2**62, (64,), generator=generator), torch.arange(64) * 3
    alone = categorical.sample(probs, seeds, positions)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(categorical.sample(probs[order], seeds[order], positions[order]), alone[order])
    assert torch.equal(categorical.sample(probs[5:6], seeds[5:6], positions[5:6]), alone[5:6])
    assert not torch.equal(categorical.sample(probs, seeds + 1, positions), alone)
    assert not torch.equal(categorical.sample(probs, seeds, positions + 1), alone)

    def sample_limited(top_ks: list[int], top_p: float = 1.0) -> torch.Tensor:
        top_ps = torch.where(torch.tensor(top_ks) < FREE, 1.0, top_p)
        return categorical.sample_limited(probs, torch.tensor(top_ks), top_ps, torch.zeros(64), seeds, positions)

    assert torch.equal(sample_limited([FREE] * 64), alone)
    assert torch.equal(sample_limited([6, FREE] * 32)[1::2], alone[1::2])
    assert torch.equal(sample_limited([6, FREE] * 32, 0.9)[::2], sample_limited([6] * 64)[::2])


@pytest.mark.parametrize("size", [1, 7, 49152])
def test_draws_at_both_ends_of_the_unit_interval_skip_what_has_no_probability(monkeypatch, size):
    ends = torch.tensor([0.0, torch.nextafter(torch.ones(()), torch.zeros(()))])
    monkeypatch.setattr(categorical, "compute_uniforms", lambda seeds, positions: ends)
    probs = torch.full((2, size + 2), 1.0 / size)
    probs[:, [0, -1]] = 0.0
    drawn = categorical.sample(probs, None, None)
    assert drawn[0] == 1
    assert drawn[1] <= size


def test_greedy_is_argmax_where_several_are_the_likeliest():
    """Logits in bfloat16 are often equal."""
    probs = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)).mul(4).round().softmax(-1)
    keys = (torch.arange(64), torch.arange(64))
    found = categorical.sample_limited(probs, torch.tensor([1, FREE] * 32), torch.ones(64), torch.zeros(64), *keys)
    assert torch.equal(found[::2].long(), probs[::2].argmax(-1))


LIMITS = [
    # top_k, top_p, min_p -> what is left of ROW
    (FREE, 1.0, 0.0, [0.1, 0.4, 0.0, 0.3, 0.2]),
    (1, 1.0, 0.0, [0.0, 0.4, 0.0, 0.0, 0.0]),
    (3, 1.0, 0.0, [0.0, 0.4, 0.0, 0.3, 0.2]),
    (FREE, 0.5, 0.0, [0.0, 0.4, 0.0, 0.3, 0.0]),
    (FREE, 0.39, 0.0, [0.0, 0.4, 0.0, 0.0, 0.0]),
    (FREE, 1.0, 0.6, [0.0, 0.4, 0.0, 0.3, 0.0]),
    (2, 0.8, 0.9, [0.0, 0.4, 0.0, 0.0, 0.0]),
]
ROW = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


def test_each_row_is_sampled_within_its_limits():
    num = 20000
    top_ks, top_ps, min_ps, kept = zip(*LIMITS, strict=True)
    limits = [torch.tensor(each).repeat_interleave(num) for each in (top_ks, top_ps, min_ps)]
    seeds = torch.arange(num * len(LIMITS))
    drawn = categorical.sample_limited(ROW.repeat(len(seeds), 1), *limits, seeds, seeds % 7)
    for line, weights in zip(drawn.view(-1, num).long(), torch.tensor(kept), strict=True):
        shares = torch.bincount(line, minlength=5) / num
        # Four standard errors of a share are at most 4 * 0.5 / sqrt(20000) = 0.0142.
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.0142, rtol=0)
        assert (shares[weights == 0] == 0).all()


def attend_one_by_one(q, keys, values, table, rows, num_queries, num_keys):
    out, start = torch.empty_like(q), 0
    shared = q.shape[1] // keys.shape[1]
    for row, nq, nk in zip(rows.tolist(), num_queries.tolist(), num_keys.tolist(), strict=True):
        for j in range(nq):
            slots = table[row, : nk - nq + j + 1].long()
            for head in range(q.shape[1]):
                scores = keys[slots, head // shared] @ q[start + j, head] * q.shape[2] ** -0.5
                out[start + j, head] = scores.softmax(0) @ values[slots, head // shared]
        start += nq
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("max_tokens", [1 << 15, 20])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [([1, 1, 1, 1], [7, 1, 9, 7]), ([5, 1, 3], [5, 8, 3]), ([2, 12, 1, 2], [9, 12, 30, 2]), ([3], [3])],
)
def test_groups_attend_like_one_query_at_a_time(monkeypatch, heads, max_tokens, num_queries, num_keys):
    monkeypatch.setattr(attention, "MAX_GROUP_TOKENS", max_tokens)
    torch.manual_seed(0)
    nq, nk = torch.tensor(num_queries), torch.tensor(num_keys)
    rows = torch.randperm(10)[: len(num_keys)]
    table = torch.randint(0, 200, (10, 40), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[row, : num_keys[i]] = torch.randperm(200)[: num_keys[i]].int()
    q = torch.randn(int(nq.sum()), heads[0], 16)
    keys, values = torch.randn(200, heads[1], 16), torch.randn(200, heads[1], 16)
    output = torch.full_like(q, torch.nan)
    first = nq.cumsum(0) - nq
    for members in attention.plan_groups(num_queries, num_keys):
        group = attention.build_group(members, first, nq, nk, rows, table, q.dtype)
        attention.attend(group, q, keys, values, output, None)
    expected = attend_one_by_one(q, keys, values, table, rows, nq, nk)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_groups_stay_below_the_limits_and_keep_like_lengths_together():
    lengths = [100, 20000, 110, 30000, 105, 40000]
    assert attention.plan_groups([1] * 6, lengths) == [[0, 4, 2], [1], [3], [5]]
    for group in attention.plan_groups([900, 900, 10], [900, 900, 910]):
        assert len(group) == 1 or len(group) * 910 * 900 <= attention.MAX_GROUP_AREA


@given(rows=st.integers(1, 60), inner=st.integers(1, 40), columns=st.integers(1, 80), seed=st.integers(0, 100))
def test_the_product_is_that_of_a_linear_layer_and_taken_for_a_few_rows_in_float32(rows, inner, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    found = products.multiply(x, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), atol=1e-5, rtol=1e-5)
    assert products.is_faster(x, weight) is (2 <= rows <= products.FEW_ROWS)
    assert not products.is_faster(x.bfloat16(), weight.bfloat16())
    assert not products.is_faster(x[None], weight)


def run(code: str) -> str:
    """What this prints in a process that has the stand-ins on its path as a server has."""
    environment = os.environ | {"PYTHONPATH": str(STANDINS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_new_cache_slots_are_written_into_each_requests_row():
    out = run("""
import torch, sgl_kernel
table = torch.zeros(4, 6, dtype=torch.int32)
start, end = torch.tensor([1, 0, 5]), torch.tensor([3, 1, 5])
slots = torch.tensor([7, 8, 9])
sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([2, 0, 1]), table, start, end, slots, 6)
print(table.tolist())
""")
    assert out == "[[9, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 0, 0, 0], [0, 0, 0, 0, 0, 0]]"


def test_names_without_a_body_raise_when_called():
    out = run("""
import sgl_kernel, torchvision, triton, triton.language as tl
from sgl_kernel.flash_attn import flash_attn_varlen_func
for call in (
    lambda: sgl_kernel.silu_and_mul(1), lambda: flash_attn_varlen_func(), lambda: torchvision.transforms.Resize(3),
    lambda: triton.jit(lambda x: x)[(1,)](2), lambda: tl.load(0),
):
    try:
        call()
    except NotImplementedError as error:
        assert "megarl" in str(error) and "stand-in" in str(error), error
        print("raised")
""")
    assert out.split() == ["raised"] * 5
