"""Episodes of agents: each asks the endpoint, keeps or changes its history as it likes, and is learned from token by
token.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.config.schema.task import AgentEnvironmentConfig, DataConfig
from megarl.interfaces import TurnRequest
from megarl.report.timeline import RESPONSES, span
from megarl.rollout.client import call_in_thread
from megarl.rollout.conversation import (
    Episode,
    EpisodeRequest,
    ObservationEncoder,
    Send,
    start_call_finder,
)
from megarl.rollout.endpoint import MODEL, ChatRequest, Completion, Endpoint, RefusedError
from megarl.rollout.transcript import Transcript
from megarl.task.agents import SENT, AgentError, build_agents
from megarl.task.environments import FindCalls, FoundCalls, describe_call, describe_tools, knows_tools
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOOL_LISTS = 32
"""Lists of tools of which a renderer is kept"""
MOST_REFUSED = 1000
"""Refused requests of an episode, after which it has failed"""


class Chat:
    """Messages as tokens and back, with one list of tools."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None,
        config: AgentEnvironmentConfig,
        tools: tuple[Mapping[str, Any], ...] = (),
    ):
        """Raises ConfigError naming environment.parser where there are tools and nothing reads their calls."""
        self._prompt = describe_tools(tools, config.description, data, tokenizer) if tools else None
        self._renderer = Renderer(data, tokenizer, self._prompt, vocab_size)
        self.encoder = ObservationEncoder(self._renderer)
        self._writes_calls = not (data.chat_template and knows_tools(tokenizer))
        self.find_calls: FindCalls | None = None
        if self._prompt is not None:
            self.find_calls = start_call_finder(self._prompt, config.parser, tokenizer)

    def render(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """The text of a whole conversation, up to where the policy answers, and its tokens. Raises ConfigError."""
        written = [self._renderer.defuse_message(message) for message in self._write(messages)]
        text = self._renderer.render_messages(written if self._prompt is None else self._prompt.add_to(written))
        return text, self._renderer.tokenize([text])[0]

    def encode(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """The tokens between an answer with this last token and the next one. Raises ConfigError."""
        return self.encoder.encode(self._write(messages), last_token)

    def _write(self, messages: Sequence[Message]) -> list[Message]:
        """For a chat template that knows no tools, calls as text and results as the user's messages."""
        if not self._writes_calls:
            return list(messages)
        written: list[Message] = []
        after_result = False
        for message in messages:
            content = message.content
            for call in message.others.get("tool_calls", ()):
                content += describe_call(call["function"]["name"], call["function"]["arguments"])
            if message.role == "tool" and after_result:
                written[-1] = Message("user", f"{written[-1].content}\n{content}")
            else:
                written.append(Message("user" if message.role == "tool" else message.role, content))
            after_result = message.role == "tool"
        return written


@dataclass
class Place:
    """The end of an answer."""

    segment: int
    num_tokens: int
    """Of the segment up to here"""
    last_token: int
    is_free: bool = True
    """Nothing of the segment follows it, or is about to"""


class Recorder:
    """One episode: answers its agent's requests, each as the continuation of what it continues."""

    def __init__(
        self, request: EpisodeRequest, send: Send, get_chat: Callable[..., Chat], config: AgentEnvironmentConfig,
        response_length: int, prompt_length: int,
    ):  # fmt: skip
        self._request, self._send, self._get_chat, self._config = request, send, get_chat, config
        self._response_length, self._longest = response_length, prompt_length + response_length
        self.transcript: Transcript | None = None
        self.limit: FinishReason | None = None
        """Why requests were refused"""
        self.error: Exception | None = None
        """What no agent is to blame for"""
        self._places: dict[bytes, list[Place]] = {}
        """By what has been said"""
        self._names: dict[bytes, int] = {}
        self._num_begun = self._num_refused = self._num_under_way = self._num_reserved = 0
        self._freed = asyncio.Event()
        """Tokens that were reserved may have been left"""
        self._last = time.monotonic()
        """When the agent was last answered"""

    async def complete(self, request: ChatRequest) -> Completion:
        """The policy's next answer. Raises RefusedError."""
        silent_s = 0.0 if self._num_under_way else time.monotonic() - self._last
        self._num_under_way += 1
        try:
            return await self._complete(request, silent_s)
        except RefusedError:
            raise
        except Exception as error:
            self.error = self.error or error
            raise RefusedError(503, "failed", "the policy cannot answer") from error
        finally:
            self._num_under_way -= 1
            self._last = time.monotonic()

    def count_refused(self) -> None:
        self._num_refused += 1
        self._last = time.monotonic()

    async def watch(self) -> str:
        """Why the episode cannot go on, as soon as it cannot."""
        begin = time.monotonic()
        while True:
            now = time.monotonic()
            if self.error is not None:
                return "the policy cannot answer"
            if now - begin > self._config.episode_deadline_s:
                return f"it took longer than environment.episode_deadline_s={self._config.episode_deadline_s:g} s"
            if not self._num_under_way and now - self._last > self._config.step_deadline_s:
                return f"it was silent for longer than environment.step_deadline_s={self._config.step_deadline_s:g} s"
            if self._num_refused > MOST_REFUSED:
                return f"more than {MOST_REFUSED} of its requests were refused"
            await asyncio.sleep(min(0.2, self._config.step_deadline_s / 4))

    async def _complete(self, request: ChatRequest, silent_s: float) -> Completion:
        if self._num_begun == self._config.max_turns:
            self.limit = self.limit or FinishReason.max_turns
            raise RefusedError(400, "max_turns", f"environment.max_turns={self._num_begun} requests have been answered")
        self._num_begun += 1
        try:
            chat = await call_in_thread(partial(self._get_chat, request.tools))
            said = _hash_messages(request)
            place, observation, text = self._find(chat, request, said)
        except ConfigError as error:
            raise RefusedError(400, "invalid_value", "; ".join(error.problems)) from error
        continued = place if place is not None and place.is_free else None
        if continued is not None:
            continued.is_free = False
        sent = np.concatenate([self._join(place), np.array(observation, dtype=np.int32)])
        num_observed = 0 if continued is None else len(observation)
        try:
            limit = await self._reserve(request, sent, num_observed)
            try:
                turn = await self._send(self._build_turn(request, sent, limit, said[-1]))
                turn = cut_at(turn, request.stop, chat.encoder.decode)
                message, num_calls, num_malformed = await self._read(chat, turn)
                segment = self._begin(text, sent, request) if continued is None else continued.segment
                assert self.transcript is not None
                numbers = {"requests": 1.0, "agent_s": silent_s} | ({"segments": 1.0} if continued is None else {})
                if request.tools:
                    numbers |= {"tool_calls": float(num_calls), "malformed_calls": float(num_malformed)}
                self.transcript.add_turn(sent, turn, segment, numbers)
            finally:
                self._num_reserved -= limit + num_observed
                self._freed.set()
        except BaseException:
            if continued is not None:
                continued.is_free = True
            raise
        ids = turn.token_ids.tolist()
        own = Place(segment, len(sent) + len(ids), ids[-1])
        self._places.setdefault(_hash(said[-1], _read_back(message)), []).append(own)
        finish = "tool_calls" if message.get("tool_calls") else turn.finish_reason.value
        tokens = [chat.encoder.decode([token]) for token in ids] if request.logprobs else []
        return Completion(message, finish, sent.tolist(), ids, tokens, turn.rollout_logprobs.tolist())

    def _find(self, chat: Chat, request: ChatRequest, said: Sequence[bytes]) -> tuple[Place | None, Sequence[int], str]:
        """What the request continues, if anything, the tokens after that, and of what continues nothing the text."""
        for number in range(len(request.messages) - 1, 0, -1):
            places = self._places.get(said[number])
            if places is None or request.messages[number - 1].role != "assistant":
                continue
            place = next((place for place in places if place.is_free), places[0])
            # What the template cannot continue is a conversation of its own.
            with contextlib.suppress(ConfigError):
                return place, chat.encode(request.messages[number:], place.last_token), ""
        text, ids = chat.render(request.messages)
        return None, ids, text

    def _join(self, place: Place | None) -> NDArray[np.int32]:
        if place is None:
            return np.zeros(0, dtype=np.int32)
        assert self.transcript is not None
        return self.transcript.join(place.segment)[: place.num_tokens]

    def _begin(self, text: str, sent: NDArray[np.int32], request: ChatRequest) -> int:
        """The number of a segment that begins with what was sent."""
        if self.transcript is not None:
            return self.transcript.begin(sent)
        prompt = self._request.prompt
        self.transcript = Transcript(
            replace(prompt, text=text, token_ids=tuple(sent.tolist()), messages=request.messages)
        )
        return 0

    async def _reserve(self, request: ChatRequest, sent: NDArray[np.int32], num_observed: int) -> int:
        """How many tokens the answer may have, which other requests then may not. Raises RefusedError for none."""
        own = [limit for limit in (self._config.turn_length, request.max_tokens) if limit is not None]
        while True:
            num_used = 0 if self.transcript is None else self.transcript.num_tokens
            left = self._response_length - num_used - num_observed
            limit = min([*own, left - self._num_reserved, self._longest - len(sent)])
            # What is under way may need less than it may take.
            if limit >= min([*own, left, self._longest - len(sent)]) or not self._num_reserved:
                break
            self._freed.clear()
            await self._freed.wait()
        if limit < 1:
            self.limit = self.limit or FinishReason.length
            lengths = f"data.prompt_length and rollout.response_length leave no room after {len(sent)} tokens"
            raise RefusedError(400, "context_length_exceeded", f"{lengths}, {num_used} of them generated or read")
        self._num_reserved += limit + num_observed
        return limit

    def _build_turn(self, request: ChatRequest, sent: NDArray[np.int32], limit: int, said: bytes) -> TurnRequest:
        name = None
        if self._request.name is not None:
            number = self._names[said] = self._names.get(said, 0) + 1
            name = f"{self._request.name}/{said.hex()[:16]}/{request.seed or 0}/{number}"
        return TurnRequest(sent, limit, self._request.sampling, self._request.server, name)

    async def _read(self, chat: Chat, turn: Response) -> tuple[dict[str, Any], int, int]:
        """The answer as OpenAI's message, how many calls it has, and how many more that cannot be read."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if chat.find_calls is None:
            return message, 0, 0
        raw = chat.encoder.decode(turn.token_ids.tolist())
        found: FoundCalls = await call_in_thread(partial(chat.find_calls, raw))
        if found.calls:
            message["content"] = found.text or None
            functions = [{"name": name, "arguments": arguments} for name, arguments in found.calls]
            message["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": each} for each in functions
            ]
        return message, len(found.calls), found.num_malformed


def cut_at(turn: Response, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Response:
    """The turn up to the first of these texts: to stop there is as likely as to go on was."""
    if not any(text in turn.text for text in stop):
        return turn
    low, high = 1, len(turn)
    while low < high:
        middle = (low + high) // 2
        if any(text in decode(turn.token_ids[:middle].tolist()) for text in stop):
            high = middle
        else:
            low = middle + 1
    text = turn.text[: min(turn.text.index(each) for each in stop if each in turn.text)]
    rows = slice(0, low)
    arrays = (turn.rollout_logprobs[rows], turn.generated[rows], turn.weight_versions.expand()[rows])
    return Response(turn.token_ids[rows], text, *arrays, FinishReason.stop)


def _read_back(message: Mapping[str, Any]) -> Message:
    """The answer as the agent is expected to send it back."""
    calls = [{"function": dict(call["function"])} for call in message.get("tool_calls", ())]
    for call in calls:
        with contextlib.suppress(ValueError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return Message("assistant", message["content"] or "", {"tool_calls": calls} if calls else {})


def _hash_messages(request: ChatRequest) -> list[bytes]:
    """One for each number of first messages, from 0 on; with the tools."""
    hashes = [hashlib.sha256(json.dumps(request.tools, sort_keys=True).encode()).digest()]
    for message in request.messages:
        hashes.append(_hash(hashes[-1], message))
    return hashes


def _hash(before: bytes, message: Message) -> bytes:
    """Of a conversation with one more message. Clients may change white space around it and the calls' ids."""
    calls = [call["function"] for call in message.others.get("tool_calls", ())]
    content = json.dumps([message.role, message.content.strip(), calls], sort_keys=True)
    return hashlib.sha256(before + content.encode()).digest()


class AgentRunner:
    """Runs episodes of agents. For one event loop."""

    keeps_step = False

    def __init__(
        self, config: AgentEnvironmentConfig, get_chat: Callable[..., Chat], response_length: int, prompt_length: int
    ):
        self._config, self._get_chat = config, get_chat
        self._lengths = response_length, prompt_length
        self._endpoint, self._agents = Endpoint(config.host), build_agents(config)
        self._slots = asyncio.Semaphore(config.max_episodes)

    async def run(self, request: EpisodeRequest, send: Send) -> Episode:
        """The whole episode. send: generates a turn; what it raises is raised."""
        async with self._slots:
            await self._agents.start()
            recorder = Recorder(request, send, self._get_chat, self._config, *self._lengths)
            url, key = await self._endpoint.open(recorder)
            name = f"{request.name or request.prompt.id}-{secrets.token_hex(4)}"
            variables = dict(zip(SENT.values(), (url, key, MODEL), strict=True))
            task = describe_task(request.prompt, request.seed)
            with span("agent", process=RESPONSES, track="environment", prompt=request.prompt.id):
                try:
                    result, failure = await self._wait(recorder, self._agents.run(name, variables, task))
                finally:
                    await self._endpoint.close(key)
        if recorder.error is not None:
            raise recorder.error
        return build_episode(request.prompt, recorder, result, failure)

    async def close(self) -> None:
        """End the endpoint and all agents."""
        await self._endpoint.stop()
        await self._agents.close()

    async def _wait(self, recorder: Recorder, work: Awaitable[Any]) -> tuple[Any, str | None]:
        """What the agent gave, or why it gave nothing."""
        agent, watch = asyncio.ensure_future(work), asyncio.ensure_future(recorder.watch())
        try:
            await asyncio.wait((agent, watch), return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                return None, f"the agent was ended: {watch.result()}"
            try:
                return agent.result(), None
            except AgentError as error:
                return None, f"the agent failed: {error}"
        finally:
            for task in (agent, watch):
                task.cancel()
            await asyncio.gather(agent, watch, return_exceptions=True)


def describe_task(prompt: Prompt, seed: int) -> dict[str, Any]:
    """What an agent is told of its task, JSON."""
    asked = next((message.content for message in reversed(prompt.messages) if message.role == "user"), prompt.text)
    task = {
        "id": prompt.id,
        "question": asked,
        "messages": [message.to_dict() for message in prompt.messages],
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "columns": dict(prompt.columns),
        "source": prompt.source,
        "seed": seed,
    }
    found: dict[str, Any] = json.loads(json.dumps(task, default=str))
    return found


def build_episode(prompt: Prompt, recorder: Recorder, result: Any, failure: str | None) -> Episode:
    """result: null, the answer as a text, or {"answer": TEXT, "reward": NUMBER, "rewards": [NUMBER of each request],
    "details": {NAME: NUMBER}}, of which each may be missing."""
    transcript = recorder.transcript
    if recorder.limit is not None:
        failure = None  # An agent may end as it likes once it has been told that there is no more.
    if transcript is None:
        failure = failure or "the agent has asked for nothing"
        return Episode(prompt, Transcript(prompt).build_response(FinishReason.stop), failure)
    answer: str | None = None
    if failure is None:
        try:
            answer = _note_result(transcript, result)
        except ValueError as error:
            failure = f"the agent gave {str(result)[:100]!r}: {error}"
    finish = recorder.limit or FinishReason.stop
    return Episode(transcript.prompt, transcript.build_response(finish, answer), failure)


def _note_result(transcript: Transcript, result: Any) -> str | None:
    """Take over rewards and details; returns the answer. Raises ValueError."""
    if result is None or isinstance(result, str):
        return result
    known = {"answer", "reward", "rewards", "details"}
    if not isinstance(result, Mapping) or not set(result) <= known:
        raise ValueError(f"a text, or a dictionary of {', '.join(sorted(known))} was expected")
    answer, rewards, details = result.get("answer"), result.get("rewards") or (), result.get("details") or {}
    if answer is not None and not isinstance(answer, str):
        raise ValueError("answer: a text was expected")
    if not isinstance(rewards, list | tuple) or len(rewards) not in (0, len(transcript.turns)):
        raise ValueError(f"rewards: a list of {len(transcript.turns)} numbers, one for each request, was expected")
    if not isinstance(details, Mapping):
        raise ValueError("details: a dictionary of numbers was expected")
    each = [_read_number("rewards", reward) for reward in rewards] or [0.0] * len(transcript.turns)
    each[-1] += _read_number("reward", result.get("reward", 0.0))
    numbers = {str(name): _read_number(f"details.{name}", value) for name, value in details.items()}
    for turn, reward in enumerate(each):
        transcript.note(reward, numbers if turn == len(each) - 1 else {}, turn)
    return answer


def _read_number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: found {value!r}; a finite number was expected")
    return float(value)


class AgentConversation:
    """How episodes of an agent are run, in one configuration."""

    def __init__(
        self,
        config: AgentEnvironmentConfig,
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None,
    ):
        self.config = config
        self._build = partial(Chat, data, tokenizer, vocab_size, config)
        self._prompt_length = data.prompt_length
        self._chats: dict[str, Chat] = {}

    def get_chat(self, tools: tuple[Mapping[str, Any], ...] = ()) -> Chat:
        """Thread-safe. Raises ConfigError."""
        name = json.dumps(tools, sort_keys=True)
        if (found := self._chats.get(name)) is None:
            found = self._build(tools)
            if len(self._chats) >= MOST_TOOL_LISTS:
                self._chats.pop(next(iter(self._chats)), None)
            self._chats[name] = found
        return found

    @property
    def encoder(self) -> ObservationEncoder:
        """Without tools."""
        return self.get_chat().encoder

    def build_runner(self, response_length: int) -> AgentRunner:
        return AgentRunner(self.config, self.get_chat, response_length, self._prompt_length)

    async def check_agent(self) -> None:
        """Raises ConfigError where the agent's function cannot be loaded."""
        agents = build_agents(self.config)
        try:
            await agents.start()
        except AgentError as error:
            raise ConfigError([f"environment.path: {error}"]) from error
        finally:
            await agents.close()
