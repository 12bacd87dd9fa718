"""Prompts and responses for the tests of the verifiers."""

import json
from typing import Any

from megarl.types import FinishReason, Prompt, Response


def build_prompt(answer: str, **metadata: Any) -> Prompt:
    return Prompt("p1", "", (), answer, {key: json.dumps(value) for key, value in metadata.items()})


def build_response(text: str, finish_reason: FinishReason = FinishReason.stop) -> Response:
    return Response((1,), text, (0.0,), (True,), (0,), finish_reason)
