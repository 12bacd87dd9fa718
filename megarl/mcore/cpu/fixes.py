"""Corrections of three Megatron-Core 0.16.1 modules for machines without CUDA, applied by the import hook."""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch


def _fix_random(module: ModuleType) -> None:
    """tensor_parallel.random keeps its random states in the CPU's generator."""

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # Without the stock check that the CPU's state stays the same meanwhile: here it is the tracked state.
        if name not in self.states_:
            raise KeyError(f"random state {name!r} is not added; known: {sorted(self.states_)}")
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)

    vars(module).update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    module.CudaRNGStatesTracker.fork = fork


def _fix_mappings(module: ModuleType) -> None:
    """tensor_parallel.mappings gathers and scatters parts of different sizes, which Gloo cannot: they are padded."""
    stock_gather: Callable[..., torch.Tensor] = module._gather_along_first_dim
    stock_scatter: Callable[..., torch.Tensor] = module._reduce_scatter_along_first_dim

    def pad(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(*output_split_sizes, 1)
        parts = stock_gather(pad(input_, longest), group).split(longest)  # type: ignore[no-untyped-call]
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(input_, group, input_split_sizes, use_global_buffer)
        longest = max(*input_split_sizes, 1)
        parts = input_.split(input_split_sizes)  # type: ignore[no-untyped-call]
        padded = torch.cat([pad(part, longest) for part in parts])
        return stock_scatter(padded, group)[: input_split_sizes[group.rank()]]

    vars(module).update(_gather_along_first_dim=gather, _reduce_scatter_along_first_dim=scatter)


def _fix_grad_buffer(module: ModuleType) -> None:
    """distributed.param_and_grad_buffer sums and gathers in place where a group has one rank: Gloo would copy all
    gradients twice.
    """

    def skip_alone(stock: Callable[..., Any]) -> Callable[..., Any]:
        def collective(output: torch.Tensor, input_: torch.Tensor, *, group: Any, **options: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input_.data_ptr():
                return None
            return stock(output, input_, group=group, **options)

        return collective

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(module, name, skip_alone(getattr(module, name)))


FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.distributed.param_and_grad_buffer": _fix_grad_buffer,
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.tensor_parallel.random": _fix_random,
}
