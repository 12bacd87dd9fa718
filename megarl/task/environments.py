"""From the `environment` group to what makes an environment for each episode: tools, `verifiers`, own classes."""

import asyncio
import copy
import functools
import importlib.util
import inspect
import json
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from megarl.config.errors import ConfigError, load_named
from megarl.config.schema import task as schema
from megarl.environment import Action, Environment, EpisodeSetting, Observation, Step
from megarl.files import parse_json
from megarl.task.process import CallError, FunctionProcess, load_callable, running_users_code, shorten
from megarl.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BUILT_IN: Mapping[str, str] = {
    "calculator": "megarl.examples.toys.calculator:calculator",
    "python": "megarl.task.sandbox:python",
}
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


METADATA = "verifiers"
"""Name in Prompt.metadata of the row of the environment's dataset, as JSON [part, number]; part: train or heldout"""

raised_by_rewards: ContextVar[list[str]] = ContextVar("raised_by_rewards")
"""What reward functions of the episode at hand have raised: a Rubric takes it for a reward of 0."""


def load_verifiers_environment(env_id: str, args: Mapping[str, Any]) -> Any:
    """The environment (verifiers.Environment): one for all calls with the same arguments.

    env_id: the name of an installed environment, whose module has load_environment(), or package.module:callable. To be
    called from the main thread. Raises ConfigError naming environment.id or environment.args.
    """
    return _load(env_id, json.dumps(args, sort_keys=True))


@functools.cache
def _load(env_id: str, args: str) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        how = "that package is not installed; `make install EXTRAS=verifiers` does"
        raise ConfigError([f"environment: verifiers found, but {how}"])
    import verifiers

    path = env_id if ":" in env_id else f"{env_id.replace('-', '_').split('/')[-1]}:load_environment"
    make: Any = load_named("environment.id", path)
    # The constructor takes these signals for itself; they are the run's.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with running_users_code(f"environment.args: {env_id} with {args}"):
            found = make(**json.loads(args))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if not isinstance(found, verifiers.Environment):
        raise ConfigError([f"environment.id: {env_id} gives a {type(found).__name__}, no verifiers.Environment"])
    if wrong := _prepare(found):
        raise ConfigError([f"environment.id: {env_id} {wrong}"])
    return found


def _prepare(env: Any) -> str | None:
    """Let `raised_by_rewards` have what rubrics raise; what of the environment megarl does not take."""
    members = getattr(env, "envs", ())  # Of an EnvGroup
    if env.message_type != "chat":
        return f"is for {env.message_type}; megarl takes those of messages"
    if any(member.oai_tools for member in members):
        return "is a group with tools; megarl takes an environment with tools alone"
    rubrics = [env.rubric]
    for rubric in rubrics:  # Grows by those of a group of rubrics.
        rubrics += getattr(rubric, "rubrics", None) or []
        for number, function in enumerate(() if hasattr(rubric, "rubrics") else rubric.funcs):
            if rubric._is_group_func(function):
                name = getattr(function, "__name__", function)
                return f"rewards a group of responses by {name}; megarl rewards each by itself"
            rubric.funcs[number] = _recording(function)
    # Tokens are the rollout's own.
    env.set_interleaved_rollouts(False)
    return next(filter(None, map(_prepare, members)), None)


def _recording(function: Any) -> Any:
    @functools.wraps(function)  # Its signature says what it is given.
    async def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = function(*arguments, **keywords)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            name = getattr(function, "__name__", "a reward function")
            raised_by_rewards.get([]).append(f"{name} raised {type(error).__name__}: {error}")
            raise

    return call


def read_text(message: Mapping[str, Any]) -> str:
    """The content of a message of the OpenAI form. Raises ValueError where it has pictures or sound."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = {str(part.get("type")) for part in content}
    if kinds != {"text"}:
        raise ValueError(f"a message has parts of type {', '.join(sorted(kinds))}; megarl reads text alone")
    return "\n\n".join(str(part["text"]) for part in content)


T = TypeVar("T")
Messages = list[dict[str, Any]]
OVERLONG = "the maximum context length is reached"
"""What `verifiers` takes for the end of an episode that has become too long, in words that it looks for"""


class VerifiersEnvironment(Environment):
    """One episode. Its rubric's reward is that of the last turn; details are the rubric's metrics."""

    def __init__(
        self, id: str, args: Mapping[str, Any], prompt: ToolPrompt | None = None, find_calls: FindCalls | None = None
    ):
        """prompt, find_calls: how tools' results are given to the policy, and its calls read; None without tools."""
        self._env, self._prompt, self._policy = load_verifiers_environment(id, args), prompt, _Policy(find_calls)
        self._known: Messages = []
        """The conversation as the policy has read and written it"""
        self._episode: asyncio.Task[dict[str, Any]] | None = None

    async def reset(self, setting: EpisodeSetting) -> Observation | None:  # type: ignore[override]
        """Raises ValueError for a prompt of other data."""
        try:
            part, number = json.loads(setting.prompt.metadata[METADATA])
        except (KeyError, ValueError, TypeError) as error:
            needed = "environment=verifiers goes with data=verifiers"
            raise ValueError(f"the prompt is of no environment's dataset; {needed}") from error
        row: dict[str, Any] = (self._env.build_dataset() if part == "train" else self._env.build_eval_dataset())[number]
        asked = await _run(self._wait(row))
        if asked is None:
            raise RuntimeError("the environment ended the episode before its first turn")
        self._known = asked
        return None if asked == list(row["prompt"]) else to_messages(asked)

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        """Raises RuntimeError where the environment, or a function of its rubric, raised."""
        asked = await _run(self._wait(action))
        if asked is None:
            return await self.cut()
        start = len(self._known) + 1
        if asked[: start - 1] != self._known or len(asked) <= start or asked[start - 1]["role"] != "assistant":
            raise RuntimeError("the environment has rewritten the conversation; megarl continues it token by token")
        self._known = asked
        messages = asked[start:]
        if self._prompt is None or any(message["role"] != "tool" for message in messages):
            return Step(to_messages(messages))
        return Step(self._prompt.answer([read_text(message) for message in messages]))

    async def cut(self) -> Step:  # type: ignore[override]
        """End the episode. Its reward is that of what has been said."""

        async def end() -> dict[str, Any]:
            assert self._episode is not None
            self._policy.answers.put_nowait(None)
            return await self._episode

        state = await _run(end())
        details = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Step(reward=float(state["reward"]), done=True, details=details)

    async def close(self) -> None:  # type: ignore[override]
        async def cancel() -> None:
            if self._episode is not None and not self._episode.done():
                self._episode.cancel()
                await asyncio.wait((self._episode,))

        await _run(cancel())

    # The rest runs on the loop of `verifiers`.

    async def _play(self, row: dict[str, Any]) -> dict[str, Any]:
        """The whole episode; its state in the end."""
        raised: list[str] = []
        raised_by_rewards.set(raised)
        state: dict[str, Any] = await self._env.rollout(row, self._policy, "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        await self._env.rubric.score_rollout(state)
        if raised:
            raise RuntimeError(raised[0])
        return state

    async def _wait(self, given: Action | dict[str, Any]) -> Messages | None:
        """What the policy is asked next; None where the episode has ended. Raises what it raised. given: the action, or
        the row with which the episode begins."""
        if isinstance(given, Action):
            self._policy.answers.put_nowait(given)
        else:
            self._episode = asyncio.create_task(self._play(given))
        assert self._episode is not None
        asked = asyncio.create_task(self._policy.asked.get())
        await asyncio.wait((asked, self._episode), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self._episode.result()
        return None


class _Policy:
    """What `verifiers` takes for a client of OpenAI's: each completion that it asks for is the policy's next action."""

    def __init__(self, find_calls: FindCalls | None) -> None:
        self._find_calls = find_calls
        self.asked: asyncio.Queue[Messages] = asyncio.Queue()
        self.answers: asyncio.Queue[Action | None] = asyncio.Queue()
        """None: there is none, as the episode has reached a limit"""
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: Messages, **options: Any) -> Any:
        """The action as a ChatCompletion; as a server does, an error where the conversation has become too long."""
        from openai import BadRequestError
        from openai.types.chat import ChatCompletion

        self.asked.put_nowait(copy.deepcopy(messages))
        action = await self.answers.get()
        if action is None:
            request = httpx.Request("POST", "http://policy")
            raise BadRequestError(OVERLONG, response=httpx.Response(400, text=OVERLONG, request=request), body=None)
        # An answer without any text is taken for a server's fault and not for the policy's.
        message: dict[str, Any] = {"role": "assistant", "content": action.text or " "}
        found = None if self._find_calls is None else await asyncio.to_thread(self._find_calls, action.raw_text)
        if found is not None and found.calls:
            message["tool_calls"] = [
                {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(found.calls)
            ]
        reason = "length" if action.finish_reason is FinishReason.length else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        fields = {"id": f"turn-{action.turn}", "object": "chat.completion", "created": 0, "model": "policy"}
        return ChatCompletion.model_validate({**fields, "choices": [choice]})


def to_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(str(message["role"]), read_text(message)) for message in messages)


async def _run(call: Coroutine[Any, Any, T]) -> T:
    """Await on the loop of `verifiers`, whose functions may block: the caller's loop has other episodes."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, _start_loop()))


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


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
        make = partial(VerifiersEnvironment, config.id, config.args)
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
        schemas = tuple(load_verifiers_environment(config.id, config.args).oai_tools or ())
    if not schemas:
        return None
    if text is None and not (data.chat_template and knows_tools(tokenizer)):
        text = HERMES
    if text is not None:
        text = text.replace(TOOLS_PLACEHOLDER, "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    return ToolPrompt(schemas, text)


def knows_tools(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template describes tools and takes messages of role tool. Many ignore what they do not know."""
    name, parameters = "megarl_probe", {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": parameters}}
    words = {"user": "QUESTION", "assistant": "ANSWER", "tool": "RESULT"}
    chat = [{"role": role, "content": word} for role, word in words.items()]
    if not tokenizer.chat_template:
        return False
    try:
        text = str(tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False))
    except Exception:  # A template is a program of the checkpoint's author.
        return False
    return name in text and "RESULT" in text
