"""megarl: reinforcement learning of large language models on Megatron-Core, SGLang and Ray."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`megarl.train(overrides)` and `megarl.compose(...)` (megarl/api.py), imported when they are first used."""
    if name == "train":
        # The module, which is callable: whoever imports megarl.train sets this name to it.
        return importlib.import_module(f"{__name__}.{name}")
    if name == "compose":
        return importlib.import_module(f"{__name__}.api").compose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
