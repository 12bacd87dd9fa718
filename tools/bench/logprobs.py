"""Memory and time of log-probs, entropy and full KL from bfloat16 logits, beside the plain way, in one run.

Run: python tools/bench/logprobs.py [--tokens 512 2048] [--vocab 151936] [--repeats 9]

The plain way is float32 log_softmax of all logits, then gather, as a loss is written without thought of memory.
Memory: a fresh process per case; the logits are there before and are not counted; the gradient of the logits, which
both ways hand to the model's backward in the logits' dtype, is not counted either. What is left is what the way of
computing costs: on a CPU the highest resident size (VmHWM, which sees every allocation of the process), on a GPU
torch's peak of allocated bytes. Time: one process, the two ways in turn, so that a busy machine slows both; the ratio
is the median of those of neighbouring runs, with the quartiles as its spread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.mcore.full_kl import compute_full_kl
from megarl.mcore.logprobs import VocabShard, compute_logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUANTITIES = ("logprobs", "logprobs and entropy", "full KL")
GOAL_PEAK, GOAL_FORWARD, GOAL_BACKWARD = 1 / 8, 1.1, 1.35
DEADLINE_S = 600
WARM_UP_TOKENS = 4

Inputs = tuple[Tensor, Tensor, Tensor]
"""logits [R, V], reference logits [R, V], targets [R]"""


def make_inputs(num_tokens: int, vocab: int) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits, ref_logits = torch.empty(2, num_tokens, vocab, dtype=torch.bfloat16, device=DEVICE).unbind()
    for tensor in (logits, ref_logits):
        tensor.normal_(0, 3, generator=generator)
    return logits, ref_logits, torch.randint(0, vocab, (num_tokens,), device=DEVICE, generator=generator)


def compute_chunked(quantity: str, inputs: Inputs) -> Tensor:
    """The sum over tokens of what is asked for."""
    logits, ref_logits, targets = inputs
    shard = VocabShard(0, logits.shape[1], None)
    if quantity == "full KL":
        return compute_full_kl(logits, ref_logits, 1.0, shard).sum()
    logprobs, entropy = compute_logprobs(logits, targets, 1.0, shard, with_entropy=quantity != "logprobs")
    return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()


def compute_plain(quantity: str, inputs: Inputs) -> Tensor:
    """As `compute_chunked`."""
    logits, ref_logits, targets = inputs
    log_p = torch.log_softmax(logits.float(), -1)
    if quantity == "full KL":
        with torch.no_grad():
            log_q = torch.log_softmax(ref_logits.float(), -1)
        return (log_p.exp() * (log_p - log_q)).sum()
    logprobs = log_p.gather(1, targets[:, None]).sum()
    return logprobs if quantity == "logprobs" else logprobs - (log_p.exp() * log_p).sum()


WAYS = {"chunked": compute_chunked, "plain": compute_plain}


def run_once(way: Callable[[str, Inputs], Tensor], quantity: str, inputs: Inputs, backward: bool) -> None:
    logits = inputs[0].detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        total = way(quantity, (logits, *inputs[1:]))
        if backward:
            total.backward()  # type: ignore[no-untyped-call]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def read_status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure_peak(way: str, quantity: str, num_tokens: int, vocab: int, backward: bool) -> int:
    """Bytes held at the worst moment beyond the logits and their gradient; meant for a process of its own."""
    # Threads, kernels and the allocator's first pages are not the computation's.
    run_once(WAYS[way], quantity, make_inputs(WARM_UP_TOKENS, vocab), backward)
    inputs = make_inputs(num_tokens, vocab)
    gradient = inputs[0].nbytes if backward else 0
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once(WAYS[way], quantity, inputs, backward)
        return torch.cuda.max_memory_allocated() - before - gradient
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = read_status("VmRSS")
    run_once(WAYS[way], quantity, inputs, backward)
    return read_status("VmHWM") - before - gradient


def measure_peak_apart(way: str, quantity: str, num_tokens: int, vocab: int, backward: bool) -> int:
    case = json.dumps([way, quantity, num_tokens, vocab, backward])
    command = [sys.executable, __file__, "--peak-of", case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    return int(done.stdout)


def measure_times(quantity: str, inputs: Inputs, backward: bool, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each way; the ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            start = time.perf_counter()
            run_once(way, quantity, inputs, backward)
            if repeat:  # the first is the warm-up
                times[name].append(time.perf_counter() - start)
    return times


def compare(quantity: str, num_tokens: int, vocab: int, backward: bool, repeats: int) -> list[float]:
    """Prints a line of the table; goal / measured of memory and of time."""
    peaks = {way: measure_peak_apart(way, quantity, num_tokens, vocab, backward) for way in WAYS}
    times = measure_times(quantity, make_inputs(num_tokens, vocab), backward, repeats)
    ratios = [ours / plain for ours, plain in zip(times["chunked"], times["plain"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    peak_ratio = max(0, peaks["chunked"]) / peaks["plain"]
    name = f"{quantity}, {'forward + backward' if backward else 'forward'}, {num_tokens} tokens"
    print(
        f"{name:52} {peaks['plain'] / 2**20:8.0f} {peaks['chunked'] / 2**20:8.1f} {peak_ratio:8.4f}"
        f" {statistics.median(times['plain']):8.3f} {statistics.median(times['chunked']):8.3f}"
        f" {middle:6.2f} ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return [GOAL_PEAK / max(peak_ratio, 1e-9), (GOAL_BACKWARD if backward else GOAL_FORWARD) / middle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; several wait for one another if others run"
    )
    parser.add_argument("--peak-of", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of is not None:
        print(measure_peak(*args.peak_of))
        return
    torch.set_num_threads(args.threads)
    print(f"{DEVICE}, threads: {args.threads}, vocabulary {args.vocab}, bfloat16 logits; MiB, seconds")
    print(f"{'':52} {'plain':>8} {'chunked':>8} {'peak':>8} {'plain':>8} {'chunked':>8} {'time':>6} (quartiles)")
    margins = [
        margin
        for num_tokens in args.tokens
        for quantity in QUANTITIES
        for backward in (False, True)
        for margin in compare(quantity, num_tokens, args.vocab, backward, args.repeats)
    ]
    print(
        f"goals: peak {GOAL_PEAK:g} of the plain way's, time {GOAL_FORWARD:g} of it forward and {GOAL_BACKWARD:g} with"
        " backward; the ratio below is goal / measured where it is least"
    )
    print(f"ratio: {min(margins):.2f} goal: 1")


if __name__ == "__main__":
    main()
