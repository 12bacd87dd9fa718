"""Stand-in for triton.language: SGLang makes constants of it while it loads, and torch reads `dtype`."""

from megarl_placeholder import get_placeholder


class constexpr:
    def __init__(self, value):
        self.value = value


class dtype:
    pass


def __getattr__(name):
    return get_placeholder("triton.language", name)
