"""Attention, sampling and products for many sequences in one call: pure torch.

Attention works on SGLang's paged cache: sequences are gathered into groups of like length, padded to the group's
longest, and the padding is masked. Sampling is by the inverse of a categorical distribution, with random numbers that
follow a key.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

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


def attend(group, query, keys, values, output, scaling, window=None, sinks=None):
    """Write one group's attention. query, output: [tokens, Hq, D]; keys, values: [slots, Hk, D]; window: how many keys
    before its own a query sees; sinks: [Hq], scores of one more key, whose value is 0.
    """
    g, lq, lk = group.shape
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    k = keys.flatten(1).index_select(0, group.slots).view(g, lk, num_kv_heads, -1).transpose(1, 2)
    v = values.flatten(1).index_select(0, group.slots).view(g, lk, num_kv_heads, -1).transpose(1, 2)
    q = query.index_select(0, group.queries).view(g, lq, num_heads, -1).transpose(1, 2)
    k, v, mask = k.to(q.dtype), v.to(q.dtype), group.mask
    if window is not None:
        first = (mask == 0).sum(-1, keepdim=True) - 1 - window
        mask = mask.masked_fill(torch.arange(lk) < first, float("-inf"))
    if sinks is not None:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        rows = (g, num_kv_heads, num_heads // num_kv_heads) if lq == 1 else (g, num_heads, lq)
        scores = sinks.to(q.dtype).view(1, *(rows[1:] if lq == 1 else (num_heads, 1)), 1).expand(*rows, 1)
        mask = torch.cat([mask.expand(*rows, lk), scores], -1)
    if lq == 1:
        # The query heads that share a key head are its query positions: no key is copied per head.
        q = q.reshape(g, num_kv_heads, num_heads // num_kv_heads, -1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        out = out.reshape(g, num_heads, -1)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=num_heads != num_kv_heads)
        out = out.transpose(1, 2).reshape(g * lq, num_heads, -1)
    if group.outputs is None:
        output.index_copy_(0, group.queries, out)
    else:
        output.index_copy_(0, group.queries[group.outputs], out[group.outputs])


# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), as signed numbers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def sample(probs, seeds, positions):
    """One index per row. probs: float [B, V], rows need not sum to 1; seeds, positions: int64 [B]; returns int32 [B].

    Index i is drawn where the cumulative sum first exceeds u * total, u of (seed, position) alone: an index of
    probability 0 is never drawn. One random number per row, where torch.multinomial takes one per entry.
    """
    cumulative = probs.float().cumsum(-1)
    total = cumulative[:, -1:]
    uniforms = compute_uniforms(seeds, positions)[:, None]
    # The product can round up to the total itself; nothing would exceed that.
    level = (uniforms * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).view(-1).to(torch.int32)


def compute_uniforms(seeds, positions):
    """float32 in [0, 1), multiples of 2**-24, of int64 seeds and positions of one shape.

    The position-th number of the splitmix64 sequence that starts at the mixed seed: neighbouring seeds are as good
    as any.
    """
    words = mix(mix(seeds) + (positions.long() + 1) * GAMMA)
    return shift_right(words, 40).float() * 2.0**-24


def mix(words):
    """splitmix64's bijection of 64-bit words, here int64; torch's products wrap around."""
    words = (words ^ shift_right(words, 30)) * FIRST
    words = (words ^ shift_right(words, 27)) * SECOND
    return words ^ shift_right(words, 31)


def shift_right(words, num_bits):
    """Zeros come in from the left, where int64's own shift repeats the sign."""
    return (words >> num_bits) & (2 ** (64 - num_bits) - 1)


def sample_limited(probs, top_ks, top_ps, min_ps, seeds, positions):
    """As `sample`, each row within its limits; a row without any is sampled as `sample` would.

    top_ks: int [B]; top_ps, min_ps: float [B]; 2**30 or the like, 1 and 0 where there is no limit.
    """
    is_limited = (top_ks < probs.shape[-1]) | (top_ps < 1) | (min_ps > 0)
    drawn = torch.empty_like(seeds, dtype=torch.int32)
    for limited in (False, True):
        # Sorting is dear, so only where there is a limit.
        rows = (is_limited == limited).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        keys = (seeds[rows], positions[rows])
        if limited:
            weights, ids = truncate(probs[rows], top_ks[rows], top_ps[rows], min_ps[rows])
            drawn[rows] = ids.gather(1, sample(weights, *keys)[:, None].long())[:, 0].int()
        else:
            drawn[rows] = sample(probs[rows], *keys)
    return drawn


def truncate(probs, top_ks, top_ps, min_ps):
    """Weights [B, K] from the likeliest on, 0 where a row's limits exclude one, not rescaled; their ids, int64 [B, K].

    Kept are the top_k likeliest, of them those that are needed to reach top_p (all from 1 on), and of them those of at
    least min_p times the likeliest.
    """
    weights, ids = probs.topk(min(probs.shape[-1], int(top_ks.max())))
    keep = torch.arange(weights.shape[-1], device=probs.device) < top_ks[:, None]
    keep &= (weights.cumsum(-1) - weights <= top_ps[:, None]) | (top_ps[:, None] >= 1)
    keep &= weights >= weights[:, :1] * min_ps[:, None]
    return weights.where(keep, 0), ids


FEW_ROWS = 48
"""Up to so many rows BLAS is faster with the weights as the left factor: with 4 rows of a model of 135M parameters 2.5
times, with 32 1.2 times"""


def is_faster(x, weight):
    """Whether `multiply` takes less time than x @ weight.T."""
    return x.dim() == 2 and 1 < len(x) <= FEW_ROWS and x.dtype is weight.dtype is torch.float32


def multiply(x, weight):
    """x [rows, K], weight [N, K] -> [rows, N]"""
    return (weight @ x.t()).t().contiguous()
