"""Megatron's configuration of a mixture of experts, and the marks on its weights that its training needs."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.model.layer_spec import find_layers
from megarl.models.architecture import Architecture


def build_expert_fields(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """The fields of TransformerConfig about experts that the checkpoint, the layout or this engine decides."""
    fields: dict[str, Any] = {
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }
    experts = arch.experts
    if experts is None:
        return fields
    if not arch.has_unlike_layers:
        # There is no dense layer: the same size in both fields keeps the experts on this very configuration, of
        # which Megatron would make them a copy.
        fields["ffn_hidden_size"] = experts.ffn_size
    else:
        fields["moe_layer_freq"] = [int(arch.has_experts(layer)) for layer in range(arch.num_layers)]
    return {
        **fields,
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_size,
        # The router here adds its own terms by moe_aux_loss_coeff and moe_z_loss_coeff.
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": experts.score_function,
        # The softmax over the chosen experts is the softmax over all of them, normalized to the chosen ones. Of the
        # sigmoid Megatron normalizes always.
        "moe_router_pre_softmax": experts.score_function == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_enable_expert_bias": experts.has_correction_bias,
        # The router counts no tokens for an update: the bias is the checkpoint's.
        **({"moe_router_bias_update_rate": 0.0} if experts.has_correction_bias else {}),
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_grouped_gemm": find_layers().groups_experts,
    }


def check_expert_options(megatron: dict[str, Any], with_experts: bool) -> Iterator[str]:
    """What is wrong with model.megatron's keys about experts; one message each."""
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = megatron.get(key)
        if value is not None and not with_experts:
            yield f"model.megatron.{key}: found {value!r}, but the model has no experts; leave it out"
        elif value is not None and (not isinstance(value, int | float) or value < 0):
            yield f"model.megatron.{key}: found {value!r}; it must be a number of 0 or more"
    dispatcher = megatron.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher not in ("alltoall", "flex"):
        yield (
            f"model.megatron.moe_token_dispatcher_type: found {dispatcher!r}; it must be alltoall or flex, since"
            " micro-batches differ in length"
        )
    if "moe" in (megatron.get("recompute_modules") or ()):
        # The router is told its micro-batch by the layer, which is not run again.
        yield "model.megatron.recompute_modules: found moe, which is not built here; recompute=full is"


def mark_experts(model: torch.nn.Module) -> None:
    """Mark the experts' weights as such: their gradients are summed over the ranks that hold the same experts.

    Megatron does so only where expert parallelism is above 1. Without it and with an expert-tensor parallelism other
    than the tensor parallelism, the tensor-parallel ranks, each of which sends its own part of the sequence, would
    silently keep different gradients of the same weights.
    """
    for name, param in model.named_parameters():
        if ".mlp.experts." in name:
            setattr(param, "allreduce", False)  # noqa: B010
            if not hasattr(param, "tensor_model_parallel"):
                # Not a copy of another rank's weight, whatever the tensor parallelism of the rest of the model.
                set_tensor_model_parallel_attributes(param, True, 0 if "linear_fc1" in name else 1, 1)
