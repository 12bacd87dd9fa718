"""Products of a few rows with a layer's weights: pure torch."""

import torch

FEW_ROWS = 48
"""Up to so many rows BLAS is faster with the weights as the left factor: with 4 rows of a model of 135M parameters 2.5
times, with 32 1.2 times"""


def is_faster(x, weight):
    """Whether `multiply` takes less time than x @ weight.T."""
    return x.dim() == 2 and 1 < len(x) <= FEW_ROWS and x.dtype is weight.dtype is torch.float32


def multiply(x, weight):
    """x [rows, K], weight [N, K] -> [rows, N]"""
    return (weight @ x.t()).t().contiguous()
