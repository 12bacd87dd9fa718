"""The driver's own work in one iteration with recorded answers, from the servers' answers to what the ranks are sent.

What lies between, for VAPO on qwen32b as planned for 64 GPUs (8,192 samples of 8,192 tokens on average): parse and
decode the answers, write the journal, build the tensors, merge the log-probs and values that the ranks report, metrics
and targets, minibatches and their counts, and what each rank is sent (megarl/cluster/actors.py). A few answers are
recorded and parsed over and over; the models' results are made in between and cost no time here, but
count as memory. Not included: verifiers, which run in processes of their own, and Ray's copying. Seconds are CPU time
on one thread. In a run most of the answers are parsed, decoded and journaled while others are still generated; here all
of it counts. Responses of one length and, with as many tokens, lengths that vary 20 times, each in a process of its
own.

The ratio is the smaller of 2% of the planned iteration over the driver's time, and of 8 GB over its memory, for the
number of tokens that was measured. --rows 8192 is the whole of that iteration.
"""

import argparse
import concurrent.futures
import multiprocessing
import pickle
import random
import string
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tokenizers
import torch
from speed import Result, find_medians, find_status, take_turns
from transformers import PreTrainedTokenizerFast

from megarl.algo.algorithm import compute_targets
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.losses import count_minibatch
from megarl.algo.statistics import allocate_zeros
from megarl.cluster.actors import Sharer, merge_rows
from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.spec import Role, RowsResult, WorkerSpec
from megarl.plan.job import PUBLISHED, build_plan, find_models
from megarl.rollout.collector import build_tensors
from megarl.rollout.engine import parse_answer
from megarl.rollout.rollout_file import save_samples
from megarl.run.components import split_minibatches
from megarl.types import Prompt, Response, Rollout, Sample, Score, Sequences, TrainingSamples

JOB = ["algo=vapo", "model=qwen32b"]
JOB_TOKENS = 8192 * 8192
SHARE, MOST_BYTES = 0.02, 8e9
SPREAD = 20
"""Longest response over the shortest, where lengths vary"""
KINDS = {"one length": False, f"lengths vary {SPREAD} x": True}
NUM_RECORDED = 32
"""Different answers of one length"""
VOCABULARY = 49_152
GROUP = 16
PROMPT = Prompt("p", "What?", tuple(range(100, 164)), "42")
WEIGHT_VERSION = 3


def choose_lengths(varies: bool, num_rows: int, longest: int) -> list[int]:
    """num_rows * longest tokens in all; varied: log-uniform lengths down to longest / SPREAD, in more rows."""
    if not varies:
        return [longest] * num_rows
    generator, lengths, left = np.random.default_rng(0), [longest], (num_rows - 1) * longest
    while left:
        drawn = int(longest * SPREAD ** -generator.random())
        lengths.append(min(left, max(drawn, longest // SPREAD)))
        left -= lengths[-1]
    return lengths


def make_answer(generator: np.random.Generator, length: int) -> bytes:
    """As SGLang 0.5.23 sends it."""
    ids = generator.integers(0, VOCABULARY, length).tolist()
    logprobs = (-generator.exponential(0.5, length)).astype(np.float32).tolist()
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop", "matched": 2},
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
    return orjson.dumps({"output_ids": ids, "meta_info": meta})


def record_answers(lengths: Sequence[int]) -> list[bytes]:
    """An answer for each row; of one length at most NUM_RECORDED are different."""
    generator = np.random.default_rng(1)
    recorded: dict[int, list[bytes]] = {}
    answers = []
    for row, length in enumerate(lengths):
        own = recorded.setdefault(length, [])
        if len(own) < NUM_RECORDED:
            own.append(make_answer(generator, length))
        answers.append(own[row % len(own)])
    return answers


def build_tokenizer() -> Any:
    """A byte-level one of words of letters, to decode with: what a model's has costs as much."""
    generator = random.Random(0)
    words = {"".join(generator.choices(string.ascii_lowercase, k=1 + n % 6)) for n in range(3 * VOCABULARY)}
    vocabulary = {word: number for number, word in enumerate(sorted(words)[:VOCABULARY])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer)


class Clock:
    """CPU seconds by the name of the step that ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str | None = None) -> None:
        now = time.process_time()
        if name is not None:
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = time.process_time()


def read_answers(answers: Sequence[bytes], tokenizer: Any, clock: Clock) -> Iterator[Response]:
    def decode(ids: Any) -> str:
        clock.lap("answers")
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        clock.lap("decoding")
        return text

    for raw in answers:
        yield parse_answer(raw, decode).response
        clock.lap("answers")


def report_rows(sequences: Sequences, center: float, num_ranks: int) -> list[RowsResult]:
    """What the data-parallel ranks of a role report, each of an equal part of the rows."""
    longest, found = int(sequences.response_lengths.max()), []
    generator = np.random.default_rng(2)
    for rows in torch.arange(sequences.num_samples).tensor_split(num_ranks):
        values = allocate_zeros((len(rows), longest), torch.float32)
        for place, row in enumerate(rows.tolist()):
            length = int(sequences.response_lengths[row])
            values[place, :length] = torch.from_numpy(center + 0.1 * generator.standard_normal(length, np.float32))
        found.append(RowsResult(rows, values))
    return found


def build_spec(config: Config, role: Role, checkpoint: Path, num_ranks: int) -> WorkerSpec:
    """As planned for 64 GPUs, with so many data-parallel ranks."""
    own = config.policy if role is Role.policy else config.critic
    parallel = own.parallel
    size = parallel.tp * parallel.pp * parallel.cp
    return WorkerSpec(
        role=role,
        checkpoint=str(checkpoint),
        parallel=ParallelConfig(num_ranks * size, parallel.tp, parallel.sp, parallel.pp, parallel.vpp, parallel.cp),
        optimizer=own.optimizer,
        dtype=own.dtype,
        algo=config.algo,
        temperature=1.0,
        response_length=config.rollout.response_length,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
    )


def count_bytes(share: Any) -> int:
    """As Ray writes it: what is pickled, and the arrays beside it, of which no copy is made."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(share, protocol=5, buffer_callback=buffers.append)
    return len(text) + sum(buffer.raw().nbytes for buffer in buffers)


def share_batch(samples: TrainingSamples, config: Config, checkpoint: Path, num_ranks: int, clock: Clock) -> list[str]:
    """Divide the batch over the ranks of critic and policy, one after the other; what each is sent, in words."""
    minibatches, lines = split_minibatches(config, samples.sequences.num_samples, 1), []
    for role, own in ((Role.critic, samples.for_critic()), (Role.policy, samples.for_policy())):
        sharer = Sharer(build_spec(config, role, checkpoint, num_ranks))
        for rows in minibatches:
            count_minibatch(own, rows)
        largest = max(map(count_bytes, sharer.share(own, minibatches)))
        clock.lap("shares")
        lines.append(f"{role.value}, {num_ranks} data-parallel ranks: a rank is sent {largest / 1e9:.3f} GB")
    return lines


def work(
    answers: Sequence[bytes], config: Config, num_ranks: int, tokenizer: Any, folder: Path
) -> tuple[Clock, list[str]]:
    """The whole of it; the seconds of each step, and what the ranks are sent."""
    clock = Clock()
    responses = read_answers(answers, tokenizer, clock)
    samples = [Sample(PROMPT, r, Score(i % 3 / 2, i % 3 == 2), i // GROUP) for i, r in enumerate(responses)]
    rollout = Rollout(tuple(samples), WEIGHT_VERSION)
    clock.lap("answers")
    save_samples(folder / "journal", [[rollout.samples]])
    clock.lap("journal")
    tensors = build_tensors(rollout)
    clock.lap("tensors")
    reported = [report_rows(tensors.sequences, center, num_ranks) for center in (-0.5, 0.3)]
    clock.lap()
    old, values = (merge_rows(tensors.sequences)(each) for each in reported)
    del reported
    clock.lap("merging")
    experience = tensors.build_experience(old, values=values)
    compute_batch_metrics(experience)
    targets, _ = compute_targets(experience, config.algo, 0.0, response_length=config.rollout.response_length)
    clock.lap("targets")
    return clock, share_batch(targets, config, folder, num_ranks, clock)


def measure(lengths: Sequence[int], num_ranks: int, repeats: int) -> tuple[dict[str, float], float, list[str]]:
    """Meant for a process of its own: CPU nanoseconds of each step and bytes at the worst moment, per token."""
    torch.set_num_threads(1)
    tokenizer, config, lines = build_tokenizer(), load_config(JOB), list[str]()
    small, answers = record_answers([64] * GROUP), record_answers(lengths)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_bytes(orjson.dumps(PUBLISHED["Qwen/Qwen2.5-32B"]))

        def run_once(own: Sequence[bytes]) -> dict[str, float]:
            clock, lines[:] = work(own, config, num_ranks, tokenizer, folder)
            return clock.seconds

        # Imports and the allocator's first pages are not the driver's work.
        run_once(small)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = find_status("VmRSS")
        calls = take_turns({"all": lambda: run_once(answers)}, repeats, 0)["all"]
    peak, num_tokens = find_status("VmHWM") - before, sum(lengths)
    found = {name: seconds / num_tokens * 1e9 for name, seconds in find_medians(calls).items() if name != "seconds"}
    return found, peak / num_tokens, lines


def measure_apart(lengths: Sequence[int], args: argparse.Namespace) -> tuple[dict[str, float], float, list[str]]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, lengths, args.ranks, args.repeats).result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=512, help="responses of one length")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the longest response")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks; 1 as planned")


def run(args: argparse.Namespace) -> Result:
    config = load_config(JOB)
    planned = build_plan(config, find_models(config)).seconds.iteration
    most_ns, most_bytes = SHARE * planned / JOB_TOKENS * 1e9, MOST_BYTES / JOB_TOKENS
    rows: list[dict[str, Any]] = []
    ratios: list[float] = []
    notes: list[str] = []
    for kind, varies in KINDS.items():
        ns, num_bytes, notes = measure_apart(choose_lengths(varies, args.rows, args.length), args)
        total = sum(ns.values())
        rows.append({"ns a token": kind, **ns, "all": total, "bytes a token": num_bytes})
        ratios.append(min(most_ns / total, most_bytes / num_bytes))
    notes.append(f"2% of the planned iteration of {planned:,.0f} s: {most_ns:.0f} ns; 8 GB: {most_bytes:.0f} bytes")
    return Result(rows, min(ratios), 1, notes)
