"""From the `environment` group to what makes an environment for each episode: tools, own classes, `verifiers`."""

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from megarl.config.errors import ConfigError
from megarl.config.schema import task as schema
from megarl.environment import Action, Environment, Step
from megarl.files import parse_json
from megarl.task.process import CallError, FunctionProcess, load_callable, running_users_code, shorten
from megarl.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BUILT_IN: Mapping[str, str] = {
    "calculator": "megarl.examples.toys.calculator:calculator",
    "python": "megarl.task.sandbox:python",
}
VERIFIERS = "megarl.examples.verifiers.episodes:"
"""Where environments of the package verifiers are played and their data read"""
ToolSchema = Mapping[str, Any]
"""A tool's description for a chat template: {"type": "function", "function": {"name", "description", "parameters"}}"""


class ToolResult(NamedTuple):
    text: str
    """What the policy reads"""
    failed: bool


class Toolbox:
    """Answers tool calls, each in one of environment.num_processes processes with limits. Thread-safe. What a tool does
    wrong is a result that says so."""

    def __init__(self, config: schema.ToolsEnvironmentConfig):
        """Loads the tools. Raises ConfigError naming environment.tools."""
        paths = find_tools(config.tools)
        self.schemas: tuple[ToolSchema, ...] = tuple(describe_tool(path) for path in paths)
        functions = [schema["function"] for schema in self.schemas]
        by_name = {function["name"]: path for function, path in zip(functions, paths, strict=True)}
        if len(by_name) < len(paths):
            raise ConfigError([f"environment.tools: found {', '.join(config.tools)}; two tools have the same name"])
        self._validators = {each["name"]: Draft202012Validator(each["parameters"]) for each in functions}
        # The last one used is the first one taken: further ones start only where they are needed.
        self._free: queue.LifoQueue[FunctionProcess] = queue.LifoQueue()
        self._processes = [
            FunctionProcess(
                "megarl.task.process:load_tools",
                timeout_s=config.call_timeout_s,
                memory_gb=config.memory_gb,
                options={"paths": by_name, "result_length": config.result_length},
            )
            for _ in range(config.num_processes)
        ]
        self._processes[-1].start("environment.tools")
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
            return _fail(f"{name}: wrong arguments: {shorten(wrong.message, 300)}")
        process = self._free.get()
        try:
            return ToolResult(str(process.call({"name": name, "arguments": given})), failed=False)
        except CallError as error:
            is_said = error.kind in ("raised", "time", "memory")
            return _fail(f"{name}: {shorten(str(error), 300) if is_said else 'its process ended'}")
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


def find_tools(names: Sequence[str]) -> list[str]:
    """The path, package.module:function, of each tool. Raises ConfigError for a name that is neither."""
    if not names:
        raise ConfigError(["environment.tools: found none; name one or more, as environment.tools=[calculator]"])
    wrong = [name for name in names if name not in BUILT_IN and ":" not in name]
    if wrong:
        needed = f"one of {', '.join(BUILT_IN)} or a function of your own, as FILE.py:NAME or package.module:NAME"
        raise ConfigError([f"environment.tools: found {name!r}; it must be {needed}" for name in wrong])
    return [BUILT_IN.get(name, name) for name in names]


def describe_tool(path: str) -> ToolSchema:
    """The schema of the function "package.module:function", from its signature and its docstring. Raises ConfigError
    naming environment.tools where it has none."""
    from transformers.utils import chat_template_utils as templates

    function = load_callable(path, "environment.tools")
    try:
        schema: ToolSchema = templates.get_json_schema(function)
        return schema
    except Exception as error:  # It has classes of its own for docstrings and types, and raises others.
        needed = 'an argument needs a type, and the docstring a description and "Args:" with a line for each argument'
        raise ConfigError([f"environment.tools: {path} cannot be described: {error} ({needed})"]) from error


def _fail(reason: str) -> ToolResult:
    return ToolResult(f"error: {reason}", failed=True)


TOOLS_PLACEHOLDER = "{tools}"
HERMES = """You may call these functions, described by JSON schemas:
{tools}
To call one, write {"name": its name, "arguments": its arguments as a JSON object} between <tool_call> and \
</tool_call>. You are given the result. An answer without a call is your final answer."""
"""For chat templates that know no tools; the format is that of Hermes and of Qwen's models (SGLang's parser hermes)."""


@dataclass(frozen=True)
class ToolPrompt:
    """The tools as the prompts have them."""

    schemas: tuple[Mapping[str, Any], ...]
    text: str | None
    """What describes them in the system message; None: the chat template does, by `tools=`"""
    is_fallback: bool = False
    """The text is HERMES, in place of a chat template that describes no tools or takes no results"""

    def add_to(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with `text` at the end of the system message, which is added where there is none."""
        if self.text is None:
            return tuple(messages)
        if not messages or messages[0].role != "system":
            return (Message("system", self.text), *messages)
        content = "\n\n".join(filter(None, (messages[0].content, self.text)))
        return (Message("system", content), *messages[1:])

    def answer(self, results: Sequence[str]) -> tuple[Message, ...]:
        """The messages that give the policy the results of an action's calls, in order: one user's message where the
        chat template describes no tools, for many templates then take no other role, and no role twice in a row."""
        if self.text is None:
            return tuple(Message("tool", result) for result in results)
        return (Message("user", "\n".join(results)),)


class FoundCalls(NamedTuple):
    calls: tuple[tuple[str, str], ...]
    """The name and the arguments, a JSON object as text, of each, in order"""
    num_malformed: int = 0
    """Calls that were begun and could not be read"""
    text: str = ""
    """What stands beside the calls"""


def describe_call(name: str, arguments: Any) -> str:
    """A call as HERMES asks for it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


FindCalls = Callable[[str], FoundCalls]
"""Reads the calls in an action's text, special tokens included"""


class ToolsEnvironment(Environment):
    """Answers each call with the tool's result or with what is wrong with it. An action without a call is final.
    details of each turn: tool_calls (calls begun, malformed ones included) and tool_errors (answered with an error)."""

    def __init__(
        self, config: schema.ToolsEnvironmentConfig, toolbox: Toolbox, prompt: ToolPrompt, find_calls: FindCalls
    ):
        self._config, self._toolbox, self._prompt, self._find_calls = config, toolbox, prompt, find_calls
        self._rewarded = False

    def step(self, action: Action) -> Step:
        # An episode that is cut ends here: nobody would read the results.
        is_cut = action.finish_reason is FinishReason.length
        found = FoundCalls(()) if is_cut else self._find_calls(action.raw_text)
        num_calls = len(found.calls) + found.num_malformed
        if not num_calls:
            return Step(done=True, details={"tool_calls": 0.0, "tool_errors": 0.0})
        limit = self._config.max_calls
        answers = [self._toolbox.call(name, arguments) for name, arguments in found.calls[:limit]]
        results, num_left = [answer.text for answer in answers], max(0, len(found.calls) - limit)
        if num_left:
            results.append(f"error: {num_left} calls were not run; {limit} at most are run at a time")
        if found.num_malformed:
            needed = "a call is the tool's name and its arguments, in the format that was described"
            results.append(f"error: {found.num_malformed} of the calls could not be read; {needed}")
        num_errors = sum(answer.failed for answer in answers) + num_left + found.num_malformed
        is_first = not num_errors and not self._rewarded
        self._rewarded |= is_first
        reward = self._config.call_reward if is_first else 0.0
        details = {"tool_calls": float(num_calls), "tool_errors": float(num_errors)}
        return Step(self._prompt.answer(results), reward, details=details)


EnvironmentFactory = Callable[[], Environment]


def build_environment(
    config: schema.EnvironmentConfig,
) -> tuple[schema.MultiTurnEnvironmentConfig, EnvironmentFactory] | None:
    """The limits of an episode and what makes its environment; None where the first turn is the whole episode. Makes
    one environment, to see that it can be made. Raises ConfigError naming the key that is wrong."""
    if isinstance(config, schema.SingleTurnEnvironmentConfig):
        return None
    make: EnvironmentFactory
    if isinstance(config, schema.VerifiersEnvironmentConfig):
        make = partial(load_callable(VERIFIERS + "VerifiersEnvironment"), config.id, config.args)
    else:
        assert isinstance(config, schema.ClassEnvironmentConfig)
        make = partial(load_callable(config.path, "environment.path"), **config.options)
    with running_users_code("environment: making one"):
        made = make()
    if not isinstance(made, Environment):
        found = f"found a {type(made).__name__}; expected one derived from megarl.environment.Environment"
        raise ConfigError([f"environment: {found}"])
    return config, make


def build_tool_prompt(
    config: schema.EnvironmentConfig, data: schema.DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ToolPrompt | None:
    """How the tools of this configuration are described; None where there are none. Raises ConfigError naming
    environment.tools, or environment.id."""
    schemas: tuple[Mapping[str, Any], ...] = ()
    text = None
    if isinstance(config, schema.ToolsEnvironmentConfig):
        schemas, text = tuple(describe_tool(path) for path in find_tools(config.tools)), config.description
    elif isinstance(config, schema.VerifiersEnvironmentConfig):
        schemas = tuple(load_callable(VERIFIERS + "load")(config.id, config.args).oai_tools or ())
    return describe_tools(schemas, text, data, tokenizer) if schemas else None


def describe_tools(
    schemas: tuple[ToolSchema, ...], text: str | None, data: schema.DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> ToolPrompt:
    """How these tools are described: by the text, else by the chat template, else by HERMES."""
    is_fallback = text is None and not (data.chat_template and knows_tools(tokenizer))
    text = HERMES if is_fallback else text
    if text is not None:
        text = text.replace(TOOLS_PLACEHOLDER, "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    return ToolPrompt(schemas, text, is_fallback)


def knows_tools(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template describes tools and takes messages of role tool. Many ignore what they do not know."""
    name, parameters = "megarl_probe", {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": parameters}}
    # Twice, for some want the roles to alternate.
    turns = [("assistant", "ANSWER"), ("tool", "RESULT")] * 2
    chat = [{"role": role, "content": word} for role, word in (("user", "QUESTION"), *turns)]
    if not tokenizer.chat_template:
        return False
    try:
        text = str(tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False))
    except Exception:  # A template is a program of the checkpoint's author.
        return False
    return name in text and "RESULT" in text
