"""Stand-in for SGLang's compiled kernels, which have no CPU wheel.

SGLang calls one of them on its CPU path without AMX; it has a body here. Every other name raises when called.
"""

import torch
from megarl_placeholder import get_placeholder, open_package

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write each request's new cache slots into its row of `req_to_token`.

    req_pool_indices, start_offset, end_offset: int [B]; req_to_token: int [rows, pool_len], written in place
    at [row, start:end]; out_cache_loc: int [sum of end - start], request by request.
    """
    lengths = (end_offset - start_offset).long()
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    columns = torch.arange(rows.numel()) - (first - start_offset.long()).repeat_interleave(lengths)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def __getattr__(name):
    return get_placeholder("sgl_kernel", name)


open_package("sgl_kernel")
