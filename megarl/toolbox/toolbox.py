"""The tools of a run: their descriptions, and the processes that call them."""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from megarl.config.errors import ConfigError
from megarl.config.schema.environment import ToolsEnvironmentConfig
from megarl.config.user_code import load_named
from megarl.json_text import parse_json
from megarl.sandbox.function_process import (
    CallError,
    CallMemoryError,
    CallRaisedError,
    CallTimeoutError,
    FunctionProcess,
    StartError,
)

BUILT_IN: Mapping[str, str] = {
    "calculator": "megarl.toolbox.calculator:calculator",
    "python": "megarl.toolbox.python:python",
}
ToolSchema = Mapping[str, Any]
"""A tool's description for a chat template: {"type": "function", "function": {"name", "description", "parameters"}}"""


@dataclass(frozen=True)
class ToolResult:
    text: str
    """What the policy reads"""
    failed: bool


class Toolbox:
    """Answers tool calls, each in one of environment.num_processes processes with limits. Thread-safe.

    What a tool does wrong is a result that says so.
    """

    def __init__(self, config: ToolsEnvironmentConfig):
        """Loads the tools. Raises ConfigError naming environment.tools."""
        paths = find_tools(config.tools)
        self.schemas: tuple[ToolSchema, ...] = tuple(describe_tool(path) for path in paths)
        by_name = {schema["function"]["name"]: path for schema, path in zip(self.schemas, paths, strict=True)}
        if len(by_name) < len(paths):
            raise ConfigError([f"environment.tools: found {', '.join(config.tools)}; two tools have the same name"])
        self._validators = {
            schema["function"]["name"]: Draft202012Validator(schema["function"]["parameters"])
            for schema in self.schemas
        }
        # The last one used is the first one taken: further ones start only where they are needed.
        self._free: queue.LifoQueue[FunctionProcess] = queue.LifoQueue()
        self._processes = [
            FunctionProcess(
                "megarl.toolbox.dispatch:load_tools",
                timeout_s=config.call_timeout_s,
                memory_gb=config.memory_gb,
                options={"paths": by_name, "result_length": config.result_length},
            )
            for _ in range(config.num_processes)
        ]
        try:
            self._processes[-1].start()
        except StartError as error:
            raise ConfigError([f"environment.tools: {error}"]) from error
        for process in self._processes:
            self._free.put(process)

    def call(self, name: str, arguments: str) -> ToolResult:
        """The result of one call. arguments: a JSON object, as the policy wrote it."""
        if name not in self._validators:
            return _fail(f"there is no tool {name!r}; there is {', '.join(self._validators)}")
        try:
            given = parse_json(arguments)
        except ValueError as error:
            return _fail(f"{name}: the arguments are not JSON: {error}")
        wrong = best_match(self._validators[name].iter_errors(given))
        if wrong is not None:
            return _fail(f"{name}: wrong arguments: {_shorten_line(wrong.message)}")
        return self._run(name, given)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _run(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        process = self._free.get()
        try:
            return ToolResult(str(process.call({"name": name, "arguments": arguments})), failed=False)
        except CallRaisedError as error:
            return _fail(f"{name}: {_shorten_line(str(error))}")
        except (CallTimeoutError, CallMemoryError) as error:
            return _fail(f"{name}: {error}")
        except (CallError, StartError):
            return _fail(f"{name}: its process ended")
        finally:
            self._free.put(process)


def find_tools(names: Sequence[str]) -> list[str]:
    """The path, package.module:function, of each tool. Raises ConfigError for a name that is neither."""
    if not names:
        raise ConfigError(
            ["environment.tools: found none; name one or more, for example environment.tools=[calculator]"]
        )
    wrong = [name for name in names if name not in BUILT_IN and ":" not in name]
    if wrong:
        raise ConfigError(
            [
                f"environment.tools: found {name!r}; it must be one of {', '.join(BUILT_IN)} or a function of your own,"
                " as FILE.py:NAME or package.module:NAME"
                for name in wrong
            ]
        )
    return [BUILT_IN.get(name, name) for name in names]


def describe_tool(path: str) -> ToolSchema:
    """The schema of the function "package.module:function", from its signature and its docstring.

    Raises ConfigError naming environment.tools where it has none: types for all arguments and, in the docstring, a
    description and an entry under "Args:" for each argument are needed.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    function = load_named("environment.tools", path)
    if not callable(function):
        raise ConfigError(
            [f"environment.tools: found {path!r}, of type {type(function).__name__}; a function was expected"]
        )
    try:
        schema: ToolSchema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            [
                f"environment.tools: {path} cannot be described: {error} (an argument needs a type, and the docstring a"
                ' description and "Args:" with a line for each argument)'
            ]
        ) from error
    return schema


def _fail(reason: str) -> ToolResult:
    return ToolResult(f"error: {reason}", failed=True)


def _shorten_line(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
