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


def _initial_adam_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """What torch.optim.AdamW holds of a parameter before its first step."""
    return {
        # The fused kernel reads it where the parameter is.
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
    }


def _fix_distrib_optimizer(module: ModuleType) -> None:
    """The distributed optimizer's load, for torch.optim.AdamW in place of the fused Adam of TE or Apex.

    The stock one copies every key of the optimizer state, `step` included, from a checkpoint that has no
    `step` per parameter, and leaves one step tensor shared by all parameters, so that each step counts once
    per parameter. It takes `fused` and `foreach` from the checkpoint too, which TE's or Apex's does not have.
    """
    cls = module.DistributedOptimizer
    stock_load = cls.load_state_dict
    stock_sharded_state_dict = cls.sharded_state_dict

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        destination = {"param": main_param, **self.optimizer.state[main_param]}
        with torch.no_grad():
            for key, value in destination.items():
                if key in tensors:
                    value.copy_(tensors[key])

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        kernels = [{key: group.get(key) for key in ("fused", "foreach")} for group in self.optimizer.param_groups]
        stock_load(self, state_dict)
        for group, kernel in zip(self.optimizer.param_groups, kernels, strict=True):
            group.update(kernel)
        for param, state in self.optimizer.state.items():
            if "step" in state:
                state["step"] = state["step"].to(param.device, torch.float32, copy=True)

    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **rest: Any) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    self.optimizer.state[param].update(_initial_adam_state(param))
        return stock_sharded_state_dict(self, model_sharded_state_dict, is_loading, **rest)

    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict
    cls.sharded_state_dict = sharded_state_dict


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


FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.tensor_parallel.random": _fix_random,
    "megatron.core.optimizer.distrib_optimizer": _fix_distrib_optimizer,
}
