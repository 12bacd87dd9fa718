"""Buckets as bytes: packed from a training rank's tensors, unpacked into a server rank's, and described in JSON."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.sync.plan import Bucket, Copy
from megarl.sync.slices import TensorSlice


def fill_bucket(
    bucket: Bucket, message: Tensor, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write the copies' elements into `message`, uint8 [num_bytes], rounded to the target's dtype.

    dtypes: of the target tensors, by name.
    """
    for copy, offset in zip(bucket.copies, bucket.offsets, strict=True):
        part = message[offset : offset + copy.num_bytes].view(dtypes[copy.target_tensor])
        part.view(copy.target.num_rows, copy.target.num_cols).copy_(copy.source.of(tensors[copy.source_tensor]))


def empty_bucket(bucket: Bucket, message: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Write the elements of `message`, uint8 [num_bytes], to their places in the server rank's tensors."""
    for copy, offset in zip(bucket.copies, bucket.offsets, strict=True):
        target = tensors[copy.target_tensor]
        part = message[offset : offset + copy.num_bytes].view(target.dtype)
        copy.target.of(target).copy_(part.view(copy.target.num_rows, copy.target.num_cols))


def encode_bucket(bucket: Bucket) -> list[Any]:
    """The part of the bucket that the receiver must know, as JSON."""
    copies = [
        [copy.target_tensor, *(copy.target.row, copy.target.col, copy.target.num_rows, copy.target.num_cols)]
        for copy in bucket.copies
    ]
    return [bucket.source, bucket.target, [copy.item_size for copy in bucket.copies], copies]


def decode_bucket(encoded: list[Any]) -> Bucket:
    """The bucket that `encode_bucket` wrote, without the regions of its sources."""
    source, target, item_sizes, copies = encoded
    nowhere = TensorSlice(0, 0, 0, 0)
    made = (
        Copy("", nowhere, name, TensorSlice(*region), item_size)
        for (name, *region), item_size in zip(copies, item_sizes, strict=True)
    )
    return Bucket(source, target, tuple(made))
