"""CPU time and memory of the driver from the servers' answers to TrainingSamples, beside a Python object per token.

Run: python tools/bench/driver.py [--rows 512] [--length 8192] [--repeats 5] [--threads 1]

What the driver does with a rollout of VAPO (GAE with a lambda for each length, a critic's values, all metrics): parse
SGLang's answers, build the tensors, compute targets and metrics. The models' log-probs and values are made in between
and cost no time here, but count as memory, as do the responses; the answers do not. The other way is that of the json
module, a tuple entry per token and float64 matrices padded to the longest response. Both are given the same bytes and
must agree. All is done for responses of one length and, with as many tokens, for lengths that vary 20 times. Each way
is measured in a process of its own; seconds are those of the process (CPU time: with one thread, what a step takes on a
quiet machine). The journal, which each rollout is written to, is timed apart.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import orjson
import torch

from megarl.algo.blocks import allocate_zeros
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.targets import compute_targets
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig
from megarl.rollout.answers import parse_answer
from megarl.rollout.rollout_file import load_rollouts, write_rollouts
from megarl.rollout.tensors import build_tensors
from megarl.types import Metrics, Prompt, Response, Rollout, Sample, Score, TrainingSamples

sys.path.insert(0, str(Path(__file__).parent))
import padded_driver

GOAL_NS, GOAL_BYTES = 300.0, 60.0
SPREAD = 20
"""Longest response over the shortest, where lengths vary"""
GROUP = 16
PROMPT = Prompt("p", "What?", tuple(range(100, 164)), "42")
WEIGHT_VERSION = 3
DEADLINE_S = 3600
LENGTHS = {"equal": "one length", "varied": f"{SPREAD} x"}


def choose_lengths(kind: str, num_rows: int, longest: int) -> list[int]:
    """num_rows * longest tokens in all; varied: log-uniform lengths down to longest / SPREAD, in more rows."""
    total = num_rows * longest
    if kind == "equal":
        return [longest] * num_rows
    generator, lengths, left = np.random.default_rng(0), [longest], total - longest
    while left:
        drawn = int(longest * SPREAD ** -generator.random())
        lengths.append(min(left, max(drawn, longest // SPREAD)))
        left -= lengths[-1]
    return lengths


def make_answers(lengths: list[int]) -> list[bytes]:
    """As SGLang 0.5.23 sends them."""
    generator = np.random.default_rng(1)
    return [make_answer(generator, length) for length in lengths]


def make_answer(generator: np.random.Generator, length: int) -> bytes:
    ids = generator.integers(0, 151_000, length).tolist()
    logprobs = (-generator.exponential(0.5, length)).astype(np.float32).tolist()
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop", "matched": 151_645},
        "prompt_tokens": len(PROMPT.token_ids),
        "weight_version": str(WEIGHT_VERSION),
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": list(zip(logprobs, ids, [None] * length, strict=True)),
        "output_token_logprobs_length": length,
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": 63,
        "weight_versions": [{"version": str(WEIGHT_VERSION), "start": 0, "end": length}],
        "e2e_latency": 1.5,
    }
    return orjson.dumps({"text": "word " * length, "output_ids": ids, "meta_info": meta})


@cache
def load_algo() -> AlgoConfig:
    return load_config(["algo=vapo"]).algo


class Clock:
    """CPU seconds by the name of the step that ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str | None = None) -> None:
        now = time.process_time()
        if name is not None:
            self.seconds[name] = now - self._last
        self._last = time.process_time()


def build_rollout(responses: Iterator[Response]) -> Rollout:
    samples = [Sample(PROMPT, r, Score(i % 3 / 2, i % 3 == 2), i // GROUP) for i, r in enumerate(responses)]
    return Rollout(tuple(samples), WEIGHT_VERSION)


def ask_models(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What policy and critic would say: old_logprobs and values, float32 [B, T]."""
    generator = np.random.default_rng(2)
    both = []
    for center in (-0.5, 0.3):
        padded = allocate_zeros((len(lengths), max(lengths)), torch.float32)
        for row, length in enumerate(lengths):
            padded[row, :length] = torch.from_numpy(center + 0.1 * generator.standard_normal(length, np.float32))
        both.append(padded)
    return both[0], both[1]


def run_arrays(answers: list[bytes], lengths: list[int], clock: Clock) -> tuple[TrainingSamples, Metrics, Rollout]:
    clock.lap()
    rollout = build_rollout(parse_answer(raw).build_response("") for raw in answers)
    clock.lap("answers")
    tensors = build_tensors(rollout)
    clock.lap("tensors")
    old_logprobs, values = ask_models(lengths)
    clock.lap()
    experience = tensors.build_experience(old_logprobs, values=values)
    metrics = compute_batch_metrics(experience)
    samples, found = compute_targets(experience, load_algo(), 0.0)
    clock.lap("targets")
    return samples, metrics | found, rollout


def run_objects(answers: list[bytes], lengths: list[int], clock: Clock) -> tuple[TrainingSamples, Metrics, Rollout]:
    clock.lap()
    responses = [padded_driver.build_response(json.loads(raw)) for raw in answers]
    rollout = padded_driver.build_rollout(responses, PROMPT, GROUP, WEIGHT_VERSION)
    clock.lap("answers")
    tensors = padded_driver.build_tensors(rollout)
    clock.lap("tensors")
    old_logprobs, values = ask_models(lengths)
    clock.lap()
    samples, metrics = padded_driver.compute(tensors, old_logprobs, values, load_algo())
    clock.lap("targets")
    return samples, metrics, rollout


WAYS: dict[str, Callable[[list[bytes], list[int], Clock], tuple[TrainingSamples, Metrics, Rollout]]] = {
    "objects": run_objects,
    "arrays": run_arrays,
}


@dataclass(frozen=True)
class Measured:
    """Of one way with one kind of lengths, per token."""

    ns: dict[str, float]
    """CPU nanoseconds of each step"""
    bytes: float
    """Held at the worst moment"""
    mean_advantage: float
    journal_ns: tuple[float, float] = (0.0, 0.0)
    """To write, to read"""

    @property
    def total_ns(self) -> float:
        return sum(self.ns.values())


def read_status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure(way: str, kind: str, num_rows: int, length: int, repeats: int) -> Measured:
    """Meant for a process of its own."""
    # Imports, kernels and the allocator's first pages are not the driver's.
    small = choose_lengths(kind, 4, 64)
    WAYS[way](make_answers(small), small, Clock())
    lengths = choose_lengths(kind, num_rows, length)
    answers, num_tokens = make_answers(lengths), sum(lengths)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, clocks = read_status("VmRSS"), [Clock() for _ in range(repeats)]
    result = WAYS[way](answers, lengths, clocks[0])
    peak = read_status("VmHWM") - before
    mean_advantage = result[1]["advantage/mean"]
    journal = time_journal(result[2], num_tokens) if way == "arrays" else (0.0, 0.0)
    del result
    for clock in clocks[1:]:
        WAYS[way](answers, lengths, clock)
    ns = {name: statistics.median(c.seconds[name] for c in clocks) / num_tokens * 1e9 for name in clocks[0].seconds}
    return Measured(ns, peak / num_tokens, mean_advantage, journal)


def time_journal(rollout: Rollout, num_tokens: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder) / "journal", Clock()
        clock.lap()
        write_rollouts(path, [rollout])
        clock.lap("write")
        load_rollouts(path)
        clock.lap("read")
    return clock.seconds["write"] / num_tokens * 1e9, clock.seconds["read"] / num_tokens * 1e9


def measure_apart(way: str, kind: str, args: argparse.Namespace) -> Measured:
    repeats = args.repeats if way == "arrays" else 1
    case = json.dumps([way, kind, args.rows, args.length, repeats, args.threads])
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)
    return Measured(**json.loads(done.stdout))


def describe(way: str, kind: str, found: Measured) -> None:
    steps = "".join(f"{ns:9.0f}" for ns in found.ns.values())
    print(f"{way:8} {LENGTHS[kind]:11}{steps}{found.total_ns:9.0f}{found.bytes:9.0f}", flush=True)


def say(claim: str, is_met: bool) -> None:
    print(f"{claim}: {'met' if is_met else 'NOT MET'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="responses of one length")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the longest response")
    parser.add_argument("--repeats", type=int, default=5, help="of the arrays; the objects are timed once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        *case, num_threads = args.case
        torch.set_num_threads(num_threads)
        print(json.dumps(vars(measure(*case))))
        return
    print(f"{args.rows * args.length} tokens, at most {args.length} a response, threads: {args.threads}; per token")
    print(f"{'way':8} {'lengths':11}{'answers':>9}{'tensors':>9}{'targets':>9}{'ns':>9}{'bytes':>9}")
    found = {}
    for kind in LENGTHS:
        for way in WAYS:
            found[way, kind] = measure_apart(way, kind, args)
            describe(way, kind, found[way, kind])
        means = [found[way, kind].mean_advantage for way in WAYS]
        if not math.isclose(*means, rel_tol=1e-5, abs_tol=1e-7):
            raise RuntimeError(f"the two ways have mean advantages of {means}; they must agree")
    equal, varied = (found["arrays", kind] for kind in LENGTHS)
    write, read = equal.journal_ns
    print(f"journal: {write:.0f} ns a token to write, {read:.0f} to read")
    growth = varied.total_ns / equal.total_ns
    slower = found["objects", "varied"].total_ns / found["objects", "equal"].total_ns
    print(f"lengths that vary {SPREAD} times cost {growth:.2f} of equal ones; as padded objects {slower:.2f}")
    say(f"at most {GOAL_NS:g} ns a token", max(equal.total_ns, varied.total_ns) <= GOAL_NS)
    say(f"at most {GOAL_BYTES:g} bytes a token", equal.bytes <= GOAL_BYTES)
    ratios = [GOAL_NS / max(equal.total_ns, varied.total_ns), GOAL_BYTES / equal.bytes]
    print(f"ratio: {min(ratios):.2f} goal: 1")


if __name__ == "__main__":
    main()
