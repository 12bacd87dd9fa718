"""Episodes of agents: functions in processes of their own ask the real endpoint, where a scripted policy answers."""

import asyncio
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from data_cases import QWEN, build_byte_tokenizer

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.task import AgentEnvironmentConfig, DataConfig
from megarl.interfaces import DeadlineError, Sampling, TurnRequest
from megarl.rollout.agent import AgentConversation
from megarl.rollout.conversation import Episode, EpisodeRequest
from megarl.rollout.episodes import check_conversation
from megarl.types import FinishReason, Message, Prompt, Response

TOKENIZER = build_byte_tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": ["[end]"]})
TOKENIZER.chat_template = QWEN
PROMPT = Prompt("p", "[user]1+1[end][assistant]", (1, 2), "2", messages=(Message("user", "1+1"),))
AGENTS = '''
import asyncio, json, os, subprocess, sys, threading, time, urllib.request

def ask(messages, **more):
    """[the answer's message, its finish_reason, prompt_token_ids, token_ids], or [status, code]."""
    body = {"messages": messages, "return_token_ids": True, **more}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        answer = json.loads(urllib.request.urlopen(request).read())
    except urllib.error.HTTPError as error:
        return [error.code, json.loads(error.read())["error"]["code"]]
    choice = answer["choices"][0]
    return [choice["message"], choice["finish_reason"], answer["prompt_token_ids"], choice["token_ids"]]

def say(role, content):
    return {"role": role, "content": content}

def once(task):
    ask([say("user", task["question"])])
    return task["answer"]

def histories(task):
    """Goes on, changes what was said, goes on from a place in the middle, asks for something else at the same time."""
    first = [say("user", "a")]
    one, *_ = ask(first)
    second = [*first, one, say("user", "b")]
    two, *_ = ask(second)
    ask([*second, two, say("user", "c")])
    ask([*first, one, say("user", "other")])
    ask([*first, {**one, "content": "stripped"}, say("user", "b")])
    ask([say("user", "sub-agent")])
    ask([*second, {**two, "content": " " + two["content"] + "  ", "refusal": None}, say("user", "d")])
    return {"answer": "4", "rewards": [0, 1, 0, 0, 0, 0, 0.5], "reward": 2, "details": {"luck": 3}}

def tools(task):
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    given = [{"type": "function", "function": {"name": "double", "description": "", "parameters": parameters}}]
    messages = [say("user", "use it")]
    message, finish, *_ = ask(messages, tools=given)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "6"}
    last, end, *_ = ask([*messages, message, result], tools=given)
    return json.dumps([message["content"], finish, call["function"], last["content"], end])

def limits(task):
    return json.dumps([ask([say("user", "a")])[1] for _ in range(3)])

def long(task):
    return json.dumps([ask([say("user", "a" * 40)])[-1] for _ in range(2)])

def stop(task):
    message, finish, _, ids = ask([say("user", "a")], stop=[", ", "never"])
    ask([say("user", "a"), message, say("user", "b")])
    return json.dumps([message["content"], finish, len(ids)])

def parallel(task):
    threads = [threading.Thread(target=ask, args=([say("user", str(i))],)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def crash(task):
    ask([say("user", "a")])
    raise KeyError("x")

def die(task):
    print("last words", flush=True)
    os._exit(3)

def hang(task):
    ask([say("user", "a")])
    subprocess.Popen(["sleep", "987"], start_new_session=True)
    time.sleep(1000)

async def never_ends(task):
    while True:
        ask([say("user", "a")])
        await asyncio.sleep(0.01)

def silent(task):
    time.sleep(1000)

def asks_nothing(task):
    return "2"

def garbage(task):
    ask([say("user", "a")])
    return {"reward": float("nan")}

def unknown(task):
    ask([say("user", "a")])
    return {"score": 1}

def flood(task):
    for _ in range(2000):
        ask([])

def leaves(task):
    ask([say("user", "a")])
    subprocess.Popen(["sleep", "986"], start_new_session=True)
'''


class Policy:
    """Says these texts, one a request, then counts."""

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.requests: list[TurnRequest] = []

    async def send(self, request: TurnRequest) -> Response:
        self.requests.append(request)
        await asyncio.sleep(0)
        number = len(self.requests)
        text = self.texts[number - 1] if number <= len(self.texts) else f"{number}"
        ids = TOKENIZER.encode(f"{text}[end]", add_special_tokens=False)[: request.max_new_tokens]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        return Response(ids, text, [-0.5 * number] * len(ids), [True] * len(ids), [0] * len(ids), FinishReason.stop)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    return path


@pytest.fixture
def play(agents: Path) -> Callable[..., Any]:
    """Episodes of the functions with these names, all at once on one runner, or the only one."""

    def play(policy: Any, *names: str, response_length: int = 400, prompt_length: int = 200, **keys: Any) -> Any:
        async def run() -> list[Episode]:
            runners = []
            for name in names:
                config = AgentEnvironmentConfig(path=f"{agents}:{name}", **{"parser": "hermes", **keys})
                conversation = AgentConversation(config, DataConfig(prompt_length=prompt_length), TOKENIZER, None)
                runners.append(conversation.build_runner(response_length))
            request = EpisodeRequest(PROMPT, "k/0/0", 7, Sampling(1.0), 0)
            try:
                return list(await asyncio.gather(*(runner.run(request, policy.send) for runner in runners)))
            finally:
                for runner in runners:
                    await runner.close()

        found = asyncio.run(run())
        return found if len(names) > 1 else found[0]

    return play


def read(episode: Episode) -> list[str]:
    """The text of each segment, actions in braces."""
    response, found = episode.response, []
    starts = [episode.prompt.token_ids, *response.segment_prompts]
    for start, columns in zip(starts, response.find_segments(), strict=True):
        text = TOKENIZER.decode(list(start))
        for turn in response.turns:
            own = columns[(columns < turn.end) & (columns >= turn.start)]
            before = columns[columns < turn.start]
            if len(own):
                previous = max((each.end for each in response.turns if each.end <= turn.start), default=0)
                text += TOKENIZER.decode(response.token_ids[before[before >= previous]])
                text += "{" + TOKENIZER.decode(response.token_ids[own]) + "}"
        found.append(text)
    return found


def test_what_is_said_before_decides_which_segment_a_request_continues(play):
    policy = Policy("A", "B")
    episode = play(policy, "histories")
    assert episode.failure is None
    assert read(episode) == [
        "[user]a[end][assistant]{A[end]}[user]b[end][assistant]{B[end]}[user]c[end][assistant]{3[end]}",
        # What was generated stands before a fork as it was generated, and is learned from once.
        "[user]a[end][assistant]A[end][user]other[end][assistant]{4[end]}",
        "[user]a[end][assistant]stripped[end][user]b[end][assistant]{5[end]}",
        "[user]sub-agent[end][assistant]{6[end]}",
        # White space and keys that clients add change nothing.
        "[user]a[end][assistant]A[end][user]b[end][assistant]B[end][user]d[end][assistant]{7[end]}",
    ]
    response = episode.response
    assert (response.text, response.finish_reason) == ("4", FinishReason.stop)
    assert [turn.reward for turn in response.turns] == [0, 1, 0, 0, 0, 0, 2.5]
    assert [turn.segment for turn in response.turns] == [0, 0, 0, 1, 2, 3, 4]
    assert sum(turn.details.get("segments", 0) for turn in response.turns) == 5
    assert response.turns[-1].details["luck"] == 3
    # The tokens of training are those of serving.
    starts = [episode.prompt.token_ids, *response.segment_prompts]
    for turn, request in zip(response.turns, policy.requests, strict=True):
        own = response.find_segments()[turn.segment]
        before = [*starts[turn.segment], *response.token_ids[own[own < turn.start]]]
        assert request.token_ids.tolist() == before
    assert len({request.name for request in policy.requests}) == len(policy.requests)
    again = Policy("A", "B")
    play(again, "histories")
    assert [request.name for request in again.requests] == [request.name for request in policy.requests]


def test_calls_of_tools_are_given_as_openai_gives_them_and_their_results_continue_the_segment(play):
    call = '<tool_call>{"name": "double", "arguments": {"x": 3}}</tool_call>'
    episode = play(Policy(f"So: {call}", "6!"), "tools")
    content, finish, function, last, end = json.loads(episode.response.text)
    assert (content.strip(), finish, last, end) == ("So:", "tool_calls", "6!", "stop")
    assert (function["name"], json.loads(function["arguments"])) == ("double", {"x": 3})
    begin, after = "[system]double(x)[end][user]use it[end][assistant]", "[user](6)[end][assistant]"
    assert read(episode) == [f"{begin}{{So: {call}[end]}}{after}{{6![end]}}"]
    assert episode.response.turns[0].details["tool_calls"] == 1


def test_limits_are_told_to_the_agent_and_cost_it_nothing_else(play):
    episode = play(Policy(), "limits", max_turns=2)
    assert json.loads(episode.response.text)[2] == "max_turns"
    assert (episode.failure, episode.response.finish_reason) == (None, FinishReason.max_turns)
    episode = play(Policy("x" * 50), "long", response_length=8)
    assert (episode.failure, episode.response.finish_reason) == (None, FinishReason.length)
    assert json.loads(episode.response.text)[1] == "context_length_exceeded"
    assert len(episode.response) == 8


def test_a_stop_text_cuts_the_tokens_of_the_answer_behind_it(play):
    episode = play(Policy("one, two"), "stop")
    assert json.loads(episode.response.text) == ["one", "stop", 5]
    assert read(episode) == ["[user]a[end][assistant]{one, }[end][user]b[end][assistant]{2[end]}"]


def test_requests_at_a_time_are_segments_and_wait_where_together_they_have_no_room(play):
    for keys in ({}, {"turn_length": 6}):
        episode = play(Policy(), "parallel", response_length=24, **keys)
        assert episode.failure is None
        assert len(episode.response) <= 24
        assert len(episode.response.segment_prompts) == 3
        assert {text[6] for text in read(episode)} == set("0123")


FAILURES = {
    "crash": "the agent failed: KeyError: 'x'",
    "die": "the agent failed: its process died (exit status 3); it said: last words",
    "hang": "the agent was ended: it was silent for longer than environment.step_deadline_s=3 s",
    "silent": "the agent was ended: it was silent for longer than environment.step_deadline_s=3 s",
    "never_ends": "the agent was ended: it took longer than environment.episode_deadline_s=9 s",
    "asks_nothing": "the agent has asked for nothing",
    "garbage": "the agent gave \"{'reward': nan}\": reward: found nan; a finite number was expected",
    "unknown": "a dictionary of answer, details, reward, rewards was expected",
    "flood": "the agent was ended: more than 1000 of its requests were refused",
}


def test_whatever_an_agent_does_costs_its_own_episode_and_leaves_no_process(play):
    keys = {"step_deadline_s": 3.0, "episode_deadline_s": 9.0, "max_turns": 100_000}
    names = [*FAILURES, "once", "leaves"]
    found = dict(zip(names, play(Policy(), *names, response_length=100_000, **keys), strict=True))
    for name, message in FAILURES.items():
        assert message in str(found[name].failure)
    assert (found["once"].failure, found["once"].response.text) == (None, "2")
    assert found["leaves"].failure is None
    time.sleep(0.2)
    left = [process.cmdline() for process in psutil.process_iter() if process.name() == "sleep"]
    assert not [line for line in left if line[-1] in ("986", "987")]


def test_what_the_servers_raise_is_raised_and_not_the_agents_fault(play):
    class Broken:
        async def send(self, request: TurnRequest) -> Response:
            raise DeadlineError("no answer")

    with pytest.raises(DeadlineError, match="no answer"):
        play(Broken(), "once")


def test_a_program_is_given_its_task_as_json_and_its_last_line_is_read():
    program = "import json,sys; task = json.load(sys.stdin); print('hello'); print(json.dumps({'answer': task['id']}))"
    config = AgentEnvironmentConfig(command=["python3", "-c", program])
    conversation = AgentConversation(config, DataConfig(), TOKENIZER, None)

    async def run() -> Episode:
        runner = conversation.build_runner(100)
        try:
            return await runner.run(EpisodeRequest(PROMPT, None, 7, Sampling(1.0), 0), Policy().send)
        finally:
            await runner.close()

    assert asyncio.run(run()).failure == "the agent has asked for nothing"


def test_a_function_that_is_not_there_is_refused_before_anything_starts(agents):
    config = AgentEnvironmentConfig(path=f"{agents}:absent")
    conversation = AgentConversation(config, DataConfig(), TOKENIZER, None)
    with pytest.raises(ConfigError, match=r"environment\.path: .*absent"):
        check_conversation(conversation, [PROMPT])
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    conversation = AgentConversation(AgentEnvironmentConfig(path=f"{agents}:once"), DataConfig(), tokenizer, None)
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*leaves out"):
        check_conversation(conversation, [PROMPT])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "environment: found none of command, path and url"),
        (["environment.path=x.py:run", "environment.url=http://x"], "environment: found path and url"),
        (["environment.path=x.py:run", "rollout.router_replay=true"], "rollout.router_replay: found true"),
    ],
)
def test_keys_that_an_agent_cannot_have_are_refused_by_name(keys, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["environment=agent", *keys])


def test_the_endpoint_answers_as_openais_clients_expect_and_refuses_by_name():
    import openai

    from megarl.rollout.agent import Recorder
    from megarl.rollout.endpoint import Endpoint

    config = AgentEnvironmentConfig(path="x:y")
    conversation = AgentConversation(config, DataConfig(), TOKENIZER, None)

    async def run() -> None:
        request = EpisodeRequest(PROMPT, None, 7, Sampling(1.0), 0)
        recorder = Recorder(request, Policy("A", "B", "C").send, conversation.get_chat, config, 400, 200)
        endpoint = Endpoint()
        url, key = await endpoint.open(recorder)
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        assert [model.id async for model in client.models.list()] == ["policy"]
        found = await client.chat.completions.create(model="any", messages=messages, logprobs=True)
        choice = found.choices[0]
        assert (choice.message.content, choice.finish_reason, found.model) == ("A", "stop", "any")
        assert [token.logprob for token in choice.logprobs.content] == [-0.5] * 2
        assert "".join(token.token for token in choice.logprobs.content) == "A[end]"
        assert found.usage.completion_tokens == 2
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model="x", messages=messages, **options)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "B"
        assert chunks[-1].usage.completion_tokens == 2
        for more, message in (
            ({"n": 2}, "n: found 2; it is not supported here: ask once for each answer"),
            ({"response_format": {"type": "json_object"}}, "response_format: found"),
            ({"tool_choice": "required"}, "tool_choice: found"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
            ({"messages": [{"role": "assistant", "content": "a"}]}, "the last one is the assistant's"),
            ({"messages": [{"role": "judge", "content": "a"}]}, "found role 'judge'"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await client.chat.completions.create(**{"model": "x", "messages": messages, **more})
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http:
            answer = await http.post(f"{url}/chat/completions", content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            answer = await http.post(f"{url}/chat/completions", content=b" " * 2**25)
            assert answer.status_code == 413
        await endpoint.close(key)
        with pytest.raises(openai.AuthenticationError, match="no episode that is under way"):
            await client.chat.completions.create(model="x", messages=messages)
        await client.close()
        await endpoint.stop()

    asyncio.run(run())
