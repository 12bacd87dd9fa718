"""One episode: the policy's turns, the environment's answers, one Response."""

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.config.user_code import describe_error
from megarl.environment import Action, Environment, EpisodeSetting, Step
from megarl.interfaces import Truncation, TurnRequest
from megarl.report.timeline import RESPONSES, span
from megarl.rollout.conversation import Conversation
from megarl.rollout.engine import call_in_thread
from megarl.types import FinishReason, Prompt, Response, Turn, WeightVersions

T = TypeVar("T")
NUM_CALLS = 64
"""Blocking calls of environments at a time, each in a thread of its own"""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    temperature: float
    urgent: bool = False
    truncation: Truncation | None = None


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to be run."""

    prompt: Prompt
    name: str | None
    """Names the episode: its random numbers follow from the run's seed and this name; None: they are fresh"""
    seed: int
    """For the environment"""
    sampling: Sampling
    server: int
    """Number of the server that generates all of its turns, which has its tokens in its cache"""


@dataclass(frozen=True)
class Episode:
    """An episode that has ended."""

    prompt: Prompt
    """With the environment's beginning, where it has one of its own"""
    response: Response
    failure: str | None = None
    """Why the environment could not go on"""


Send = Callable[[TurnRequest], Awaitable[Response]]


class EnvironmentFailure(Exception):
    """An environment raised, took too long or gave what is no answer."""


class EpisodeRunner:
    """Runs episodes of up to `response_length` tokens. For one event loop."""

    def __init__(self, response_length: int, conversation: Conversation | None = None):
        """conversation: None where the first turn is the whole episode."""
        self._response_length = response_length
        self._conversation = conversation
        self._calls = asyncio.Semaphore(NUM_CALLS)

    async def run(self, request: EpisodeRequest, send: Send) -> Episode:
        """The whole episode. send: generates a turn; what it raises is raised."""
        if self._conversation is None:
            ids = np.asarray(request.prompt.token_ids, dtype=np.int32)
            return Episode(request.prompt, await send(_build_turn(request, ids, self._response_length, 0)))
        transcript = _Transcript(request.prompt)
        environment = None
        try:
            environment = await self._ask("making the environment", self._conversation.make)
            setting = EpisodeSetting(request.prompt, request.seed)
            begin = await self._ask("Environment.reset", environment.reset, setting)
            if begin is not None:
                encoder = self._conversation.encoder
                transcript = _Transcript(_encode(partial(encoder.start, request.prompt, begin)))
            finish = await self._converse(self._conversation, request, send, environment, transcript)
            return Episode(transcript.prompt, transcript.build_response(finish))
        except EnvironmentFailure as error:
            return Episode(transcript.prompt, transcript.build_response(FinishReason.stop), str(error))
        finally:
            if environment is not None:
                # The episode has ended; it counts by its reward.
                with contextlib.suppress(EnvironmentFailure):
                    await self._ask("Environment.close", environment.close)

    async def _converse(
        self,
        conversation: Conversation,
        request: EpisodeRequest,
        send: Send,
        environment: Environment,
        transcript: "_Transcript",
    ) -> FinishReason:
        """Turn after turn, added to `transcript`; returns why it ended."""
        config, encoder = conversation.config, conversation.encoder
        for number in range(config.max_turns):
            room = self._response_length - transcript.num_tokens
            limit = room if config.turn_length is None else min(room, config.turn_length)
            sent = transcript.join()
            turn = await send(_build_turn(request, sent, limit, number))
            transcript.add_action(sent, turn)
            ids = turn.token_ids.tolist()
            action = Action(turn.text, encoder.decode(ids), tuple(ids), number, turn.finish_reason)
            step = _check_step(await self._ask("Environment.step", environment.step, action))
            transcript.note(step)
            if step.done or turn.finish_reason is FinishReason.length:
                finish = turn.finish_reason
            elif number + 1 == config.max_turns:
                finish = FinishReason.max_turns
            else:
                observation = _encode(partial(encoder.encode, step.observation, ids[-1]))
                if transcript.num_tokens + len(observation) < self._response_length:
                    transcript.add_observation(observation)
                    continue
                finish = FinishReason.length
            last = None if step.done else await self._ask("Environment.cut", environment.cut)
            if last is not None:
                transcript.note(_check_step(last))
            return finish
        raise AssertionError("unreachable")

    async def _ask(self, what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns: awaited where it is a coroutine function, else in a thread."""
        assert self._conversation is not None
        if getattr(method, "__func__", None) in (Environment.reset, Environment.cut, Environment.close):
            return None  # The base class's own, which do nothing.
        deadline_s = self._conversation.config.step_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as clock:
                with span(what, process=RESPONSES, track="environment"):
                    if inspect.iscoroutinefunction(method):
                        return await method(*arguments)
                    async with self._calls:
                        return await call_in_thread(partial(method, *arguments))
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                reason = f"{what} took longer than environment.step_deadline_s={deadline_s:g} s"
                raise EnvironmentFailure(reason) from error
            raise EnvironmentFailure(f"{what} raised {describe_error(error)}") from error


class _Begun(Exception):
    """Ends an episode before its first turn."""


def check_conversation(conversation: Conversation | None, prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Begin an episode with each prompt, which shows whether the environment can read the data, and ask the chat
    template for its next turns.

    Meant for the first prompt of each split, before anything is started; not from a coroutine. Raises ConfigError
    naming environment=... and data=... where an episode cannot begin, and data.chat_template where it cannot go on.
    Returns what the user is to know of how they go on.
    """
    if conversation is None:
        return ()

    async def send(turn: TurnRequest) -> Response:
        raise _Begun

    async def begin(prompt: Prompt) -> str | None:
        try:
            episode = await EpisodeRunner(1, conversation).run(EpisodeRequest(prompt, None, 0, Sampling(1.0), 0), send)
        except _Begun:
            return None
        return episode.failure

    # A thread of its own: the caller's may have an event loop that runs, as in a notebook.
    with ThreadPoolExecutor(1) as thread:
        for prompt in prompts:
            if conversation.config.max_turns > 1:
                conversation.encoder.check(prompt)
            failure = thread.submit(asyncio.run, begin(prompt)).result()
            if failure is not None:
                raise ConfigError(
                    [f"environment=... with data=...: an episode with a first prompt cannot begin: {failure}"]
                )
    note = conversation.encoder.describe_thinking() if conversation.config.max_turns > 1 else None
    return () if note is None else (note,)


def _build_turn(request: EpisodeRequest, token_ids: NDArray[np.int32], limit: int, number: int) -> TurnRequest:
    name = request.name if number == 0 or request.name is None else f"{request.name}/{number}"
    own = request.sampling
    return TurnRequest(token_ids, limit, own.temperature, request.server, name, own.urgent, own.truncation)


class _Transcript:
    """An episode as far as it has come."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        self._parts = [np.asarray(prompt.token_ids, dtype=np.int32)]
        self._sent: list[NDArray[np.int32]] = []
        self._turns: list[Turn] = []
        self._actions: list[Response] = []
        self._generated: list[NDArray[np.bool_]] = []
        self.num_tokens = 0

    def join(self) -> NDArray[np.int32]:
        """int32 [N], all tokens so far, prompt included."""
        return np.concatenate(self._parts)

    def add_action(self, sent: NDArray[np.int32], action: Response) -> None:
        """sent: the tokens that were sent for it."""
        self._sent.append(sent)
        self._actions.append(action)
        start, end = self.num_tokens, self.num_tokens + len(action)
        self._turns.append(Turn(start, end, action.text))
        self._add(action.token_ids, generated=True)

    def note(self, step: Step) -> None:
        """The environment's answer to the last action."""
        last, details = self._turns[-1], {str(name): float(value) for name, value in step.details.items()}
        self._turns[-1] = Turn(last.start, last.end, last.text, float(step.reward), details)

    def add_observation(self, token_ids: list[int]) -> None:
        self._add(np.array(token_ids, dtype=np.int32), generated=False)

    def _add(self, token_ids: NDArray[np.int32], generated: bool) -> None:
        self._parts.append(token_ids)
        self._generated.append(np.full(len(token_ids), generated))
        self.num_tokens += len(token_ids)

    def build_response(self, finish_reason: FinishReason) -> Response:
        """Everything after the prompt. What the server was sent is what is learned from, id by id."""
        if not self._actions:
            # Something must stand there, and nothing of it is learned from.
            return Response(self._parts[0][-1:], "", (0.0,), (False,), (0,), finish_reason)
        whole = self.join()
        for turn, sent in zip(self._turns, self._sent, strict=True):
            if not np.array_equal(sent, whole[: len(self.prompt.token_ids) + turn.start]):
                raise AssertionError(f"a turn of prompt {self.prompt.id!r} was sent other tokens than are learned from")
        generated = np.concatenate(self._generated)
        logprobs = np.zeros(self.num_tokens, dtype=np.float32)
        versions = np.zeros(self.num_tokens, dtype=np.int64)
        for turn, action in zip(self._turns, self._actions, strict=True):
            logprobs[turn.start : turn.end] = action.rollout_logprobs
            expanded = action.weight_versions.expand()
            versions[turn.start : turn.end] = expanded
            versions[turn.end :] = expanded[-1]
        return Response(
            token_ids=whole[len(self.prompt.token_ids) :],
            text=self._actions[-1].text,
            rollout_logprobs=logprobs,
            generated=generated,
            weight_versions=WeightVersions.of(versions),
            finish_reason=finish_reason,
            # The last turn's answer has the experts of all tokens before it, too.
            routed_experts=self._actions[-1].routed_experts,
            turns=self._turns,
        )


def _check_step(step: object) -> Step:
    if not isinstance(step, Step):
        raise EnvironmentFailure(f"Environment.step returned a {type(step).__name__}; a Step was expected")
    for name, value in {"reward": step.reward, **step.details}.items():
        try:
            is_finite = not isinstance(value, str | bytes) and math.isfinite(float(value))
        except (TypeError, ValueError, OverflowError):
            is_finite = False
        if not is_finite:
            raise EnvironmentFailure(f"Environment.step gave the {name} {value!r}; it must be a finite number")
    return step


def _encode(encode: Callable[[], T]) -> T:
    try:
        return encode()
    except Exception as error:  # A chat template is a program of the checkpoint's author.
        raise EnvironmentFailure(f"an observation could not be encoded: {error}") from error


def draw_seed() -> int:
    """A fresh seed, for an episode without a name."""
    return random.SystemRandom().getrandbits(63)
