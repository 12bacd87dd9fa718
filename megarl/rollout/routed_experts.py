"""The experts that an answer's tokens went to (rollout.router_replay): from SGLang, in a file, as a tensor."""

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.families.architecture import Architecture
from megarl.families.registry import parse_architecture
from megarl.per_token import RoutedExperts
from megarl.rollout.served_model import load_json
from megarl.types import Sample

KEYS = {"num_layers", "top_k", "num_experts", "deflated"}


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


def to_record(experts: RoutedExperts) -> dict[str, Any]:
    """As JSON: the numbers deflated, in base64, about as long as their bytes."""
    deflated = base64.b64encode(zlib.compress(experts.data, level=1)).decode()
    return {name: getattr(experts, name) for name in KEYS - {"deflated"}} | {"deflated": deflated}


def from_record(record: Any, num_tokens: int) -> RoutedExperts:
    """What `to_record` wrote of a prompt and response of `num_tokens`. Raises ValueError."""
    if not isinstance(record, Mapping) or record.keys() != KEYS:
        raise ValueError(f'"routed_experts" must be an object of {", ".join(sorted(KEYS))}')
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
