"""The endpoint that agents ask: OpenAI's chat completions, answered by the run's policy, each episode by a key of its
own. It listens on the event loop that asks the servers.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from megarl.types import Message

MODEL = "policy"
"""What the endpoint calls its model; requests may name any"""
MOST_BYTES = 2**24
"""Of a request"""
TEXT_PARTS = ("text", "input_text", "output_text")


class RefusedError(Exception):
    """A request without an answer. code: as OpenAI's errors have it."""

    def __init__(self, status: int, code: str, text: str):
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    """Whether the answer's tokens are wanted as texts"""


@dataclass(frozen=True)
class Completion:
    """The policy's answer."""

    message: dict[str, Any]
    """As OpenAI's: role, content and tool_calls"""
    finish_reason: str
    """stop, length or tool_calls"""
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    tokens: Sequence[str]
    """The text of each, where `ChatRequest.logprobs`"""
    logprobs: Sequence[float]


class Answering(Protocol):
    """An episode."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Raises RefusedError."""
        ...

    def count_refused(self) -> None:
        """A request of the episode was refused, by `complete` or before it."""
        ...


class Endpoint:
    """For the loop on which `open` is called first."""

    def __init__(self, host: str = "127.0.0.1"):
        self._host = host
        self._episodes: dict[str, Answering] = {}
        self._under_way: dict[str, set[asyncio.Task[Any]]] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def open(self, episode: Answering) -> tuple[str, str]:
        """The base URL, and the key by which requests are the episode's, until `close`."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        self._episodes[key := f"sk-{secrets.token_hex(24)}"] = episode
        return self._url, key

    async def close(self, key: str) -> None:
        """Break off the episode's requests and answer no more of them."""
        del self._episodes[key]
        tasks = self._under_way.pop(key, set())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, backlog=1024)
        await site.start()
        port = self._runner.addresses[0][1]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{shown}:{port}/v1"

    def _find_key(self, request: web.Request) -> str:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._episodes:
            raise RefusedError(401, "invalid_api_key", "the key is of no episode that is under way")
        return key

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            self._find_key(request)
        except RefusedError as error:
            return _refuse(error)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        key = ""
        try:
            key = self._find_key(request)
            try:
                body = await request.json()
            except web.HTTPRequestEntityTooLarge:
                raise RefusedError(413, "too_large", f"a request may have {MOST_BYTES} bytes") from None
            except (ValueError, RecursionError):
                raise RefusedError(400, "invalid_json", "the body is not JSON") from None
            asked = read_request(body)
            if key not in self._episodes:
                raise RefusedError(401, "invalid_api_key", "the episode has ended")
            task = asyncio.current_task()
            assert task is not None
            under_way = self._under_way.setdefault(key, set())
            under_way.add(task)
            try:
                found = await self._episodes[key].complete(asked)
            finally:
                under_way.discard(task)
        except RefusedError as error:
            if key in self._episodes:
                self._episodes[key].count_refused()
            return _refuse(error)
        answer = build_answer(body, found)
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionError):  # Nobody reads it: the turn was taken all the same.
            await response.prepare(request)
            for chunk in build_chunks(body, answer):
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


def _refuse(error: RefusedError) -> web.Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    found = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return web.json_response({"error": found}, status=error.status)


def read_request(body: Any) -> ChatRequest:
    """Raises RefusedError for what is no request, and for what would change what the policy's tokens are drawn from.

    What says how to sample (temperature, top_p, penalties) is not obeyed: the run's own keys say it.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise _wrong("messages: a list with a message or more was expected")
    for name, wrong, why in (
        ("n", lambda n: n not in (None, 1), "ask once for each answer"),
        ("logit_bias", bool, "the policy's tokens are drawn from its own distribution"),
        ("top_logprobs", bool, "the log-prob of the token that was drawn is given, no others"),
        ("response_format", lambda it: it not in (None, {"type": "text"}), "answers are free"),
        ("tool_choice", lambda it: it not in (None, "auto", "none"), "the policy chooses whether it calls a tool"),
    ):
        if wrong(body.get(name)):
            raise _wrong(f"{name}: found {json.dumps(body[name])[:100]}; it is not supported here: {why}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    stop, tools, seed = body.get("stop") or (), body.get("tools") or (), body.get("seed")
    stop = (stop,) if isinstance(stop, str) else stop
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise _wrong(f"max_tokens: found {limit!r}; it must be a whole number from 1 on")
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) and each for each in stop):
        raise _wrong("stop: a text or a list of texts was expected")
    if not isinstance(tools, list | tuple) or not all(map(_is_tool, tools)):
        raise _wrong('tools: a list of {"type": "function", "function": {"name", ...}} was expected')
    if body.get("tool_choice") == "none":
        tools = ()
    messages = tuple(_read_message(number, each) for number, each in enumerate(body["messages"]))
    if messages[-1].role == "assistant":
        raise _wrong("messages: the last one is the assistant's, and what it has begun is not continued")
    seed = seed if isinstance(seed, int) else None
    return ChatRequest(messages, tuple(tools), limit, tuple(stop), seed, bool(body.get("logprobs")))


def _wrong(text: str) -> RefusedError:
    return RefusedError(400, "invalid_value", text)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _read_message(number: int, given: Any) -> Message:
    where = f"messages[{number}]"
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise _wrong(f"{where}: found role {role!r}; it must be system, developer, user, assistant or tool")
    content = given.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part["text"], str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise _wrong(f"{where}: found a part of type {kind!r}; the policy reads text alone")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise _wrong(f"{where}: content: a text was expected")
    others: dict[str, Any] = {}
    if calls := given.get("tool_calls"):
        try:
            others["tool_calls"] = [_read_call(call) for call in calls]
        except (KeyError, TypeError, AttributeError):
            raise _wrong(f"{where}: tool_calls: found {json.dumps(calls)[:100]}, which are no calls") from None
    if role == "tool" and isinstance(given.get("tool_call_id"), str):
        others["tool_call_id"] = given["tool_call_id"]
    return Message("system" if role == "developer" else role, content or "", others)


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as chat templates take them."""
    function, arguments = call["function"], call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": str(function["name"]), "arguments": arguments}}


def build_answer(body: Mapping[str, Any], found: Completion) -> dict[str, Any]:
    """As OpenAI's; with return_token_ids also prompt_token_ids, and token_ids in the choice, as vLLM gives them."""
    choice: dict[str, Any] = {"index": 0, "message": found.message, "finish_reason": found.finish_reason}
    choice["logprobs"] = None
    if body.get("logprobs"):
        tokens = zip(found.tokens, found.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in tokens
            ]
        }
    num_prompt, num_tokens = len(found.prompt_token_ids), len(found.token_ids)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [choice],
        "usage": usage,
    }
    if body.get("return_token_ids"):
        answer["prompt_token_ids"], choice["token_ids"] = list(found.prompt_token_ids), list(found.token_ids)
    return answer


def build_chunks(body: Mapping[str, Any], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer as what a stream has: it is complete when the first chunk is sent."""
    (choice,) = answer["choices"]
    common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    message = dict(choice["message"])
    calls = message.pop("tool_calls", None)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": message["content"] or ""}]
    if calls:
        deltas.append({"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]})
    own = {name: value for name, value in choice.items() if name not in ("message", "index", "finish_reason")}
    chunks = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **(own if number == 1 else {})}]}
        for number, delta in enumerate(deltas)
    ]
    chunks.append({**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**common, "choices": [], "usage": answer["usage"]})
    return chunks
