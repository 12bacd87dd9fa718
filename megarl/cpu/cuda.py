"""What Megatron finds in place of torch.cuda without CUDA; everything else falls through to torch.cuda."""

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def current_device() -> torch.device:
    return _CPU


def device_count() -> int:
    return 1


def is_available() -> bool:
    return False


def _nothing(*args: object, **kwargs: object) -> None:
    return None


synchronize = empty_cache = set_device = set_stream = reset_peak_memory_stats = _nothing


class Stream:
    """A stream, on which everything has already happened, or an event, which has; also what makes it the current one.
    All are equal.
    """

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = __exit__ = _nothing

    def record_event(self, event: "Stream | None" = None) -> "Stream":
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Stream") -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self


Event = ExternalStream = current_stream = default_stream = stream = Stream


def get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


manual_seed = manual_seed_all = torch.manual_seed
random = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
default_generators = (torch.default_generator,)


def memory_stats(*args: object) -> dict[str, int]:
    return defaultdict(int)


def memory_allocated(*args: object) -> int:
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated
nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=stream, mark=_nothing)


def compile(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """torch.compile as the identity: compiling costs minutes on a CPU and gains little there."""
    return function if function is not None else lambda decorated: decorated


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
