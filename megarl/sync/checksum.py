"""Checksums of tensors that add up over their parts, so that ranks which hold parts of a tensor make its checksum.

Sum over the words w of a matrix of w * a(row) * b(column) modulo 2^64, with odd pseudo-random a and b: a change of one
word always changes it (an odd factor has an inverse), and any other difference is missed once in 2^48 or so, as are
swapped rows, columns, words or tensors. A word is 8 bytes where the bounds of all parts of the tensor are
multiples of 8 bytes, else it is one element.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megarl.sync.plan import Bucket, Copy
from megarl.sync.slices import TensorSlice

MASK = (1 << 64) - 1
CHUNK = 1 << 20
"""Words that are processed at a time"""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@lru_cache(maxsize=64)
def _factors(salt: int, count: int, device: torch.device) -> Tensor:
    """int64 [count], odd: the finalizer of splitmix64, here with the right shifts of signed numbers."""
    x = torch.arange(1, count + 1, device=device) * -7046029254386353131 + salt
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1


def find_words(copies: Iterable[Copy]) -> dict[str, int]:
    """The word size in bytes of each target tensor's checksum, by tensor name.

    copies: all copies that go to one server rank.
    """
    words: dict[str, int] = {}
    for copy in copies:
        bounds = (copy.target.col * copy.item_size, copy.target.num_cols * copy.item_size)
        fits = all(bound % 8 == 0 for bound in bounds)
        words[copy.target_tensor] = min(words.get(copy.target_tensor, 8), 8 if fits else copy.item_size)
    return words


def compute_checksum(part: Tensor, at: TensorSlice, word: int) -> int:
    """The share of a tensor's checksum that one part of it contributes.

    part: [rows, cols] in the target's dtype. at: its region in the whole tensor. word: bytes per word.
    """
    item_size = part.element_size()
    if part.stride(1) != 1 or (word != item_size and part.stride(0) * item_size % 8) or part.data_ptr() % word:
        part = part.contiguous()
    bits = part.view(_INTEGERS[word])
    first = at.col * item_size // word
    cols = _factors(1, first + bits.shape[1], bits.device)[first:]
    rows = _factors(2, at.row + at.num_rows, bits.device)[at.row :]
    step = max(1, CHUNK // bits.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.shape[0], step):
        chunk = bits[start : start + step].to(torch.int64)
        total += ((chunk * cols).sum(1) * rows[start : start + step]).sum()
    return int(total) & MASK


def sum_checksums(
    buckets: Iterable[Bucket], words: Mapping[tuple[int, str], int], take: Callable[[Copy], Tensor]
) -> dict[tuple[int, str], int]:
    """What the buckets' copies add to each checksum, by (server rank, tensor name).

    take: gives the elements of a copy in the target's dtype.
    """
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for bucket in buckets:
        for copy in bucket.copies:
            key = (bucket.target, copy.target_tensor)
            sums[key] = (sums[key] + compute_checksum(take(copy), copy.target, words[key])) & MASK
    return dict(sums)
