"""The format of a line of rollouts.jsonl: keys and types."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from megarl.types import FinishReason

FIRST_OLD = "first_old_logprobs"
EXPERTS = "routed_experts"
NUMBER = "group_number"

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


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


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
_WHOLES: Check = (_list_of(_is_whole), "a list of whole numbers, 0 or more")
_NUMBERS: Check = (_list_of(_is_number), "a list of finite numbers")
FIELDS: dict[str, dict[str, Check]] = {
    "prompt": {
        "id": _TEXT,
        "text": _TEXT,
        "token_ids": _WHOLES,
        "answer": _TEXT,
        "metadata": (_map_of(_is_text), "an object of texts"),
    },
    "response": {
        "token_ids": _WHOLES,
        "text": _TEXT,
        "rollout_logprobs": _NUMBERS,
        "generated": (_list_of(_is_flag), "a list of true and false"),
        "weight_versions": (_list_of(_is_integer), "a list of whole numbers"),
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


def check_record(record: Any, where: str) -> dict[str, Any]:
    """The record, with exactly the keys and types of the format. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found a JSON {type(record).__name__}; expected an object")
    optional = {name: check for name, check in _OPTIONAL.items() if name in record}
    _check_fields(record, _LINE | optional, where, "")
    for name, checks in FIELDS.items():
        _check_fields(record[name], checks, where, f"{name}.")
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
