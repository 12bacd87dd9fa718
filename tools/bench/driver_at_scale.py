"""The driver's own work in one iteration of 8192 responses of 8192 tokens, with recorded answers, and its memory.

Run: python tools/bench/driver_at_scale.py [--rows 8192] [--length 8192] [--ranks 1]

What lies between the servers' answers and the ranks' inputs, for VAPO on qwen32b as planned for 64 GPUs (8,192 samples
of 8,192 tokens on average): parse and decode the answers, write the journal, build the tensors, merge the log-probs and
values that the ranks report, metrics and targets, minibatches and their counts, and what each rank of policy and critic
is sent (`Sharer`). A few answers are recorded and parsed over and over; the models' results are made in between and
cost no time here, but count as memory. Not included: verifiers, which run in processes of their own, and
Ray's copying. Seconds are the process's CPU time on one thread. In a run most of the answers are parsed, decoded and
journaled while others are still generated; here all of it counts.

Prints what a rank is sent beside the whole batch. The ratio is the smaller of 2% of the planned iteration over the
driver's seconds, and 8 GB over its peak memory.
"""

import argparse
import pickle
import random
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from megarl.algo.blocks import allocate_zeros
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.targets import compute_targets
from megarl.cluster.workers import Sharer, count_minibatches, merge_rows
from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.worker_spec import Role, RowsResult, WorkerSpec
from megarl.minibatches import split_minibatches
from megarl.plan.job import PUBLISHED, build_plan, count_quickly, find_models
from megarl.rollout.answers import parse_answer
from megarl.rollout.rollout_file import write_rollouts
from megarl.rollout.tensors import build_tensors
from megarl.types import Response, Rollout, Sequences, TrainingSamples

sys.path.insert(0, str(Path(__file__).parent))
import driver

JOB = ["algo=vapo", "model=qwen32b"]
SHARE, MOST_BYTES = 0.02, 8e9
NUM_RECORDED = 32
VOCABULARY = 49_152


def build_tokenizer() -> Any:
    """A byte-level one of words of letters, to decode with: what a model's has costs as much."""
    generator = random.Random(0)
    words = {"".join(generator.choices(string.ascii_lowercase, k=1 + n % 6)) for n in range(3 * VOCABULARY)}
    vocabulary = {word: number for number, word in enumerate(sorted(words)[:VOCABULARY])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer)


def record_answers(length: int, number: int) -> list[bytes]:
    generator = np.random.default_rng(1)
    answers = []
    for _ in range(number):
        answer = orjson.loads(driver.make_answer(generator, length))
        ids = [token % VOCABULARY for token in answer["output_ids"]]
        entries = answer["meta_info"]["output_token_logprobs"]
        entries = [[entry[0], token, None] for entry, token in zip(entries, ids, strict=True)]
        answer["meta_info"]["output_token_logprobs"] = entries
        answers.append(orjson.dumps(answer | {"output_ids": ids}))
    return answers


def read_answers(answers: list[bytes], num_rows: int, tokenizer: Any, clock: driver.Clock) -> Iterator[Response]:
    for row in range(num_rows):
        answer = parse_answer(answers[row % len(answers)])
        start = time.process_time()
        text = str(tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        clock.seconds["decoding"] = clock.seconds.get("decoding", 0.0) + time.process_time() - start
        yield answer.build_response(text)


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


def list_tensors(samples: TrainingSamples) -> Iterator[torch.Tensor]:
    for part in (samples, samples.sequences):
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def share_batch(
    samples: TrainingSamples, config: Config, checkpoint: Path, num_ranks: int, clock: driver.Clock
) -> Iterator[str]:
    """Divide the batch over the ranks of critic and policy, one after the other; what each is sent, in words."""
    minibatches = split_minibatches(config, samples.sequences.num_samples, 1)
    clock.lap("minibatches")
    for role, own in ((Role.critic, samples.for_critic()), (Role.policy, samples.for_policy())):
        sharer = Sharer(build_spec(config, role, checkpoint, num_ranks))
        count_minibatches(own, minibatches)
        shares = sharer.share_samples(own, minibatches)
        sizes = {
            is_last: max(count_bytes(s) for (_, last), s in shares.items() if last == is_last) for _, is_last in shares
        }
        total = sum(count_bytes(share) for share in shares.values())
        clock.lap(f"shares of the {role.value}")
        whole = sum(value.nbytes for value in list_tensors(own))
        yield (
            f"{role.value}, {num_ranks} data-parallel ranks: all samples {whole / 1e9:.2f} GB; a rank of the last stage"
            f" is sent {sizes[True] / 1e9:.2f}, one of another {sizes.get(False, 0) / 1e9:.2f}; the object store has"
            f" {total / 1e9:.2f}"
        )


def run(config: Config, answers: list[bytes], args: argparse.Namespace, tokenizer: Any, folder: Path) -> driver.Clock:
    clock = driver.Clock()
    rollout: Rollout = driver.build_rollout(read_answers(answers, args.rows, tokenizer, clock))
    clock.lap("answers")
    clock.seconds["answers"] -= clock.seconds["decoding"]
    write_rollouts(folder / "journal", [rollout])
    clock.lap("journal")
    tensors = build_tensors(rollout)
    clock.lap("tensors")
    reported = [report_rows(tensors.sequences, center, args.ranks) for center in (-0.5, 0.3)]
    clock.lap()
    old, values = (merge_rows(tensors.sequences)(each) for each in reported)
    del reported
    clock.lap("merged")
    experience = tensors.build_experience(old, values=values)
    compute_batch_metrics(experience)
    samples, _ = compute_targets(experience, config.algo, 0.0, response_length=config.rollout.response_length)
    clock.lap("targets")
    for line in share_batch(samples, config, folder, args.ranks, clock):
        print(line, flush=True)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="responses")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks; 1 as planned")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config([*JOB, f"train.samples_per_iteration={args.rows}"])
    planned = build_plan(load_config(JOB), find_models(load_config(JOB)), count=count_quickly).seconds.iteration
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_bytes(orjson.dumps(PUBLISHED["Qwen/Qwen2.5-32B"]))
        run(config, record_answers(64, 2), replace_sizes(args, 16, 64), tokenizer, Path(scratch))
        answers = record_answers(args.length, NUM_RECORDED)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = driver.read_status("VmRSS")
        clock = run(config, answers, args, tokenizer, Path(scratch))
    peak, seconds = driver.read_status("VmHWM"), sum(clock.seconds.values())
    parts = ", ".join(f"{name} {part:.1f}" for name, part in clock.seconds.items())
    tokens = args.rows * args.length
    print(f"{seconds:.1f} s for {tokens / 1e6:.1f} million tokens ({parts})")
    ahead = sum(clock.seconds[name] for name in ("answers", "decoding", "journal"))
    print(f"{ahead:.1f} s of it while others are generated; {seconds - ahead:.1f} s that everybody waits for")
    print(f"2% of the planned iteration of {planned:,.0f} s: {SHARE * planned:.1f} s")
    print(f"at most {peak / 1e9:.2f} GB of memory, {before / 1e9:.2f} of it before the first answer")
    print(f"ratio: {min(SHARE * planned / seconds, MOST_BYTES / peak):.2f} goal: 1")


def replace_sizes(args: argparse.Namespace, rows: int, length: int) -> argparse.Namespace:
    """The same for a small batch first: imports and the allocator's first pages are not the driver's work."""
    return argparse.Namespace(**{**vars(args), "rows": rows, "length": length})


if __name__ == "__main__":
    main()
