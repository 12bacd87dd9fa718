"""Tokens per second of the policy's update beside a plain Megatron-Core pretraining step, in one run.

Run: python tools/bench/train_step.py [--rows 32] [--repeats 7] [--threads 1] [--dtype float32]

One process, the same 9M-parameter model, layer spec, distributed optimizer and micro-batch size for both. The update:
the worker's own call on samples of GSM8K-like lengths, packed, with PPO's clipped loss and the positive LM loss. The
plain step: Megatron's GPTModel on a [b, s] batch of as many tokens and rows, all rows of the same length, none of it
padding, with Megatron's cross entropy. Its core attention is torch's scaled_dot_product_attention, several times
faster than the stock one on a CPU (--attention stock takes that). Tokens are real tokens. The two take turns; the
ratio is the median of those of neighbouring steps. On a CPU seconds are those of the process (CPU time: with one
thread, what a step takes on a quiet machine); wall-clock seconds, which hold what else runs, are printed beside them.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.mcore.device import device
from megarl.mcore.model.build import build_config, wrap_chunks
from megarl.mcore.model.layer_spec import build_block_spec, uses_transformer_engine
from megarl.mcore.optimizer import build_optimizer, build_scheduler
from megarl.mcore.weights.entries import padded_vocab_size
from megarl.mcore.worker import MegatronWorker
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples

# isort: split
# After megarl.mcore, which makes it run without CUDA.
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule

VOCAB = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Log-normal (mean and deviation of the logarithm) tokens of GSM8K's questions, in a chat template, and its answers.
PROMPTS, RESPONSES = (4.47, 0.25), (4.59, 0.49)
GOAL = 0.95


def make_samples(num_rows: int) -> TrainingSamples:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        torch.empty(num_rows).log_normal_(*shape, generator=generator).clamp(1, 1000).long()
        for shape in (PROMPTS, RESPONSES)
    )
    tokens = torch.randint(0, VOCAB, (int((prompts + responses).sum()),), generator=generator)
    mask = torch.arange(int(responses.max())) < responses[:, None]

    def normal(center: float) -> Tensor:
        return (center + torch.randn(mask.shape, generator=generator)) * mask

    old_logprobs = normal(-8.0)
    return TrainingSamples(
        sequences=Sequences(tokens, prompts + responses, prompts),
        mask=mask,
        loss_mask=mask,
        positive=torch.rand(num_rows, generator=generator) > 0.5,
        advantages=normal(0.0),
        rollout_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        sampling_logprobs=None,
        ref_logprobs=None,
        old_values=None,
        returns=None,
    )


class UpdateStep:
    """The policy's update."""

    def __init__(self, checkpoint: Path, samples: TrainingSamples, args: argparse.Namespace, init_method: str):
        spec = WorkerSpec(
            role=Role.policy,
            checkpoint=str(checkpoint),
            parallel=ParallelConfig(),
            optimizer=OptimizerConfig(lr=1e-4),
            dtype=Dtype(args.dtype),
            algo=AlgoConfig(clip_high=0.28, positive_lm_coef=0.1),
            temperature=1.0,
            response_length=1024,
            tokens_per_microbatch=args.tokens_per_microbatch,
            num_threads=args.threads,
        )
        self.worker = MegatronWorker(spec, 0, 1, init_method)
        self.samples = samples
        self.rows = torch.arange(samples.sequences.num_samples)

    def run(self) -> None:
        self.worker.update(self.samples, [self.rows])


class DenseAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of [S, b, H, D] in one call of torch."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **rest: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)


class PlainStep:
    """A pretraining step as Megatron's own examples write it; needs the process groups of an UpdateStep."""

    def __init__(self, update: UpdateStep, args: argparse.Namespace):
        arch, spec = update.worker.arch, update.worker.spec
        assert spec.optimizer is not None
        config = build_config(arch, spec.parallel, spec.dtype, {})
        config = replace(config, calculate_per_token_loss=False)
        block = build_block_spec(arch, config)
        if not uses_transformer_engine():
            attention = DenseAttention if args.attention == "sdpa" else DotProductAttention
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = attention
        model = GPTModel(
            config,
            block,
            vocab_size=padded_vocab_size(arch.vocab_size, 1),
            max_sequence_length=arch.max_length,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
        )
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0, 0.02) if param.ndim > 1 else param.fill_(1)
        self.model: list[Any] = wrap_chunks([model], config, spec.optimizer)
        self.optimizer = build_optimizer(spec.optimizer, config, self.model)
        self.scheduler = build_scheduler(spec.optimizer, self.optimizer)
        self.batches = self._make_batches(update.samples.sequences, args)

    def _make_batches(self, sequences: Sequences, args: argparse.Namespace) -> list[Tensor]:
        """int64 [b, s + 1] each; as many tokens and rows as `sequences`, up to rounding."""
        length = round(sequences.lengths.float().mean().item())
        per_batch = max(1, args.tokens_per_microbatch // length)
        tokens = torch.randint(0, VOCAB, (sequences.num_samples, length + 1), device=device())
        self.mask = None
        if args.attention == "stock":
            self.mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device()).triu(1)
        return list(torch.split(tokens, per_batch))

    def _forward(self, batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(tokens.shape[1], device=device()).expand_as(tokens)
        losses = model(tokens, positions, self.mask, labels=labels.contiguous())

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach()}

        return losses, mean

    def run(self) -> None:
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self.batches),
            model=self.model,
            num_microbatches=len(self.batches),
            seq_length=self.batches[0].shape[1] - 1,
            micro_batch_size=self.batches[0].shape[0],
            forward_only=False,
        )
        self.scheduler.step(1)
        self.optimizer.step()

    @property
    def num_tokens(self) -> int:
        return sum(batch.shape[0] * (batch.shape[1] - 1) for batch in self.batches)


def write_checkpoint(directory: Path) -> int:
    """A Qwen3 with random weights; its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return sum(param.numel() for param in model.parameters())


def time_step(step: UpdateStep | PlainStep) -> tuple[float, float]:
    """Seconds of the process and on the clock; the same on a GPU, which works beside the process."""
    start, cpu_start = time.perf_counter(), time.process_time()
    step.run()
    if device().type == "cuda":
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds, seconds
    return time.process_time() - cpu_start, time.perf_counter() - start


def measure(update: UpdateStep, plain: PlainStep, repeats: int) -> float:
    """Prints both speeds; the update's over the plain step's."""
    steps: dict[str, UpdateStep | PlainStep] = {"update": update, "plain": plain}
    tokens = {"update": int(update.samples.sequences.lengths.sum()), "plain": plain.num_tokens}
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            seconds = time_step(step)
            if repeat:  # the first is the warm-up
                speeds[name].append((tokens[name] / seconds[0], tokens[name] / seconds[1]))
    for name, found in speeds.items():
        own, clock = zip(*found, strict=True)
        print(
            f"{name:7} {tokens[name]} tokens a step, {statistics.median(own):.0f} tokens/s ({min(own):.0f} to", end=""
        )
        print(f" {max(own):.0f}); on the clock {statistics.median(clock):.0f} ({min(clock):.0f} to {max(clock):.0f})")
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(speeds["update"], speeds["plain"], strict=True)]
    print(f"ratios of neighbouring steps: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; several wait for one another if others run"
    )
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float32")
    parser.add_argument("--attention", choices=["sdpa", "stock"], default="sdpa", help="of the plain step")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = write_checkpoint(Path(scratch) / "model")
        print(f"{num_parameters / 1e6:.1f}M parameters, {args.dtype}, threads: {args.threads}")
        update = UpdateStep(Path(scratch) / "model", make_samples(args.rows), args, f"file://{scratch}/init")
        ratio = measure(update, PlainStep(update, args), args.repeats)
        update.worker.close()
    print(f"ratio: {ratio:.2f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
