"""rollouts.jsonl: every sampled response of training, one strict JSON object a line, a rollout's lines together.

{"iteration": 1, "weight_version": 0, "sample": 0, "num_samples": 256, "group": 0,
 "prompt": {"id", "text", "token_ids", "answer", "metadata"},
 "response": {"token_ids", "text", "rollout_logprobs", "generated", "weight_versions", "finish_reason",
              "turns": [{"start", "end", "text", "reward", "details"}, ...]},
 "score": {"reward", "correct", "details", "answer", "failure"}}

and "group_number" where the sample has it, with the meanings of megarl/types.py. `iteration` is 0 or less during value
pretraining; `sample` counts the lines of a rollout from 0. Numbers are read back bit for bit.
"""

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.files import parse_strict_json
from megarl.report.metrics import LineFile
from megarl.report.scores import count_failed
from megarl.task.render import CriticPrompt
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score, Turn, check_score

FILE_NAME = "rollouts.jsonl"


class RolloutWriter(LineFile):
    """Appends to a rollouts.jsonl; a rollout is complete on disk when `write` returns."""

    def write(self, rollout: Rollout, iteration: int) -> None:
        """Append all samples. Raises ValueError for NaN or infinity among the numbers, and then writes nothing."""
        lines = []
        for number, sample in enumerate(rollout.samples):
            header = {"iteration": iteration, "weight_version": rollout.weight_version, "sample": number}
            record = {**header, "num_samples": len(rollout.samples), **to_record(sample)}
            response = sample.response
            for name in ("token_ids", "rollout_logprobs", "generated"):
                record["response"][name] = getattr(response, name).tolist()
            record["response"]["weight_versions"] = response.weight_versions.expand().tolist()
            lines.append(f"{json.dumps(record, allow_nan=False, separators=(',', ':'))}\n")
        self.append(lines)


def to_record(sample: Sample) -> dict[str, Any]:
    """The sample as JSON, but for what has an entry per token."""
    prompt, response, score = sample.prompt, sample.response, sample.score
    own = {name: getattr(prompt, name) for name in ("id", "text", "token_ids", "answer")}
    record = {
        "group": sample.group,
        "prompt": own | {"metadata": dict(prompt.metadata)},
        "response": {
            "text": response.text,
            "finish_reason": response.finish_reason.value,
            "turns": [{**vars(turn), "details": dict(turn.details)} for turn in response.turns],
        },
        "score": {**vars(score), "details": dict(score.details)},
    }
    return record if sample.group_number is None else record | {"group_number": sample.group_number}


def from_record(record: Mapping[str, Any], **changes: Any) -> Sample:
    """The sample of a record with all fields of its response. changes: further fields of the sample."""
    response = {
        **record["response"],
        "finish_reason": FinishReason(record["response"]["finish_reason"]),
        "turns": [Turn(**turn) for turn in record["response"]["turns"]],
    }
    return Sample(
        Prompt(**{**record["prompt"], "token_ids": tuple(record["prompt"]["token_ids"])}),
        Response(**response),
        Score(**record["score"]),
        record["group"],
        group_number=record.get("group_number"),
        **changes,
    )


def _is_list_of(value: Any, *kinds: type) -> bool:
    # The types are compared without a call for each entry, which may be one of millions.
    return isinstance(value, list) and set(map(type, value)) <= set(kinds)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_tokens(value: Any) -> bool:
    return _is_list_of(value, int) and (not value or (min(value) >= 0 and max(value) <= np.iinfo(np.int32).max))


def _are_logprobs(value: Any) -> bool:
    if not _is_list_of(value, int, float):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.array(value, np.float64).astype(np.float32)).all())


def _is_map_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what would be valid"""
_INTEGER: Check = (lambda value: type(value) is int, "a whole number")
_WHOLE: Check = (lambda value: type(value) is int and value >= 0, "a whole number, 0 or more")
_NUMBER: Check = (_is_number, "a finite number")
_TEXT: Check = (lambda value: isinstance(value, str), "a text")
_TEXT_OR_NULL: Check = (lambda value: value is None or isinstance(value, str), "a text or null")
_TOKENS: Check = (_are_tokens, "a list of whole numbers, 0 or more and of 31 bits at most")
_NUMBERS: Check = (_is_map_of(_is_number), "an object of finite numbers")
TURN = {"start": _WHOLE, "end": _WHOLE, "text": _TEXT, "reward": _NUMBER, "details": _NUMBERS}
FORM: dict[str, Any] = {
    "iteration": _INTEGER,
    **dict.fromkeys(("weight_version", "sample", "num_samples", "group"), _WHOLE),
    "prompt": {
        **dict.fromkeys(("id", "text", "answer"), _TEXT),
        "token_ids": _TOKENS,
        "metadata": (_is_map_of(_TEXT[0]), "an object of texts"),
    },
    "response": {
        "token_ids": _TOKENS,
        "text": _TEXT,
        "rollout_logprobs": (_are_logprobs, "a list of finite numbers"),
        "generated": (lambda value: _is_list_of(value, bool), "a list of true and false"),
        "weight_versions": (lambda value: _is_list_of(value, int), "a list of whole numbers"),
        "finish_reason": (lambda value: value in [r.value for r in FinishReason], "stop, length or max_turns"),
        "turns": (lambda value: isinstance(value, list), "a list of turns"),
    },
    "score": {
        "reward": _NUMBER,
        "correct": (lambda value: isinstance(value, bool), "true or false"),
        "details": _NUMBERS,
        **dict.fromkeys(("answer", "failure"), _TEXT_OR_NULL),
    },
}
"""The keys of a line, but for group_number, and what each must be"""


def _check(value: Any, form: Any, name: str = "") -> None:
    """Check that an object has exactly the keys of the form, and their types. Raises ValueError."""
    if not isinstance(form, dict):
        is_right, expected = form
        if not is_right(value):
            found = repr(value)
            raise ValueError(f'"{name}" is {found if len(found) <= 60 else f"{found[:57]}..."}; expected {expected}')
        return
    if not isinstance(value, dict):
        raise ValueError(f"found a JSON {type(value).__name__}{f' as {name!r}' if name else ''}; expected an object")
    for key in [*form, *value]:
        path = f"{name}.{key}" if name else key
        if key not in value:
            raise ValueError(f'"{path}" is missing; found {", ".join(value) or "nothing"}')
        if key not in form:
            raise ValueError(f'"{path}" is not a key of a rollout; the keys are {", ".join(form)}')
        _check(value[key], form[key], path)


def _to_sample(record: Any) -> Sample:
    """The sample of a line. Raises ValueError, naming key and value, for what `RolloutWriter` does not write."""
    has_number = isinstance(record, dict) and "group_number" in record
    _check(record, FORM | {"group_number": _WHOLE} if has_number else FORM)
    for number, turn in enumerate(record["response"]["turns"]):
        _check(turn, TURN, f"response.turns.{number}")
    return from_record(record)


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

    def check(self, sample: Sample) -> None:
        """Raises ValueError where the model cannot read the sample."""
        try:
            own = self.critic_prompt.encode(sample.prompt) if self.critic_prompt else ()
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from error
        prompt, response = sample.prompt.token_ids, sample.response.token_ids
        largest = max(max(prompt, default=0), int(response.max(initial=0)))
        if largest >= self.vocab_size:
            raise ValueError(
                f"found token id {largest}; {self.reader}'s vocabulary has {self.vocab_size} tokens: the rollouts must"
                " be of a policy with the same tokenizer"
            )
        if len(own) + len(prompt) + len(response) > self.max_length:
            before = f"{len(own)} of data.critic_prompt, " if own else ""
            raise ValueError(
                f"found {before}{len(prompt)} prompt and {len(response)} response tokens; {self.reader} has"
                f" {self.max_length} positions"
            )
        for what, length, bound, key in (
            ("prompt", len(prompt), self.prompt_length, "data.prompt_length"),
            ("response", len(response), self.response_length, "rollout.response_length"),
        ):
            if bound is not None and length > bound:
                raise ValueError(f"found a {what} of {length} tokens; {key} is {bound} and must be at least that")


def load_rollouts(path: Path) -> tuple[Rollout, ...]:
    """All rollouts of a file, in order; otherwise as `read_rollouts`."""
    return tuple(rollout for rollout, _ in read_rollouts(path))


@dataclass(frozen=True)
class Line:
    """A line of the file."""

    where: str
    """FILE:LINE"""
    start: int
    """Bytes of the file before it"""
    text: bytes


def read_rollouts(path: Path, limits: Limits | None = None) -> Iterator[tuple[Rollout, Sequence[Line]]]:
    """Iterate over the rollouts of a file, in order, with one at a time in memory, each with its samples' lines.

    A half-written last line and a rollout without its last samples are what a killed run leaves: they are dropped
    with a RuntimeWarning.

    Raises:
        ValueError: a line is not what `RolloutWriter` writes, or exceeds `limits`: says FILE:LINE, what was found and
            what would be right; or there is no complete rollout.
        FileNotFoundError: there is no such file.
    """
    samples: list[Sample] = []
    lines: list[Line] = []
    header: Mapping[str, Any] = {}
    num_rollouts = 0
    for line, record in _read_lines(path):
        with _naming(line.where):
            sample = _to_sample(record)
            if samples and record["sample"] == 0:
                _warn_incomplete(line.where, samples, header)
                samples, lines = [], []
            _check_place(record, header if samples else record, samples)
            if limits is not None:
                limits.check(sample)
        samples.append(sample)
        lines.append(line)
        header = record
        if len(samples) == header["num_samples"]:
            yield Rollout(tuple(samples), header["weight_version"]), lines
            num_rollouts, samples, lines = num_rollouts + 1, [], []
    if samples:
        _warn_incomplete(str(path), samples, header)
    if not num_rollouts:
        raise ValueError(f"{path}: found no complete rollout; expected the rollouts.jsonl of a run")


def _read_lines(path: Path) -> Iterator[tuple[Line, Any]]:
    """Every line and what its JSON is."""
    start = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                record = parse_strict_json(text)
            except ValueError as error:  # UnicodeDecodeError is one too
                if text.endswith(b"\n"):
                    raise ValueError(f"{where}: {error}; expected one JSON object a line") from None
                warnings.warn(f"{where}: a half-written last line, left by a killed run, was dropped", RuntimeWarning)
                return
            yield Line(where, start, text), record
            start += len(text)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Within the block, a ValueError begins with this place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _warn_incomplete(where: str, samples: list[Sample], header: Mapping[str, Any]) -> None:
    warnings.warn(
        f"{where}: the rollout before it has {len(samples)} of its {header['num_samples']} samples, as a killed run"
        " leaves it; it was dropped",
        RuntimeWarning,
    )


def _check_place(record: Mapping[str, Any], header: Mapping[str, Any], before: list[Sample]) -> None:
    """Check that the line is the rollout's next one. header: a line of the rollout."""
    if record["sample"] != len(before) or not record["sample"] < record["num_samples"]:
        found = f"sample {record['sample']} of {record['num_samples']}"
        raise ValueError(f"found {found}; expected sample {len(before)}: the lines of a rollout are in order")
    group, last = record["group"], before[-1].group if before else -1
    if group not in ((0,) if last < 0 else (last, last + 1)):
        expected = f"{last} or {last + 1}" if before else "0"
        raise ValueError(f'"group" is {group}; expected {expected}: groups are contiguous, numbered from 0')
    for name in ("num_samples", "weight_version", "iteration"):
        if record[name] != header[name]:
            raise ValueError(f'"{name}" is {record[name]}; the rollout\'s first line has {header[name]}')


@dataclass(frozen=True)
class SavedGroup:
    """Where the responses to one prompt are in the file."""

    id: str
    """SHA-256 of its lines"""
    where: str
    """FILE:LINE of the first of its lines"""
    start: int
    """Bytes of the file before it"""
    num_bytes: int
    num_samples: int


@dataclass(frozen=True)
class SavedGroups:
    """A file that has been read once and found valid, and where each of its groups is."""

    path: Path
    groups: tuple[SavedGroup, ...]
    num_rollouts: int
    num_failed: int
    """Responses without a reward, which are not learned from"""
    has_turns: bool
    """Whether an environment answered between turns of the policy"""
    prompts: tuple[Prompt, ...]
    """Those of the first rollout"""
    dropped: tuple[str, ...]
    """What of the file is left out, a message each"""

    @property
    def num_samples(self) -> int:
        return sum(group.num_samples for group in self.groups)


NO_GROUPS = SavedGroups(Path(), (SavedGroup("", "", 0, 0, 0),), 0, 0, False, (), ())
"""Where nothing but the critic learns, from algo.value_pretrain.rollouts; nobody takes the one group"""


def find_groups(path: Path, limits: Limits, wrong: float = 0.0) -> SavedGroups:
    """Validate the whole file, with one rollout at a time in memory. wrong: reward.wrong.

    Raises ValueError and FileNotFoundError as `read_rollouts`, and ValueError where no response has a reward or a
    score is not one that reward.wrong can scale.
    """
    groups: list[SavedGroup] = []
    num_rollouts = num_failed = 0
    has_turns = False
    prompts: dict[str, Prompt] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for rollout, lines in read_rollouts(path, limits):
            pairs = list(zip(lines, rollout.samples, strict=True))
            for line, sample in pairs:
                if sample.score.failure is None:
                    with _naming(line.where):
                        check_score(sample.score.reward, wrong)
                has_turns |= len(sample.response.turns) > 1
            if num_rollouts == 0:
                prompts = {sample.prompt.id: sample.prompt for sample in rollout.samples}
            num_rollouts, num_failed = num_rollouts + 1, num_failed + count_failed(rollout.samples)
            for _, members in groupby(pairs, key=lambda pair: pair[1].group):
                own = [line for line, _ in members]
                text = b"".join(line.text for line in own)
                id = hashlib.sha256(text).hexdigest()
                groups.append(SavedGroup(id, own[0].where, own[0].start, len(text), len(own)))
    dropped = tuple(str(warning.message) for warning in caught)
    saved = SavedGroups(path, tuple(groups), num_rollouts, num_failed, has_turns, tuple(prompts.values()), dropped)
    if num_failed == saved.num_samples:
        raise ValueError(f"{path}: none of its {num_failed} responses has a reward, so there is nothing to learn from")
    return saved


def read_group(path: Path, group: SavedGroup) -> tuple[Sample, ...]:
    """The samples of one group. Raises RuntimeError where the file has changed since it was validated."""
    with path.open("rb") as file:
        file.seek(group.start)
        text = file.read(group.num_bytes)
    if hashlib.sha256(text).hexdigest() != group.id:
        raise RuntimeError(f"{group.where}: the file has changed since the run was started")
    return tuple(_to_sample(parse_strict_json(line)) for line in text.splitlines())
