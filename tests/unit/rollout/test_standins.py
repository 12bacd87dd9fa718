"""The CPU stand-ins: sampling, the groups of attention, and what SGLang imports of them.

What attention and products compute is compared with the training engine by tests/e2e/test_contract.py.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.cpu.process import STANDINS
from megarl.cpu.standins import megarl_kernels as kernels

FREE = 2**30
"""The top_k of a row without that limit"""


@pytest.mark.parametrize(
    ("seed", "words"),
    [(0, [14819496, 7239838, 443485]), (-1, [10844024, 11830564, 5338776]), (2**63 - 1, [9349088, 11229934, 468783])],
)
def test_random_numbers_are_those_of_earlier_runs(seed, words):
    """The upper 24 bits of the numbers of Vigna's splitmix64.c."""
    found = kernels.compute_uniforms(torch.full((3,), seed), torch.arange(3)) * 2**24
    assert found.long().tolist() == words


def test_a_row_samples_the_same_wherever_it_stands_and_whatever_is_beside_it():
    generator = torch.Generator().manual_seed(2)
    # A running sum of so many in float32 passes 1 before the tail ends, and must cut nothing.
    probs = torch.softmax(3 * torch.randn(64, 49152, generator=generator), -1)
    seeds, positions = torch.randint(2**62, (64,), generator=generator), torch.arange(64) * 3
    alone = kernels.sample(probs, seeds, positions)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(kernels.sample(probs[order], seeds[order], positions[order]), alone[order])
    assert torch.equal(kernels.sample(probs[5:6], seeds[5:6], positions[5:6]), alone[5:6])
    assert not torch.equal(kernels.sample(probs, seeds + 1, positions), alone)
    assert not torch.equal(kernels.sample(probs, seeds, positions + 1), alone)

    def sample_limited(top_ks: list[int], top_p: float = 1.0) -> torch.Tensor:
        top_ps = torch.where(torch.tensor(top_ks) < FREE, 1.0, top_p)
        return kernels.sample_limited(probs, torch.tensor(top_ks), top_ps, torch.zeros(64), seeds, positions)

    assert torch.equal(sample_limited([FREE] * 64), alone)
    assert torch.equal(sample_limited([6, FREE] * 32)[1::2], alone[1::2])
    assert torch.equal(sample_limited([6, FREE] * 32, 0.9)[::2], sample_limited([6] * 64)[::2])


@pytest.mark.parametrize("size", [1, 7, 49152])
def test_draws_at_both_ends_of_the_unit_interval_skip_what_has_no_probability(monkeypatch, size):
    ends = torch.tensor([0.0, torch.nextafter(torch.ones(()), torch.zeros(()))])
    monkeypatch.setattr(kernels, "compute_uniforms", lambda seeds, positions: ends)
    probs = torch.full((2, size + 2), 1.0 / size)
    probs[:, [0, -1]] = 0.0
    drawn = kernels.sample(probs, None, None)
    assert drawn[0] == 1
    assert drawn[1] <= size


def test_greedy_is_argmax_where_several_are_the_likeliest():
    """Logits in bfloat16 are often equal."""
    probs = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)).mul(4).round().softmax(-1)
    keys = (torch.arange(64), torch.arange(64))
    found = kernels.sample_limited(probs, torch.tensor([1, FREE] * 32), torch.ones(64), torch.zeros(64), *keys)
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
    drawn = kernels.sample_limited(ROW.repeat(len(seeds), 1), *limits, seeds, seeds % 7)
    for line, weights in zip(drawn.view(-1, num).long(), torch.tensor(kept), strict=True):
        shares = torch.bincount(line, minlength=5) / num
        # Four standard errors of a share are at most 4 * 0.5 / sqrt(20000) = 0.0142.
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.0142, rtol=0)
        assert (shares[weights == 0] == 0).all()


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 50000)), min_size=1, max_size=8))
def test_groups_of_attention_hold_each_sequence_once_and_stay_below_the_limits_of_memory(sizes):
    num_queries, num_keys = [nq for nq, _ in sizes], [nq + more for nq, more in sizes]
    groups = kernels.plan_groups(num_queries, num_keys)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        most_queries, most_keys = max(num_queries[i] for i in group), max(num_keys[i] for i in group)
        assert len(group) == 1 or len(group) * most_keys <= kernels.MAX_GROUP_TOKENS
        assert len(group) == 1 or len(group) * most_keys * most_queries <= kernels.MAX_GROUP_AREA


def test_new_cache_slots_are_written_into_each_requests_row_and_names_without_a_body_raise_when_called():
    code = """
import sgl_kernel, torch, torchvision, triton, triton.language as tl
from sgl_kernel.flash_attn import flash_attn_varlen_func
table = torch.zeros(4, 6, dtype=torch.int32)
start, end = torch.tensor([1, 0, 5]), torch.tensor([3, 1, 5])
slots = torch.tensor([7, 8, 9])
sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([2, 0, 1]), table, start, end, slots, 6)
print(table.tolist())
for call in (
    lambda: sgl_kernel.silu_and_mul(1), lambda: flash_attn_varlen_func(), lambda: torchvision.transforms.Resize(3),
    lambda: triton.jit(lambda x: x)[(1,)](2), lambda: tl.load(0),
):
    try:
        call()
    except NotImplementedError as error:
        assert "megarl" in str(error) and "stand-in" in str(error), error
        print("raised")
"""
    # As a server has them on its path.
    environment = os.environ | {"PYTHONPATH": str(STANDINS)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=-1, text=True).stdout
    table = "[[9, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 0, 0, 0], [0, 0, 0, 0, 0, 0]]"
    assert out.splitlines() == [table, *["raised"] * 5]
