"""SGLang's answers to /generate, from JSON to arrays without a Python object per token.

An answer of SGLang 0.5.23, which writes JSON without spaces, has each token twice, about 40 bytes:

{"output_ids": [ID, ...],
 "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 5, "weight_version": "3",
               "weight_versions": [{"version": "3", "start": 0, "end": 7}],
               "output_token_logprobs": [[LOGPROB, ID, null], ...], "routed_experts": "BASE64"}}

What is as long as the response is cut out first: Arrow reads the numbers from the bytes, the json module the rest.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import parse_architecture
from megarl.rollout.client import RequestError
from megarl.rollout.server import load_json
from megarl.types import FinishReason, Response, RoutedExperts, Sample, WeightVersions

_LONG = re.compile(rb'"(output_ids|output_token_logprobs|routed_experts)":([\["])')
_COMMA = ord(",")
_EVERY_OTHER = 0b01010101
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one prompt."""

    response: Response
    """One turn of at least one token"""
    num_prompt_tokens: int
    index: int
    """Place of the prompt in its call, in a streamed answer to several prompts; else 0"""


def parse_answer(raw: bytes, decode: Callable[[NDArray[np.int32]], str], arch: Architecture | None = None) -> Answer:
    """The answer to one prompt: one JSON object.

    decode: the text of tokens, which servers do not send. arch: of the model whose routed experts the answer has; None:
    it has none. Raises RequestError for an answer that was aborted, is inconsistent or cannot be read.
    """
    answer, cut = _cut_out(raw)
    try:
        meta = answer["meta_info"]
        reason, num_prompt_tokens = meta["finish_reason"], meta["prompt_tokens"]
        if reason is None or reason["type"] not in ("stop", "length"):
            raise RequestError(f"a response ended with {reason}; stop or length was expected")
        ids, logprobs = _parse_tokens(cut[answer["output_ids"]], cut[meta["output_token_logprobs"]])
        versions = _find_versions(meta, len(ids))
        encoded = bytes(cut[meta["routed_experts"]]) if arch and meta.get("routed_experts") is not None else None
    except (KeyError, TypeError, IndexError, ValueError) as error:
        described = f"{type(error).__name__} {error}"
        raise RequestError(f"an answer is not what SGLang writes ({described}): {json.dumps(answer)[:500]}") from None
    try:
        experts = decode_answer(encoded, num_prompt_tokens + len(ids), arch) if arch else None
    except ValueError as error:
        raise RequestError(f"an answer of {len(ids)} tokens cannot be replayed: {error}") from None
    finish, generated = FinishReason[reason["type"]], np.ones(len(ids), dtype=np.bool_)
    response = Response(ids, decode(ids), logprobs, generated, versions, finish, experts)
    return Answer(response, num_prompt_tokens, answer.get("index", 0))


def _cut_out(raw: bytes) -> tuple[Any, list[memoryview]]:
    """The JSON value with the number of its piece in place of each long array or text, and the pieces."""
    view, pieces, rest, done = memoryview(raw), list[memoryview](), list[bytes](), 0
    while found := _LONG.search(raw, done):
        start = found.end()
        # No number has a quote: the next one is the text's end, or is behind the array.
        quote = raw.find(b'"', start)
        if found[2] == b'"':
            end = quote
        elif found[1] == b"output_ids":
            end = raw.find(b"]", start)
        elif raw[start : start + 1] == b"]":
            end = start
        else:
            end = raw.rfind(b"]]", start, quote if quote >= 0 else len(raw)) + 1
        if end < start:
            raise RequestError(f"an answer cannot be read: its {found[1].decode()} have no end")
        rest += [raw[done : start - 1], str(len(pieces)).encode()]
        pieces.append(view[start:end])
        done = end + 1
    try:
        return json.loads(b"".join([*rest, raw[done:]])), pieces
    except ValueError as error:
        raise RequestError(f"an answer of {len(raw)} bytes is not the JSON that SGLang writes: {error}") from None


def _parse_tokens(ids: memoryview, entries: memoryview) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """int32 [T] of ID,...,ID and float32 [T] of [LOGPROB,ID,null],...,[LOGPROB,ID,null] with the same ids."""
    expected = np.fromstring(ids.tobytes(), np.int64, sep=",") if ids else np.zeros(0, np.int64)
    logprobs, found = _parse_entries(entries)
    if not len(expected) or not np.array_equal(found, expected):
        raise RequestError(
            f"a response of {len(expected)} tokens came with {len(found)} log-probs, not of these tokens"
        )
    wrong = ~np.isfinite(logprobs) | (expected < 0) | (expected > _LARGEST_ID)
    if wrong.any():
        t = int(wrong.argmax())
        raise RequestError(f"a response of {len(expected)} tokens has id {expected[t]} with log-prob {logprobs[t]}")
    return expected.astype(np.int32), logprobs


def _parse_entries(entries: memoryview) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """The log-probs and ids."""
    commas = np.nonzero(np.frombuffer(entries, np.uint8) == _COMMA)[0] if entries else np.zeros(0, np.int64)
    num = (len(commas) + 1) // 3
    if len(commas) != 3 * num - 1:
        return np.zeros(0, np.float32), np.zeros(0)
    # An Arrow array of texts has no gaps: those between the numbers are texts too, but null, which are not read.
    bounds = np.empty((num, 4), np.int32)
    bounds[0, 0], bounds[1:, 0] = 1, commas[2::3] + 2
    bounds[:, 1], bounds[:, 2], bounds[:, 3] = commas[0::3], commas[0::3] + 1, commas[1::3]
    if (bounds[:, 0] > bounds[:, 1]).any():
        raise ValueError("a log-prob is missing")
    num_texts = bounds.size - 1
    valid = bytes([_EVERY_OTHER]) * (num_texts // 8 + 1)
    texts = pa.StringArray.from_buffers(
        num_texts, pa.py_buffer(bounds.reshape(-1)), pa.py_buffer(entries), pa.py_buffer(valid)
    )
    numbers = np.frombuffer(texts.cast(pa.float64()).buffers()[1], np.float64)[:num_texts]
    with np.errstate(over="ignore"):
        return numbers[0::4].astype(np.float32), numbers[2::4]


def _find_versions(meta: Mapping[str, Any], length: int) -> WeightVersions:
    """SGLang's spans {version, start, end}, which must cover the response."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    bounds = [(span["start"], span["end"]) for span in spans]
    starts, ends = [*(start for start, _ in bounds), length], [0, *(end for _, end in bounds)]
    if starts != ends or ends != sorted(ends):
        raise RequestError(f"weight versions {spans} do not cover a response of {length} tokens")
    filled = [(int(span["version"]), span["end"]) for span in spans if span["start"] < span["end"]]
    runs = [list(run) for _, run in groupby(filled, key=lambda each: each[0])]
    return WeightVersions(tuple(run[0][0] for run in runs), tuple(run[-1][1] for run in runs))


def load_expert_architecture(checkpoint: Path) -> Architecture:
    """The architecture of a checkpoint directory. Raises ConfigError where the model has no experts."""
    path = checkpoint / "config.json"
    try:
        arch = parse_architecture(load_json(path), path)
    except ValueError as error:
        raise ConfigError([f"model.path: {error}"]) from error
    if arch.experts is None:
        raise ConfigError([f"rollout.router_replay: found true, but the model of {checkpoint} has no experts"])
    return arch


def decode_answer(encoded: str | bytes | None, num_tokens: int, arch: Architecture) -> RoutedExperts:
    """SGLang's routed_experts: base64 of int32 [num_tokens - 1, layers, experts of a token].

    num_tokens: of prompt and response. Raises ValueError for another number of them, and for what no router chooses: a
    number that is no expert's, or the same expert twice.
    """
    assert arch.experts is not None
    if encoded is None:
        raise ValueError("it has no routed_experts; the server needs --enable-return-routed-experts")
    top_k, num_experts = arch.experts.top_k, arch.experts.num_experts
    found = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    expected = (num_tokens - 1, arch.num_layers, top_k)
    if found.size != np.prod(expected):
        raise ValueError(f"it has {found.size} routed experts; {' x '.join(map(str, expected))} were expected")
    routed = found.reshape(expected)[:, arch.experts.num_dense_layers :]
    # SGLang's own buffer begins as zeros, and it writes -1 for padding.
    if routed.size and not 0 <= routed.min() <= routed.max() < num_experts:
        raise ValueError(f"it has routed experts from {routed.min()} to {routed.max()} of {num_experts}")
    if top_k > 1 and bool((routed[..., 0] == routed[..., 1]).any()):
        raise ValueError("a token of it was routed to the same expert twice")
    data = found.astype(np.uint8 if num_experts < 256 else np.int16).tobytes()
    return RoutedExperts(data, arch.num_layers, top_k, num_experts)


def build_routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    """`Sequences.routed_experts` of these samples: 0 for each one's last token, and for samples without; None where
    no sample has any.
    """
    first = next((x for s in samples if (x := s.response.routed_experts)), None)
    if first is None:
        return None
    lengths = [len(s.prompt.token_ids) + len(s.response.token_ids) for s in samples]
    packed = torch.zeros(sum(lengths), first.num_layers, first.top_k, dtype=first.dtype)
    for sample, rows in zip(samples, torch.split(packed, lengths), strict=True):
        if sample.response.routed_experts is not None:
            rows[:-1] = sample.response.routed_experts.to_tensor() + 1
    return packed
