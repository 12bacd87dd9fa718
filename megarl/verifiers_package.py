"""Environments of the package `verifiers` (an extra), loaded once for their prompts and for their episodes."""

import functools
import importlib.util
import inspect
import json
import signal
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.user_code import load_named

METADATA = "verifiers"
"""Name in Prompt.metadata of the row of the environment's dataset, as JSON [part, number]"""
TRAIN, HELDOUT = "train", "heldout"

raised_by_rewards: ContextVar[list[str]] = ContextVar("raised_by_rewards")
"""What reward functions of the episode at hand have raised: a Rubric takes it for a reward of 0."""


def load_verifiers_environment(env_id: str, args: Mapping[str, Any]) -> Any:
    """The environment (verifiers.Environment): one for all calls with the same arguments.

    env_id: the name of an installed environment, whose module has load_environment(), or package.module:callable. To be
    called from the main thread. Raises ConfigError naming environment.id or environment.args.
    """
    try:
        return _load(env_id, json.dumps(args, sort_keys=True))
    except TypeError as error:
        raise ConfigError([f"environment.args: found {dict(args)}; it must be JSON: {error}"]) from error


@functools.cache
def _load(env_id: str, args: str) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            ["environment: verifiers found, but that package is not installed; `make install EXTRAS=verifiers` does"]
        )
    import verifiers

    path = env_id if ":" in env_id else f"{env_id.replace('-', '_').split('/')[-1]}:load_environment"
    make: Any = load_named("environment.id", path)
    # The constructor takes these signals for itself; they are the run's.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        found = make(**json.loads(args))
    except Exception as error:  # Anybody's code.
        raise ConfigError([f"environment.args: {env_id} with {args} raised {type(error).__name__}: {error}"]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if not isinstance(found, verifiers.Environment):
        raise ConfigError([f"environment.id: {env_id} gives a {type(found).__name__}, no verifiers.Environment"])
    _prepare(env_id, found)
    return found


def _prepare(env_id: str, env: Any) -> None:
    """Raises ConfigError for what megarl does not take."""
    members = getattr(env, "envs", ())  # Of an EnvGroup
    if env.message_type != "chat":
        raise ConfigError([f"environment.id: {env_id} is for {env.message_type}; megarl takes those of messages"])
    if any(member.oai_tools for member in members):
        raise ConfigError(
            [f"environment.id: {env_id} is a group with tools; megarl takes an environment with tools alone"]
        )
    for rubric in _list_rubrics(env.rubric):
        _record_errors(env_id, rubric)
    # Tokens are the rollout's own.
    env.set_interleaved_rollouts(False)
    for member in members:
        _prepare(env_id, member)


def _list_rubrics(rubric: Any) -> Iterator[Any]:
    """The rubric, or those of a group of rubrics."""
    parts = getattr(rubric, "rubrics", None)
    if parts is None:
        yield rubric
    for part in parts or ():
        yield from _list_rubrics(part)


def _record_errors(env_id: str, rubric: Any) -> None:
    """Let `raised_by_rewards` have what the rubric's functions raise. Raises ConfigError for functions of groups."""
    for number, function in enumerate(rubric.funcs):
        if rubric._is_group_func(function):
            name = getattr(function, "__name__", function)
            raise ConfigError(
                [f"environment.id: {env_id} rewards a group of responses by {name}; megarl rewards each by itself"]
            )
        rubric.funcs[number] = _recording(function)


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
