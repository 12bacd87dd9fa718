"""Generation and weight sync with a real SGLang server; transformers is the independent reference."""

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from fakes.backend import Done
from generation import generate_groups
from loop_parts import hosts_of, open_trainer
from servers import API_KEY, running_server
from syncs import load_checksums
from transformers import AutoModelForCausalLM, GenerationConfig

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.rollout.client import RequestError, SGLangClient
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.server import ServerError, SGLangServer
from megarl.signals import find_shared_memory, pick_free_port
from megarl.sync.sync import DiskSync, build_probe_tokens
from megarl.types import Prompt, Sequences

EOS = 2
pytestmark = [pytest.mark.server, pytest.mark.slow]


class TransformersPolicy:
    """A policy held by transformers: the part of TrainBackend that a weight sync uses."""

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.model.generation_config = GenerationConfig()  # transformers saves no hostile one

    def move_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)

    @torch.no_grad()
    def response_logprobs(self, prompt, response, temperature):
        ids = torch.tensor([*prompt, *response])
        logits = self.model(ids[None]).logits[0] / temperature
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]

    def logprobs(self, sequences: Sequences, temperature: float) -> Done:
        assert sequences.num_samples == 1
        tokens, start = sequences.tokens.tolist(), int(sequences.prompt_lengths[0])
        return Done(self.response_logprobs(tokens[:start], tokens[start:], temperature)[None])

    def rounded_logprobs(self, sequences: Sequences, temperature: float, unit: float) -> Done:
        """As if rounding had no effect: the bound is then the least."""
        return self.logprobs(sequences.select(torch.tensor([0])), temperature)

    def export_weights(self, directory: Path) -> Done:
        shutil.copytree(self.checkpoint, directory)
        self.model.save_pretrained(directory)
        return Done(None)


def build_prompts(num: int = 12) -> list[Prompt]:
    """Lengths from 1 to 70 tokens, so that groups are padded and long prompts are shared."""
    rng = random.Random(3)
    lengths = [1, 2, 5, 31, 32, 70]
    ids = [tuple(rng.randrange(3, 50) for _ in range(lengths[i % len(lengths)])) for i in range(num)]
    return [Prompt(f"p{i}", "", tokens, "") for i, tokens in enumerate(ids)]


def build_sync(policy, engine, rollout_config, directory, tokens) -> DiskSync:
    """Of a policy that no ranks compute, so that no checksums are compared."""
    ranks = SimpleNamespace(verify=lambda: None, close=lambda: None)
    options = {"directory": directory, "policy_dtype": Dtype.float32}
    return DiskSync(policy, engine.clients, rollout_config, ranks, tokens, **options)


def compute_worst_gap(policy, prompts, groups, temperature) -> float:
    return max(
        float(
            (policy.response_logprobs(p.token_ids, r.token_ids, temperature) - torch.tensor(r.rollout_logprobs))
            .abs()
            .max()
        )
        for p, group in zip(prompts, groups, strict=True)
        for r in group
    )


def generate_first(engine: SGLangEngine):
    return generate_groups(engine, build_prompts(8), num_responses=4, temperature=1.0, key="first")


@pytest.fixture(scope="module")
def policy(tiny_checkpoint):
    return TransformersPolicy(tiny_checkpoint)


@pytest.fixture(scope="module")
def engine(server, tiny_checkpoint, rollout_config, tmp_path_factory):
    """Of the session's server with its checkpoint's weights as version 0, whoever used it before."""
    made = SGLangEngine(
        [server.url], tiny_checkpoint, rollout_config, check_processes=server.check_alive, api_key=API_KEY
    )
    checkpoint = TransformersPolicy(tiny_checkpoint)
    tokens = build_probe_tokens((), checkpoint.model.config.vocab_size)
    build_sync(checkpoint, made, rollout_config, tmp_path_factory.mktemp("first"), tokens).publish(0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def first_responses(engine):
    return generate_first(engine)


def test_samples_have_the_models_distribution_whatever_its_generation_config_says(policy, engine):
    """Chi squared of the first tokens, within five deviations: of top_k=1 or a temperature of 0.1 it is thousands."""
    (prompt, *_), number = build_prompts(3)[2:], 2000
    keys = {"num_responses": number, "temperature": 1.0, "key": "frequencies", "response_length": 4}
    (responses,) = generate_groups(engine, [prompt], **keys)
    with torch.no_grad():
        expected = number * policy.model(torch.tensor([prompt.token_ids])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor([int(each.token_ids[0]) for each in responses]), minlength=len(expected))
    frequent = expected > 5
    pairs = [(found[frequent], expected[frequent]), (found[~frequent].sum()[None], expected[~frequent].sum()[None])]
    chi_squared = sum(float(((n - e) ** 2 / e.clamp(min=1e-9)).sum()) for n, e in pairs)
    degrees = int(frequent.sum())
    assert degrees > 20
    assert abs(chi_squared - degrees) < 5 * (2 * degrees) ** 0.5
    assert max(len(each.token_ids) for each in responses) == 4


def test_publishing_moves_new_weights_and_raises_the_version(
    first_responses, engine, tiny_checkpoint, rollout_config, tmp_path, policy
):
    prompts = build_prompts()
    generate_groups(engine, prompts, num_responses=1, temperature=1.0)  # leaves old prefixes in the server's cache
    trained = TransformersPolicy(tiny_checkpoint)
    tokens = build_probe_tokens((), trained.model.config.vocab_size)
    sync = build_sync(trained, engine, rollout_config, tmp_path / "weights", tokens)
    for version, seed in [(1, 11), (2, 12)]:
        trained.move_weights(seed)
        before = load_checksums(engine.clients[0])
        metrics = sync.publish(version)
        assert load_checksums(engine.clients[0]) != before
        assert engine.clients[0].load_weight_version() == version
        assert metrics["sync/probe_logprob_gap"] < 1e-4
        assert [d.name for d in (tmp_path / "weights").iterdir()] == [f"v{version}"]
        groups = generate_groups(engine, prompts, num_responses=2, temperature=0.7)
        assert compute_worst_gap(trained, prompts, groups, 0.7) < 1e-4
        assert compute_worst_gap(policy, prompts, groups, 0.7) > 0.1
        assert {v for group in groups for r in group for v in r.weight_versions.versions} == {version}
    sync.close()
    assert not (tmp_path / "weights").exists()


def test_a_server_that_computes_another_model_ends_the_run_before_anything_is_trained(
    first_responses, server, engine, tiny_checkpoint, rollout_config, tmp_path
):
    client, tokens = engine.clients[0], build_probe_tokens((), 55)
    build_sync(TransformersPolicy(tiny_checkpoint), engine, rollout_config, tmp_path / "first", tokens).publish(5)
    version, before = client.load_weight_version(), load_checksums(client)
    # The server was started with the base of the positions that the checkpoint says; the policy has another.
    trained = shutil.copytree(tiny_checkpoint, tmp_path / "trained")
    fields = json.loads((trained / "config.json").read_text())
    fields["rope_parameters"]["rope_theta"] = 100.0
    (trained / "config.json").write_text(json.dumps(fields))
    overrides = ("algo=grpo", f"model.path={trained}")
    with hosts_of(server, num_workers=1) as hosts, open_trainer(hosts, tmp_path / "run", overrides) as trainer:
        [weights] = trainer.roles.policy._call("shards", list).result()
        with pytest.raises(
            SyncError, match=r"computes another model than the policy .* keys of the model's config.json"
        ):
            trainer.run()
        [after] = trainer.roles.policy._call("shards", list).result()
        assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
        assert trainer.iteration == 0
        assert client.load_weight_version() == UNPUBLISHED
        # The checksums had been found equal.
        assert load_checksums(client) == before
    client.set_weight_version(version)


def is_refused(client: SGLangClient, hanging: threading.Thread) -> bool:
    """Whether the server refuses to drop its cache before the thread's requests end."""
    while hanging.is_alive():
        try:
            client.flush_cache(wait_s=0.0)
        except RequestError:
            return True
    return False


def test_no_token_is_of_a_prefix_that_older_weights_cached_in_thirty_syncs(
    first_responses, engine, tiny_checkpoint, rollout_config, tmp_path
):
    trained, client = TransformersPolicy(tiny_checkpoint), engine.clients[0]
    sync = build_sync(trained, engine, rollout_config, tmp_path / "weights", build_probe_tokens((), 55))
    system = tuple(3 + (11 * i) % 45 for i in range(200))
    prompts = [Prompt(f"p{i}", "", (*system, 3 + i), "") for i in range(4)]
    conversations: list[Prompt] = []
    first, gaps = client.load_weight_version() + 1, []
    for version in range(first, first + 30):
        trained.move_weights(version)
        refused = version % 10 == 0
        if refused:
            # What is under way keeps the cache from being dropped by itself; the sync drops it all the same.
            endless = {"max_new_tokens": 150, "ignore_eos": True}
            hanging = threading.Thread(target=client.generate, args=([list(prompts[0].token_ids)] * 4, endless))
            hanging.start()
            assert is_refused(client, hanging)
        sync.publish(version)
        # The second turn of conversations whose first one is of the weights before.
        asked = prompts + conversations
        groups = generate_groups(engine, asked, num_responses=2, temperature=1.0)
        assert {r.weight_versions.versions for group in groups for r in group} == {(version,)}
        gaps.append(compute_worst_gap(trained, asked, groups, 1.0))
        conversations = [
            replace(prompt, id=f"turn-{prompt.id}", token_ids=(*prompt.token_ids, *group[0].token_ids, 7, 9))
            for prompt, group in zip(prompts, groups, strict=False)
        ]
        if refused:
            hanging.join(60)
            assert not hanging.is_alive()
    assert max(gaps) < 2e-4, gaps


def test_a_lost_server_is_replaced_by_the_next(first_responses, server, tiny_checkpoint, rollout_config):
    dead = f"http://127.0.0.1:{pick_free_port('127.0.0.1')}"
    pair = SGLangEngine([dead, server.url], tiny_checkpoint, rollout_config, api_key=API_KEY)
    groups = generate_groups(pair, build_prompts(5), num_responses=2, temperature=1.0)
    assert [len(group) for group in groups] == [2] * 5
    with pytest.raises(RuntimeError, match=f"{dead} does not answer"):
        pair.check_health()


def test_a_server_that_exits_at_start_shows_the_end_of_its_log(tiny_checkpoint, rollout_config, tmp_path):
    options = {"load_format": "nonsense"}
    config = RolloutConfig(**{**vars(rollout_config), "sglang": options})
    failing = SGLangServer(config, tiny_checkpoint, log_file=tmp_path / "failing.log", seed=1)
    failing.start()
    with pytest.raises(ServerError, match=r"(?s)exited with status 2; .*failing.log.*invalid choice: 'nonsense'"):
        failing.wait_healthy(rollout_config.startup_deadline_s)
    failing.stop()


def test_a_server_started_anew_repeats_a_key_keeps_others_out_and_stop_leaves_nothing(
    first_responses, tiny_checkpoint, rollout_config, tmp_path
):
    log_file = tmp_path / "again.log"
    again = SGLangServer(rollout_config, tiny_checkpoint, log_file=log_file, seed=7)
    again.start()
    again.wait_healthy(rollout_config.startup_deadline_s)
    engine = SGLangEngine([again.url], tiny_checkpoint, rollout_config, api_key=again.api_key)
    assert not any(
        again.api_key in word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()
    )
    assert log_file.stat().st_mode & 0o077 == 0
    with contextlib.closing(SGLangClient(again.url, vocab_size=55, deadline_s=10.0)) as stranger:
        for call in (lambda: stranger.generate([[5]], {"max_new_tokens": 1}), stranger.flush_cache, stranger.reset):
            with pytest.raises(RequestError, match="answered 401"):
                call()
    assert generate_first(engine) == first_responses
    guard = psutil.Process(again.pid)
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) >= 4
    shared = find_shared_memory(p.pid for p in processes)
    assert shared & {entry.inode() for entry in os.scandir("/dev/shm")}
    scratch = again._scratch
    again.stop()
    assert [p for p in processes if p.is_running()] == []
    assert not shared & {entry.inode() for entry in os.scandir("/dev/shm")}
    assert scratch is not None
    assert not scratch.exists()
    assert not again.is_alive()
    with pytest.raises(RuntimeError, match="does not answer"):
        engine.check_health()


@pytest.fixture
def stale_engine(rollout_config, tiny_checkpoint, tmp_path) -> Iterator[SGLangEngine]:
    """Of a server with fewer places than the test has responses: some wait in its queue when the weights change."""
    config = replace(rollout_config, max_staleness=1, response_length=300, max_running_requests=8)
    with (
        running_server(config, tiny_checkpoint, tmp_path / "server.log", seed=1) as running,
        contextlib.closing(SGLangEngine([running.url], tiny_checkpoint, config, api_key=API_KEY)) as engine,
    ):
        yield engine


def test_responses_in_flight_go_on_with_the_new_weights_and_say_so_for_each_token(
    stale_engine, tiny_checkpoint, rollout_config, tmp_path
):
    # Four prompts of 40 tokens, shared as prefixes: their cache must not survive the weights.
    prompts = [Prompt(str(i), "", tuple(3 + (7 * i + j) % 45 for j in range(40)), "") for i in range(4)]
    trained = TransformersPolicy(tiny_checkpoint)
    sync = build_sync(trained, stale_engine, rollout_config, tmp_path / "weights", build_probe_tokens((), 55))
    sync.publish(1)
    policies = {1: TransformersPolicy(tiny_checkpoint)}
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(generate_groups(stale_engine, prompts, num_responses=24, temperature=1.0))
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
        for (greedy,) in generate_groups(stale_engine, prompts, num_responses=1, temperature=0.0, urgent=True):
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
