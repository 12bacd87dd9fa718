"""What a sample of a run's responses tells: their lengths, right and wrong, and an estimate of the entropy.

Of rollouts.jsonl (logger.save_rollouts), or else of tokens.jsonl (logger.num_token_records), at most NUM_SAMPLED lines
are read, spread evenly over the file; a small file is read whole.
"""

import contextlib
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.report.history import History, Range, sample_lines
from megarl.report.token_file import FILE_NAME as TOKENS_NAME
from megarl.report.token_file import TRAIN

FILE_NAME = "rollouts.jsonl"
NUM_SAMPLED = 1500
ENTROPY_ESTIMATE = "derived/entropy_estimate"
"""Mean of -log pi(a) over the tokens that were sampled: without bias where all of the distribution is sampled"""
LOGGED_ITERATION = re.compile(r"^(?:\S+ \S+ )?iteration (\d+)/\d+  ")
"""The line of an iteration in train.log, with or without its time"""


@dataclass(frozen=True)
class LoggedWarning:
    text: str
    count: int
    """How often it is in the log"""
    iteration: int | None
    """The iteration that was logged before the last of them; None: none was"""


@dataclass(frozen=True)
class SampledResponse:
    iteration: int
    """0 during value pretraining"""
    num_tokens: int
    """Generated ones"""
    is_correct: bool
    surprise: float | None
    """Mean -log prob of the generated tokens in the rollout engine; None without tokens"""


def sample_responses(run_dir: Path, problems: list[str]) -> list[SampledResponse]:
    """In the file's order; empty where there is no file."""
    path, has_all = run_dir / FILE_NAME, (run_dir / FILE_NAME).is_file()
    if not has_all:
        path = run_dir / TOKENS_NAME
    found: list[SampledResponse] = []
    num_bad = 0
    try:
        for record in sample_lines(path, NUM_SAMPLED):
            try:
                if has_all:
                    found.append(_to_response(record))
                elif record["kind"] == TRAIN:
                    found.append(_to_excerpt(record))
            except (KeyError, TypeError, ValueError):
                num_bad += 1
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error}")
    if num_bad:
        problems.append(f"{path}: {num_bad} of {num_bad + len(found)} sampled lines are not what a run writes")
    return found


def _to_response(record: Mapping[str, Any]) -> SampledResponse:
    response = record["response"]
    pairs = zip(response["rollout_logprobs"], response["generated"], strict=True)
    logprobs = [float(logprob) for logprob, generated in pairs if generated]
    surprise = -math.fsum(logprobs) / len(logprobs) if logprobs else None
    return SampledResponse(int(record["iteration"]), len(logprobs), bool(record["score"]["correct"]), surprise)


def _to_excerpt(record: Mapping[str, Any]) -> SampledResponse:
    """Of a line of tokens.jsonl, which may lack the middle of a long response."""
    positions = [position for start, end in record["kept"] for position in range(start, end)]
    observed = {position for start, end in record["observed"] for position in range(start, end)}
    pairs = zip(positions, record["rollout_logprobs"], strict=True)
    logprobs = [float(each) for position, each in pairs if each is not None and position not in observed]
    surprise = -math.fsum(logprobs) / len(logprobs) if logprobs else None
    num_tokens = int(record["num_tokens"]) - len(observed)
    return SampledResponse(int(record["iteration"]), num_tokens, bool(record["score"]["correct"]), surprise)


def add_entropy_estimate(history: History, responses: Iterable[SampledResponse]) -> None:
    """Put ENTROPY_ESTIMATE into the points of the responses' iterations."""
    ends = [point.last for point in history.points]
    for response in responses:
        index = bisect_left(ends, response.iteration)
        if response.surprise is None or response.iteration < 1 or index == len(ends):
            continue
        value = Range(1, response.surprise, response.surprise, response.surprise)
        metrics = history.points[index].metrics
        if ENTROPY_ESTIMATE in metrics:
            metrics[ENTROPY_ESTIMATE].add(value)
        else:
            metrics[ENTROPY_ESTIMATE] = value
        history.last[ENTROPY_ESTIMATE] = metrics[ENTROPY_ESTIMATE].mean


@dataclass(frozen=True)
class LengthBin:
    low: float
    high: float
    num_correct: int
    num_wrong: int


def bin_lengths(responses: Sequence[SampledResponse], num_bins: int = 24) -> list[LengthBin]:
    """The generated tokens of the responses in bins of equal width; empty where there are none."""
    if not responses:
        return []
    longest = max(response.num_tokens for response in responses) + 1
    width = max(1.0, longest / num_bins)
    counts = [[0, 0] for _ in range(math.ceil(longest / width))]
    for response in responses:
        counts[int(response.num_tokens / width)][response.is_correct] += 1
    return [LengthBin(i * width, (i + 1) * width, right, wrong) for i, (wrong, right) in enumerate(counts)]


def read_warnings(path: Path, most: int = 20, most_bytes: int = 4 * 2**20) -> Iterator[LoggedWarning]:
    """The lines of a log that begin with "warning: ", each once, the newest `most` of them.

    Of a log longer than most_bytes only its end is read.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        found: dict[str, LoggedWarning] = {}
        iteration: int | None = None
        for line in file.read().decode("utf-8", "replace").splitlines():
            before, mark, text = line.partition("warning: ")
            # A logger's time and level may stand before it.
            if mark and len(before) < 60 and (not before or before[0] in "[0123456789"):
                count = found.pop(text).count if text in found else 0
                found[text] = LoggedWarning(text, count + 1, iteration)
            elif logged := LOGGED_ITERATION.search(line):
                iteration = int(logged[1])
        yield from list(found.values())[-most:]
