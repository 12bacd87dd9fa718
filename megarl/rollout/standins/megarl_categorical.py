"""Sampling from a categorical distribution by its inverse: pure torch."""

import torch


def sample(probs):
    """One index per row. probs: float [B, V], rows sum to about 1; returns int32 [B].

    Index i is drawn where the cumulative sum first exceeds u * total, u uniform in [0, 1): an index of
    probability 0 is never drawn. One random number per row, where torch.multinomial takes one per entry.
    """
    cumulative = probs.float().cumsum(-1)
    total = cumulative[:, -1:]
    # The product can round up to the total itself; nothing would exceed that.
    level = (torch.rand_like(total) * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).view(-1).to(torch.int32)
