"""What runs in a tool's process: one function that calls any of the tools by name."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from megarl.sandbox.function_server import call, load_callable
from megarl.sandbox.program import find_protections
from megarl.toolbox.python import python


def load_tools(paths: Mapping[str, str], result_length: int) -> Callable[..., str]:
    """The function (name, arguments) -> result as text, of the tools at `paths`, package.module:function by name.

    A result that is no text is given as JSON; results are cut to `result_length` characters. Raises ValueError for a
    path that names no function.
    """
    functions = {name: load_callable(path) for name, path in paths.items()}
    if functions.get("python") is python:
        find_protections()  # Tries what the machine has, which takes a second: no call's time.

    def run(name: str, arguments: dict[str, Any]) -> str:
        result = call(functions[name], **arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return shorten(text, result_length)

    return run


def shorten(text: str, length: int) -> str:
    """The beginning of a text, which says what was cut off."""
    if len(text) <= length:
        return text
    return f"{text[:length]}\n... ({len(text) - length} more characters)"
