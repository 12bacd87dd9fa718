"""Weights that change under responses in flight, and a training run with generation ahead, with real servers."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from generation import generate_groups
from loop_parts import hosts_of, open_trainer
from servers import API_KEY, running_server
from test_server import TransformersPolicy, build_sync

from megarl.rollout.engine import SGLangEngine
from megarl.rollout.rollout_file import load_rollouts
from megarl.rollout.server import SGLangServer
from megarl.run.inputs import load_inputs
from megarl.sync.probe import build_probe_tokens
from megarl.task.data import PromptSampler
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


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def iterations_allowed(monkeypatch) -> list[int]:
    """The groups of so many iterations may be sent to the server."""
    allowed = [1]
    generate = SGLangEngine.generate_turns

    async def generate_when_allowed(self, requests, take):
        number = int(requests[0].name.split("/")[0].removeprefix("group-"))
        while number >= 4 * allowed[0]:
            await asyncio.sleep(0.02)
        await generate(self, requests, take)

    monkeypatch.setattr(SGLangEngine, "generate_turns", generate_when_allowed)
    return allowed


def wait_for_running_requests(url: str) -> None:
    """Until as many responses are under way as the server has places, each some tokens long."""
    deadline = time.monotonic() + 60
    headers = {"Authorization": f"Bearer {API_KEY}"}
    while httpx.get(f"{url}/v1/loads", headers=headers).json()["loads"][0]["num_running_reqs"] < 8:
        assert time.monotonic() < deadline, "the server did not begin with a rollout within 60 s"
        time.sleep(0.05)
    time.sleep(0.2)


def test_at_staleness_one_an_iteration_learns_from_two_versions_each_with_its_own_logprobs(
    stale_server, tiny_checkpoint, run_dir, iterations_allowed
):
    overrides = [
        *("rollout.max_staleness=1", "algo.mismatch.correction=tis"),
        *("algo.value_pretrain.steps=0", "logger.save_rollouts=true"),
        *("train.num_iterations=3", "train.prompts_per_iteration=4", "train.responses_per_prompt=16"),
        *("train.samples_per_minibatch=32", f"rollout.response_length={LENGTH}", "rollout.max_running_requests=8"),
        f"model.path={tiny_checkpoint}",
    ]
    with hosts_of(stale_server, num_workers=2) as hosts, open_trainer(hosts, run_dir, overrides) as trainer:
        trainer.fleet.publish(0)
        num_tokens: Counter[int] = Counter()
        for iteration in range(1, 4):
            rollout, metrics = trainer.source.take(iteration)
            experience, _ = trainer.roles.score(rollout, 1)
            versions = [v for sample in rollout.samples for v in sample.response.weight_versions.expand()]
            behind = trainer.version - torch.tensor(versions)
            assert metrics["rollout/staleness_max"] == behind.max() <= 1
            assert metrics["rollout/staleness_mean"] == pytest.approx(float(behind.double().mean()))
            gap = (experience.old_logprobs - experience.rollout_logprobs)[experience.mask].abs()
            # The present policy is that of the tokens that are not behind, and of no others.
            assert gap[behind == 0].numel() == 0 or gap[behind == 0].max() < 1e-4
            assert gap[behind == 1].numel() == 0 or gap[behind == 1].max() > 1e-2
            num_tokens.update(behind.tolist())
            samples, _ = trainer.algorithm.build_targets(experience, 1)
            trainer.roles.update(samples, iteration)
            # The weights change while the next rollout is under way, however long the update took.
            if iteration < 3:
                iterations_allowed[0] += 1
                wait_for_running_requests(stale_server.url)
            trainer.fleet.publish(trainer.version + 1)
        assert min(num_tokens[0], num_tokens[1]) > 0
        assert trainer.source.close() == 0
    # One rollout an iteration, its prompts those of a run that waits, whichever group was complete first.
    saved = load_rollouts(run_dir / "rollouts.jsonl")
    drawn = PromptSampler(load_inputs(trainer.config).data.train, trainer.config.seed)
    for iteration, rollout in enumerate(saved):
        names = {sample.group_number: sample.prompt.id for sample in rollout.samples}
        numbers = range(4 * iteration, 4 * (iteration + 1))
        assert [names[number] for number in numbers] == [prompt.id for prompt in drawn.next_batch(4)]
    assert [rollout.weight_version for rollout in saved] == [0, 1, 2]
    for rollout in saved[1:]:
        assert any(len(sample.response.weight_versions.versions) == 2 for sample in rollout.samples)
