"""The format of a line of rollouts.jsonl: keys and types; and packed, as a run that is resumed reads it."""

import binascii
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.per_token import WeightVersions
from megarl.types import FinishReason

FIRST_OLD = "first_old_logprobs"
EXPERTS = "routed_experts"
NUMBER = "group_number"
_LARGEST_TOKEN = np.iinfo(np.int32).max

Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what would be valid"""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list_of(kinds: set[type], value: Any) -> bool:
    # The types are compared without a call for each entry, which may be one of millions.
    return isinstance(value, list) and set(map(type, value)) <= kinds


def _are_tokens(value: Any) -> bool:
    return _is_list_of({int}, value) and (not value or (min(value) >= 0 and max(value) <= _LARGEST_TOKEN))


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
        "correct": (_is_flag, "true or false"),
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


_DTYPES = {"token_ids": "<i4", "rollout_logprobs": "<f4", "generated": "|b1", FIRST_OLD: "<f4"}
"""What has an entry per token; `weight_versions` has too, but as runs"""
_PACKED_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("token_ids", "rollout_logprobs", "generated"), _PACKED),
    "weight_versions": (
        lambda v: _is_list_of({list}, v) and all(_is_list_of({int}, run) and len(run) == 2 for run in v),
        "a list of [version, number of the token after its last one]",
    ),
}


def unfold(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with lists in place of arrays."""
    lists = {name: value.tolist() for name, value in record.items() if isinstance(value, np.ndarray)}
    for name, value in record.items():
        if isinstance(value, dict):
            lists[name] = unfold(value)
        elif isinstance(value, WeightVersions):
            lists[name] = value.expand().tolist()
    return {**record, **lists}


def pack(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with texts in place of arrays: base64 of int32, float32 or bytes of 0 and 1, little-endian.

    Raises ValueError for NaN or infinity in an array.
    """
    packed: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            packed[name] = pack(value) if name == "response" else value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ValueError(f"{name}: found NaN or infinity, which are not JSON compliant")
            packed[name] = binascii.b2a_base64(value.astype(_DTYPES[name]).tobytes(), newline=False).decode("ascii")
        elif isinstance(value, WeightVersions):
            packed[name] = [list(run) for run in zip(value.versions, value.ends, strict=True)]
        else:
            packed[name] = value
    return packed


def unpack(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record that has been checked with arrays in place of texts and lists. Raises ValueError."""
    response = dict(record["response"])
    is_packed = isinstance(response["token_ids"], str)
    arrays = {**{name: response[name] for name in _DTYPES if name in response}}
    if FIRST_OLD in record:
        arrays[FIRST_OLD] = record[FIRST_OLD]
    try:
        for name, value in arrays.items():
            arrays[name] = _read_array(value, name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    response |= {name: value for name, value in arrays.items() if name != FIRST_OLD}
    if is_packed:
        versions, ends = zip(*response["weight_versions"], strict=True) if response["weight_versions"] else ((), ())
        if any(a >= b for a, b in pairwise((0, *ends))):
            raise ValueError(f'{where}: "weight_versions" end at {list(ends)}; the ends must rise from above 0')
        response["weight_versions"] = WeightVersions(tuple(versions), tuple(ends))
    return {**record, "response": response, **{name: x for name, x in arrays.items() if name == FIRST_OLD}}


def _read_array(value: Any, name: str) -> NDArray[Any]:
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


def check_record(record: Any, where: str) -> dict[str, Any]:
    """The record, with exactly the keys and types of the format. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found a JSON {type(record).__name__}; expected an object")
    optional = {name: check for name, check in _OPTIONAL.items() if name in record}
    response = record.get("response")
    is_packed = isinstance(response, dict) and isinstance(response.get("token_ids"), str)
    if is_packed and FIRST_OLD in optional:
        optional[FIRST_OLD] = _PACKED
    _check_fields(record, _LINE | optional, where, "")
    for name, checks in FIELDS.items():
        packed = _PACKED_FIELDS if is_packed and name == "response" else {}
        _check_fields(record[name], checks | packed, where, f"{name}.")
    return record


def _check_fields(record: Mapping[str, Any], checks: Mapping[str, Check], where: str, prefix: str) -> None:
    for name in [*checks, *record]:
        if name not in record:
            raise ValueError(f'{where}: "{prefix}{name}" is missing; found {", ".join(record) or "nothing"}')
        if name not in checks:
            raise ValueError(f'{where}: "{prefix}{name}" is not a key of a rollout; the keys are {", ".join(checks)}')
        is_right, expected = checks[name]
        if not is_right(record[name]):
            found = repr(record[name])
            found = found if len(found) <= 60 else f"{found[:57]}..."
            raise ValueError(f'{where}: "{prefix}{name}" is {found}; expected {expected}')
