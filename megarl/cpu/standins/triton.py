"""Stand-in for triton: SGLang's kernels can be defined, not launched.

SGLang decorates its kernels while it loads, computes grid sizes with `cdiv` and `next_power_of_2`, and makes constants
of `triton.language`; `triton.knobs` has nothing for it to watch.
"""

import sys
from types import ModuleType

from megarl_placeholder import get_placeholder, open_package

__version__ = "3.0.0"
__path__: list[str] = []


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


class constexpr:
    """Of triton.language"""

    def __init__(self, value):
        self.value = value


class dtype:
    """Of triton.language; torch reads it as an attribute"""


def __getattr__(name):
    return get_placeholder("triton", name)


open_package("triton")

import triton.language  # noqa: E402

vars(triton.language).update(constexpr=constexpr, dtype=dtype)
# Without placeholders: SGLang does without the names that it does not find.
knobs = sys.modules["triton.knobs"] = ModuleType("triton.knobs")
vars(knobs).update(runtime=None, compilation=None)
