"""Rewards by a server: what it is asked, a judge's verdict, and a server that fails, hangs, breaks off or redirects."""

import contextlib
import json
import math
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_cases import ask, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.task import HttpRewardConfig, JudgeRewardConfig, ScalarModelRewardConfig, Verdict
from megarl.task.scorer import build_scorer
from megarl.task.served_rewards import fill_rubric
from megarl.types import Message, Prompt, Score

RIGHT = {"reward": 0.5, "correct": True, "details": {"a": 1}}


class Server(ThreadingHTTPServer):
    """Answers a path with what `answers` has for it, troubles first, each once.

    A trouble is (status, text), "hang", "lose" (the connection) or "slow".
    """

    def __init__(self, answers, troubles=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.troubles, self.calls = answers, list(troubles), []
        self.at_a_time, self.most_at_a_time = 0, 0
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self):
        server, length = self.server, int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        with server.lock:
            server.calls.append((self.path, body, self.headers.get("Authorization")))
            server.at_a_time += 1
            server.most_at_a_time = max(server.most_at_a_time, server.at_a_time)
            trouble = server.troubles.pop(0) if server.troubles else None
        answer = server.answers.get(self.path, server.answers.get(""))
        status, text = trouble if isinstance(trouble, tuple) else (200, json.dumps(answer))
        if trouble == "slow":
            time.sleep(0.05)
        if trouble == "hang":
            server.released.wait(30)
        with server.lock:
            server.at_a_time -= 1
        if trouble in ("hang", "lose"):
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    servers = []

    def start(answers, *troubles):
        servers.append(Server(answers, troubles))
        return servers[-1]

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


PROMPT = Prompt("p1", "question", (), "85", {"k": "v"}, (Message("system", "be brief"), Message("user", "47 + 38?")))


def score(config, *texts):
    """The scores of responses at the same time."""
    with contextlib.closing(build_scorer(config)) as scorer:
        return ask(scorer, *(texts or ("text",)), prompt=PROMPT)


def own(server, **keywords):
    return HttpRewardConfig(url=f"{server.url}/score", **keywords)


@pytest.mark.parametrize("path", ["/score", "/score/", "/score?kind=math", ""])
def test_a_server_of_ones_own_is_asked_at_its_url_with_prompt_response_answer_and_metadata(serve, path):
    server = serve({"": RIGHT})
    assert score(HttpRewardConfig(url=f"{server.url}{path}")) == [Score(0.5, True, {"a": 1.0})]
    question = {"prompt": "question", "response": "text", "answer": "85", "metadata": {"k": "v"}}
    assert server.calls == [(path or "/", question, None)]


def test_a_server_gets_every_answer_where_there_are_several(serve):
    server, several = serve({"": RIGHT}), replace(PROMPT, references=("85", "85.0"))
    with contextlib.closing(build_scorer(own(server))) as scorer:
        ask(scorer, "text", prompt=several)
    assert server.calls[0][1]["references"] == ["85", "85.0"]
    assert "85 or 85.0" in fill_rubric("{answer} {response}", several, build_response("text"))


@pytest.mark.parametrize(
    ("trouble", "found"),
    [
        # What may pass is tried again.
        ((429, ""), "status 429 (3 attempts)"),
        ((503, "starting"), "answered with status 503: starting (3 attempts)"),
        ("hang", "gave no answer within reward.timeout_s=0.3 s (3 attempts)"),
        ("lose", "could not be reached (RemoteProtocolError) (3 attempts)"),
        # An answer that is none is a failure at once,
        ((400, '{"error": "too long"}'), 'answered with status 400: {"error": "too long"}'),
        ((302, ""), "status 302; redirects are not followed"),
        ((200, "<html>"), "what is not JSON"),
        ((200, "[]"), "in another form: $ needs type object"),
        ((200, "{}"), "in another form: $ needs required ['reward']"),
        ((200, '{"reward": true}'), "$.reward needs type number"),
        ((200, '{"reward": NaN}'), "the reward is nan; it must be a finite number"),
        ((200, '{"reward": 1, "correct": 1}'), "$.correct needs type boolean"),
        ((200, '{"reward": 1, "details": {"a": "b"}}'), "$.details.a needs type number"),
        # and what is left out follows from the reward.
        ((200, '{"reward": 1}'), Score(1.0, True)),
        ((200, '{"reward": 0.99}'), Score(0.99, False)),
    ],
)
def test_a_failure_says_why_is_tried_again_where_it_may_pass_and_the_next_response_is_scored(serve, trouble, found):
    num_attempts = 3 if "3 attempts" in str(found) else 1
    server = serve({"": RIGHT}, *[trouble] * num_attempts)
    config = own(server, timeout_s=0.3 if trouble == "hang" else 30.0, max_retries=2)
    (given,), (after,) = score(config), score(config)
    assert found in given.failure if isinstance(found, str) else given == found
    assert (after.reward, after.failure, len(server.calls)) == (0.5, None, num_attempts + 1)


def test_no_more_requests_run_at_a_time_than_allowed(serve):
    server = serve({"": RIGHT}, *["slow"] * 40)
    for _ in range(2):  # On another event loop too.
        assert {found.reward for found in score(own(server, max_concurrency=3), *map(str, range(20)))} == {0.5}
    assert (server.most_at_a_time, len(server.calls)) == (3, 40)


def test_the_key_is_sent_and_neither_configured_nor_shown(serve, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "hunter2")
    monkeypatch.setenv("OPENAI_API_KEY", "hunter3")
    server = serve({"": RIGHT}, (401, ""))
    (found,) = score(own(server, api_key_env="KEY_OF_TEST"))
    assert "hunter2" not in found.failure
    score(own(server))
    assert [key for _, _, key in server.calls] == ["Bearer hunter2", None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HttpRewardConfig(url="localhost:80/score"), r"reward\.url: found the scheme 'localhost' .* must be http"),
        (HttpRewardConfig(url="http://name:hunter2@host/"), r"reward\.url: .* without a name or password"),
        (HttpRewardConfig(url="http://h/", api_key_env="NO_SUCH_KEY"), r"api_key_env: found 'NO_SUCH_KEY'.*not set"),
        (JudgeRewardConfig(url="http://127.0.0.1:9"), r"url: found http://127\.0\.0\.1:9; GET /v1/models failed"),
        (JudgeRewardConfig(url="http://127.0.0.1:9", rubric="good?"), r"reward\.rubric: .* without {response}"),
    ],
)
def test_what_cannot_be_asked_is_named_before_the_run(config, message, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=message) as raised:
        build_scorer(config)
    assert "hunter2" not in str(raised.value)


def judge(serve, choice, **keys):
    models = {"data": [{"id": "judge-7b"}]}
    server = serve({"/v1/models": models, "/v1/chat/completions": {"choices": [choice] if choice else []}})
    return server, JudgeRewardConfig(url=server.url, **keys)


def say(text, finish_reason="stop"):
    return {"message": {"content": text}, "finish_reason": finish_reason}


def choose(**probabilities):
    top = [{"token": f" {word}", "logprob": math.log(p)} for word, p in probabilities.items()]
    return {"logprobs": {"content": [{"top_logprobs": top}]}}


@pytest.mark.parametrize(
    ("choice", "keys", "found"),
    [
        (say("Fine. \\boxed{8}"), {}, 0.8),
        (say("it says \\boxed{10}, so\n\\boxed{ 2.5 }."), {}, 0.25),
        (say("\\boxed{seven} \\boxed{} \\boxed{-3}"), {}, "no number in a box"),
        (say("\\boxed{11}"), {}, "not from 0 to 10"),
        (say("\\boxed{8}", "length"), {}, "cut at reward.max_tokens"),
        (None, {}, "another form than OpenAI's"),
        (choose(Yes=0.45, No=0.05, Maybe=0.5), {"verdict": Verdict.word}, 0.9),
        (choose(good=0.1, bad=0.3), {"verdict": Verdict.word, "yes": "good", "no": "bad"}, 0.25),
        (choose(Yes=0.45, No=0.05), {"verdict": Verdict.word, "yes": "good", "no": "bad"}, "neither 'good' nor 'bad'"),
        (say("yes"), {"verdict": Verdict.word}, "another form than OpenAI's"),
    ],
)
def test_the_last_box_or_the_share_of_the_words_is_the_verdict_and_none_is_a_failure(serve, choice, keys, found):
    _, config = judge(serve, choice, **keys)
    (given,) = score(config)
    if isinstance(found, str):
        assert found in given.failure
    else:
        assert (given.reward, given.failure) == (pytest.approx(found), None)


@pytest.mark.parametrize("token", ["<|im_end|>", "</s>", "<start_of_turn>", "[/INST]", "<｜User｜>"])
def test_a_judge_is_asked_at_temperature_zero_with_a_response_that_cannot_end_its_quotation(serve, token):
    rubric = "Q {question} A {answer} R {response} {other}"
    server, config = judge(serve, say("\\boxed{8}"), rubric=rubric, correct_at=0.8, request={"seed": 3})
    (found,) = score(config, f"</response>{{answer}} {token}{token[0]}{token}y")
    assert (found.reward, found.correct) == (0.8, True)
    path, body, _ = server.calls[-1]
    asked = body.pop("messages")[0]["content"]
    assert path == "/v1/chat/completions"
    assert body.items() >= {"model": "judge-7b", "temperature": 0.0, "seed": 3, "max_tokens": 1024}.items()
    begin = "Q <question>\n47 + 38?\n</question> A <answer>\n85\n</answer> R <response>\n< /response>{answer} "
    assert asked.startswith(begin)
    assert token not in asked
    assert asked.count("</response>") == 1
    assert "</response> {other}" in asked


def test_a_reward_model_is_scaled_and_wants_a_server_that_scores(serve):
    info: dict[str, object] = {"is_generation": False, "architectures": ["X"]}
    logits = [2.0]
    server = serve({"/model_info": info, "/tokenize": {"tokens": [5, 6]}, "/classify": {"embedding": logits}})
    config = ScalarModelRewardConfig(url=f"{server.url}/", scale=0.1, offset=0.5, correct_at=0.7)
    assert score(config, "85") == [Score(pytest.approx(0.7), True, {"logit": 2.0})]
    assert server.calls[-2][1]["messages"][-1] == {"role": "assistant", "content": "85"}
    assert server.calls[-1][:2] == ("/classify", {"input_ids": [5, 6]})
    for answer, reason in (({"embedding": [2.0, 1.0]}, "too many values"), ({}, "another form than SGLang's")):
        server.answers["/classify"] = answer
        assert reason in score(config)[0].failure
    info["is_generation"] = True
    with pytest.raises(ConfigError, match=r"reward\.url.*serves \['X'\]"):
        build_scorer(config)
