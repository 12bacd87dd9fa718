"""The share of the measured matmul peak that updates, log-probs, values and generation of a 135M model reach.

A model of SmolLM2-135M's shape with random weights; responses of GSM8K-like lengths, packed. Operations are those of
`ROLE/model_tflop_sum`: a multiply-add is two; causal attention counts its lower triangle, the vocabulary head the
response tokens alone; a backward pass is two forward ones, and nothing that is computed again counts. Generation is one
SGLang server that computes prompts and responses of the same lengths, all requests at once, and counts as a forward
pass over them. The peak is the best of square and of the model's own products with the same dtype and as many threads,
measured anew beside each phase: a share is of its neighbour. On a GPU the share of the data sheet's peak stands beside
it. At the end one policy update under torch.profiler: the operators outside products and attention by their own time.
The ratio is the policy update's share.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed import Numbers, Result, describe_range, find_medians, take_turns
from torch import Tensor

from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.config.schema.root import RolloutConfig
from megarl.mcore.device import device
from megarl.mcore.microbatches import compute_row_costs
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.mcore.worker import MegatronWorker
from megarl.rollout.client import SGLangClient
from megarl.rollout.server import SGLangServer
from megarl.types import Sequences, TrainingSamples

VOCAB, HIDDEN, FFN = 49152, 576, 1536
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# Log-normal (mean and deviation of the logarithm) tokens of GSM8K's questions, in a chat template, and its answers.
PROMPTS, RESPONSES = (4.47, 0.25), (4.59, 0.49)
MAX_TOKEN = 4096
PHASES = ("update", "forward", "generation")
GOAL = 0.7
NUM_LARGEST = 5
PEAK_S = 0.5
"""Least seconds of one measurement of the peak"""
DEADLINE_S = 900.0
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


def make_samples(num_rows: int) -> TrainingSamples:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        torch.empty(num_rows).log_normal_(*shape, generator=generator).clamp(1, 1000).long()
        for shape in (PROMPTS, RESPONSES)
    )
    tokens = torch.randint(0, MAX_TOKEN, (int((prompts + responses).sum()),), generator=generator)
    mask = torch.arange(int(responses.max())) < responses[:, None]

    def normal(center: float) -> Tensor:
        return (center + torch.randn(mask.shape, generator=generator)) * mask

    old_logprobs, advantages = normal(-8.0), normal(0.0)
    return TrainingSamples(
        sequences=Sequences(tokens, prompts + responses, prompts),
        mask=mask,
        loss_mask=mask,
        positive=torch.rand(num_rows, generator=generator) > 0.5,
        advantages=advantages,
        rollout_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        sampling_logprobs=None,
        ref_logprobs=None,
        old_values=torch.zeros_like(advantages),
        returns=advantages,
    )


def write_checkpoint(directory: Path, num_layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model_class: Any = LlamaForCausalLM
    model = model_class(LlamaConfig(**SIZES, num_hidden_layers=num_layers))
    model.float().save_pretrained(directory)


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def measure_peak(dtype: torch.dtype, num_tokens: int) -> float:
    """1e12 operations a second of the best product."""
    shapes = [(n, n, n) for n in (512, 1024, 2048)]
    shapes += [(num_tokens, HIDDEN, 2 * FFN), (num_tokens, FFN, HIDDEN), (num_tokens // 2, HIDDEN, VOCAB)]
    best = 0.0
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=dtype, device=device())
        right = torch.randn(inner, columns, dtype=dtype, device=device())
        left @ right  # warm-up
        end, is_measured = time.perf_counter() + PEAK_S / len(shapes), False
        while time.perf_counter() < end or not is_measured:
            synchronize()
            start = time.perf_counter()
            left @ right
            synchronize()
            best = max(best, 2e-12 * rows * inner * columns / (time.perf_counter() - start))
            is_measured = True
    return best


def measure_share(phase: Callable[[], float], args: argparse.Namespace) -> Numbers:
    """phase: computes and gives its 1e12 operations."""
    peak = measure_peak(getattr(torch, args.dtype), args.tokens_per_microbatch)
    synchronize()
    start = time.perf_counter()
    tflop = phase()
    synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tflops": tflop / seconds, "share": tflop / seconds / peak}


def build_worker(role: Role, checkpoint: Path, args: argparse.Namespace, init_method: str) -> MegatronWorker:
    spec = WorkerSpec(
        role=role,
        checkpoint=str(checkpoint),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-6),
        dtype=Dtype(args.dtype),
        algo=AlgoConfig(clip_high=0.28),
        temperature=1.0,
        response_length=1024,
        tokens_per_microbatch=args.tokens_per_microbatch,
        num_threads=args.threads,
    )
    return MegatronWorker(spec, 0, 1, init_method)


def list_phases(worker: MegatronWorker, samples: TrainingSamples) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """(kind, name, call that gives its 1e12 operations) of one role."""
    role, rows = worker.spec.role, torch.arange(samples.sequences.num_samples)
    is_critic = role is Role.critic
    forward_tflop = 2e-12 * sum(compute_row_costs(worker.arch, samples.sequences, with_value_head=is_critic))

    def update() -> float:
        return float(worker.update(samples, [rows])[0][f"{role.value}/model_tflop_sum"])

    def forward() -> float:
        if is_critic:
            worker.values(samples.sequences)
        else:
            worker.logprobs(samples.sequences, 1.0)
        return forward_tflop

    yield "update", f"{role.value} update", update
    yield "forward", "values" if is_critic else "log-probs", forward


@contextlib.contextmanager
def open_generation(
    checkpoint: Path, samples: TrainingSamples, args: argparse.Namespace
) -> Iterator[Callable[[], float]]:
    """A call that generates responses of the samples' lengths and gives its 1e12 operations."""
    sequences = samples.sequences
    tflop = 2e-12 * sum(compute_row_costs(read_architecture(checkpoint), sequences))
    rows = torch.split(sequences.tokens, sequences.lengths.tolist())
    prompts = [row[:length].tolist() for row, length in zip(rows, sequences.prompt_lengths.tolist(), strict=True)]
    params = [
        {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
        for length in sequences.response_lengths.tolist()
    ]
    config = RolloutConfig(
        dtype=Dtype(args.dtype),
        num_threads=args.threads,
        kv_cache_tokens=2 * int(sequences.lengths.sum()),
        max_running_requests=len(prompts),
    )
    server = SGLangServer(config, checkpoint, log_file=checkpoint.parent / "server.log", seed=1)
    server.start()
    try:
        server.wait_healthy(DEADLINE_S)
        client = SGLangClient(server.url, vocab_size=VOCAB, deadline_s=DEADLINE_S, api_key=server.api_key)

        def generate() -> float:
            client.flush_cache()
            client.generate(prompts, params, return_logprob=True)
            return tflop

        yield generate
        client.close()
    finally:
        server.stop()


def is_counted(name: str) -> bool:
    """Whether an operator's work is among the operations that are counted."""
    return name.removeprefix("aten::") in MATMULS or name.startswith(ATTENTION)


def describe_profile(call: Callable[[], object]) -> list[str]:
    """Operators of one call outside products and attention by their own time, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    totals, numbers = Counter[str](), Counter[str]()
    for event in profile.key_averages():
        if event.key.startswith("aten::"):
            totals[event.key] += int(event.self_cpu_time_total)
            numbers[event.key] += event.count
    overall = sum(totals.values())
    counted = sum(total for name, total in totals.items() if is_counted(name))
    lines = [f"profile of {overall / 1e6:.2f} s in operators: products and attention {counted / overall:.0%}"]
    others = [(name, total) for name, total in totals.most_common() if not is_counted(name)]
    for name, total in others[:NUM_LARGEST]:
        lines.append(f"  {name} {total / 1e3:.0f} ms, {total / overall:.1%}, {numbers[name]} calls")
    return lines


def measure_phase(name: str, call: Callable[[], float], args: argparse.Namespace) -> dict[str, Any]:
    """The row of one phase."""
    calls = take_turns({name: lambda: measure_share(call, args)}, args.repeats, args.warm_up)[name]
    found = find_medians(calls)
    row = {"phase": name, "TFLOP/s": found["tflops"], "share of the peak": found["share"]}
    row["least to most"] = describe_range([each["share"] for each in calls])
    if device().type == "cuda":
        sheet = load_config([f"cluster={args.cluster}"]).cluster.hardware.bf16_tflops
        row["share of the data sheet's"] = found["tflops"] / sheet
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16, help="responses, of 205 tokens on average with their prompts")
    parser.add_argument("--layers", type=int, default=30, help="of the model")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float32")
    parser.add_argument("--only", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--cluster", default="h100x8", help="on a GPU: the hardware whose data sheet counts")


def run(args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    samples = make_samples(args.rows)
    rows: list[dict[str, Any]] = []
    profile: list[str] = []
    ratio = float("nan")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        write_checkpoint(checkpoint, args.layers)
        for role in (Role.policy, Role.critic):
            own = samples if role is Role.critic else replace(samples, old_values=None, returns=None)
            worker = build_worker(role, checkpoint, args, f"file://{scratch}/{role.value}")
            for kind, name, call in list_phases(worker, own):
                if kind not in args.only:
                    continue
                rows.append(measure_phase(name, call, args))
                if (role, kind) == (Role.policy, "update"):
                    ratio, profile = rows[-1]["share of the peak"], describe_profile(call)
            worker.close()
            del worker
        if "generation" in args.only:
            with open_generation(checkpoint, samples, args) as generate:
                rows.append(measure_phase("generation", generate, args))
    tokens = f"{int(samples.sequences.lengths.sum())} tokens, {int(samples.mask.sum())} of them generated"
    return Result(rows, ratio, GOAL, [f"{args.dtype}, threads: {args.threads}; {tokens}", *profile])
