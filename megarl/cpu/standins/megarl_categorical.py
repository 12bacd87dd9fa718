"""Sampling from a categorical distribution by its inverse, with random numbers that follow a key: pure torch."""

import torch

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
