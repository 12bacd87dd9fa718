"""Value pretraining over the fakes (tests/fakes): online with a trainer's parts, and from saved rollouts."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes.backend import FakeBackend
from fakes.run import World, load

from megarl.mcore.worker_spec import Role
from megarl.report.metrics import load_metrics
from megarl.report.report import build_report
from megarl.rollout.rollout_file import load_rollouts
from megarl.run.inputs import load_models, load_saved_rollouts
from megarl.run.signals import Stopped, stopping_on_signals
from megarl.types import Prompt, Response, Score
from megarl.value_pretraining.job import pretrain_offline
from megarl.value_pretraining.loop import pretrain_critic

VAPO = ("algo=vapo", "algo.value_pretrain.patience=null", "critic.optimizer.lr=0.2", "logger.save_rollouts=true")
STEPS = "algo.value_pretrain.steps=8"


def reward_letter(prompt: Prompt, _response: Response) -> Score:
    """Its expectation differs from prompt to prompt: whether the asked letter is a, b or c."""
    return Score(float(prompt.text[0] in "abc"), False)


def test_it_explains_heldout_returns_and_leaves_the_policy_bit_identical(tmp_path: Path) -> None:
    world = World(reward=reward_letter)
    with world.open_trainer(tmp_path, [*VAPO, STEPS]) as trainer:
        policy, critic = trainer.components.policy, trainer.components.critic
        before, critic_before = policy.copy_weights(), critic.copy_weights()
        summary = pretrain_critic(trainer)
        assert all(torch.equal(x, before[name]) for name, x in policy.copy_weights().items())
        assert not any(torch.equal(x, critic_before[name]) for name, x in critic.copy_weights().items())
        assert trainer.num_samples == 8 * 24
        keys = [key for key, _ in trainer.components.engine.asked]
    assert keys == [f"pretraining-{step}" for step in range(1, 9)]
    # Each value is of a rollout that the critic had not trained on; a new value head explains nothing.
    curve = [line["pretrain/explained_variance"] for line in load_metrics(tmp_path / "value_pretrain.jsonl")]
    assert len(curve) == summary.num_rollouts == 8
    assert curve[0] == pytest.approx(0, abs=1e-6)
    assert min(curve[-2:]) > 0.3
    assert summary.explained_variance == curve[-1]
    assert [verb for role, verb in world.log if role == "policy"] == []


def test_a_critic_that_has_learned_nothing_is_said_at_the_end_of_value_pretraining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*VAPO, "algo.value_pretrain.steps=2", "logger.terminal=true"]
    constant = World(reward=lambda _prompt, _response: Score(0.5, False))
    with constant.open_trainer(tmp_path / "constant", given) as trainer:
        pretrain_critic(trainer)
    assert "the critic explains nothing after value pretraining" in " ".join(capsys.readouterr().out.split())
    with World(reward=reward_letter).open_trainer(tmp_path / "letter", [*VAPO, STEPS, given[-1]]) as trainer:
        pretrain_critic(trainer)
    assert "explains nothing" not in " ".join(capsys.readouterr().out.split())


def test_each_step_takes_its_samples_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, [*VAPO, "algo.value_pretrain.steps=3"]) as trainer:
        pretrain_critic(trainer)
        trainer.train(1)
        orders = trainer.components.critic.orders
    assert [sorted(order) for order in orders] == [list(range(24))] * 4
    assert len(set(map(tuple, orders))) == 4


def test_it_ends_at_the_explained_variance_aimed_at(tmp_path: Path) -> None:
    given = [*VAPO, "algo.value_pretrain.steps=50", "algo.value_pretrain.stop_at_explained_variance=0.3"]
    with World(reward=reward_letter).open_trainer(tmp_path, given) as trainer:
        summary = pretrain_critic(trainer)
    curve = [line["pretrain/explained_variance"] for line in load_metrics(tmp_path / "value_pretrain.jsonl")]
    assert max(curve[:-1]) < 0.3 <= curve[-1] == summary.explained_variance
    assert summary.num_rollouts < 50


def test_from_saved_rollouts_it_is_the_same_as_from_fresh_ones(tmp_path: Path) -> None:
    online = World(reward=reward_letter)
    with online.open_trainer(tmp_path / "online", [*VAPO, STEPS]) as trainer:
        pretrain_critic(trainer)
        expected = trainer.components.critic.copy_weights()
    saved = tmp_path / "online" / "rollouts.jsonl"
    assert len(list(load_rollouts(saved))) == 8
    config, inputs = load([*VAPO, STEPS, f"algo.value_pretrain.rollouts={saved}"])
    critic = FakeBackend(inputs.specs[Role.critic])
    with contextlib.closing(build_report(config.logger, tmp_path, 1)) as report:
        rollouts = load_saved_rollouts(config, load_models(config))
        assert rollouts is not None
        summary = pretrain_offline(config, critic, report, rollouts)
    assert summary.num_rollouts == 8
    assert all(torch.equal(x, expected[name]) for name, x in critic.copy_weights().items())


class Killed(BaseException):
    """The driver is gone: nothing of ours handles it."""


def kill() -> None:
    raise Killed


def stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("online")
    with pytest.MonkeyPatch.context() as patch:
        World(reward=reward_letter).pretrain(patch, run_dir, [*VAPO, STEPS])
    return run_dir


@pytest.mark.parametrize("is_online", [True, False])
@pytest.mark.parametrize("end", [kill, stop])
@pytest.mark.parametrize("save_every", [1, 3])
def test_the_job_that_is_killed_or_stopped_goes_on_to_the_same_end(
    save_every: int,
    end: Callable[[], None],
    is_online: bool,
    rollouts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [*VAPO, STEPS, f"checkpoint.save_every={save_every}"]
    if not is_online:
        given.append(f"algo.value_pretrain.rollouts={rollouts}/rollouts.jsonl")
    num_updates = 0

    def watch(role: str, verb: str) -> None:
        nonlocal num_updates
        num_updates += (role, verb) == ("critic", "update")
        if num_updates == 5:
            end()

    run_dir = tmp_path / "run"
    with pytest.raises(Killed if end is kill else Stopped), stopping_on_signals():
        World(watch, reward=reward_letter).pretrain(monkeypatch, run_dir, given)
    latest = {(1, kill): 4, (3, kill): 3}.get((save_every, end), 5)
    assert (run_dir / "value_pretraining" / "latest").read_text() == f"iteration-{latest:06}\n"
    world = World(reward=reward_letter)
    world.pretrain(monkeypatch, run_dir, given)
    assert sum(each == ("critic", "update") for each in world.log) == 8 - latest
    assert not (run_dir / "value_pretraining").exists()
    assert summarize(run_dir) == summarize(rollouts)


def summarize(run_dir: Path) -> tuple[list[dict[str, float]], bytes]:
    lines = load_metrics(run_dir / "value_pretrain.jsonl")
    curve = [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]
    return curve, (run_dir / "critic" / "model.safetensors").read_bytes()


def test_runs_that_take_a_value_pretraining_equal_one_that_makes_its_own(
    rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, weights and saved rollouts: what a sweep shares changes nothing."""
    given = [*VAPO, STEPS, "train.num_iterations=2", "train.eval_every=2"]
    World(reward=reward_letter).run_job(monkeypatch, tmp_path / "own", given)
    taken = [*given, f"algo.value_pretrain.taken_from={rollouts}"]
    world = World(reward=reward_letter)
    world.run_job(monkeypatch, tmp_path / "taken", taken)
    assert sum(each == ("critic", "update") for each in world.log) == 2
    for name in ("metrics.jsonl", "value_pretrain.jsonl"):
        own, found = (
            [
                {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))}
                for line in load_metrics(tmp_path / x / name)
            ]
            for x in ("own", "taken")
        )
        assert found == own
    for name in ("rollouts.jsonl", "policy/model.safetensors", "critic/model.safetensors"):
        assert (tmp_path / "taken" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()


def test_training_goes_on_after_it_from_the_pretrained_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(reward=reward_letter)
    world.run_job(monkeypatch, tmp_path / "run", [*VAPO, STEPS, "train.num_iterations=1", "checkpoint.save_every=1"])
    order = [(role, verb) for role, verb in world.log if verb in ("update", "publish", "begin_save")]
    assert order[:3] == [("servers", "publish"), ("critic", "update"), ("critic", "begin_save")]
    assert order.count(("critic", "update")) == 9
    assert order.index(("policy", "update")) > max(i for i, each in enumerate(order) if each == order[1]) - 2
    lines = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[1]["critic/explained_variance"] > 0.5
