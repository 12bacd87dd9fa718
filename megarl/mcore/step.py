"""Forward and backward passes over micro-batches through Megatron's own schedules.

Gradients are the sum over micro-batches and data-parallel ranks, undivided: losses come already divided by
the counts of the whole minibatch, so that the gradient does not depend on how the minibatch was cut.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.algo.losses import LossOutput
from megarl.mcore.batch import PackedBatch
from megarl.timeline import span

HeadFunction = Callable[[Tensor, PackedBatch], tuple[Tensor, Any]]
"""Output of the last stage and its micro-batch -> the loss (a scalar) and whatever is to be kept of it."""


def sum_gradients(config: TransformerConfig, model: Sequence[torch.nn.Module]) -> None:
    """Have Megatron reduce gradients by pure sums (calculate_per_token_loss is on; see model.build_config), and
    only after the last micro-batch.
    """

    def finalize(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
        # Megatron would divide by num_tokens here.
        finalize_model_grads(model, None, **kwargs)

    config.finalize_model_grads_func = finalize
    no_sync = [chunk.no_sync for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if no_sync:
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


@span("micro-batches")
def run_schedule(
    model: list[torch.nn.Module],
    batches: Sequence[PackedBatch],
    head: HeadFunction,
    *,
    forward_only: bool,
    force_all_reduce: bool = False,
) -> list[Any]:
    """Run the micro-batches; what `head` kept of each, in order, on the last pipeline stage, [] on others.

    model: this rank's pieces of the model, more than one under the interleaved schedule, which asks for a
    multiple of pp micro-batches. Every rank of the model must call it with the same number of micro-batches.
    The gradients of earlier calls are not cleared. force_all_reduce: every data-parallel rank gets the whole
    gradient, not only the part that its optimizer updates.
    """

    def forward_step(batch_iterator: Any, stage: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batch_iterator)
        out = run_stage(stage, batch)

        def loss_function(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, kept = head(output, batch)
            # With a token count the schedule leaves the loss as it is; with a pair it would scale it.
            return loss, torch.ones((), dtype=torch.int, device=loss.device), kept

        return out, loss_function

    schedule: Callable[..., list[Any]] = get_forward_backward_func()
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in model],
        model=model,
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.shape[1] for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        force_all_reduce=force_all_reduce,
    )


def run_stage(stage: torch.nn.Module, batch: PackedBatch) -> Tensor:
    """Output of this rank's stage of the model for one micro-batch."""
    out: Tensor = stage(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=None,
        packed_seq_params=batch.params,
        **_output_dtype(stage),
    )
    return out


def _output_dtype(model: Any) -> dict[str, bool]:
    """Float16Module would hold a float32 copy of the logits."""
    config = getattr(model, "config", None) or model.module.config
    return {"fp32_output": False} if config.bf16 else {}


def accumulate(outputs: list[LossOutput]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums and maxima of this rank's micro-batches."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for output in outputs:
        for key, value in output.sums.items():
            sums[key] = sums[key] + value if key in sums else value
        for key, value in output.maxima.items():
            maxima[key] = torch.maximum(maxima[key], value) if key in maxima else value
    return sums, maxima
