"""Servers that are killed in the middle of a rollout and of a weight sync; the run goes on."""

import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from generation import build_collector
from loop_parts import SIZES, find_server, open_trainer
from servers import API_KEY

from megarl.config.load import load_config
from megarl.interfaces import UNPUBLISHED
from megarl.report.record import load_metrics
from megarl.rollout.client import SGLangClient
from megarl.rollout.collector import Collector, build_tensors
from megarl.rollout.server import find_loss
from megarl.run.inputs import load_inputs
from megarl.run.job import open_resources
from megarl.task.scorer import build_scorer
from megarl.trainer import Trainer
from megarl.types import Rollout

pytestmark = [pytest.mark.server, pytest.mark.slow]
KILL_AFTER_S = 2.0
OVERRIDES = [
    *("train.num_iterations=2", "train.eval_every=2", "train.prompts_per_iteration=8"),
    *("train.samples_per_minibatch=32", "algo.value_pretrain.steps=0", "rollout.num_servers=2"),
    *("rollout.request_deadline_s=120", "logger.terminal=true"),
]


def find_schedulers(url: str) -> list[psutil.Process]:
    """The processes that hold the model of the server at `url`, one per rank."""
    server = find_server(url)
    assert server is not None
    return [process for process in server.children(recursive=True) if "sglang::scheduler" in process.name()]


def kill_soon(*urls: str) -> None:
    """Stop these servers' models now and kill them shortly after: a call that starts in between is never answered."""
    pids = [process.pid for url in urls for process in find_schedulers(url)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Timer(KILL_AFTER_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]).start()


class KillingCollector(Collector):
    """The servers die in its second rollout."""

    num_rollouts = 0

    def sample(self, *args, **keys):
        self.num_rollouts += 1
        if self.num_rollouts == 2:
            kill_soon(*(client.url for client in self._engine.clients))
        return super().sample(*args, **keys)


class KillingSync:
    """The real sync; the first server dies in the publish of version 1."""

    def __init__(self, sync, url: str):
        self.sync, self.url, self.published = sync, url, []

    def publish(self, version):
        if version == 1 and version not in self.published:
            kill_soon(self.url)
        self.published.append(version)
        return self.sync.publish(version)

    def reconnect(self):
        self.sync.reconnect()


def split_starts(log: Path) -> list[str]:
    """The log of each start of a server."""
    return re.split(r"^\S+ -m sglang\.launch_server ", log.read_text(), flags=re.MULTILINE)[1:]


def compute_logprob_gap(trainer) -> float:
    """Largest |rollout_logprobs - old_logprobs| over fresh responses of all servers."""
    prompts, sample = trainer.source.groups._sampler.next_batch(8), trainer.components.collector.sample
    number, version = trainer.config.train.responses_per_prompt, trainer.fleet.version
    samples = trainer.fleet.ask(lambda: sample(prompts, number, weight_version=version, key="gap"))
    tensors = build_tensors(Rollout(samples, version))
    old = trainer.roles.policy.logprobs(tensors.sequences, 1.0).result()
    return float((old - tensors.rollout_logprobs)[tensors.mask].abs().max())


@pytest.mark.long
def test_servers_killed_in_a_sync_and_in_a_rollout_come_back_with_the_current_weights(tiny_checkpoint, tmp_path):
    overrides = [*OVERRIDES, f"model.path={tiny_checkpoint}"]
    config = load_config([*SIZES, *overrides])
    inputs = load_inputs(config)
    with (
        open_resources(config, inputs.checkpoint, tmp_path / "logs") as resources,
        open_trainer(resources, tmp_path, overrides) as trainer,
    ):
        components = trainer.components
        urls = [client.url for client in components.engine.clients]
        assert [client.load_weight_version() for client in components.engine.clients] == [UNPUBLISHED] * 2
        sync = KillingSync(components.sync, urls[0])
        collector = build_collector(components.engine, KillingCollector, scorer=build_scorer(config.reward))
        trainer = Trainer(config, replace(components, sync=sync, collector=collector))
        summary = trainer.run()
        assert collector.num_rollouts == 3
        # The sync that failed, then, before the rollout is repeated, the weights that were current then.
        assert sync.published == [0, 1, 1, 1, 2]
        assert [client.load_weight_version() for client in components.engine.clients] == [2, 2]
        assert compute_logprob_gap(trainer) < 1e-4
    assert summary.num_iterations == 2
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    for name in ("reward/mean", "policy/clip_frac", "critic/explained_variance", "sync/bytes", "time/rollout"):
        assert all(name in line for line in lines[1:]), name
    log = (tmp_path / "train.log").read_text()
    first, second = re.findall(r"^[-\d]+ [:\d]+ (.*was lost.*)$", log, flags=re.MULTILINE)
    lost = r"SGLang server {}/2 was lost: it exited with status 137 \(its log: \S+/server-{}\.log\)"
    assert re.fullmatch(lost.format(0, 0) + "; restart 1 of at most 3", first)
    assert re.fullmatch("; ".join([lost.format(0, 0), lost.format(1, 1)]) + "; restart 1 of at most 3", second)
    for number, num_starts in ((0, 3), (1, 2)):
        starts = split_starts(tmp_path / "logs" / f"server-{number}.log")
        assert len(starts) == num_starts
        for text in starts:
            assert "POST /end_weight_update" in text.partition("POST /generate")[0]


def test_what_a_failed_sync_leaves_in_a_server_is_cleared_and_no_loss(server):
    client = SGLangClient(server.url, vocab_size=55, deadline_s=60.0, api_key=API_KEY)
    endless = {"max_new_tokens": 400, "ignore_eos": True}
    hanging = threading.Thread(target=lambda: client.generate([[5]] * 4, endless), daemon=True)
    hanging.start()
    client.pause()
    client.begin_update()
    assert find_loss(server) is None
    hanging.join(60)
    assert not hanging.is_alive()
    client.pause()
    client.begin_update()
    client.end_update()
    client.resume()
    (answer,) = client.generate([[5]], {"max_new_tokens": 3, "ignore_eos": True})
    assert len(answer["output_ids"]) == 3
    client.close()
