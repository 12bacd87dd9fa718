"""Weights that change under responses in flight, and a training run with generation ahead, with real servers."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from generation import generate_groups
from servers import API_KEY, running_server
from test_server import TransformersPolicy, build_sync

from megarl.rollout.engine import SGLangEngine
from megarl.rollout.server import SGLangServer
from megarl.sync.sync import build_probe_tokens
from megarl.types import Prompt

pytestmark = [pytest.mark.server, pytest.mark.slow]
LENGTH = 300


@pytest.fixture(scope="module")
def stale_config(rollout_config):
    """With fewer places than the test has responses, so that some wait in the queue when the weights change."""
    return replace(rollout_config, max_staleness=1, response_length=LENGTH, max_running_requests=8)


@pytest.fixture(scope="module")
def stale_server(tiny_checkpoint, stale_config, server_seed, tmp_path_factory) -> Iterator[SGLangServer]:
    log_file = tmp_path_factory.mktemp("stale") / "server.log"
    with running_server(stale_config, tiny_checkpoint, log_file, server_seed) as running:
        yield running


def test_responses_in_flight_go_on_with_the_new_weights_and_say_so_for_each_token(
    stale_server, stale_config, tiny_checkpoint, tmp_path
):
    engine = SGLangEngine([stale_server.url], tiny_checkpoint, stale_config, api_key=API_KEY)
    # Four prompts of 40 tokens, shared as prefixes: their cache must not survive the weights.
    prompts = [Prompt(str(i), "", tuple(3 + (7 * i + j) % 45 for j in range(40)), "") for i in range(4)]
    trained = TransformersPolicy(tiny_checkpoint)
    sync = build_sync(trained, engine, stale_config, tmp_path, build_probe_tokens((), trained.model.config.vocab_size))
    sync.publish(1)
    policies = {1: TransformersPolicy(tiny_checkpoint)}
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(generate_groups(engine, prompts, num_responses=24, temperature=1.0))
    )
    thread.start()
    version = 1
    while thread.is_alive():
        version += 1
        thread.join(0.5)
        trained.move_weights(version)
        sync.publish(version)
        policies[version] = TransformersPolicy(tiny_checkpoint)
        policies[version].model.load_state_dict(trained.model.state_dict())
        # An evaluation in between is of the present weights alone.
        for (greedy,) in generate_groups(engine, prompts, num_responses=1, temperature=0.0, urgent=True):
            assert greedy.weight_versions.versions == (version,)
    mixed = 0
    for prompt, group in zip(prompts, found, strict=True):
        for response in group:
            got = torch.tensor(response.rollout_logprobs)
            spans = response.weight_versions.list_runs()
            assert [version for version, _, _ in spans] == sorted({version for version, _, _ in spans})
            mixed += len(spans) > 1
            for version, start, end in spans:
                own = policies[version].response_logprobs(prompt.token_ids, response.token_ids, 1.0)
                torch.testing.assert_close(got[start:end], own[start:end], atol=1e-4, rtol=0)
    assert mixed >= 4
    engine.close()
