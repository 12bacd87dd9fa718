"""One rank of one role: a Megatron model that gives log-probs or values, is updated, and writes its weights.

A plain class without Ray. Every rank of a role is called with the same arguments in the same order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.algo.losses import (
    LossCounts,
    LossOutput,
    TokenTargets,
    count_minibatch,
    critic_loss,
    policy_loss,
)
from megarl.config.schema.algo import KLEstimator, needs_full_kl
from megarl.mcore import process_groups, state
from megarl.mcore.batch import ContextGroup, PackedBatch, build_batch, choose_length
from megarl.mcore.checkpoints import DESCRIPTION, Entry, PeftAdapter, copy_description, write_hf_checkpoint
from megarl.mcore.device import find_processor, send
from megarl.mcore.layers import (
    choose_overlap,
    compute_load_metrics,
    describe_fast_ways,
    find_layers,
    replay_routes,
    start_minibatch,
)
from megarl.mcore.logprobs import VocabShard, compute_full_kl, compute_logprobs
from megarl.mcore.microbatches import COMPUTED, REAL, describe_work, plan_microbatches
from megarl.mcore.model import PackedGPT, build_chunks, build_config, freeze, wrap_chunks
from megarl.mcore.optimizer import (
    OffloadManager,
    build_optimizer,
    build_scheduler,
    describe_adam,
    uses_everything,
    uses_weights,
)
from megarl.mcore.spec import (
    Role,
    RowsResult,
    WorkerSpec,
    build_role_fields,
    check_role_fields,
    find_token_multiple,
    read_architecture,
)
from megarl.mcore.state import attach_adapters, export_peft
from megarl.models.architecture import Architecture
from megarl.report.timeline import span
from megarl.types import Metrics, Sequences, TrainingSamples


def build_targets(samples: TrainingSamples, batch: PackedBatch) -> TokenTargets:
    """The targets of the batch's R response tokens, on the batch's device."""

    def flat(padded: Tensor | None) -> Tensor | None:
        return None if padded is None else batch.flatten(padded)

    return TokenTargets(
        rows=send(batch.token_rows),
        mask=batch.flatten(samples.mask),
        loss_mask=batch.flatten(samples.loss_mask),
        positive=send(samples.positive[batch.rows][batch.token_rows]),
        advantages=batch.flatten(samples.advantages),
        old_logprobs=flat(samples.old_logprobs),
        rollout_logprobs=batch.flatten(samples.rollout_logprobs),
        sampling_logprobs=flat(samples.sampling_logprobs),
        ref_logprobs=flat(samples.ref_logprobs),
        old_values=flat(samples.old_values),
        returns=flat(samples.returns),
        critic_mask=flat(samples.critic_mask),
        samples=send(batch.rows[batch.token_rows]),
        num_rows=batch.num_rows,
        row_lengths=send(samples.mask[batch.rows].sum(1)),
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
        # Of all context-parallel ranks, as it divides it.
        seq_length=max(batch.tokens.shape[1] for batch in batches) * parallel_state.get_context_parallel_world_size(),
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


class Teachers:
    """The weights of several checkpoints for one model, in host memory; it has those of the first as it is given."""

    def __init__(self, chunks: Sequence[PackedGPT], arch: Architecture, others: Sequence[Path]):
        self._weights = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
        self._kept = [self._copy()] if others else []
        for directory in others:
            state.load_hf(chunks, directory, arch)
            self._kept.append(self._copy())
        self._chosen = len(others)
        self.choose(0)

    def choose(self, number: int) -> bool:
        """Give the model the weights of this checkpoint; whether it had others."""
        if number == self._chosen:
            return False
        for weight, kept in zip(self._weights, self._kept[number], strict=True):
            weight.copy_(kept)
        self._chosen = number
        return True

    def _copy(self) -> list[Tensor]:
        return [weight.to("cpu", copy=True) for weight in self._weights]


COLLECTIVE_GRACE_S = 30.0
"""By so much a collective's deadline is later than its caller's, who then still finds out where every rank waits."""
WARM_UP_TOKENS = 64
FP8_ROUNDING = 2.0**-4
"""The relative error of a product of numbers of 8 bits (e4m3)"""


class MegatronWorker:
    def __init__(self, spec: WorkerSpec, rank: int, world_size: int, init_method: str, gpu: str | None = None) -> None:
        """Join the role's process group and build the model from the checkpoint. Waits for all ranks.

        gpu: UUID of the GPU that this process was started for; None: not known, or there is none.
        Raises ValueError or FileNotFoundError for a layout, checkpoint or model.megatron that does not fit.
        """
        machine = find_processor()
        machine.prepare(spec.dtype, deterministic=spec.deterministic, num_threads=spec.num_threads)
        self.spec = spec = choose_overlap(spec)
        self.arch = read_architecture(Path(spec.checkpoint))
        problems = list(check_role_fields(self.arch, spec, in_worker=True))
        if problems:
            raise ValueError("; ".join(problems))
        deadline = spec.deadline_s + COLLECTIVE_GRACE_S
        limits = deadline, spec.collective_deadline_s
        process_groups.initialize(spec.parallel, rank, world_size, init_method, spec.seed, *limits, gpu=gpu)
        self.config = build_config(self.arch, spec.parallel, spec.dtype, spec.megatron, build_role_fields(spec))
        # This rank's pieces of the model: one, or vpp.
        self.chunks = build_chunks(self.arch, self.config, spec.role is Role.critic)
        state.load_hf(self.chunks, Path(spec.checkpoint), self.arch)
        if spec.router_replay:
            replay_routes(self.chunks)
        freeze(self.chunks, spec.trainable)
        self.peft_config = attach_adapters(self.chunks, spec.lora, spec.seed, spec.checkpoint)
        if spec.value_range is not None and self.chunks[-1].post_process:
            self.chunks[-1].output_layer.value_range = spec.value_range
        self.model: list[Any] = wrap_chunks(self.chunks, self.config, spec.optimizer)
        sum_gradients(self.config, self.model)
        self.reference: list[torch.nn.Module] | None = None
        if spec.role is Role.policy and needs_full_kl(spec.algo):
            # The checkpoint's weights once more, frozen, in the policy's own layout: distributions stay in the process.
            if spec.parallel.pp > 1:
                raise ValueError(f"parallel.pp: {spec.parallel.pp} found; a KL of estimator full needs 1")
            chunks = build_chunks(self.arch, self.config, with_value_head=False)
            state.load_hf(chunks, Path(spec.checkpoint), self.arch)
            self.reference = wrap_chunks(chunks, self.config, None)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._writing: state.Writing | None = None
        self._updated: RowsResult | None = None
        if spec.optimizer is not None:
            self.optimizer = build_optimizer(spec.optimizer, self.config, self.model)
            self.scheduler = build_scheduler(spec.optimizer, self.optimizer)
        self._teachers = Teachers(self.chunks, self.arch, [Path(teacher) for teacher in spec.teachers])
        self.offload = OffloadManager(spec.offload, [*self.chunks, *(self.reference or [])], self.model, self.optimizer)

    def describe(self) -> str:
        """What computes here, in a few words; then the faster ways that are on, and those that are off."""
        optimizer = "" if self.optimizer is None else f", {describe_adam(self.optimizer)}"
        fp8 = f" with FP8 products ({self.spec.fp8.value}, {self.spec.fp8_recipe.value})" if self.spec.fp8 else ""
        ways = describe_fast_ways(self.arch, self.spec, vars(self.config))
        return "\n".join([f"{find_layers().name} in {self.spec.dtype.value}{fp8}{optimizer}", *ways])

    @uses_weights
    def warm_up(self) -> None:
        """Compute two texts (a pair) for each data-parallel rank and a sum over those that share gradients, so that
        kernels and communicators have their memory before a server measures what is free. All ranks call it.
        """
        number, length = 2 * parallel_state.get_data_parallel_world_size(), min(WARM_UP_TOKENS, self.arch.max_length)
        whole, prompts = torch.full((number,), length), torch.ones(number, dtype=torch.int64)
        texts = Sequences(torch.zeros(number * length, dtype=torch.int64), whole, prompts)
        if self.spec.role is Role.critic:
            self._value(texts)
        else:
            self._score(texts, 1.0)
        if self.optimizer is not None:
            groups = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
            groups += [parallel_state.get_expert_data_parallel_group()] if self.arch.experts else []
            for group in groups:
                torch.distributed.all_reduce(torch.zeros(1, device=find_processor().device()), group=group)

    @uses_weights
    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> RowsResult | None:
        """float32 [b, T] log-probs of the response tokens, of the temperature-scaled distribution.

        The rows of this data-parallel rank on the rank that reports for it, None on the others. teacher: which of the
        checkpoints scores, 0 for spec.checkpoint, else the place in spec.teachers, from 1 on.
        """
        if self._teachers.choose(teacher):
            self.offload.is_changed = True
        return self._score(sequences, temperature)

    @uses_weights
    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> RowsResult | None:
        """As `logprobs`, with the errors of `add_rounding`; with FP8 products of at least those of e4m3."""
        # Ranks with other rows or layers have other errors; tensor-parallel copies of a tensor stay copies.
        stage, row = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        seed = row * self.spec.parallel.pp + stage
        with add_rounding(self.chunks, max(unit, FP8_ROUNDING if self.spec.fp8 else 0.0), seed):
            return self._score(sequences, temperature)

    @uses_weights
    def values(self, sequences: Sequences) -> RowsResult | None:
        """float32 [b, T] values of the states in which the response tokens are chosen; else as `logprobs`."""
        if self.spec.role is not Role.critic:
            raise ValueError(f"a {self.spec.role.value} has no values")
        return self._value(sequences)

    @uses_weights
    def reference_kl(self, sequences: Sequences, temperature: float) -> RowsResult | None:
        """float32 [b, T] KL(policy, reference) over the whole vocabulary at each response token; else as `logprobs`.

        Raises ValueError where the algorithm has no KL of estimator full, so that no reference is held.
        """
        if self.reference is None:
            raise ValueError(f"a {self.spec.role.value} without a KL of estimator full holds no reference")
        return self._evaluate(sequences, lambda logits, batch: self._full_kl(logits, batch, temperature))

    @uses_everything
    def update(
        self, samples: TrainingSamples, minibatches: Sequence[Tensor], counts: Sequence[LossCounts | None] = ()
    ) -> list[Metrics]:
        """One optimizer step for each entry of `minibatches` (int64 row numbers); all ranks get its metrics.

        counts: of each, where `samples` lacks other ranks' targets. Raises FloatingPointError for a gradient of NaN.
        """
        if self.spec.optimizer is None:
            raise ValueError(f"{self.spec.role.value} is not trained")
        self._check_tokens(samples.sequences)
        if samples.old_logprobs is None and self.spec.role is Role.policy and len(minibatches) != 1:
            raise ValueError(f"update without old_logprobs: {len(minibatches)} minibatches found; it must be one")
        metrics = [self._step(samples.select(rows), own) for rows, own in zip_longest(minibatches, counts)]
        if self._updated is not None:
            self._updated = RowsResult(minibatches[0][self._updated.rows], self._updated.values)
        if self.spec.optimizer.overlap_param_gather:
            # The next reader of the weights may not be a forward pass, which would wait for them.
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        return metrics

    def updated_logprobs(self) -> RowsResult | None:
        """The old_logprobs of the last update, which was given none, in its rows; once. Else as `logprobs`."""
        found, self._updated = self._updated, None
        return found

    @uses_weights
    def export_weights(self, directory: Path) -> None:
        """Write an ordinary Hugging Face checkpoint directory, complete or not at all."""
        self._export(directory, state.export_hf(self.chunks, self.arch))

    @uses_everything
    def export_gradient(self, samples: TrainingSamples, directory: Path) -> None:
        """Write the gradient of one minibatch of all samples as `export_weights` does weights; nothing is trained."""
        self._check_tokens(samples.sequences)
        self._sum_gradient(samples, count_minibatch(samples), everywhere=True)
        self._updated = None
        self._export(directory, state.export_hf(self.chunks, self.arch, state.take_gradient, torch.float32))

    def _export(self, directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        adapter = export_peft(self.chunks, self.arch, self.peft_config)
        source, fields = Path(self.spec.checkpoint), self.spec.critic_fields
        state.write_on_first_rank(lambda: write_hf_checkpoint(directory, source, tensors, fields, adapter), tensors)

    @uses_everything
    def begin_save(self, directory: Path) -> None:
        """Write parameters, optimizer, schedule and random states beside what comes next; `finish_save` ends it."""
        self._writing = state.begin_save(Path(directory), self._training_state())

    def finish_save(self) -> None:
        """Wait for the files and complete the directory. Raises what writing them raised.

        Beside them in hf/ is everything of the Hugging Face checkpoint that is not weights.
        """
        writing, self._writing = self._writing, None
        assert writing is not None, "begin_save comes first"
        writing.finish()
        target, dtype = writing.directory / DESCRIPTION, self.config.params_dtype

        def describe() -> None:
            value_head = dtype if self.spec.role is Role.critic else None
            copy_description(Path(self.spec.checkpoint), target, value_head, self.spec.critic_fields, dtype)
            if self.peft_config:
                # The adapters themselves are among the weights.
                PeftAdapter(self.peft_config, {}).write(target)

        state.write_on_first_rank(describe)

    @uses_everything
    def load(self, directory: Path) -> None:
        """Continue from a saved state, under any layout. It contains pickles: its checksums must have been verified."""
        state.load_state(Path(directory), self._training_state())

    def _training_state(self) -> state.TrainingState:
        return state.TrainingState(self.chunks, self.optimizer, self.scheduler, self.spec.parallel)

    def entries(self) -> list[Entry]:
        """This rank's parameters, each once; not the last stage's copy of tied embeddings."""
        return [entry for entry, _ in state.list_own_entries(self.chunks)]

    def shards(self) -> state.Weights:
        """The weights of `entries` by their names; where there are adapters, merged copies."""
        return state.Weights(state.list_own_entries(self.chunks))

    def tensor_ranks(self) -> tuple[int, int]:
        """Which of the shards of a weight this rank holds: of others, of experts'."""
        expert_group = parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_rank(), expert_group.rank()

    def close(self) -> None:
        process_groups.destroy()

    def _score(self, sequences: Sequences, temperature: float) -> RowsResult | None:
        if self.spec.role is Role.critic:
            raise ValueError("a critic has no logprobs")
        return self._evaluate(sequences, lambda out, batch: self._logprobs(out, batch, temperature, False)[0])

    def _value(self, sequences: Sequences) -> RowsResult | None:
        return self._evaluate(sequences, lambda out, batch: batch.gather(out))

    def _check_tokens(self, sequences: Sequences) -> None:
        if sequences.tokens.numel() and not 0 <= int(sequences.tokens.max()) < self.arch.vocab_size:
            raise ValueError(f"token {int(sequences.tokens.max())} is outside the vocabulary of {self.arch.vocab_size}")

    def _batches(self, sequences: Sequences) -> list[PackedBatch]:
        """This data-parallel rank's micro-batches, of up to tokens_per_microbatch on each context-parallel rank."""
        if sequences.segments is not None:
            raise ValueError("sequences: found several segments in a response; each is a row of its own for a role")
        parallel, num_ranks = self.spec.parallel, parallel_state.get_data_parallel_world_size()
        shares = plan_microbatches(self.spec, self.arch, sequences, num_ranks)
        share = shares[parallel_state.get_data_parallel_rank()]
        multiple = find_token_multiple(self.spec) * (parallel.tp if parallel.sp else 1)
        group = parallel_state.get_context_parallel_group()
        context = ContextGroup(group.size(), group.rank(), group)
        length = choose_length(sequences, share, multiple, group.size()) if parallel.pp > 1 else 0
        self.config.variable_seq_lengths = length == 0
        return [build_batch(sequences, rows, multiple, context, length) for rows in share]

    def _logprobs(
        self, logits: Tensor, batch: PackedBatch, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of all the batch's response tokens, from the logits of those which this rank predicts."""
        logprobs, entropy = compute_logprobs(logits, batch.own_targets, temperature, self._shard(logits), with_entropy)
        return batch.gather(logprobs), None if entropy is None else batch.gather(entropy)

    def _full_kl(self, logits: Tensor, batch: PackedBatch, temperature: float) -> Tensor:
        assert self.reference is not None, "a policy with a KL of estimator full holds its reference"
        with torch.no_grad():
            ref_logits = run_stage(self.reference[0], batch)
        return batch.gather(compute_full_kl(logits, ref_logits, temperature, self._shard(logits)))

    def _shard(self, logits: Tensor) -> VocabShard:
        group, width = parallel_state.get_tensor_model_parallel_group(), logits.shape[1]
        start = group.rank() * width
        num_valid = max(0, min(width, self.arch.vocab_size - start))
        return VocabShard(start, num_valid, group if group.size() > 1 else None)

    @torch.no_grad()
    def _evaluate(self, sequences: Sequences, head: Any) -> RowsResult | None:
        self._check_tokens(sequences)
        for chunk in self.model:
            chunk.eval()
        batches = self._batches(sequences)
        outputs = run_schedule(
            self.model, batches, lambda out, batch: (out.new_zeros(()), head(out, batch)), forward_only=True
        )
        return collect_rows(sequences, batches, outputs) if process_groups.reports() else None

    def _loss(self, out: Tensor, batch: PackedBatch, samples: TrainingSamples, counts: LossCounts) -> LossOutput:
        targets, algo = build_targets(samples, batch), self.spec.algo
        if self.spec.role is Role.critic:
            return critic_loss(batch.gather(out), targets, algo, counts, self.spec.value_range)
        logprobs, entropy = self._logprobs(out, batch, self.spec.temperature, True)
        full = algo.kl.in_loss and algo.kl.loss_estimator is KLEstimator.full
        full_kl = self._full_kl(out, batch, self.spec.temperature) if full else None
        return policy_loss(logprobs, entropy, targets, algo, counts, self.spec.response_length, full_kl)

    def _sum_gradient(self, samples: TrainingSamples, counts: LossCounts, everywhere: bool = False) -> list[LossOutput]:
        """Forward and backward over a minibatch; this rank's losses. Each data-parallel rank holds the sum of the
        gradients where its optimizer updates, or everywhere.
        """

        def head(out: Tensor, batch: PackedBatch) -> tuple[Tensor, LossOutput]:
            output = self._loss(out, batch, samples, counts)
            output.sums[REAL] = samples.sequences.lengths[batch.rows].sum()
            output.sums[COMPUTED] = batch.params.cu_seqlens_q[-1]
            # A batch without response tokens still runs backward: other ranks wait for its part.
            loss = output.loss if batch.targets.numel() else output.loss + out.sum()
            return loss, output

        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = everywhere
        start_minibatch(self.chunks, samples.sequences.num_samples, int(samples.sequences.lengths.sum()))
        self.optimizer.zero_grad()
        batches = self._batches(samples.sequences)
        outputs = run_schedule(self.model, batches, head, forward_only=False, force_all_reduce=everywhere)
        if samples.old_logprobs is None and self.spec.role is Role.policy and process_groups.reports():
            self._updated = collect_rows(samples.sequences, batches, [output.old_logprobs for output in outputs])
        return outputs

    def _step(self, samples: TrainingSamples, counts: LossCounts | None) -> Metrics:
        outputs = self._sum_gradient(samples, counts or count_minibatch(samples))
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        name, found = self.spec.role.value, process_groups.combine(*accumulate(outputs))
        rate = next(group["lr"] for group in self.optimizer.param_groups if group["default_config"])
        metrics = describe_work(found, self.spec, self.arch, samples.sequences)
        metrics |= compute_load_metrics(self.chunks, name)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"{name}: the gradient norm is {grad_norm}. Most often {name}.optimizer.lr ({rate:.3g} in this step) is"
                f" too high; metrics of the step: {metrics}"
            )
        return {f"{name}/grad_norm": float(grad_norm), f"{name}/lr": rate, **metrics}
