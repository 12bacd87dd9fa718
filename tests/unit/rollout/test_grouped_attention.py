"""The attention that the CPU stand-ins give SGLang, against one softmax per query."""

import sys

import pytest
import torch

from megarl.cpu.serving import STANDINS


@pytest.fixture(scope="module")
def attention():
    sys.path.insert(0, str(STANDINS))
    try:
        import megarl_grouped_attention

        yield megarl_grouped_attention
    finally:
        sys.path.remove(str(STANDINS))


def compute_reference(q, keys, values, table, rows, num_queries, num_keys):
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
def test_groups_attend_like_one_query_at_a_time(attention, monkeypatch, heads, max_tokens, num_queries, num_keys):
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
    groups = attention.plan_groups(num_queries, num_keys)
    assert sorted(i for group in groups for i in group) == list(range(len(num_keys)))
    first = nq.cumsum(0) - nq
    for members in groups:
        group = attention.build_group(members, first, nq, nk, rows, table, q.dtype)
        attention.attend(group, q, keys, values, output, None)
    expected = compute_reference(q, keys, values, table, rows, nq, nk)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_groups_stay_below_the_limits_and_keep_like_lengths_together(attention):
    lengths = [100, 20000, 110, 30000, 105, 40000]
    groups = attention.plan_groups([1] * 6, lengths)
    assert groups == [[0, 4, 2], [1], [3], [5]]
    long_prompts = attention.plan_groups([900, 900, 10], [900, 900, 910])
    assert all(
        len(g) == 1 or len(g) * max([900, 900, 910][i] for i in g) * 900 <= attention.MAX_GROUP_AREA
        for g in long_prompts
    )
