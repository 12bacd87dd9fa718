"""rollouts.jsonl: every sampled response of training, one strict JSON object a line, a rollout's lines together.

{"iteration": 1, "weight_version": 0, "sample": 0, "num_samples": 256, "group": 0,
 "prompt": {"id", "text", "token_ids", "answer", "metadata"},
 "response": {"token_ids", "text", "rollout_logprobs", "generated", "weight_versions", "finish_reason",
              "turns": [{"start", "end", "text", "reward", "details"}, ...]},
 "score": {"reward", "correct", "details", "answer", "failure"}}

and "first_old_logprobs" and "group_number" where the sample has them, with the meanings of megarl/types.py. `iteration`
is 0 during value pretraining; `sample` counts the lines of a rollout from 0. Numbers are read back bit for bit. The
files from which a run goes on (`write_rollouts`) also have "routed_experts"; the one of all its responses has not: they
are some hundred bytes a token. In them what has an entry per token is packed (`_pack`): 12 bytes a token and no Python
object, since each iteration waits for its journal.

RUN_DIR/journal has such files of what was sampled, so that a resumed run need not sample it again:

iteration-3-round-1.jsonl   what one call gave; likewise pretraining-2.jsonl
group-40-37.jsonl           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others
"""

import base64
import binascii
import contextlib
import hashlib
import json
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.algo.rewards import check_score
from megarl.config.errors import ConfigError
from megarl.files import parse_strict_json, write_atomically
from megarl.report.metrics import LineFile
from megarl.report.scores import count_failed
from megarl.task.render import CriticPrompt
from megarl.types import FinishReason, Prompt, Response, Rollout, RoutedExperts, Sample, Score, Turn, WeightVersions

FILE_NAME = "rollouts.jsonl"
JOURNAL = "journal"
"""The folder of `Journal` in a run's directory"""
FIRST_OLD = "first_old_logprobs"
EXPERTS = "routed_experts"
NUMBER = "group_number"


class RolloutWriter(LineFile):
    """Appends to a rollouts.jsonl; a rollout is complete on disk when `write` returns."""

    def write(self, rollout: Rollout, iteration: int) -> None:
        """Append all samples. Raises ValueError for NaN or infinity among the numbers, and then writes nothing."""
        self.append(list(format_rollout(rollout, iteration)))


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a file of these rollouts, as iterations 0, 1, ...; it is complete on disk or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, (line for number, each in enumerate(rollouts) for line in format_rollout(each, number, True))
    )


def format_rollout(rollout: Rollout, iteration: int, to_resume: bool = False) -> Iterator[str]:
    """The lines of a rollout. Raises ValueError for NaN or infinity among the numbers.

    to_resume: packed, with routed experts.
    """
    write = _pack if to_resume else _list_tokens
    for number, sample in enumerate(rollout.samples):
        response = sample.response
        record = {
            "iteration": iteration,
            "weight_version": rollout.weight_version,
            "sample": number,
            "num_samples": len(rollout.samples),
            "group": sample.group,
            "prompt": {name: getattr(sample.prompt, name) for name in FIELDS["prompt"]}
            | {"metadata": dict(sample.prompt.metadata)},
            "response": {
                "token_ids": write(response.token_ids),
                "text": response.text,
                "rollout_logprobs": write(response.rollout_logprobs),
                "generated": write(response.generated),
                "weight_versions": write(response.weight_versions),
                "finish_reason": response.finish_reason.value,
                "turns": [{**vars(turn), "details": dict(turn.details)} for turn in response.turns],
            },
            "score": {**vars(sample.score), "details": dict(sample.score.details)},
        }
        if sample.first_old_logprobs is not None:
            record[FIRST_OLD] = write(sample.first_old_logprobs)
        if sample.group_number is not None:
            record[NUMBER] = sample.group_number
        if to_resume and response.routed_experts is not None:
            record[EXPERTS] = experts_to_record(response.routed_experts)
        yield f"{json.dumps(record, allow_nan=False, separators=(',', ':'))}\n"


def _list_tokens(values: NDArray[Any] | WeightVersions) -> list[Any]:
    """One entry for each token."""
    return list((values.expand() if isinstance(values, WeightVersions) else values).tolist())


def _pack(values: NDArray[Any] | WeightVersions) -> Any:
    """Arrays as base64 of int32, float32 or bytes of 0 and 1, little-endian; versions as runs."""
    if isinstance(values, WeightVersions):
        return [list(run) for run in zip(values.versions, values.ends, strict=True)]
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("found NaN or infinity among the log-probs, which are not JSON compliant")
    return binascii.b2a_base64(values.tobytes(), newline=False).decode("ascii")


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
        with _naming(line.where):
            check_record(record)
            if samples and record["sample"] == 0:
                _warn_incomplete(line.where, samples, header)
                samples, lines = [], []
            _check_place(record, header if samples else None, samples)
            samples.append(_to_sample(record, limits))
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


def _check_place(record: Mapping[str, Any], header: Mapping[str, Any] | None, before: list[Sample]) -> None:
    """Check that the line is the rollout's next one. header: the rollout's first line, if this is not the first."""
    if record["sample"] != len(before) or not record["sample"] < record["num_samples"]:
        found = f"sample {record['sample']} of {record['num_samples']}"
        raise ValueError(f"found {found}; expected sample {len(before)}: the lines of a rollout are in order")
    group, last = record["group"], before[-1].group if before else -1
    if group not in ((0,) if last < 0 else (last, last + 1)):
        expected = f"{last} or {last + 1}" if before else "0"
        raise ValueError(f'"group" is {group}; expected {expected}: groups are contiguous, numbered from 0')
    for name in ("num_samples", "weight_version", "iteration"):
        if header and record[name] != header[name]:
            raise ValueError(f'"{name}" is {record[name]}; the rollout\'s first line has {header[name]}')


def _to_sample(record: Mapping[str, Any], limits: Limits | None = None) -> Sample:
    """The sample of a line that has been checked. Raises ValueError."""
    prompt = Prompt(**{**record["prompt"], "token_ids": tuple(record["prompt"]["token_ids"])})
    response = record["response"]
    arrays = {name: _read_array(name, response.get(name, record.get(name))) for name in _DTYPES}
    token_ids, versions = arrays.pop("token_ids"), response["weight_versions"]
    if isinstance(response["token_ids"], str):
        versions = _read_versions(versions)
    for name, values in {**arrays, "weight_versions": versions}.items():
        if values is not None and len(values) != len(token_ids):
            raise ValueError(f"response has {len(values)} {name}; expected one for each of its {len(token_ids)} tokens")
    experts = read_experts(record[EXPERTS], len(prompt.token_ids) + len(token_ids)) if EXPERTS in record else None
    if limits:
        _check_limits(prompt, token_ids, limits)
    first_old = arrays.pop(FIRST_OLD)
    return Sample(
        prompt,
        Response(
            token_ids=token_ids,
            text=response["text"],
            weight_versions=versions,
            finish_reason=FinishReason(response["finish_reason"]),
            routed_experts=experts,
            turns=[Turn(**turn) for turn in response["turns"]],
            **arrays,
        ),
        Score(**record["score"]),
        record["group"],
        first_old_logprobs=first_old,
        group_number=record.get(NUMBER),
    )


_DTYPES = {"token_ids": "<i4", "rollout_logprobs": "<f4", "generated": "|b1", FIRST_OLD: "<f4"}
"""What has an entry per token; `weight_versions` has too, but as runs"""


def _read_array(name: str, value: Any) -> Any:
    """The array of a list or of a packed text; None: there is none."""
    if value is None:
        return None
    if not isinstance(value, str):
        return np.array(value, _DTYPES[name])
    try:
        found = np.frombuffer(binascii.a2b_base64(value, strict_mode=True), _DTYPES[name])
    except ValueError as error:  # binascii.Error is one too
        raise ValueError(f'"{name}" cannot be read: {error}') from None
    if (found.view(np.uint8) > 1).any() if name == "generated" else not np.isfinite(found).all():
        raise ValueError(f'"{name}" has what is no number of its kind')
    if name == "token_ids" and found.size and found.min() < 0:
        raise ValueError(f'"token_ids" has {found.min()}; expected numbers of 0 or more')
    return found


def _read_versions(runs: list[list[int]]) -> WeightVersions:
    versions, ends = zip(*runs, strict=True) if runs else ((), ())
    if any(a >= b for a, b in pairwise((0, *ends))):
        raise ValueError(f'"weight_versions" end at {list(ends)}; the ends must rise from above 0')
    return WeightVersions(tuple(versions), tuple(ends))


def _check_limits(prompt: Prompt, response: NDArray[np.int32], limits: Limits) -> None:
    try:
        own = limits.critic_prompt.encode(prompt) if limits.critic_prompt else ()
    except ConfigError as error:
        raise ValueError("; ".join(error.problems)) from error
    largest = max([*prompt.token_ids, *response.tolist()], default=0)
    if largest >= limits.vocab_size:
        raise ValueError(
            f"found token id {largest}; {limits.reader}'s vocabulary has {limits.vocab_size} tokens: the rollouts must"
            " be of a policy with the same tokenizer"
        )
    if len(own) + len(prompt.token_ids) + len(response) > limits.max_length:
        before = f"{len(own)} of data.critic_prompt, " if own else ""
        raise ValueError(
            f"found {before}{len(prompt.token_ids)} prompt and {len(response)} response tokens; {limits.reader} has"
            f" {limits.max_length} positions"
        )
    for what, tokens, bound, key in (
        ("prompt", prompt.token_ids, limits.prompt_length, "data.prompt_length"),
        ("response", response, limits.response_length, "rollout.response_length"),
    ):
        if bound is not None and len(tokens) > bound:
            raise ValueError(f"found a {what} of {len(tokens)} tokens; {key} is {bound} and must be at least that")


EXPERT_KEYS = {"num_layers", "top_k", "num_experts", "deflated"}


def experts_to_record(experts: RoutedExperts) -> dict[str, Any]:
    """As JSON: the numbers deflated, in base64, about as long as their bytes."""
    deflated = base64.b64encode(zlib.compress(experts.data, level=1)).decode()
    return {name: getattr(experts, name) for name in EXPERT_KEYS - {"deflated"}} | {"deflated": deflated}


def read_experts(record: Any, num_tokens: int) -> RoutedExperts:
    """What `experts_to_record` wrote of a prompt and response of `num_tokens`. Raises ValueError."""
    if not isinstance(record, Mapping) or record.keys() != EXPERT_KEYS:
        raise ValueError(f'"routed_experts" must be an object of {", ".join(sorted(EXPERT_KEYS))}')
    sizes, deflated = [record[name] for name in ("num_layers", "top_k", "num_experts")], record["deflated"]
    if not all(isinstance(x, int) and x > 0 for x in sizes) or not isinstance(deflated, str):
        raise ValueError('"routed_experts" must have positive whole numbers and a text')
    experts = RoutedExperts(b"", *sizes)
    size = experts.dtype.itemsize * (num_tokens - 1) * experts.num_layers * experts.top_k
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(deflated, validate=True), size + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f'"routed_experts" cannot be read: {error}') from None
    if len(data) != size:
        shape = f"{num_tokens - 1} x {experts.num_layers} x {experts.top_k}"
        raise ValueError(f'"routed_experts" are not {shape} numbers of {experts.dtype}')
    return RoutedExperts(data, *sizes)


Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what would be valid"""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(kinds: set[type], value: Any) -> bool:
    # The types are compared without a call for each entry, which may be one of millions.
    return isinstance(value, list) and set(map(type, value)) <= kinds


def _are_tokens(value: Any) -> bool:
    largest = np.iinfo(np.int32).max
    return _is_list_of({int}, value) and (not value or (min(value) >= 0 and max(value) <= largest))


def _are_numbers(value: Any) -> bool:
    if not _is_list_of({int, float}, value):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.array(value, np.float64).astype(np.float32)).all())


def _map_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_turn(value: Any) -> bool:
    checks = {
        "start": _is_whole,
        "end": _is_whole,
        "text": _is_text,
        "reward": _is_number,
        "details": _map_of(_is_number),
    }
    return (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


_WHOLE: Check = (_is_whole, "a whole number, 0 or more")
_TEXT: Check = (_is_text, "a text")
_TOKENS: Check = (_are_tokens, "a list of whole numbers, 0 or more and of 31 bits at most")
_NUMBERS: Check = (_are_numbers, "a list of finite numbers")
_PACKED: Check = (_is_text, "a text, as the other packed fields")
FIELDS: dict[str, dict[str, Check]] = {
    "prompt": {
        "id": _TEXT,
        "text": _TEXT,
        "token_ids": _TOKENS,
        "answer": _TEXT,
        "metadata": (_map_of(_is_text), "an object of texts"),
    },
    "response": {
        "token_ids": _TOKENS,
        "text": _TEXT,
        "rollout_logprobs": _NUMBERS,
        "generated": (partial(_is_list_of, {bool}), "a list of true and false"),
        "weight_versions": (partial(_is_list_of, {int}), "a list of whole numbers"),
        "finish_reason": (lambda v: v in [r.value for r in FinishReason], "stop, length or max_turns"),
        "turns": (lambda v: isinstance(v, list) and all(map(_is_turn, v)), "a list of turns"),
    },
    "score": {
        "reward": (_is_number, "a finite number"),
        "correct": (lambda v: isinstance(v, bool), "true or false"),
        "details": (_map_of(_is_number), "an object of finite numbers"),
        "answer": (lambda v: v is None or _is_text(v), "a text or null"),
        "failure": (lambda v: v is None or _is_text(v), "a text or null"),
    },
}
_LINE: dict[str, Check] = {
    **dict.fromkeys(("iteration", "weight_version", "sample", "num_samples", "group"), _WHOLE),
    **dict.fromkeys(FIELDS, (lambda value: isinstance(value, dict), "an object")),
}
_OPTIONAL: dict[str, Check] = {
    FIRST_OLD: _NUMBERS,
    EXPERTS: (lambda value: isinstance(value, dict), "an object"),
    NUMBER: _WHOLE,
}
_PACKED_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("token_ids", "rollout_logprobs", "generated"), _PACKED),
    "weight_versions": (
        lambda v: _is_list_of({list}, v) and all(_is_list_of({int}, run) and len(run) == 2 for run in v),
        "a list of [version, number of the token after its last one]",
    ),
}


def check_record(record: Any) -> dict[str, Any]:
    """The record, with exactly the keys and types of the format. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"found a JSON {type(record).__name__}; expected an object")
    optional = {name: check for name, check in _OPTIONAL.items() if name in record}
    response = record.get("response")
    is_packed = isinstance(response, dict) and isinstance(response.get("token_ids"), str)
    if is_packed and FIRST_OLD in optional:
        optional[FIRST_OLD] = _PACKED
    _check_fields(record, _LINE | optional, "")
    for name, checks in FIELDS.items():
        packed = _PACKED_FIELDS if is_packed and name == "response" else {}
        _check_fields(record[name], checks | packed, f"{name}.")
    return record


def _check_fields(record: Mapping[str, Any], checks: Mapping[str, Check], prefix: str) -> None:
    for name in [*checks, *record]:
        if name not in record:
            raise ValueError(f'"{prefix}{name}" is missing; found {", ".join(record) or "nothing"}')
        if name not in checks:
            raise ValueError(f'"{prefix}{name}" is not a key of a rollout; the keys are {", ".join(checks)}')
        is_right, expected = checks[name]
        if not is_right(record[name]):
            found = repr(record[name])
            found = found if len(found) <= 60 else f"{found[:57]}..."
            raise ValueError(f'"{prefix}{name}" is {found}; expected {expected}')


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
        for rollout, lines in read_with_lines(path, limits):
            for line, sample in zip(lines, rollout.samples, strict=True):
                if sample.score.failure is None:
                    with _naming(line.where):
                        check_score(sample.score.reward, wrong)
                has_turns |= len(sample.response.turns) > 1
            if num_rollouts == 0:
                prompts = {sample.prompt.id: sample.prompt for sample in rollout.samples}
            num_rollouts, num_failed = num_rollouts + 1, num_failed + count_failed(rollout.samples)
            pairs = zip(lines, rollout.samples, strict=True)
            for _, group in groupby(pairs, key=lambda pair: pair[1].group):
                groups.append(_locate([line for line, _ in group]))
    dropped = tuple(str(warning.message) for warning in caught)
    saved = SavedGroups(path, tuple(groups), num_rollouts, num_failed, has_turns, tuple(prompts.values()), dropped)
    if num_failed == saved.num_samples:
        raise ValueError(f"{path}: none of its {num_failed} responses has a reward, so there is nothing to learn from")
    return saved


def _locate(lines: Sequence[Line]) -> SavedGroup:
    text = b"".join(line.text for line in lines)
    return SavedGroup(hashlib.sha256(text).hexdigest(), lines[0].where, lines[0].start, len(text), len(lines))


def read_group(path: Path, group: SavedGroup) -> tuple[Sample, ...]:
    """The samples of one group. Raises RuntimeError where the file has changed since it was validated."""
    with path.open("rb") as file:
        file.seek(group.start)
        text = file.read(group.num_bytes)
    if hashlib.sha256(text).hexdigest() != group.id:
        raise RuntimeError(f"{group.where}: the file has changed since the run was started")
    return tuple(_to_sample(check_record(parse_strict_json(line))) for line in text.splitlines())


_GROUP = re.compile(r"group-(\d+)-(\d+)")


class Journal:
    """Samples by the key of their call; a file is complete on disk or absent."""

    def __init__(self, directory: Path):
        self._directory = directory

    def load(self, key: str, prompts: Sequence[Prompt], num_responses: int) -> tuple[Sample, ...] | None:
        """The samples that were saved under this key; None where there are none for these prompts.

        A file that cannot be read or has other prompts is not used; a warning says so.
        """
        path = self._find(key)
        if not path.is_file():
            return None
        try:
            (rollout,) = load_rollouts(path)
        except ValueError as error:
            warnings.warn(f"{error}; the responses are sampled again", RuntimeWarning, stacklevel=2)
            return None
        asked = [prompt.id for prompt in prompts for _ in range(num_responses)]
        if [sample.prompt.id for sample in rollout.samples] != asked:
            warnings.warn(
                f"{path}: has responses to other prompts than this run's; they are sampled again",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return rollout.samples

    def list_groups(self, first: int) -> list[tuple[int, int]]:
        """(place, number) of the groups from place `first` on, in order."""
        found = (_GROUP.fullmatch(path.stem) for path in self._directory.glob("group-*.jsonl"))
        return sorted((int(m[1]), int(m[2])) for m in found if m is not None and int(m[1]) >= first)

    def save(self, key: str, samples: Sequence[Sample]) -> None:
        write_rollouts(self._find(key), [Rollout(tuple(samples), 0)])

    def drop(self, key: str) -> None:
        """Remove what was saved under `key` and under keys that begin with `key`/."""
        name = key.replace("/", "-")
        for path in [self._find(key), *self._directory.glob(f"{name}-*.jsonl")]:
            path.unlink(missing_ok=True)

    def drop_failed(self) -> None:
        """Remove the files that have a sample without a reward: whoever resumes samples and scores them again."""
        for path in self._directory.glob("*.jsonl"):
            (rollout,) = load_rollouts(path)
            if any(sample.score.failure is not None for sample in rollout.samples):
                path.unlink()

    def forget(self, through: int, num_groups: int = 0, num_steps: float = math.inf) -> None:
        """Remove the samples of iterations up to this one, of the first `num_groups` groups in the order in which they
        were complete, and of the first `num_steps` steps of value pretraining."""
        kept = {r"iteration-(\d+)-.*": through + 1, _GROUP.pattern: num_groups, r"pretraining-(\d+)": num_steps + 1}
        for path in self._directory.glob("*.jsonl"):
            if not any((m := re.fullmatch(name, path.stem)) and int(m[1]) >= first for name, first in kept.items()):
                path.unlink()

    def _find(self, key: str) -> Path:
        return self._directory / f"{key.replace('/', '-')}.jsonl"


def name_pretraining(step: int) -> str:
    """The key of the responses of a step of value pretraining, counted from 1."""
    return f"pretraining-{step}"


def name_group(place: int, number: int) -> str:
    """The key of group `number`, which is the one at `place` (from 0) in the order in which groups are complete."""
    return f"group-{place}-{number}"
