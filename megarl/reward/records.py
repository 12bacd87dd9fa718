"""Prompts, responses and scores as JSON, for functions in other processes."""

import base64
import json
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn, WeightVersions

_ARRAYS: dict[str, type[np.generic]] = {"token_ids": np.int32, "rollout_logprobs": np.float32, "generated": np.bool_}


def encode_prompt(prompt: Prompt) -> dict[str, Any]:
    """All that a prompt has."""
    return {
        **vars(prompt),
        "token_ids": _encode(prompt.token_ids, np.int32),
        "metadata": dict(prompt.metadata),
        # May hold what JSON has no type for, such as dates.
        "columns": json.dumps(dict(prompt.columns), default=str),
        "messages": [vars(message) for message in prompt.messages],
    }


def decode_prompt(record: dict[str, Any]) -> Prompt:
    """The prompt that `encode_prompt` was given."""
    token_ids = tuple(_decode(record["token_ids"], np.int32).tolist())
    messages = tuple(Message(**message) for message in record["messages"])
    columns = json.loads(record["columns"])
    return Prompt(**{**record, "token_ids": token_ids, "messages": messages, "columns": columns})


def encode_response(response: Response) -> dict[str, Any]:
    """All that a response has; arrays are base64 of their bytes, which costs 14 bytes a token."""
    versions, experts = response.weight_versions, response.routed_experts
    return {
        **{name: _encode(getattr(response, name), dtype) for name, dtype in _ARRAYS.items()},
        "text": response.text,
        "weight_versions": vars(versions),
        "finish_reason": response.finish_reason.value,
        "routed_experts": experts and {**vars(experts), "data": base64.b64encode(experts.data).decode()},
        "turns": [{**vars(turn), "details": dict(turn.details)} for turn in response.turns],
    }


def decode_response(record: dict[str, Any]) -> Response:
    """The response that `encode_response` was given."""
    experts = record["routed_experts"]
    versions = {name: tuple(values) for name, values in record["weight_versions"].items()}
    return Response(
        **{name: _decode(record[name], dtype) for name, dtype in _ARRAYS.items()},
        text=record["text"],
        weight_versions=WeightVersions(**versions),
        finish_reason=FinishReason(record["finish_reason"]),
        routed_experts=experts and RoutedExperts(**{**experts, "data": base64.b64decode(experts["data"])}),
        turns=tuple(Turn(**turn) for turn in record["turns"]),
    )


def encode_score(score: Score) -> dict[str, Any]:
    """All that a score has, as plain numbers. Raises TypeError and ValueError for what is not a number."""
    return {
        **{field.name: getattr(score, field.name) for field in fields(score)},
        "reward": float(score.reward),
        "correct": _read_truth(score.correct),
        "details": {str(name): float(value) for name, value in score.details.items()},
    }


def _read_truth(value: Any) -> bool:
    # The text "False" is true to Python, and so is NaN.
    if isinstance(value, str) or value not in (0, 1):
        raise TypeError(f"a Score has the correct {value!r}; it must be True or False")
    return bool(value)


def _encode(values: ArrayLike, dtype: type[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
