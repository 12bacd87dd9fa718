"""Stand-in for triton: SGLang's kernels can be defined, not launched.

SGLang decorates its kernels while it loads and computes grid sizes with `cdiv` and `next_power_of_2`.
"""

from megarl_placeholder import get_placeholder, open_package

__version__ = "3.0.0"


def cdiv(x, y):
    return -(-x // y)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Kernel:
    """A decorated function; a launch raises."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __getitem__(self, grid):
        raise NotImplementedError(
            f"the Triton kernel {self.__name__} was launched without CUDA; megarl's triton is a stand-in"
        )

    def __call__(self, *args, **kwargs):
        return self[None]


def jit(fn=None, **options):
    return Kernel(fn) if callable(fn) else Kernel


def autotune(*args, **options):
    return lambda kernel: kernel


heuristics = autotune


class Config:
    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs


def __getattr__(name):
    return get_placeholder("triton", name)


open_package("triton")

import triton.language  # noqa: E402, F401 - torch reads it as an attribute
