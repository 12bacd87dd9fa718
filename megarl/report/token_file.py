"""tokens.jsonl: some responses of each iteration and evaluation, token by token, for the rollout viewer.

{"iteration": 3, "kind": "train", "sample": 17, "group": 1, "age": 0, "weight_version": 2,
 "prompt": {"id", "text", "answer"}, "score": {"reward", "correct", "details", "answer", "failure"},
 "finish_reason": "stop", "num_tokens": 40, "kept": [[0, 40]], "observed": [[12, 20]],
 "versions": [[version, end], ...], "turns": [{"start", "end", "reward", "details"}, ...],
 "tokens": [" The", ...], "rollout_logprobs": [...], "log_ratios": [...], "values": [...], "advantages": [...],
 "returns": [...], "ref_logprobs": [...], "entropies": [...], "log_changes": [...]}

`kind` is "train", or "heldout" for a greedy response of an evaluation; `sample` is its number in the rollout, of which
`weight_version` is the trainer's version. `kept` has the ranges of response tokens that the line has, two where the
middle of a long response is left out: "tokens" (their texts) and the fields after it have an entry for each of them, in
order. `observed` has the ranges that the environment wrote, `versions` the version of the weights that sampled each run
of tokens and where it ends; `turns` are those of `megarl.types`. Ranges count tokens of the response.

rollout_logprobs: log pi by the rollout engine. log_ratios: log pi by the policy before the update minus
rollout_logprobs. values, advantages, returns: as `megarl.types.TrainingSamples` has them. ref_logprobs: by the
reference. entropies: of the policy before the update, in nats. log_changes: log pi after the update minus log pi before
it. What was not computed is absent. Numbers have 4 significant digits; null stands where a number is not finite.

The lines of an iteration have logger.token_record_kb at most, and those of an evaluation. Texts of prompts, answers and
failures longer than `LONGEST_TEXT` characters lose their middle.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megarl.report.metrics import LineFile
from megarl.report.text import shorten
from megarl.types import Experience, FinishReason, Rollout, Sample, TrainingSamples

FILE_NAME = "tokens.jsonl"
TRAIN, HELDOUT = "train", "heldout"
LONGEST_TEXT = 4000
SMALLEST_PIECE = 16
"""A response of which fewer tokens fit is left out"""
LONGEST_CHARACTER = 4
"""Tokens that one character may be split into; UTF-8 has at most 4 bytes"""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Range = tuple[int, int]


class TokenFile(LineFile):
    """Appends to a tokens.jsonl; what it was given is on disk when a call returns."""

    def __init__(self, path: Path, num_records: int, max_bytes: int, decode: Callable[[list[int]], str | list[str]]):
        """Open or create `path`, and cut off a half-written last line.

        num_records, max_bytes: of each iteration, and of each evaluation. decode: a tokenizer's.
        """
        super().__init__(path)
        self._num_records, self._max_bytes = num_records, max_bytes
        self._texts = TokenTexts(decode)

    def choose(self, rollout: Rollout) -> list[int]:
        """The numbers of the samples of training to be written: `choose_samples`."""
        return choose_samples(rollout.samples, self._num_records)

    def write(self, iteration: int, rollout: Rollout, rows: Sequence[int], fields: Mapping[str, Tensor]) -> None:
        """Append these samples of an iteration. fields: float [len(rows), T] each, by their names in the line."""
        self._write(iteration, TRAIN, rollout, rows, fields)

    def write_heldout(self, iteration: int, rollout: Rollout) -> None:
        """Append the first samples of an evaluation, whose prompts are the same each time."""
        self._write(iteration, HELDOUT, rollout, range(min(self._num_records, len(rollout.samples))), {})

    def _write(
        self, iteration: int, kind: str, rollout: Rollout, rows: Sequence[int], fields: Mapping[str, Tensor]
    ) -> None:
        left, lines = self._max_bytes, list[str]()
        for place, row in enumerate(rows):
            head = {"iteration": iteration, "kind": kind, "sample": row, "weight_version": rollout.weight_version}
            own = {name: tensor[place].tolist() for name, tensor in fields.items()}
            lines.append(self._format(head, rollout.samples[row], own, left // (len(rows) - place)))
            left -= len(lines[-1])
        self.append(lines)

    def _format(
        self, head: Mapping[str, Any], sample: Sample, fields: Mapping[str, Sequence[float]], max_bytes: int
    ) -> str:
        """The line, with as many tokens as fit; "" where hardly any does. fields: may be longer than the response."""
        response = sample.response
        lists: dict[str, Sequence[Any]] = {"tokens": self._texts.list_texts(response.token_ids.tolist())}
        for name, values in {"rollout_logprobs": response.rollout_logprobs.tolist(), **fields}.items():
            lists[name] = [_round(value) for value in values[: len(response)]]
        shared = {**head, **_describe(sample)}
        num_kept = len(response)
        while True:
            kept = _keep_ends(len(response), num_kept)
            cut = {name: [x for start, end in kept for x in values[start:end]] for name, values in lists.items()}
            line = f"{json.dumps({**shared, 'kept': kept, **cut}, allow_nan=False, separators=(',', ':'))}\n"
            if len(line) <= max_bytes:
                return line
            # A tenth less than the mean token would allow: they differ.
            num_kept = min(num_kept - 1, int(0.9 * num_kept * max_bytes / len(line)))
            if num_kept < SMALLEST_PIECE:
                return ""


class TokenTexts:
    """The text of each token of a response. Those that together make one character stand at the last of them."""

    def __init__(self, decode: Callable[[list[int]], str | list[str]]):
        self._decode = decode
        self._cache: dict[int, str] = {}

    def list_texts(self, token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        place = 0
        while place < len(token_ids):
            text = self._cache.get(token_ids[place])
            if text is None:
                text = self._cache[token_ids[place]] = str(self._decode([token_ids[place]]))
            num = 1
            if REPLACEMENT in text:
                for longer in range(2, LONGEST_CHARACTER + 1):
                    joined = str(self._decode(list(token_ids[place : place + longer])))
                    if REPLACEMENT not in joined:
                        num, text = min(longer, len(token_ids) - place), joined
                        break
            texts += [""] * (num - 1) + [text]
            place += num
        return texts


def choose_samples(samples: Sequence[Sample], num: int) -> list[int]:
    """The numbers of at most `num` samples of fresh and replayed groups: of each group the first response that is
    right, wrong, cut and without a reward, groups in the order of a hash of their prompts' ids.

    So the same prompts are chosen whenever they come, in every run, and right and wrong responses to them.
    """
    groups: dict[int, dict[str, int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group, {}).setdefault(name_outcome(sample), row)

    def rank(group: int) -> bytes:
        first = min(groups[group].values())
        return hashlib.blake2b(samples[first].prompt.id.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    ordered = sorted(groups, key=lambda group: (rank(group), group))
    return [row for group in ordered for row in sorted(groups[group].values())][:num]


def name_outcome(sample: Sample) -> str:
    """failed (there is no reward), truncated (cut at the length limit), right or wrong."""
    if sample.score.failure is not None:
        return "failed"
    if sample.response.finish_reason is FinishReason.length:
        return "truncated"
    return "right" if sample.score.correct else "wrong"


def collect_fields(experience: Experience, samples: TrainingSamples, rows: Tensor) -> dict[str, Tensor]:
    """What training knows of the tokens of these rows (int64 [K]), float32 [K, T] each, by their names in a line."""
    found: dict[str, Tensor] = {}
    # Where nothing reads the policy's own log-probs, they are the rollout engine's.
    if experience.old_logprobs is not experience.rollout_logprobs:
        log_ratios = experience.old_logprobs[rows] - experience.rollout_logprobs[rows]
        found["log_ratios"] = log_ratios.where(experience.mask[rows], 0.0)
    given = {"values": experience.values, "advantages": samples.advantages, "returns": samples.returns}
    given["ref_logprobs"] = experience.ref_logprobs
    return found | {name: tensor[rows] for name, tensor in given.items() if tensor is not None}


def _describe(sample: Sample) -> dict[str, Any]:
    prompt, response, score = sample.prompt, sample.response, sample.score
    return {
        "group": sample.group,
        "age": sample.age,
        "prompt": {
            "id": prompt.id,
            "text": shorten(prompt.text, LONGEST_TEXT),
            "answer": shorten(prompt.answer, LONGEST_TEXT),
        },
        "score": {
            "reward": score.reward,
            "correct": score.correct,
            "details": dict(score.details),
            "answer": None if score.answer is None else shorten(score.answer, LONGEST_TEXT),
            "failure": None if score.failure is None else shorten(score.failure, LONGEST_TEXT),
        },
        "finish_reason": response.finish_reason.value,
        "num_tokens": len(response),
        "observed": list(_find_ranges(~response.generated)),
        "versions": list(zip(response.weight_versions.versions, response.weight_versions.ends, strict=True)),
        "turns": [
            {"start": turn.start, "end": turn.end, "reward": turn.reward, "details": dict(turn.details)}
            for turn in response.turns
        ],
    }


def _keep_ends(length: int, num: int) -> list[Range]:
    """The ranges of the first and the last tokens, `num` together."""
    if num >= length:
        return [(0, length)]
    return [(0, num - num // 2), (length - num // 2, length)]


def _find_ranges(flags: NDArray[np.bool_]) -> Iterator[Range]:
    """(start, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded
