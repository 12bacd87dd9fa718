"""Megatron's AdamW with sharded state and float32 master weights, and its learning-rate schedule."""

from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.schema.roles import LrDecay, OptimizerConfig
from megarl.mcore.distributed_optimizer import ReshardableOptimizer
from megarl.timeline import span

# get_megatron_optimizer makes it under this name.
megatron.core.optimizer.DistributedOptimizer = ReshardableOptimizer


def build_optimizer(
    config: OptimizerConfig, transformer: TransformerConfig, model: list[torch.nn.Module]
) -> MegatronOptimizer:
    """The optimizer of a model wrapped by `wrap_chunks`. Biases and norms are not decayed."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=transformer.bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=bool(config.overlap_param_gather),
            log_num_zeros_in_grad=False,
        ),
        model,
    )
    if USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            # torch's one-kernel AdamW (of float32 tensors, as all are here): on a CPU several times as fast as its
            # default loop over tensors; on a GPU without the temporaries of its default there, foreach, which are as
            # large as the shard of the weights, and which megarl/plan/ does not count.
            group["fused"] = True
            group["foreach"] = False
    shown: Any = optimizer
    shown.step = span("optimizer step")(optimizer.step)
    return optimizer


ADAM_SOURCES = {"transformer_engine": "Transformer Engine's fused Adam", "apex": "Apex's fused Adam"}


def describe_adam(optimizer: MegatronOptimizer) -> str:
    """Whose Adam updates the weights: Transformer Engine's where Megatron can import it, else Apex's, else torch's."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    name = ADAM_SOURCES.get(type(part).__module__.split(".")[0])
    if name is None:
        name = "torch's fused AdamW" if part.param_groups[0].get("fused") else "torch's AdamW"
    return name


def build_scheduler(config: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule; `step(1)` comes before each optimizer step: a warm-up's first step has a rate above 0.

    Raises ValueError where decay needs `decay_steps` beyond the warm-up and does not have it.
    """
    constant = config.decay is LrDecay.constant
    decay_steps = config.decay_steps if not constant else config.warmup_steps + 1
    if decay_steps is None or decay_steps <= config.warmup_steps:
        raise ValueError(
            f"optimizer.decay={config.decay.value} needs optimizer.decay_steps greater than "
            f"optimizer.warmup_steps={config.warmup_steps}; found {config.decay_steps}"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
