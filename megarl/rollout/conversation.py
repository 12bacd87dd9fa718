"""An episode: the policy's turns and what answers between them, observations as tokens and tools, as one Response."""

import asyncio
import contextlib
import functools
import inspect
import json
import math
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.config.errors import ConfigError, describe_error
from megarl.config.schema.root import RolloutConfig
from megarl.config.schema.task import (
    MultiTurnEnvironmentConfig,
)
from megarl.cpu.process import STANDINS
from megarl.environment import Action, Environment, EpisodeSetting, Observation, Step
from megarl.interfaces import Sampling, TurnRequest
from megarl.report.timeline import RESPONSES, span
from megarl.rollout.client import call_in_thread
from megarl.rollout.server import GenerationSpec, find_stop_tokens
from megarl.rollout.transcript import Transcript
from megarl.task.environments import (
    EnvironmentFactory,
    FoundCalls,
    ToolPrompt,
)
from megarl.task.process import CallError, FunctionProcess
from megarl.task.render import Renderer
from megarl.types import FinishReason, Message, Prompt, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, ANSWER, OBSERVATION, THOUGHT = "QUESTION", "MEGARL-ANSWER", "MEGARL-OBSERVATION", "MEGARL-THOUGHT"
"""Contents of the conversation in which a chat template shows what stands between an answer and the next one"""


def find_turn_end(renderer: Renderer) -> int | None:
    """The special token with which the chat template ends an answer.

    None without one, and where an answer may have special tokens in it, as those of gpt-oss have: its parts end alike.
    """
    if not renderer.uses_template:
        return None
    asked, answered = Message("user", QUESTION), Message("assistant", ANSWER)
    try:
        begin = renderer.render_messages([asked])
        text = renderer.render_messages([asked, answered, asked], for_answer=False)
    except ConfigError:  # A template for one turn.
        return None
    before, found, after = text.partition(ANSWER)
    if not found or renderer.find_special(before[_count_shared(begin, before) :]):
        return None
    after = after.strip()
    end = next((token for token in renderer.special_tokens if after.startswith(token)), None)
    return None if end is None else renderer.tokenizer.get_vocab()[end]


def _count_shared(a: str, b: str) -> int:
    """Characters with which both begin."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), min(len(a), len(b)))


def add_turn_end(config: RolloutConfig, spec: GenerationSpec, renderer: Renderer) -> tuple[RolloutConfig, str]:
    """The configuration with the tokens among rollout.stop_token_ids with which the chat template ends an answer and
    the tokenizer a text, and a sentence on what ends responses, and by whom where they differ. Base models have
    templates without that token among their own, and servers read no tokenizer.

    Raises ConfigError as `find_stop_tokens`.
    """
    tokenizer = renderer.tokenizer
    stop = find_stop_tokens(config, spec, tokenizer)
    ends = {"the chat template": find_turn_end(renderer), "the tokenizer": tokenizer.eos_token_id}
    said = {name: (end,) for name, end in ends.items() if end is not None and end < spec.vocab_size}
    sources = {**spec.sources, **said}
    every = dict.fromkeys([*stop, *chain(*sources.values())])
    agree = len(set(map(frozenset, sources.values()))) < 2

    def describe(token: int) -> str:
        by = " and ".join(name for name, tokens in sources.items() if token in tokens)
        return f"{tokenizer.convert_ids_to_tokens(token)} ({token}{f', by {by}' if by and not agree else ''})"

    added = [token for token in every if token not in stop]
    config = replace(config, stop_token_ids=[*config.stop_token_ids, *added]) if added else config
    return config, f"responses end with {', '.join(map(describe, every))}"


class ObservationEncoder:
    """Encodes what an environment says for one tokenizer, with its chat template where the data use it."""

    def __init__(self, renderer: Renderer):
        """renderer: of the prompts."""
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer
        self._checked = set[tuple[str, ...]]()
        """Roles of the observations that the chat template can write"""

    def check(self, prompt: Prompt) -> None:
        """Raises ConfigError where the chat template, once a conversation goes on, does not write as before what has
        been said, so that `encode` would not give what stands between its turns. prompt: one that it begins with.
        """
        if not self._renderer.uses_template:
            return
        self._check_following(prompt.messages or (Message("user", QUESTION),), self._answer())

    def describe(self) -> Iterator[str]:
        """Sentences on what an episode has otherwise than its chat template, rendered anew, would have it."""
        if not self._renderer.uses_template:
            return
        if (thinking := self._describe_thinking()) is not None:
            yield thinking
        text, end = self._render_following(self._answer()).lstrip(), self._tokenizer.eos_token
        own = next((token for token in self._renderer.special_tokens if text.startswith(token)), end)
        if find_turn_end(self._renderer) is None and own != end:  # gpt-oss
            yield f"behind an answer that ends with {end} the chat template writes {own}; training has both"
        if self._renderer.tools is not None and self._renderer.tools.is_fallback:
            why = "the chat template describes no tools, or does not take their results behind an answer"
            yield f"{why}: a text in the system message describes them (environment.description)"

    def _describe_thinking(self) -> str | None:
        """Where the chat template leaves out the thinking of earlier turns, which an episode keeps."""
        thought = Message("assistant", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")
        try:
            text = self._renderer.render_messages((Message("user", QUESTION), thought, *self._answer()))
        except ConfigError:  # A template with its own form of thinking.
            return None
        if THOUGHT in text:
            return None
        return "the chat template leaves out the thinking of earlier turns; training keeps it, as it was generated"

    def _answer(self) -> Sequence[Message]:
        """What an environment says, or the tools, of content OBSERVATION."""
        tools = self._renderer.tools
        return (Message("user", OBSERVATION),) if tools is None else tools.answer([OBSERVATION])

    def _check_following(self, asked: Sequence[Message], following: Sequence[Message]) -> None:
        """Raises as `check`. following: of content OBSERVATION."""
        answered, roles = Message("assistant", ANSWER), ", ".join(m.role for m in following)
        # Some templates write an end instead of the answer's beginning (Phi), others a beginning that no earlier
        # answer has (DeepSeek R1).
        open_end = self._renderer.render_messages(asked)
        begin = open_end[: _count_shared(open_end, self._renderer.render_messages(asked, for_answer=False))]
        expected = self._render_following(following)
        for num_turns in (1, 2):
            earlier = (*asked, answered, *(*following, answered) * (num_turns - 1))
            text = self._renderer.render_messages((*earlier, *following))
            if not text.startswith(begin):
                why = "it writes the first messages otherwise once others follow"
            elif (text.count(ANSWER), text.count(OBSERVATION)) != (num_turns, num_turns * len(following)):
                why = "it leaves out, changes or repeats earlier messages"
            elif text.rpartition(ANSWER)[2] != expected:
                why = (
                    f"behind answer {num_turns} of {len(earlier)} messages it writes"
                    f" {text.rpartition(ANSWER)[2][:60]!r}, in a conversation of two messages {expected[:60]!r}"
                )
            else:
                continue
            raise ConfigError(
                [
                    f"data.chat_template: the template cannot continue a conversation turn by turn with messages of"
                    f" {roles}: {why}; data.chat_template_path names a file with another template"
                ]
            )
        self._checked.add(tuple(m.role for m in following))

    def _render_following(self, messages: Sequence[Message]) -> str:
        """What the chat template writes behind an answer that these messages follow."""
        conversation = (Message("user", QUESTION), Message("assistant", ANSWER), *messages)
        _, found, text = self._renderer.render_messages(conversation).partition(ANSWER)
        if not found:
            raise ConfigError(
                ["data.chat_template: the template leaves out or changes the answer before an observation"]
            )
        return text

    def start(self, prompt: Prompt, observation: Observation) -> Prompt:
        """The prompt with the observation in place of its text.

        Raises ConfigError where the tokenizer cannot read it, or its chat template refuses the messages.
        """
        messages = self._to_messages(observation)
        if messages is None:
            ids = tuple(self._check_tokens(observation))
            text = self.decode(ids)
        else:
            text = self._renderer.render_messages(messages)
            (ids,) = self._renderer.tokenize([text])
        return replace(prompt, text=text, token_ids=ids, messages=messages or ())

    def encode(self, observation: Observation, last_token: int) -> list[int]:
        """Token ids from the end of an action to the beginning of the next one.

        last_token: the action's last token; where it is what a chat template ends an answer with, that is not
        repeated. Raises as `start`.
        """
        messages = self._to_messages(observation)
        if messages is None:
            return self._check_tokens(observation)
        if not self._renderer.uses_template:
            text = "".join(message.content for message in messages)
            return list(self._renderer.tokenize([text], add_special_tokens=False)[0])
        if tuple(m.role for m in messages) not in self._checked:
            self._check_following((Message("user", QUESTION),), [Message(m.role, OBSERVATION) for m in messages])
        text, end = self._render_following(messages), self.decode([last_token])
        ids = self._renderer.tokenize([text], add_special_tokens=False)[0]
        if ids[:1] == (last_token,):
            # Read together, for some tokens take the space behind them (Phi-3's).
            return list(ids[1:])
        if text.startswith(end):
            (ids,) = self._renderer.tokenize([text.removeprefix(end)], add_special_tokens=False)
        return list(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def _check_tokens(self, observation: Observation) -> list[int]:
        ids, size = [int(token) for token in observation], self._renderer.vocab_size  # type: ignore[arg-type]
        outside = [token for token in ids if token < 0 or (size is not None and token >= size)]
        if outside:
            raise ConfigError(
                [f"environment: the observation's token {outside[0]} is outside the vocabulary of {size}"]
            )
        return ids

    def _to_messages(self, observation: Observation) -> tuple[Message, ...] | None:
        """None for token ids. What the tokenizer would read as a special token is defused."""
        if isinstance(observation, str):
            return (Message("user", self._renderer.defuse(observation)),)
        if not all(isinstance(part, Message) for part in observation):
            return None
        messages = tuple(self._renderer.defuse_message(m) for m in observation)  # type: ignore[arg-type]
        if messages and messages[-1].role == "assistant":
            raise ConfigError(["environment: an observation ends with a message of assistant, which the policy writes"])
        return messages


FALLBACK = "hermes"
"""The format that the description asks for where the chat template knows no tools"""
TIMEOUT_S = 5.0
"""Of reading one action, which takes a millisecond; SGLang's expressions can take for ever"""
MEMORY_GB = 4.0


def start_call_finder(
    prompt: ToolPrompt, parser: str | None, tokenizer: "PreTrainedTokenizerBase"
) -> Callable[[str], FoundCalls]:
    """What finds the calls in an action's text, special tokens included, with SGLang's parser in a process that this
    starts. Thread-safe. What SGLang's parser cannot stand is malformed.

    parser: SGLang's name of it; None: the one for the tokenizer's chat template. Raises ConfigError naming
    environment.parser.
    """
    options = {
        "parser": parser if prompt.text is None else parser or FALLBACK,
        "template": tokenizer.chat_template,
        "tokens": sorted(tokenizer.get_added_vocab()),
    }
    process, end, tools = _share_process(json.dumps(options)), str(tokenizer.eos_token or ""), list(prompt.schemas)
    process.start("environment.parser")

    def find_calls(text: str) -> FoundCalls:
        try:
            found = process.call({"text": text.removesuffix(end), "tools": tools})
        except CallError:
            return FoundCalls((), num_malformed=1)
        calls = tuple((name, arguments) for name, arguments in found["calls"])
        return FoundCalls(calls, found["num_malformed"], found["text"])

    return find_calls


@functools.lru_cache(maxsize=4)
def _share_process(options: str) -> FunctionProcess:
    """One for all the sets of an evaluation: each would take seconds and hundreds of megabytes."""
    return FunctionProcess(
        "megarl.rollout.conversation:load_parser",
        timeout_s=TIMEOUT_S,
        memory_gb=MEMORY_GB,
        options=json.loads(options),
    )


@dataclass(frozen=True)
class Conversation:
    """What answers the policy, and within which limits."""

    make: EnvironmentFactory
    config: MultiTurnEnvironmentConfig
    encoder: ObservationEncoder


def load_parser(parser: str | None, template: str | None, tokens: list[str]) -> Callable[..., dict[str, Any]]:
    """The function (text, tools' schemas) -> {"parser", "calls": [[name, arguments as JSON], ...], "num_malformed",
    "text"}, of which the last is what stands beside the calls.

    parser: SGLang's name; None: as its servers find it for the chat template `template`
    and the tokenizer's added `tokens`. Raises ValueError for a parser that SGLang does not have, or where there is
    none.
    """
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "true"  # A call of an unknown tool is answered, too.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # This process sees no GPU.
    sys.path.insert(0, str(STANDINS))  # The server reads a chat template with what stands here.
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from sglang.srt.parser.template_detection import (
        detect_reasoning_parser,
        detect_reasoning_pattern,
        detect_tool_call_parser,
    )

    vocabulary = SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens, 0))
    forced, toggle = detect_reasoning_pattern(template)
    reasoning = detect_reasoning_parser(template, vocabulary, toggle, forced)
    name = parser or detect_tool_call_parser(template, vocabulary, toggle, forced)
    if name is None and template is not None:
        # SGLang does not know Qwen2.5's, Hermes' and Llama 3's, which are told by the tags that they write.
        name = "hermes" if "<tool_call>" in template else "llama3" if "ipython" in template else None
    known = FunctionCallParser.ToolCallParserEnum
    if name not in known:
        found = f"found {name!r}; it must be" if name else "found null, and the chat template does not tell it; name"
        raise ValueError(f"{found} one of SGLang's parsers: {', '.join(sorted(known))}")

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        described = [Tool.model_validate(tool) for tool in tools]
        if reasoning is not None:
            _, text = ReasoningParser(reasoning, stream_reasoning=False).parse_non_stream(text)
        found = FunctionCallParser(described, name)
        calls: list[list[str]] = []
        num_malformed = 0
        beside = text
        if text and found.has_tool_call(text):
            beside, parsed = found.parse_non_stream(text)
            calls = [[call.name, call.parameters] for call in parsed if call.name]
            # How many calls the text begins, as far as the format has a marker for each.
            marker = found.detector.bot_token.strip()
            num_begun = max(1, len(parsed), text.count(marker) if marker else 0)
            num_malformed = num_begun - len(calls)
        return {"parser": name, "calls": calls, "num_malformed": num_malformed, "text": beside}

    return read


T = TypeVar("T")
MAX_CALLS = 64
"""Blocking calls of environments at a time, each in a thread of its own"""


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


class Runner(Protocol):
    """Runs episodes, on one event loop."""

    @property
    def keeps_step(self) -> bool:
        """Whether an episode sends one turn at a time, as soon as it can: then all can be sent in the same batches."""
        ...

    async def run(self, request: EpisodeRequest, send: Send) -> Episode:
        """The whole episode. send: generates a turn; what it raises is raised."""
        ...

    async def close(self) -> None:
        """End what has been started for episodes."""
        ...


class EpisodeRunner:
    """Runs episodes of up to `response_length` tokens. For one event loop."""

    keeps_step = True

    def __init__(self, response_length: int, conversation: Conversation | None = None):
        """conversation: None where the first turn is the whole episode."""
        self._response_length = response_length
        self._conversation = conversation
        self._calls = asyncio.Semaphore(MAX_CALLS)

    async def run(self, request: EpisodeRequest, send: Send) -> Episode:
        """The whole episode. send: generates a turn; what it raises is raised."""
        if self._conversation is None:
            ids = np.asarray(request.prompt.token_ids, dtype=np.int32)
            return Episode(request.prompt, await send(_build_turn(request, ids, self._response_length, 0)))
        transcript = Transcript(request.prompt)
        environment = None
        try:
            environment = await self._ask("making the environment", self._conversation.make)
            setting = EpisodeSetting(request.prompt, request.seed)
            begin = await self._ask("Environment.reset", environment.reset, setting)
            if begin is not None:
                encoder = self._conversation.encoder
                transcript = Transcript(_encode(partial(encoder.start, request.prompt, begin)))
            finish = await self._converse(self._conversation, request, send, environment, transcript)
            return Episode(transcript.prompt, transcript.build_response(finish))
        except EnvironmentFailure as error:
            return Episode(transcript.prompt, transcript.build_response(FinishReason.stop), str(error))
        finally:
            if environment is not None:
                # The episode has ended; it counts by its reward.
                with contextlib.suppress(EnvironmentFailure):
                    await self._ask("Environment.close", environment.close)

    async def close(self) -> None: ...

    async def _converse(
        self,
        conversation: Conversation,
        request: EpisodeRequest,
        send: Send,
        environment: Environment,
        transcript: Transcript,
    ) -> FinishReason:
        """Turn after turn, added to `transcript`; returns why it ended."""
        config, encoder = conversation.config, conversation.encoder
        observation = np.zeros(0, dtype=np.int32)
        for number in range(config.max_turns):
            room = self._response_length - transcript.num_tokens - len(observation)
            limit = room if config.turn_length is None else min(room, config.turn_length)
            sent = np.concatenate([transcript.join(), observation])
            turn = await send(_build_turn(request, sent, limit, number))
            transcript.add_turn(sent, turn)
            ids = turn.token_ids.tolist()
            action = Action(turn.text, encoder.decode(ids), tuple(ids), number, turn.finish_reason)
            step = _check_step(await self._ask("Environment.step", environment.step, action))
            transcript.note(step.reward, step.details)
            if step.done or turn.finish_reason is FinishReason.length:
                finish = turn.finish_reason
            elif number + 1 == config.max_turns:
                finish = FinishReason.max_turns
            else:
                encoded = _encode(partial(encoder.encode, step.observation, ids[-1]))
                observation = np.array(encoded, dtype=np.int32)
                if transcript.num_tokens + len(observation) < self._response_length:
                    continue
                finish = FinishReason.length
            last = None if step.done else await self._ask("Environment.cut", environment.cut)
            if last is not None:
                final = _check_step(last)
                transcript.note(final.reward, final.details)
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


def _build_turn(request: EpisodeRequest, token_ids: NDArray[np.int32], limit: int, number: int) -> TurnRequest:
    name = request.name if number == 0 or request.name is None else f"{request.name}/{number}"
    return TurnRequest(token_ids, limit, request.sampling, request.server, name)


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
