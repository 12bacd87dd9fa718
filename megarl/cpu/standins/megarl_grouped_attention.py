"""Attention for many sequences in one call: pure torch, on SGLang's paged cache.

Sequences are gathered into groups of like length, padded to the group's longest, and the padding is masked.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_GROUP_AREA = 1 << 20
"""Most padded query x key positions of a group: bounds the memory of its mask and scores."""
MAX_GROUP_TOKENS = 1 << 15
"""Most padded key positions of a group: bounds the memory of its gathered keys and values."""


@dataclass(frozen=True)
class Group:
    """Sequences attended together: g of them, padded to Lq queries and Lk keys."""

    queries: torch.Tensor
    """int64 [g * Lq]: rows of the flat query tensor; padding repeats the sequence's last row"""
    slots: torch.Tensor
    """int64 [g * Lk]: rows of the KV cache; padding repeats a valid one"""
    mask: torch.Tensor
    """float [g, 1, Lq, Lk], added to the scores: 0 or -inf, in the model's dtype"""
    outputs: torch.Tensor | None
    """int64: the entries of `queries` that are no padding; None where all are"""
    shape: tuple[int, int, int]
    """g, Lq, Lk"""


def plan_groups(num_queries, num_keys):
    """Lists of sequence numbers, each list small enough for one call; like lengths go together."""
    order = sorted(range(len(num_keys)), key=lambda i: (num_keys[i], num_queries[i]))
    groups, current, longest_query = [], [], 0
    for i in order:
        longest_query = max(longest_query, num_queries[i])
        size = (len(current) + 1) * num_keys[i]
        if current and (size > MAX_GROUP_TOKENS or size * longest_query > MAX_GROUP_AREA):
            groups.append(current)
            current, longest_query = [], num_queries[i]
        current.append(i)
    return [*groups, current] if current else groups


def build_group(members, first_query, num_queries, num_keys, rows, req_to_token, dtype):
    """The Group of these sequences; the tensors are int64 [number of sequences] on the CPU."""
    members = torch.tensor(members)
    nq, nk = num_queries[members, None], num_keys[members, None]
    lq, lk = int(nq.max()), int(nk.max())
    query, key = torch.arange(lq), torch.arange(lk)
    queries = first_query[members, None] + torch.minimum(query, nq - 1)
    slots = req_to_token[rows[members, None], torch.minimum(key, nk - 1)].long()
    # Query j of a sequence stands at position nk - nq + j and sees the keys up to there.
    visible = key <= (nk - nq + torch.minimum(query, nq - 1))[:, :, None]
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[:, None]
    real = (query < nq).view(-1)
    outputs = None if bool(real.all()) else real.nonzero().view(-1)
    return Group(queries.view(-1), slots.reshape(-1), mask, outputs, (len(members), lq, lk))


def attend(group, query, keys, values, output, scaling):
    """Write one group's attention. query, output: [tokens, Hq, D]; keys, values: [slots, Hk, D]."""
    g, lq, lk = group.shape
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    k = keys.flatten(1).index_select(0, group.slots).view(g, lk, num_kv_heads, -1).transpose(1, 2)
    v = values.flatten(1).index_select(0, group.slots).view(g, lk, num_kv_heads, -1).transpose(1, 2)
    q = query.index_select(0, group.queries).view(g, lq, num_heads, -1).transpose(1, 2)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if lq == 1:
        # The query heads that share a key head are its query positions: no key is copied per head.
        q = q.reshape(g, num_kv_heads, num_heads // num_kv_heads, -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        out = out.reshape(g, num_heads, -1)
    else:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, scale=scaling, enable_gqa=num_heads != num_kv_heads
        )
        out = out.transpose(1, 2).reshape(g * lq, num_heads, -1)
    if group.outputs is None:
        output.index_copy_(0, group.queries, out)
    else:
        output.index_copy_(0, group.queries[group.outputs], out[group.outputs])
