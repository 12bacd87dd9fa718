"""The share of the measured matmul peak that updates, log-probs, values and generation of a 135M model reach.

Run: python tools/bench/mfu.py [--rows 16] [--layers 30] [--repeats 3] [--dtype float32] [--only update ...]

A model of SmolLM2-135M's shape with random weights; responses of GSM8K-like lengths, packed. Operations are those of
`ROLE/model_tflop_sum`: a multiply-add is two; causal attention counts its lower triangle, the vocabulary head the
response tokens alone; a backward pass is two forward ones, and nothing that is computed again counts. Generation is one
SGLang server that computes prompts and responses of the same lengths, all requests at once, and counts as a forward
pass over them. The peak is the best of square and of the model's own products with the same dtype and as many threads,
measured anew beside each phase: a share is of its neighbour. On a GPU the share of the data sheet's peak stands beside
it. Shares are of the wall clock; in parentheses, on a CPU, those of the process's own time over its threads, which a
busy machine disturbs less and which does not see a thread that sleeps. At the end one policy update under
torch.profiler: operators outside products and attention by their own time, each with the code that called it, or whose
gradient it is. The ratio is the policy update's share.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.mcore.device import device
from megarl.mcore.model.architecture import read_architecture
from megarl.mcore.row_costs import compute_row_costs
from megarl.mcore.worker import MegatronWorker
from megarl.mcore.worker_spec import Role, WorkerSpec
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
NUM_LARGEST, NUM_CALLERS = 5, 3
PEAK_S = 0.5
"""Least seconds of one measurement of the peak"""
DEADLINE_S = 900.0
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
BACKWARD = "autograd::engine::evaluate_function: "
NAMED = ("megarl/mcore/", "megarl/algo/", "megarl/task/", "megatron/core/")


@dataclass(frozen=True)
class Share:
    """One call of a phase beside the peak measured just before it."""

    clock: float
    """Operations over seconds of the clock, over the peak"""
    own: float
    """The same with the process's own seconds over its threads, on a CPU"""
    tflops: float
    """1e12 operations a second of the clock"""


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


def write_checkpoint(directory: Path, num_layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers)).float()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def measure_peak(dtype: torch.dtype, num_tokens: int) -> tuple[float, float]:
    """1e12 operations a second of the best product, by the clock and by the process's own time over its threads."""
    shapes = [(n, n, n) for n in (512, 1024, 2048)]
    shapes += [(num_tokens, HIDDEN, 2 * FFN), (num_tokens, FFN, HIDDEN), (num_tokens // 2, HIDDEN, VOCAB)]
    best_clock = best_own = 0.0
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=dtype, device=device())
        right = torch.randn(inner, columns, dtype=dtype, device=device())
        end = time.perf_counter() + PEAK_S / len(shapes)
        tflop = 2e-12 * rows * inner * columns
        left @ right  # warm-up
        number, own = 0, time.process_time()
        while time.perf_counter() < end or number == 0:
            synchronize()
            start = time.perf_counter()
            left @ right
            synchronize()
            best_clock, number = max(best_clock, tflop / (time.perf_counter() - start)), number + 1
        # Of all together: what one short product has used is not known at its end.
        own = max(time.process_time() - own, 1e-9) / torch.get_num_threads()
        best_own = max(best_own, number * tflop / own)
    return best_clock, best_own


def measure(phase: Callable[[], float], dtype: torch.dtype, num_tokens: int, repeats: int) -> list[Share]:
    """phase: computes and gives its 1e12 operations. The first call warms up and does not count."""
    phase()
    found = []
    for _ in range(repeats):
        peak, own_peak = measure_peak(dtype, num_tokens)
        synchronize()
        start, own_start = time.perf_counter(), time.process_time()
        tflop = phase()
        synchronize()
        seconds, own = time.perf_counter() - start, (time.process_time() - own_start) / torch.get_num_threads()
        found.append(Share(tflop / seconds / peak, tflop / own / own_peak, tflop / seconds))
    return found


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


def measure_generation(checkpoint: Path, samples: TrainingSamples, args: argparse.Namespace) -> list[Share]:
    """The server is a process of its own: its own time is not known here, and shares of both kinds are the clock's."""
    sequences = samples.sequences
    tflop = 2e-12 * sum(compute_row_costs(read_architecture(checkpoint), sequences))
    starts = (sequences.lengths.cumsum(0) - sequences.lengths).tolist()
    prompts = [
        sequences.tokens[start : start + length].tolist()
        for start, length in zip(starts, sequences.prompt_lengths.tolist(), strict=True)
    ]
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

        shares = measure(generate, getattr(torch, args.dtype), args.tokens_per_microbatch, args.repeats)
        client.close()
    finally:
        server.stop()
    return [Share(share.clock, share.clock, share.tflops) for share in shares]


def is_counted(name: str) -> bool:
    """Whether an operator's work is among the operations that are counted."""
    return name.removeprefix("aten::") in MATMULS or name.startswith(ATTENTION)


def shorten(frame: str) -> str:
    """A profiler's name of a frame, from its package on."""
    for part in ("/site-packages/", f"{Path(__file__).resolve().parents[2]}/"):
        frame = frame.rpartition(part)[2] or frame
    return frame


def find_caller(event: Any, forwards: Mapping[int, Sequence[str]]) -> str:
    """The innermost frame of megarl or Megatron-Core that called it, or whose gradient it is."""
    frames, node = [], None
    parent = event.cpu_parent
    while parent is not None and node is None:
        if parent.name.startswith(BACKWARD):
            node = parent
        elif ".py(" in parent.name:
            frames.append(parent.name)
        parent = parent.cpu_parent
    label = ""
    if node is not None:
        label = f"gradient ({node.name.removeprefix(BACKWARD).rpartition('::')[2]}) of "
        frames = frames or list(forwards.get(node.sequence_nr, ()))
    known = [frame for frame in frames if any(part in frame for part in NAMED)]
    return label + shorten((known or frames or ["torch's autograd"])[0])


def list_frames(event: Any) -> list[str] | None:
    """The frames around an operator of the forward pass, innermost first; None in the backward pass."""
    frames, parent = [], event.cpu_parent
    while parent is not None:
        if parent.name.startswith(BACKWARD):
            return None
        if ".py(" in parent.name:
            frames.append(parent.name)
        parent = parent.cpu_parent
    return frames


def describe_profile(call: Callable[[], object]) -> str:
    """Operators of one call outside products and attention by their own time, the largest first, with callers."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
        call()
    forwards: dict[int, Sequence[str]] = {}
    operators = []
    for event in profile.events():
        frames = list_frames(event) if event.sequence_nr >= 0 else None
        if frames:
            forwards.setdefault(event.sequence_nr, frames)
        if event.name.startswith("aten::"):
            operators.append(event)
    totals, numbers = Counter[str](), Counter[str]()
    callers: dict[str, Counter[str]] = {}
    for event in operators:
        totals[event.name] += event.self_cpu_time_total
        numbers[event.name] += 1
    overall = sum(totals.values())
    others = {name: total for name, total in totals.items() if not is_counted(name)}
    counted = overall - sum(others.values())
    lines = [f"profile of {overall / 1e6:.2f} s in operators: products and attention {counted / overall:.0%}"]
    largest = sorted(others, key=lambda name: -others[name])[:NUM_LARGEST]
    for event in operators:
        if event.name in largest:
            callers.setdefault(event.name, Counter())[find_caller(event, forwards)] += event.self_cpu_time_total
    for name in largest:
        lines.append(f"  {name} {totals[name] / 1e3:.0f} ms, {totals[name] / overall:.1%}, {numbers[name]} calls")
        lines += [f"    {time / 1e3:6.0f} ms {who}" for who, time in callers[name].most_common(NUM_CALLERS)]
    return "\n".join(lines)


def show(name: str, shares: Sequence[Share], datasheet: float | None) -> float:
    """Prints one phase; its median share of the measured peak."""
    middle = sorted(shares, key=lambda share: share.clock)[len(shares) // 2]
    own = statistics.median(share.own for share in shares)
    found = " ".join(f"{share.clock:.2f}" for share in shares)
    text = f"{name:14} {middle.tflops:8.3f} TFLOP/s, {middle.clock:.2f} of the peak ({own:.2f}); each: {found}"
    print(text + (f"; {middle.tflops / datasheet:.2f} of the data sheet's" if datasheet else ""), flush=True)
    return middle.clock


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="responses, of 205 tokens on average with their prompts")
    parser.add_argument("--layers", type=int, default=30, help="of the model")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float32")
    parser.add_argument("--only", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--cluster", default="h100x8", help="on a GPU: the hardware whose data sheet counts")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    torch.manual_seed(0)
    samples = make_samples(args.rows)
    samples = replace(samples, old_values=torch.zeros_like(samples.advantages), returns=samples.advantages)
    dtype, datasheet = getattr(torch, args.dtype), None
    if device().type == "cuda":
        datasheet = load_config([f"cluster={args.cluster}"]).cluster.hardware.bf16_tflops
    torch.set_num_threads(args.threads)
    peak = measure_peak(dtype, args.tokens_per_microbatch)[0]
    print(f"{args.dtype}, threads: {args.threads}; the best product has {peak:.3f} TFLOP/s;", end=" ")
    print(f"{int(samples.sequences.lengths.sum())} tokens, {int(samples.mask.sum())} of them generated", flush=True)
    ratio, profile = float("nan"), ""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        write_checkpoint(checkpoint, args.layers)
        for role in (Role.policy, Role.critic):
            worker = build_worker(role, checkpoint, args, f"file://{scratch}/{role.value}")
            for kind, name, call in list_phases(worker, samples):
                if kind not in args.only:
                    continue
                share = show(name, measure(call, dtype, args.tokens_per_microbatch, args.repeats), datasheet)
                if (role, kind) == (Role.policy, "update"):
                    ratio, profile = share, describe_profile(call)
            worker.close()
            del worker
        if "generation" in args.only:
            show("generation", measure_generation(checkpoint, samples, args), datasheet)
    print(profile)
    print(f"ratio: {ratio:.2f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
