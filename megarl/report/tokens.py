"""The tokens of some responses: the file that a run writes of them, and the viewer of a page that shows them."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megarl.files import parse_json
from megarl.report.record import LineFile
from megarl.report.text import shorten
from megarl.types import Experience, FinishReason, Rollout, Sample, TrainingSamples

TOKENS_FILE = "tokens.jsonl"
TRAIN, HELDOUT = "train", "heldout"
MAX_BYTES = 100_000
LONGEST_TEXT = 4000
SMALLEST_PIECE = 16
"""A response of which fewer tokens fit is left out"""
LONGEST_CHARACTER = 4
"""Tokens that one character may be split into; UTF-8 has at most 4 bytes"""


class TokenFile(LineFile):
    """Appends to a tokens.jsonl; what it was given is on disk when a call returns."""

    def __init__(self, path: Path, num_records: int, decode: Callable[[list[int]], str | list[str]]):
        """num_records: of each iteration, and of each evaluation. decode: a tokenizer's."""
        super().__init__(path)
        self._num_records, self._texts = num_records, TokenTexts(decode)

    def write_training(
        self, iteration: int, rollout: Rollout, experience: Experience, samples: TrainingSamples
    ) -> None:
        """Append those of the samples that `choose_samples` gives, with what training knows of their tokens."""
        rows = choose_samples(rollout.samples, self._num_records)
        fields: dict[str, Tensor | None] = {"values": experience.values, "advantages": samples.advantages}
        fields |= {"returns": samples.returns, "ref_logprobs": experience.ref_logprobs}
        # Where nothing reads the policy's own log-probs, they are the rollout engine's.
        if experience.old_logprobs is not experience.rollout_logprobs:
            log_ratios = experience.old_logprobs - experience.rollout_logprobs
            fields["log_ratios"] = log_ratios.where(experience.mask, 0.0)
        self.write(iteration, rollout, rows, {name: x[rows] for name, x in fields.items() if x is not None})

    def write_heldout(self, iteration: int, rollout: Rollout) -> None:
        """Append the first samples of an evaluation, whose prompts are the same each time."""
        self.write(iteration, rollout, range(min(self._num_records, len(rollout.samples))), {}, HELDOUT)

    def write(
        self, iteration: int, rollout: Rollout, rows: Sequence[int], fields: Mapping[str, Tensor], kind: str = TRAIN
    ) -> None:
        """Append these samples of an iteration. fields: float [len(rows), T] each, by their names in the line."""
        left, lines = MAX_BYTES, list[str]()
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
        response, length = sample.response, len(sample.response)
        lists: dict[str, Sequence[Any]] = {"tokens": self._texts.list_texts(response.token_ids.tolist())}
        for name, values in {"rollout_logprobs": response.rollout_logprobs.tolist(), **fields}.items():
            lists[name] = [_round(value) for value in values[:length]]
        shared, num = {**head, **_describe(sample)}, length
        while num == length or num >= SMALLEST_PIECE:
            kept = [(0, length)] if num == length else [(0, num - num // 2), (length - num // 2, length)]
            cut = {name: [x for start, end in kept for x in values[start:end]] for name, values in lists.items()}
            line = f"{json.dumps({**shared, 'kept': kept, **cut}, allow_nan=False, separators=(',', ':'))}\n"
            if len(line) <= max_bytes:
                return line
            # A tenth less than the mean token would allow: they differ.
            num = min(num - 1, int(0.9 * num * max_bytes / len(line)))
        return ""


class TokenTexts:
    """The text of each token of a response. Those that together make one character stand at the last of them."""

    def __init__(self, decode: Callable[[list[int]], str | list[str]]):
        self._decode = decode
        self._cache: dict[int, str] = {}

    def list_texts(self, token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        while len(texts) < len(token_ids):
            first = token_ids[len(texts)]
            if first not in self._cache:
                self._cache[first] = str(self._decode([first]))
            num, text = 1, self._cache[first]
            while "\N{REPLACEMENT CHARACTER}" in text and num < LONGEST_CHARACTER:
                num += 1
                text = str(self._decode(list(token_ids[len(texts) : len(texts) + num])))
            if "\N{REPLACEMENT CHARACTER}" in text:
                num, text = 1, self._cache[first]
            texts += [""] * (min(num, len(token_ids) - len(texts)) - 1) + [text]
        return texts


def choose_samples(samples: Sequence[Sample], num: int) -> list[int]:
    """The numbers of at most `num` samples: of each group the first response that is right, wrong, cut and without a
    reward, groups in the order of a hash of their prompts' ids, so that every run chooses the same prompts.
    """
    groups: dict[int, dict[tuple[bool, ...], int]] = {}
    for row, sample in enumerate(samples):
        is_cut = sample.response.finish_reason is FinishReason.length
        failed = sample.score.failure is not None
        outcome = (failed, is_cut and not failed, sample.score.correct and not (is_cut or failed))
        groups.setdefault(sample.group, {}).setdefault(outcome, row)

    def rank(group: int) -> bytes:
        first = min(groups[group].values())
        return hashlib.blake2b(samples[first].prompt.id.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    ordered = sorted(groups, key=lambda group: (rank(group), group))
    return [row for group in ordered for row in sorted(groups[group].values())][:num]


def _describe(sample: Sample) -> dict[str, Any]:
    prompt, response, score = sample.prompt, sample.response, sample.score
    texts = {"answer": score.answer, "failure": score.failure}
    texts = {name: None if text is None else shorten(text, LONGEST_TEXT) for name, text in texts.items()}
    edges = np.flatnonzero(np.diff(np.concatenate([[False], ~response.generated, [False]]).astype(np.int8))).tolist()
    return {
        "group": sample.group,
        "age": sample.age,
        "prompt": {
            "id": prompt.id,
            **({"source": prompt.source} if prompt.source else {}),
            **{n: shorten(getattr(prompt, n), LONGEST_TEXT) for n in ("text", "answer")},
        },
        "score": {"reward": score.reward, "correct": score.correct, "details": dict(score.details), **texts},
        "finish_reason": response.finish_reason.value,
        "num_tokens": len(response),
        "observed": list(zip(edges[::2], edges[1::2], strict=True)),
        "versions": list(zip(response.weight_versions.versions, response.weight_versions.ends, strict=True)),
        "turns": [
            {"start": turn.start, "end": turn.end, "reward": turn.reward, "details": dict(turn.details)}
            for turn in response.turns
        ],
    }


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


KEYS = {"iteration", "kind", "sample", "prompt", "score", "num_tokens", "observed", "tokens"}
Record = dict[str, Any]


def load_records(run_dir: Path, max_bytes: int) -> list[Record]:
    """Records in the file's order, of `max_bytes` at most on the page: those of every iteration, or of every second,
    fourth ... one up to the last. Lines that cannot be read are left out; without a file there are none.
    """
    sizes, lines = dict[int, int](), list[tuple[int, bytes]]()
    if (path := run_dir / TOKENS_FILE).is_file():
        matches = ((re.match(rb'\{"iteration":\s?(\d+)', line), line) for line in path.read_bytes().splitlines())
        lines = [(int(match[1]), line) for match, line in matches if match]
    for number, line in lines:
        sizes[number] = sizes.get(number, 0) + len(line) + 1 + 5 * line.count(b"<")
    chosen = sorted(sizes, reverse=True)
    while sum(sizes[number] for number in chosen) > max_bytes:
        chosen = chosen[::2] if len(chosen) > 1 else []
    kept, found = set(chosen), list[Record]()
    for line in (line for number, line in lines if number in kept):
        with contextlib.suppress(ValueError):  # The line that is being written.
            if (record := parse_json(line)).keys() >= KEYS:
                found.append(record)
    return found
