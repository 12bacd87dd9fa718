"""Sampled responses on disk: rollouts.jsonl, and the journal that a resumed run goes on from.

rollouts.jsonl has every response of training, one strict JSON object a line, a rollout's lines together:

{"iteration": 1, "weight_version": 0, "sample": 0, "num_samples": 256, "group": 0,
 "prompt": {"id", "text", "token_ids", "answer", "metadata"},
 "response": {"token_ids", "text", "rollout_logprobs", "generated", "weight_versions", "finish_reason",
              "turns": [{"start", "end", "text", "reward", "details"}, ...]},
 "score": {"reward", "correct", "details", "answer", "failure"}}

and "group_number", the score's "token_rewards" and, with data=mix, the prompt's "source" where the sample has them,
with the meanings of megarl/types.py. `iteration` is 0 or less during value pretraining; `sample` counts the lines of a
rollout from 0. Numbers are read back bit for bit.

RUN_DIR/journal has the responses whose update is in no checkpoint yet, one file for each call, so that a resumed run
need not sample again:

iteration-3-round-1.samples   what one call gave; likewise pretraining-2.samples
group-40-37.samples           with rollout.max_staleness > 0: group 37, the one that was complete after 40 others

Its files are of msgpack, with what has an entry per token as bytes, since every iteration waits for its journal.
"""

import contextlib
import hashlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
import numpy as np
from pydantic import ConfigDict, Field, ValidationError, create_model

from megarl.config.errors import ConfigError
from megarl.files import parse_strict_json, write_atomically
from megarl.report.evaluation import count_failed
from megarl.report.record import LineFile
from megarl.task.render import CriticPrompt
from megarl.types import (
    FinishReason,
    Prompt,
    Response,
    Rollout,
    RoutedExperts,
    Sample,
    Score,
    Turn,
    WeightVersions,
    check_score,
)

ROLLOUTS_FILE = "rollouts.jsonl"
Group = tuple[Sample, ...]
"""The samples of one prompt"""


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
    own |= {"source": prompt.source} if prompt.source else {}
    several = bool(response.segment_prompts)
    record = {
        "group": sample.group,
        "prompt": own | {"metadata": dict(prompt.metadata)},
        "response": {
            "text": response.text,
            "finish_reason": response.finish_reason.value,
            "turns": [_to_turn(turn) for turn in response.turns],
            **({"segment_prompts": [each.tolist() for each in response.segment_prompts]} if several else {}),
        },
        "score": {name: value for name, value in vars(score).items() if name != "token_rewards" or value}
        | {"details": dict(score.details)},
    }
    return record if sample.group_number is None else record | {"group_number": sample.group_number}


def _to_turn(turn: Turn) -> dict[str, Any]:
    found = {**vars(turn), "details": dict(turn.details)}
    return found if turn.segment else {name: value for name, value in found.items() if name != "segment"}


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
        Score(**{**record["score"], "token_rewards": tuple(record["score"].get("token_rewards", ()))}),
        record["group"],
        group_number=record.get("group_number"),
        **changes,
    )


def _form(**fields: Any) -> Any:
    """What an object of exactly these keys must be; pydantic checks it. A pair: the type, and what a missing key is."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    definitions: dict[str, Any] = {
        name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()
    }
    return create_model("Form", __config__=config, **definitions)


_LARGEST = float(np.finfo(np.float32).max)
_WHOLE = Annotated[int, Field(ge=0)]
_TOKENS = list[Annotated[int, Field(ge=0, le=int(np.iinfo(np.int32).max))]]
_NUMBERS = dict[str, float]
_LINE = _form(
    iteration=int,
    **dict.fromkeys(("weight_version", "sample", "num_samples", "group"), _WHOLE),
    prompt=_form(id=str, text=str, answer=str, token_ids=_TOKENS, metadata=dict[str, str], source=(str, "")),
    response=_form(
        token_ids=_TOKENS,
        text=str,
        rollout_logprobs=list[Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]],
        generated=list[bool],
        weight_versions=list[int],
        finish_reason=Literal[tuple(reason.value for reason in FinishReason)],
        turns=list[_form(start=_WHOLE, end=_WHOLE, text=str, reward=float, details=_NUMBERS, segment=(_WHOLE, 0))],  # type: ignore[misc]
        segment_prompts=(list[_TOKENS], []),
    ),
    score=_form(
        reward=float,
        correct=bool,
        details=_NUMBERS,
        answer=str | None,
        failure=str | None,
        token_rewards=(list[float], []),
    ),
    group_number=(_WHOLE | None, None),
)


def _to_sample(record: Any) -> Sample:
    """The sample of a line. Raises ValueError, naming key and value, for what `RolloutWriter` does not write."""
    try:
        _LINE.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, found = ".".join(map(str, first["loc"])), repr(first["input"])
        found = found if len(found) <= 60 else f"{found[:57]}..."
        raise ValueError(f'"{name}": {first["msg"]}; found {found}') from None
    return from_record(record)


@dataclass(frozen=True)
class Limits:
    """The limits of the model that will read the rollouts."""

    vocab_size: int
    max_length: int
    """Maximum tokens of prompt and response together"""
    response_length: int
    prompt_length: int | None = None
    """Maximum tokens of a prompt; None: only max_length limits it"""
    reader: str = "the critic"
    """Whose limits they are, in messages"""
    critic_prompt: CriticPrompt | None = None
    """What the model reads before each prompt, if it is a critic with data.critic_prompt"""

    def check(self, sample: Sample) -> None:
        """Raises ValueError where the model cannot read the sample."""
        try:
            num_own = len(self.critic_prompt.encode(sample.prompt)) if self.critic_prompt else 0
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from error
        prompt, response = sample.prompt.token_ids, sample.response.token_ids
        largest = max(max(prompt, default=0), int(response.max(initial=0)))
        starts, segments = sample.response.segment_prompts, sample.response.find_segments()
        largest = max(largest, *(int(each.max(initial=0)) for each in starts), 0)
        longest = max(len(before) + len(own) for before, own in zip((prompt, *starts), segments, strict=True))
        if largest >= self.vocab_size:
            raise ValueError(
                f"found token id {largest}; {self.reader}'s vocabulary has {self.vocab_size} tokens: the rollouts must"
                " be of a policy with the same tokenizer"
            )
        whole, of_reader = num_own + longest, f"the length for {self.reader}"
        for what, length, key, bound in (
            ("a prompt", len(prompt), "data.prompt_length", self.prompt_length),
            ("a response", len(response), "rollout.response_length", self.response_length),
            ("prompt and response", whole, of_reader, self.max_length),
        ):
            if bound is not None and length > bound:
                raise ValueError(f"found {what} of {length} tokens; {key} is {bound} and must be at least that")


class Line(NamedTuple):
    """A line of the file; where: FILE:LINE, start: the bytes of the file before it."""

    where: str
    start: int
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
    members: list[tuple[Sample, Line]] = []
    header: Mapping[str, Any] = {}
    num_rollouts = 0
    for line, record in _read_lines(path):
        with _naming(line.where):
            sample = _to_sample(record)
            if members and record["sample"] == 0:
                _warn_incomplete(line.where, len(members), header)
                members = []
            header = header if members else record
            _check_place(record, header, [each for each, _ in members[-1:]], len(members))
            if limits is not None:
                limits.check(sample)
        members.append((sample, line))
        if len(members) == header["num_samples"]:
            samples, lines = zip(*members, strict=True)
            yield Rollout(samples, header["weight_version"]), lines
            num_rollouts, members = num_rollouts + 1, []
    if members:
        _warn_incomplete(str(path), len(members), header)
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


def _warn_incomplete(where: str, num_samples: int, header: Mapping[str, Any]) -> None:
    warnings.warn(
        f"{where}: the rollout before it has {num_samples} of its {header['num_samples']} samples, as a killed run"
        " leaves it; it was dropped",
        RuntimeWarning,
    )


def _check_place(record: Mapping[str, Any], header: Mapping[str, Any], last: Sequence[Sample], number: int) -> None:
    """Check that the line is the rollout's next one. header: the rollout's first line. last: the sample before it."""
    if record["sample"] != number or not number < record["num_samples"]:
        found = f"sample {record['sample']} of {record['num_samples']}"
        raise ValueError(f"found {found}; expected sample {number}: the lines of a rollout are in order")
    expected = (last[0].group, last[0].group + 1) if last else (0,)
    if record["group"] not in expected:
        right = " or ".join(map(str, expected))
        raise ValueError(f'"group" is {record["group"]}; expected {right}: groups are contiguous, numbered from 0')
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
    rollout: int
    """Number of its rollout, from 0"""


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


NO_GROUPS = SavedGroups(Path(), (SavedGroup("", "", 0, 0, 0, 0),), 0, 0, False, (), ())
"""Where nothing but the critic learns, from algo.value_pretrain.rollouts; nobody takes the one group"""


def find_groups(path: Path, limits: Limits, wrong: float = 0.0) -> SavedGroups:
    """Validate the whole file, with one rollout at a time in memory. wrong: reward.wrong.

    Raises ValueError and FileNotFoundError as `read_rollouts`, and ValueError where no response has a reward or a
    score is not one that reward.wrong can scale.
    """
    groups: list[SavedGroup] = []
    counts: Counter[str] = Counter()
    prompts: dict[str, Prompt] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for rollout, lines in read_rollouts(path, limits):
            if not counts["rollouts"]:
                prompts = {sample.prompt.id: sample.prompt for sample in rollout.samples}
            pairs = list(zip(lines, rollout.samples, strict=True))
            for line, sample in pairs:
                if sample.score.failure is None:
                    with _naming(line.where):
                        check_score(sample.score.reward, wrong)
                counts["turns"] = max(counts["turns"], len(sample.response.turns))
            counts.update(rollouts=1, failed=count_failed(rollout.samples))
            for _, members in groupby(pairs, key=lambda pair: pair[1].group):
                own = [line for line, _ in members]
                text, (where, start, _) = b"".join(line.text for line in own), own[0]
                size = len(text), len(own), counts["rollouts"] - 1
                groups.append(SavedGroup(hashlib.sha256(text).hexdigest(), where, start, *size))
    saved = SavedGroups(
        *(path, tuple(groups), counts["rollouts"], counts["failed"], counts["turns"] > 1, tuple(prompts.values())),
        tuple(str(warning.message) for warning in caught),
    )
    if saved.num_failed == saved.num_samples:
        raise ValueError(
            f"{path}: none of its {saved.num_failed} responses has a reward, so there is nothing to learn from"
        )
    return saved


def read_group(path: Path, group: SavedGroup) -> tuple[Sample, ...]:
    """The samples of one group. Raises RuntimeError where the file has changed since it was validated."""
    with path.open("rb") as file:
        file.seek(group.start)
        text = file.read(group.num_bytes)
    if hashlib.sha256(text).hexdigest() != group.id:
        raise RuntimeError(f"{group.where}: the file has changed since the run was started")
    return tuple(from_record(parse_strict_json(line)) for line in text.splitlines())


JOURNAL = "journal"
"""The folder of `Journal` in a run's directory"""
ARRAYS = {"token_ids": np.int32, "rollout_logprobs": np.float32, "generated": np.bool_}


def save_samples(path: Path, groups: Sequence[Sequence[Group]]) -> None:
    """Write samples; the file is complete on disk or absent. What only environments and rewards read is left out."""
    records = [[[_describe(sample) for sample in group] for group in each] for each in groups]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgpack.packb(records, unicode_errors="surrogatepass"))


def _describe(sample: Sample) -> dict[str, Any]:
    response, first_old = sample.response, sample.first_old_logprobs
    versions, experts = response.weight_versions, response.routed_experts
    return {
        **to_record(sample),
        "arrays": {name: getattr(response, name).tobytes() for name in ARRAYS},
        "versions": [versions.versions, versions.ends],
        "experts": None if experts is None else list(vars(experts).values()),
        "first_old_logprobs": None if first_old is None else first_old.tobytes(),
    }


def load_samples(path: Path) -> list[list[Group]]:
    """What `save_samples` wrote, bit for bit. Raises ValueError naming the file where it is damaged."""
    content = path.read_bytes()
    try:
        records = msgpack.unpackb(content, unicode_errors="surrogatepass")
        return [[tuple(map(_build, group)) for group in each] for each in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None


def _build(record: dict[str, Any]) -> Sample:
    first_old, experts = record["first_old_logprobs"], record["experts"]
    # Arrays of bytes could not be written to, of which torch warns.
    arrays: dict[str, Any] = {
        name: np.frombuffer(bytearray(record["arrays"][name]), dtype) for name, dtype in ARRAYS.items()
    }
    versions, ends = record["versions"]
    record["response"] |= arrays | {
        "weight_versions": WeightVersions(tuple(versions), tuple(ends)),
        "routed_experts": None if experts is None else RoutedExperts(*experts),
    }
    kept = None if first_old is None else np.frombuffer(bytearray(first_old), np.float32)
    return from_record(record, first_old_logprobs=kept)


def name_group(place: int, number: int) -> str:
    """The key of group `number`, which is the one at `place` (from 0) in the order in which groups are complete."""
    return f"group-{place}-{number}"


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
        try:
            ((samples,),) = load_samples(path)
            if [s.prompt.id for s in samples] != [prompt.id for prompt in prompts for _ in range(num_responses)]:
                raise ValueError(f"{path}: has responses to other prompts than this run's")
        except FileNotFoundError:
            return None
        except ValueError as error:
            warnings.warn(f"{error}; the responses are sampled again", RuntimeWarning, stacklevel=2)
            return None
        return samples

    def list_groups(self, first: int) -> list[tuple[int, int]]:
        """(place, number) of the groups from place `first` on, in order."""
        found = (_GROUP.fullmatch(path.stem) for path in self._directory.glob("group-*.samples"))
        return sorted((int(m[1]), int(m[2])) for m in found if m is not None and int(m[1]) >= first)

    def save(self, key: str, samples: tuple[Sample, ...]) -> None:
        save_samples(self._find(key), [[samples]])

    def drop(self, key: str) -> None:
        """Remove what was saved under `key`."""
        self._find(key).unlink(missing_ok=True)

    def drop_failed(self) -> None:
        """Remove the files that have a sample without a reward: whoever resumes samples and scores them again."""
        for path in self._directory.glob("*.samples"):
            ((samples,),) = load_samples(path)
            if any(sample.score.failure is not None for sample in samples):
                path.unlink()

    def forget(self, through: int, num_groups: int = 0, num_steps: float = math.inf) -> None:
        """Remove the samples of iterations up to this one, of the first `num_groups` groups in the order in which they
        were complete, and of the first `num_steps` steps of value pretraining."""
        kept: Mapping[str, float] = {
            r"iteration-(\d+)-.*": through + 1,
            _GROUP.pattern: num_groups,
            r"pretraining-(\d+)": num_steps + 1,
        }
        for path in self._directory.glob("*.samples"):
            if not any((m := re.fullmatch(name, path.stem)) and int(m[1]) >= first for name, first in kept.items()):
                path.unlink()

    def _find(self, key: str) -> Path:
        return self._directory / f"{key.replace('/', '-')}.samples"
