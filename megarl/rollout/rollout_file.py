"""rollouts.jsonl: every sampled response of training, one strict JSON object a line, a rollout's lines together.

{"iteration": 1, "weight_version": 0, "sample": 0, "num_samples": 256, "group": 0,
 "prompt": {"id", "text", "token_ids", "answer", "metadata"},
 "response": {"token_ids", "text", "rollout_logprobs", "generated", "weight_versions", "finish_reason",
              "turns": [{"start", "end", "text", "reward", "details"}, ...]},
 "score": {"reward", "correct", "details", "answer", "failure"}}

and "first_old_logprobs" and "group_number" where the sample has them, with the meanings of megarl/types.py. `iteration`
is 0 during value pretraining; `sample` counts the lines of a rollout from 0. Numbers are read back bit for bit. The
files from which a run goes on (`write_rollouts`) also have "routed_experts"; the one of all its responses has not: they
are some hundred bytes a token. In them what has an entry per token is packed (`rollout_records.pack`): 12 bytes a token
and no Python object, since each iteration waits for its journal.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.manifest import write_atomically
from megarl.config.errors import ConfigError
from megarl.data.critic_prompt import CriticPrompt
from megarl.json_text import parse_strict_json
from megarl.report.metrics import LineFile
from megarl.rollout import routed_experts
from megarl.rollout.rollout_records import EXPERTS, FIELDS, FIRST_OLD, NUMBER, check_record, pack, unfold, unpack
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn

FILE_NAME = "rollouts.jsonl"


class RolloutWriter(LineFile):
    """Appends to a rollouts.jsonl; a rollout is complete on disk when `write` returns."""

    def write(self, rollout: Rollout, iteration: int) -> None:
        """Append all samples. Raises ValueError for NaN or infinity among the numbers, and then writes nothing."""
        self.append(list(format_rollout(rollout, iteration)))


def format_rollout(rollout: Rollout, iteration: int, to_resume: bool = False) -> Iterator[str]:
    """The lines of a rollout. Raises ValueError for NaN or infinity among the numbers.

    to_resume: packed, with routed experts.
    """
    for number, sample in enumerate(rollout.samples):
        record = _to_record(rollout, number, iteration)
        if to_resume and sample.response.routed_experts is not None:
            record[EXPERTS] = routed_experts.to_record(sample.response.routed_experts)
        packed = pack(record) if to_resume else unfold(record)
        yield f"{json.dumps(packed, allow_nan=False, separators=(',', ':'))}\n"


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a file of these rollouts, as iterations 0, 1, ...; it is complete on disk or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, (line for number, each in enumerate(rollouts) for line in format_rollout(each, number, True))
    )


@dataclass(frozen=True)
class Limits:
    """The limits of the model that will read the rollouts."""

    vocab_size: int
    max_length: int
    """Maximum tokens of prompt and response together"""
    response_length: int
    """Maximum tokens of a response"""
    prompt_length: int | None = None
    """Maximum tokens of a prompt; None: only max_length limits it"""
    reader: str = "the critic"
    """Whose limits they are, in messages"""
    critic_prompt: CriticPrompt | None = None
    """What the model reads before each prompt, if it is a critic with data.critic_prompt"""


@dataclass(frozen=True)
class SavedRollouts:
    """A rollouts.jsonl that has been read once and found valid."""

    path: Path
    num_rollouts: int
    num_samples: int


def check_rollouts(path: Path, limits: Limits) -> SavedRollouts:
    """Validate the whole file without keeping it. Raises as `read_rollouts`, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        sizes = [len(rollout.samples) for rollout in read_rollouts(path, limits)]
    return SavedRollouts(path, len(sizes), sum(sizes))


def load_rollouts(path: Path, limits: Limits | None = None) -> tuple[Rollout, ...]:
    """All rollouts of a file, in order; otherwise as `read_rollouts`."""
    return tuple(read_rollouts(path, limits))


def read_rollouts(path: Path, limits: Limits | None = None) -> Iterator[Rollout]:
    """Iterate over the rollouts of a file, in order, with one at a time in memory.

    A half-written last line and a rollout without its last samples are what a killed run leaves: they are dropped
    with a RuntimeWarning.

    Raises:
        ValueError: a line is not what `RolloutWriter` writes, or exceeds `limits`: says FILE:LINE, what was found and
            what would be right; or there is no complete rollout.
        FileNotFoundError: there is no such file.
    """
    for rollout, _ in read_with_lines(path, limits):
        yield rollout


@dataclass(frozen=True)
class Line:
    """A line of the file."""

    where: str
    """FILE:LINE"""
    start: int
    """Bytes of the file before it"""
    text: bytes


def read_with_lines(path: Path, limits: Limits | None = None) -> Iterator[tuple[Rollout, Sequence[Line]]]:
    """As `read_rollouts`, each rollout with the lines of its samples, which follow one another in the file."""
    samples: list[Sample] = []
    lines: list[Line] = []
    header: Mapping[str, Any] = {}
    num_rollouts = 0
    for line, record in _read_lines(path):
        if samples and record["sample"] == 0:
            _warn_incomplete(line.where, samples, header)
            samples, lines = [], []
        _check_place(line.where, record, header if samples else None, samples)
        samples.append(_to_sample(record, line.where, limits))
        lines.append(line)
        header = record
        if len(samples) == header["num_samples"]:
            yield Rollout(tuple(samples), header["weight_version"]), lines
            num_rollouts, samples, lines = num_rollouts + 1, [], []
    if samples:
        _warn_incomplete(str(path), samples, header)
    if not num_rollouts:
        raise ValueError(f"{path}: found no complete rollout; expected the rollouts.jsonl of a run")


def read_sample(line: bytes, where: str) -> Sample:
    """The sample of one line. Raises ValueError that begins with `where` for what `RolloutWriter` does not write."""
    return _to_sample(unpack(check_record(_parse(line, where), where), where), where, None)


def _to_record(rollout: Rollout, number: int, iteration: int) -> dict[str, Any]:
    sample = rollout.samples[number]
    first_old = {} if sample.first_old_logprobs is None else {FIRST_OLD: sample.first_old_logprobs}
    return {
        "iteration": iteration,
        "weight_version": rollout.weight_version,
        "sample": number,
        "num_samples": len(rollout.samples),
        "group": sample.group,
        "prompt": {name: getattr(sample.prompt, name) for name in FIELDS["prompt"]}
        | {"metadata": dict(sample.prompt.metadata)},
        "response": _to_response_record(sample.response),
        "score": {**vars(sample.score), "details": dict(sample.score.details)},
        **first_old,
        **({} if sample.group_number is None else {NUMBER: sample.group_number}),
    }


def _to_response_record(response: Response) -> dict[str, Any]:
    return {
        "token_ids": response.token_ids,
        "text": response.text,
        "rollout_logprobs": response.rollout_logprobs,
        "generated": response.generated,
        "weight_versions": response.weight_versions,
        "finish_reason": response.finish_reason.value,
        "turns": [{**vars(turn), "details": dict(turn.details)} for turn in response.turns],
    }


def _read_lines(path: Path) -> Iterator[tuple[Line, Mapping[str, Any]]]:
    """Every line with its record, which has the right keys and types."""
    start = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                record = _parse(text, where)
            except ValueError:
                if text.endswith(b"\n"):
                    raise
                warnings.warn(f"{where}: a half-written last line, left by a killed run, was dropped", RuntimeWarning)
                return
            yield Line(where, start, text), unpack(check_record(record, where), where)
            start += len(text)


def _parse(line: bytes, where: str) -> Any:
    try:
        return parse_strict_json(line)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{where}: {error}; expected one JSON object a line") from None


def _warn_incomplete(where: str, samples: list[Sample], header: Mapping[str, Any]) -> None:
    warnings.warn(
        f"{where}: the rollout before it has {len(samples)} of its {header['num_samples']} samples, as a killed run"
        " leaves it; it was dropped",
        RuntimeWarning,
    )


def _check_place(where: str, record: Mapping[str, Any], header: Mapping[str, Any] | None, before: list[Sample]) -> None:
    """Check that the line is the rollout's next one. header: the rollout's first line, if this is not the first."""
    if record["sample"] != len(before) or not record["sample"] < record["num_samples"]:
        found = f"sample {record['sample']} of {record['num_samples']}"
        raise ValueError(f"{where}: found {found}; expected sample {len(before)}: the lines of a rollout are in order")
    group, last = record["group"], before[-1].group if before else -1
    if group not in ((0,) if last < 0 else (last, last + 1)):
        expected = f"{last} or {last + 1}" if before else "0"
        raise ValueError(f'{where}: "group" is {group}; expected {expected}: groups are contiguous, numbered from 0')
    for name in ("num_samples", "weight_version", "iteration"):
        if header and record[name] != header[name]:
            raise ValueError(f'{where}: "{name}" is {record[name]}; the rollout\'s first line has {header[name]}')


def _to_sample(record: Mapping[str, Any], where: str, limits: Limits | None) -> Sample:
    prompt = Prompt(**{**record["prompt"], "token_ids": tuple(record["prompt"]["token_ids"])})
    response = record["response"]
    num_tokens = len(response["token_ids"])
    per_token = {name: response[name] for name in ("rollout_logprobs", "generated", "weight_versions")}
    first_old = record.get(FIRST_OLD)
    if first_old is not None:
        per_token[FIRST_OLD] = first_old
    for name, values in per_token.items():
        if len(values) != num_tokens:
            raise ValueError(
                f"{where}: response has {len(values)} {name}; expected one for each of its {num_tokens} tokens"
            )
    experts = record.get(EXPERTS)
    if experts is not None:
        try:
            experts = routed_experts.from_record(experts, len(prompt.token_ids) + num_tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if limits:
        _check_limits(where, prompt, response["token_ids"], limits)
    return Sample(
        prompt,
        Response(
            token_ids=response["token_ids"],
            text=response["text"],
            rollout_logprobs=response["rollout_logprobs"],
            generated=response["generated"],
            weight_versions=response["weight_versions"],
            finish_reason=FinishReason(response["finish_reason"]),
            routed_experts=experts,
            turns=[Turn(**turn) for turn in response["turns"]],
        ),
        Score(**record["score"]),
        record["group"],
        first_old_logprobs=None if first_old is None else np.asarray(first_old, dtype=np.float32),
        group_number=record.get(NUMBER),
    )


def _check_limits(where: str, prompt: Prompt, response: NDArray[np.int32], limits: Limits) -> None:
    try:
        own = limits.critic_prompt.encode(prompt) if limits.critic_prompt else ()
    except ConfigError as error:
        raise ValueError(f"{where}: {'; '.join(error.problems)}") from error
    largest = max([*prompt.token_ids, *response.tolist()], default=0)
    if largest >= limits.vocab_size:
        raise ValueError(
            f"{where}: found token id {largest}; {limits.reader}'s vocabulary has {limits.vocab_size} tokens: the"
            " rollouts must be of a policy with the same tokenizer"
        )
    if len(own) + len(prompt.token_ids) + len(response) > limits.max_length:
        before = f"{len(own)} of data.critic_prompt, " if own else ""
        raise ValueError(
            f"{where}: found {before}{len(prompt.token_ids)} prompt and {len(response)} response tokens;"
            f" {limits.reader} has {limits.max_length} positions"
        )
    if limits.prompt_length is not None and len(prompt.token_ids) > limits.prompt_length:
        raise ValueError(
            f"{where}: found a prompt of {len(prompt.token_ids)} tokens; data.prompt_length is {limits.prompt_length}"
            " and must be at least that"
        )
    if len(response) > limits.response_length:
        raise ValueError(
            f"{where}: found a response of {len(response)} tokens; rollout.response_length is {limits.response_length}"
            " and must be at least that"
        )
