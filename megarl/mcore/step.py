"""Forward and backward passes over micro-batches through Megatron's own schedules. Gradients are undivided sums: losses
come already divided by the counts of the whole minibatch, so that they do not depend on how it was cut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.algo.losses import LossOutput, TokenTargets
from megarl.mcore.batch import PackedBatch
from megarl.mcore.spec import RowsResult
from megarl.timeline import span
from megarl.types import Sequences, TrainingSamples


def build_targets(samples: TrainingSamples, batch: PackedBatch) -> TokenTargets:
    """The targets of the batch's R response tokens, on the batch's device."""

    def flat(padded: Tensor | None) -> Tensor | None:
        return None if padded is None else batch.flatten(padded)

    device = batch.targets.device
    return TokenTargets(
        rows=batch.token_rows.to(device),
        mask=batch.flatten(samples.mask),
        loss_mask=batch.flatten(samples.loss_mask),
        positive=samples.positive[batch.rows][batch.token_rows].to(device),
        advantages=batch.flatten(samples.advantages),
        old_logprobs=flat(samples.old_logprobs),
        rollout_logprobs=batch.flatten(samples.rollout_logprobs),
        sampling_logprobs=flat(samples.sampling_logprobs),
        ref_logprobs=flat(samples.ref_logprobs),
        old_values=flat(samples.old_values),
        returns=flat(samples.returns),
        critic_mask=flat(samples.critic_mask),
        num_rows=batch.num_rows,
        row_lengths=samples.mask[batch.rows].sum(1).to(device),
    )


HeadFunction = Callable[[Tensor, PackedBatch], tuple[Tensor, Any]]
"""Output of the last stage and its micro-batch -> the loss (a scalar) and whatever is to be kept of it."""


def sum_gradients(config: TransformerConfig, model: Sequence[torch.nn.Module]) -> None:
    """Have Megatron reduce gradients by pure sums, and only after the last micro-batch."""

    def finalize(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
        # Megatron would divide by num_tokens here.
        finalize_model_grads(model, None, **kwargs)

    config.finalize_model_grads_func = finalize
    no_sync = [chunk.no_sync for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if no_sync:
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


@contextmanager
def add_rounding(models: Sequence[torch.nn.Module], unit: float, seed: int) -> Iterator[None]:
    """Meanwhile what each layer, and each module without children, computes has random relative errors of up to `unit`:
    about what two engines differ by that round to it.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def change(out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(change(each) for each in out)
        # Not the angles of positions, which are float32 in every dtype.
        if not torch.is_tensor(out) or out.dtype != dtype:
            return out
        if out.device not in generators:
            generators[out.device] = torch.Generator(out.device).manual_seed(seed)
        error = torch.rand(out.shape, generator=generators[out.device], device=out.device).mul_(2).sub_(1).mul_(unit)
        return (out.float() * (1 + error)).to(dtype)

    dtype, hooks = next(models[0].parameters()).dtype, []
    try:
        for model in models:
            for module in model.modules():
                if isinstance(module, TransformerLayer) or not any(module.children()):
                    hooks.append(module.register_forward_hook(lambda module, args, out: change(out)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


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

    model: this rank's pieces of the model, more than one under the interleaved schedule, which asks for a multiple of
    pp micro-batches, as many on every rank. Gradients of earlier calls are not cleared. force_all_reduce: every
    data-parallel rank gets the whole gradient, not only the part that its optimizer updates.
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
    unwrapped: Any = stage
    config = getattr(unwrapped, "config", None) or unwrapped.module.config
    out: Tensor = stage(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=None,
        packed_seq_params=batch.params,
        # Float16Module would hold a float32 copy of the logits.
        **({"fp32_output": False} if config.bf16 else {}),
    )
    return out


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


def collect_rows(sequences: Sequences, batches: Sequence[PackedBatch], outputs: Sequence[Tensor]) -> RowsResult:
    """The rows of these micro-batches, out of `sequences`, in order. outputs: float [R] of each micro-batch."""
    longest = int(sequences.response_lengths.max()) if sequences.num_samples else 0
    padded = torch.zeros(sequences.num_samples, longest, dtype=torch.float32)
    for batch, output in zip(batches, outputs, strict=True):
        padded[batch.rows[batch.token_rows], batch.columns] = output.float().cpu()
    rows = torch.cat([batch.rows for batch in batches]).sort().values
    return RowsResult(rows, padded[rows])
