"""The loop with its real parts: Ray, Megatron-Core policy and critic, and the session's SGLang server.

After test_server.py, whose first tests need the server as it was started.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_parts import hosts_of, open_trainer

from megarl.report.metrics import load_metrics
from megarl.rollout.collector import Collector
from megarl.rollout.rollout_file import load_rollouts
from megarl.rollout.tensors import build_tensors
from megarl.trainer import Trainer, split_minibatches
from megarl.types import Prompt, Response, Score
from megarl.value_pretraining.loop import pretrain_critic

pytestmark = pytest.mark.server
OVERRIDES = [
    "train.num_iterations=3",
    "train.eval_every=3",
    "algo.value_pretrain.steps=6",
    "algo.value_pretrain.patience=null",
    "logger.save_rollouts=true",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def trainer(server, tiny_checkpoint: Path, run_dir: Path) -> Iterator[Trainer]:
    """A trainer whose servers hold its policy's weights; the tests below use it one after the other."""
    overrides = [*OVERRIDES, f"model.path={tiny_checkpoint}"]
    with hosts_of(server, num_workers=2) as hosts, open_trainer(hosts, run_dir, overrides) as trainer:
        trainer.publish(0)
        yield trainer


def compute_logprob_gap(trainer: Trainer, temperature: float) -> float:
    """Largest |rollout_logprobs - old_logprobs| over fresh responses, the servers' against Megatron's."""
    engine = trainer.components.engine
    collector = Collector(engine, trainer.components.collector._reward, temperature=temperature)
    prompts = trainer.components.sampler.next_batch(8)
    tensors = build_tensors(collector.collect(prompts, 4, weight_version=trainer.version))
    old = trainer.components.policy.logprobs(tensors.sequences, temperature).result()
    return float((old - tensors.rollout_logprobs)[tensors.mask].abs().max())


def test_before_any_update_rollout_logprobs_are_megatrons_old_logprobs(trainer):
    assert compute_logprob_gap(trainer, 1.0) < 1e-4
    assert compute_logprob_gap(trainer, 0.7) < 1e-4


def test_the_loop_updates_the_policy_and_the_servers_follow(trainer, run_dir):
    before = trainer.components.policy.checksum().result()
    summary = trainer.run()
    assert summary.num_iterations == 3
    assert trainer.version == 3
    assert trainer.components.policy.checksum().result() != before
    lines = load_metrics(run_dir / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    # Four minibatches per iteration: from the second on the ratios have left 1.
    assert all(line["policy/clip_frac"] > 0 for line in lines[1:])
    assert all(line["mismatch/kl"] < 1e-6 for line in lines[1:])
    assert "reward/heldout" in lines[0]
    assert lines[3]["reward/heldout"] == summary.heldout_reward
    rollout, _ = trainer.collect(4)
    assert {v for s in rollout.samples for v in s.response.weight_versions} == {3}


def test_after_updates_rollout_logprobs_are_still_megatrons_old_logprobs(trainer):
    assert trainer.version == 3
    assert compute_logprob_gap(trainer, 1.0) < 1e-4
    assert compute_logprob_gap(trainer, 0.7) < 1e-4


def test_every_sampled_rollout_is_in_the_file_bit_by_bit(trainer, run_dir):
    before = len(load_rollouts(run_dir / "rollouts.jsonl"))
    assert before >= 3
    rollout, _ = trainer.collect(4)
    saved = load_rollouts(run_dir / "rollouts.jsonl")
    assert len(saved) == before + 1
    assert saved[-1] == rollout


def test_a_rollout_has_whole_groups_in_order_and_rewards_in_range(trainer):
    samples = trainer.collect(5)[0].samples
    assert [s.group for s in samples] == [g for g in range(16) for _ in range(16)]
    assert all(len({s.prompt.id for s in samples if s.group == g}) == 1 for g in range(16))
    assert all(0 <= s.score.reward <= 1 for s in samples)
    heldout = {p.id for p in trainer.components.heldout}
    assert not heldout & {s.prompt.id for s in samples}


def test_minibatches_cover_every_sample_once_per_epoch_in_an_order_of_their_own(trainer):
    first, again, second = (split_minibatches(trainer.config, 256, iteration) for iteration in (1, 1, 2))
    assert torch.cat(first).sort().values.tolist() == list(range(256))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_value_pretraining_explains_heldout_returns_and_leaves_the_policy_bit_identical(trainer, run_dir):
    """With a reward whose expectation differs from prompt to prompt: whether the asked letter is a, b or c."""

    def score(prompt: Prompt, _response: Response) -> Score:
        return Score(float(prompt.text[0] in "abc"), False)

    collector = Collector(trainer.components.engine, score, temperature=1.0)
    other = Trainer(trainer.config, replace(trainer.components, collector=collector))
    other.version = trainer.version
    before = trainer.components.policy.checksum().result()
    critic_before = trainer.components.critic.checksum().result()
    pretrain_critic(other)
    # Each value is of a rollout that the critic had not trained on.
    curve = [line["pretrain/explained_variance"] for line in load_metrics(run_dir / "value_pretrain.jsonl")]
    assert len(curve) == 6
    assert min(curve[-2:]) > 0.3 > curve[0]
    assert trainer.components.policy.checksum().result() == before
    assert trainer.components.critic.checksum().result() != critic_before
