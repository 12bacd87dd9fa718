"""Sampling that follows the run's seed and a call's key alone, with real servers. On a CPU."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from generation import generate_groups
from servers import API_KEY, running_server
from test_server import build_prompts

from megarl.rollout.client import ConnectionLostError
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.server import SGLangServer
from megarl.signals import pick_free_port
from megarl.types import Prompt, Response

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the sampling that is tested is for machines without CUDA"),
]
KEY = "iteration-1/round-1"


@pytest.fixture(scope="module")
def config(rollout_config):
    """Fewer places than responses, and a cache that the running ones outgrow: responses wait, and are retracted."""
    options = {"schedule_conservativeness": 0.1}
    return replace(rollout_config, max_running_requests=16, kv_cache_tokens=640, sglang=options)


@pytest.fixture(scope="module")
def first_server(tiny_checkpoint, config, tmp_path_factory) -> Iterator[SGLangServer]:
    log_file = tmp_path_factory.mktemp("seeds") / "first.log"
    with running_server(config, tiny_checkpoint, log_file, seed=1) as running:
        yield running


@pytest.fixture(scope="module")
def second_server(tiny_checkpoint, config, first_responses, tmp_path_factory) -> Iterator[SGLangServer]:
    """Started later, and with another seed of its own."""
    log_file = tmp_path_factory.mktemp("seeds") / "second.log"
    with running_server(config, tiny_checkpoint, log_file, seed=2) as running:
        yield running


@pytest.fixture(scope="module")
def build_engine(tiny_checkpoint, config):
    made = []

    def build(*urls: str, seed: int = 7) -> SGLangEngine:
        made.append(SGLangEngine(urls, tiny_checkpoint, config, seed=seed, api_key=API_KEY))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def engine(build_engine, first_server):
    return build_engine(first_server.url)


def generate(engine: SGLangEngine, key: str | None = KEY) -> list[list[Response]]:
    return generate_groups(engine, build_prompts(), num_responses=4, temperature=0.9, key=key)


def list_tokens(groups) -> list[tuple[int, ...]]:
    return [tuple(response.token_ids.tolist()) for group in groups for response in group]


@pytest.fixture(scope="module")
def first_responses(engine):
    return generate(engine)


def test_the_responses_waited_and_were_retracted(first_responses, first_server, config):
    assert len(list_tokens(first_responses)) > 2 * config.max_running_requests
    assert "Retract requests" in first_server.log_file.read_text()


def test_a_key_repeats_bit_by_bit_whatever_came_in_between(first_responses, engine):
    unkeyed = [generate(engine, None) for _ in range(2)]
    assert list_tokens(unkeyed[0]) != list_tokens(unkeyed[1])
    generate_groups(engine, build_prompts(), num_responses=1, temperature=0.0)
    other = generate(engine, "iteration-2/round-1")
    assert generate(engine) == first_responses
    assert not {each for each in list_tokens(other) if len(each) > 8} & set(list_tokens(first_responses))


def test_a_key_repeats_bit_by_bit_where_the_prompt_is_in_the_cache(server, tiny_checkpoint, rollout_config):
    """The log-probs' last bits tell a prompt's forward in one piece from its last token's alone."""
    prompt = Prompt("backwards", "", build_prompts()[5].token_ids[::-1], "")
    with contextlib.closing(SGLangEngine([server.url], tiny_checkpoint, rollout_config, api_key=API_KEY)) as engine:

        def ask(key: str | None) -> list[list[Response]]:
            return generate_groups(engine, [prompt], num_responses=1, temperature=1.0, key=key)

        keys = [f"iteration-{i}/round-1" for i in range(8)]
        first = [ask(key) for key in keys]
        ask(None)
        (cached,) = engine.clients[0].generate([prompt.token_ids], {"max_new_tokens": 1})
        assert cached["meta_info"]["cached_tokens"] == len(prompt.token_ids) - 1
        assert [ask(key) for key in keys] == first


def test_two_servers_sample_the_same_tokens_as_one(first_responses, first_server, second_server, build_engine):
    assert list_tokens(generate(build_engine(first_server.url, second_server.url))) == list_tokens(first_responses)


def test_a_lost_server_is_not_replaced_where_the_call_must_repeat(first_server, build_engine):
    dead = f"http://127.0.0.1:{pick_free_port('127.0.0.1')}"
    with pytest.raises(ConnectionLostError, match=f"{dead}/flush_cache"):
        generate(build_engine(dead, first_server.url))
