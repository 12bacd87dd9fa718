"""A stand-in for Transformer Engine's FusedAdam, which needs a GPU: AdamW with its keys and its way of keeping state.

As transformer_engine/pytorch/optimizers/fused_adam.py (2.20) does, it creates a parameter's state in its first step,
counts the steps in the parameter group as an int, knows no other state than its own by name, and allocates the state
anew in load_state_dict. Megatron takes it for Apex's, which it treats as it does Transformer Engine's.
"""

import sys
from types import ModuleType
from typing import Any

import torch

NAMES = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self, params: Any, *, lr: float, betas: Any, eps: float, weight_decay: float, adam_w_mode: bool = True
    ) -> None:
        assert adam_w_mode
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            assert isinstance(group["step"], int), "the kernel takes an int"
            (beta1, beta2), step = group["betas"], group["step"]
            first, second = 1 - beta1**step, 1 - beta2**step
            for param in group["params"]:
                state = self.state[param]
                if len(state) == 0:
                    state.update({name: torch.zeros_like(param.data) for name in NAMES})
                assert set(state) == set(NAMES), set(state)
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                update = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
                param.data.sub_(group["lr"] * (update + group["weight_decay"] * param.data))

    def state_dict(self) -> dict[str, Any]:
        state_dict: dict[str, Any] = super().state_dict()
        for state in state_dict["state"].values():
            assert set(state) <= set(NAMES), set(state)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            self.state[param] = {name: value.clone() for name, value in state.items()}


def install() -> None:
    """Have Megatron find it; call before the first import of megatron.core.optimizer."""
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    vars(optimizers).update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    sys.modules |= {"apex": apex, "apex.optimizers": optimizers}
