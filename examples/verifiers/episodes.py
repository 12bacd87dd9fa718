"""environment=verifiers and data=verifiers: environments of the package verifiers. Each plays a whole episode with
a client of OpenAI's; here that is an object which hands its requests to `VerifiersEnvironment`, as the policy's turns.
"""

import asyncio
import copy
import functools
import importlib.util
import inspect
import json
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import httpx

from megarl.config.errors import ConfigError, load_named
from megarl.config.schema.task import VerifiersDataConfig
from megarl.environment import Action, Environment, EpisodeSetting, Observation, Step
from megarl.task.data import Problem, ProblemSplits
from megarl.task.environments import FindCalls, ToolPrompt
from megarl.task.process import running_users_code
from megarl.types import FinishReason, Message

METADATA = "verifiers"
"""Name in Prompt.metadata of the row of the environment's dataset, as JSON [part, number]; part: train or heldout"""

raised_by_rewards: ContextVar[list[str]] = ContextVar("raised_by_rewards")
"""What reward functions of the episode at hand have raised: a Rubric takes it for a reward of 0."""


def load(env_id: str, args: Mapping[str, Any]) -> Any:
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
                return f"rewards a group of responses by {getattr(function, '__name__', function)}; megarl each alone"
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


def to_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(str(message["role"]), read_text(message)) for message in messages)


def read_text(message: Mapping[str, Any]) -> str:
    """The content of a message of the OpenAI form. Raises ValueError where it has pictures or sound."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = {str(part.get("type")) for part in content}
    if kinds != {"text"}:
        raise ValueError(f"a message has parts of type {', '.join(sorted(kinds))}; megarl reads text alone")
    return "\n\n".join(str(part["text"]) for part in content)


Messages = list[dict[str, Any]]
OVERLONG = "the maximum context length is reached"
"""What `verifiers` takes for the end of an episode that has become too long, in words that it looks for"""


class VerifiersEnvironment(Environment):
    """One episode. Its rubric's reward is that of the last turn; details are the rubric's metrics."""

    def __init__(
        self, id: str, args: Mapping[str, Any], prompt: ToolPrompt | None = None, find_calls: FindCalls | None = None
    ):
        """prompt, find_calls: how tools' results are given to the policy, and its calls read; None without tools."""
        self._env, self._prompt, self._policy = load(id, args), prompt, _Policy(find_calls)
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
        if self._prompt is not None and all(message["role"] == "tool" for message in messages):
            return Step(self._prompt.answer([read_text(message) for message in messages]))
        return Step(to_messages(messages))

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
        raised_by_rewards.set(raised := list[str]())
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


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


async def _run(call: Coroutine[Any, Any, Any]) -> Any:
    """Await on the loop of `verifiers`, whose functions may block: the caller's loop has other episodes."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, _start_loop()))


def load_rows(config: VerifiersDataConfig, seed: int) -> ProblemSplits:
    """The rows' prompts, as the environment makes them, and its evaluation rows as the held-out ones. Raises
    ConfigError for an environment that cannot be loaded, or whose prompts are not text."""
    env = load(config.id, config.args)
    with running_users_code(f"data.id: the dataset of {config.id}"):  # It may also need the hub.
        train, heldout = env.build_dataset(), env.build_eval_dataset()
    if train is None:
        raise ConfigError([f"data.id: {config.id} has no dataset to train on"])

    def read(part: str, number: int, row: Any) -> Problem:
        try:
            messages = to_messages(row["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError([f"data.id: {config.id}, {part} row {number}: {error}"]) from error
        return Problem(messages, str(row.get("answer") or ""), {METADATA: json.dumps([part, number])})

    others = None if heldout is None else [read("heldout", number, row) for number, row in enumerate(heldout)]
    return ProblemSplits([read("train", number, row) for number, row in enumerate(train)], others)
