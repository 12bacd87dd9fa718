"""The verifier http: a server that answers, fails, hangs, breaks off or redirects."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_cases import build_prompt, build_response

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import HttpRewardConfig
from megarl.task.scorer import build_scorer
from megarl.types import Prompt

RIGHT = json.dumps({"reward": 0.5, "correct": True, "details": {"a": 1}})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.questions.append((question, self.headers.get("Authorization")))
            server.paths.append(self.path)
            server.running += 1
            server.most = max(server.most, server.running)
            status, body = server.answers.pop(0) if server.answers else (200, RIGHT)
        try:
            self.answer(status, body)
        finally:
            with server.lock:
                server.running -= 1

    def answer(self, status, body):
        if status == "hang":
            time.sleep(1.0)
            return
        if status == "lose":
            self.connection.close()
            return
        if status == "slow":
            time.sleep(0.05)
            status = 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.lock, server.answers, server.questions, server.running, server.most = threading.Lock(), [], [], 0, 0
    server.paths = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def make(server, **keywords):
    return build_scorer(HttpRewardConfig(url=f"http://127.0.0.1:{server.server_port}/score", **keywords))


def score(scorer, count=1):
    prompt = Prompt("p1", "question", (), "85", {"k": "v"})

    async def run():
        found = await asyncio.gather(*(scorer.score(prompt, build_response(f"text {n}")) for n in range(count)))
        scorer.close()
        await asyncio.sleep(0)
        return found

    return asyncio.run(run())


def test_a_server_is_asked_with_prompt_response_answer_and_metadata(server):
    (found,) = score(make(server))
    assert (found.reward, found.correct, found.details, found.failure) == (0.5, True, {"a": 1.0}, None)
    question = {"prompt": "question", "response": "text 0", "answer": "85", "metadata": {"k": "v"}}
    assert server.questions == [(question, None)]


@pytest.mark.parametrize(("reward", "correct"), [(1, True), (0.99, False)])
def test_what_is_left_out_follows_from_the_reward(server, reward, correct):
    server.answers = [(200, json.dumps({"reward": reward}))]
    (found,) = score(make(server))
    assert (found.reward, found.correct, found.details) == (reward, correct, {})


@pytest.mark.parametrize("trouble", [(429, ""), (500, ""), (503, "busy"), ("lose", ""), ("hang", "")])
def test_trouble_that_passes_is_tried_again(server, trouble):
    server.answers = [trouble, trouble]
    (found,) = score(make(server, timeout_s=0.3))
    assert (found.reward, found.failure, len(server.questions)) == (0.5, None, 3)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ((503, ""), "answered with status 503 (3 attempts)"),
        (("hang", ""), "gave no answer within reward.timeout_s=0.3 s (3 attempts)"),
        (("lose", ""), "could not be reached (RemoteProtocolError) (3 attempts)"),
    ],
)
def test_trouble_that_does_not_pass_is_a_failure(server, trouble, reason):
    server.answers = [trouble] * 3
    (found,) = score(make(server, timeout_s=0.3, max_retries=2))
    assert reason in found.failure
    assert len(server.questions) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, ""), "status 404"),
        ((302, ""), "status 302; redirects are not followed"),
        ((200, "<html>"), "what is not JSON"),
        ((200, "[]"), 'without a number under "reward"'),
        ((200, '{"reward": "1"}'), 'without a number under "reward"'),
        ((200, '{"reward": true}'), 'without a number under "reward"'),
        ((200, '{"reward": NaN}'), "the reward is nan; it must be a finite number"),
        ((200, '{"reward": 1, "correct": 1}'), '"correct" that is neither true nor false'),
        ((200, '{"reward": 1, "details": {"a": "b"}}'), '"details" that are not numbers by name'),
    ],
)
def test_an_answer_that_is_none_is_a_failure_at_once(server, answer, reason):
    server.answers = [answer]
    (found,) = score(make(server))
    assert reason in found.failure
    assert len(server.questions) == 1


def test_no_more_requests_run_at_a_time_than_allowed(server):
    server.answers = [("slow", RIGHT)] * 20
    assert len(score(make(server, max_concurrency=3), 20)) == 20
    assert server.most == 3


def test_the_key_is_sent_and_neither_configured_nor_shown(server, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "hunter2")
    server.answers = [(401, "")]
    (found,) = score(make(server, api_key_env="KEY_OF_TEST"))
    assert server.questions[0][1] == "Bearer hunter2"
    assert "hunter2" not in found.failure


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"url": "localhost:80/score"}, r"reward\.url: found 'localhost:80/score'; it must be http"),
        ({"url": "http:///score"}, r"reward\.url: found"),
        ({"url": "http://name:hunter2@host/"}, r"reward\.url: it has a name or password"),
        ({"url": "http://host/", "api_key_env": "NO_SUCH_KEY"}, r"reward\.api_key_env: found 'NO_SUCH_KEY'.*not set"),
    ],
)
def test_what_cannot_be_asked_is_named_before_the_run(keywords, message, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=message) as raised:
        build_scorer(HttpRewardConfig(**keywords))
    assert "hunter2" not in str(raised.value)


def test_a_server_that_does_not_answer_is_found_before_the_run(server):
    server.answers = [(404, "")]
    with pytest.raises(ConfigError, match="status 404"):
        make(server).check([build_prompt("85")])


def test_the_check_before_the_run_leaves_a_scorer_that_works(server):
    scorer = make(server)
    scorer.check([build_prompt("85")])
    assert score(scorer)[0].reward == 0.5


@pytest.mark.parametrize("path", ["/score", "/score/", "/score?kind=math", ""])
def test_the_url_is_asked_as_it_is_written(server, path):
    url = f"http://127.0.0.1:{server.server_port}{path}"
    assert score(build_scorer(HttpRewardConfig(url=url)))[0].failure is None
    assert server.paths == [path or "/"]
