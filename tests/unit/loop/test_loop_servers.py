"""Lost servers, failed syncs, generation ahead and servers that give memory back, and the memory, descriptors, threads
and journal of a long run, over the fakes (tests/fakes).
"""

import gc
import itertools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.disturbed import Disturbance, stop
from fakes.rollout import FakeServers
from fakes.run import Said, World, load, load_untimed
from generation import load_rollouts

from megarl.cluster.calls import WorkerError
from megarl.environment import Action, Environment, Step
from megarl.interfaces import UNPUBLISHED
from megarl.report.record import load_metrics
from megarl.signals import Stopped, stopping_on_signals
from megarl.task.data import PromptSampler
from megarl.trainer import Trainer
from megarl.types import Experience, Metrics, Rollout, TrainingSamples

DEADLINE_S = 30.0
TWO_SERVERS = ("algo=ppo", "rollout.num_servers=2", "train.num_iterations=2", "train.eval_every=2")
STALE = ("algo=grpo", "rollout.max_staleness=1", "algo.mismatch.correction=tis")


def get_servers(trainer: Trainer) -> FakeServers:
    assert isinstance(trainer.components.servers, FakeServers)
    return trainer.components.servers


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    run_dir = tmp_path_factory.mktemp("untouched")
    with World().open_trainer(run_dir, TWO_SERVERS) as trainer:
        trainer.run()
    return load_untimed(run_dir)


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("key", ["iteration-2/round-1", "evaluation-0", "evaluation-2"])
def test_servers_lost_in_a_rollout_or_an_evaluation_come_back_with_the_current_weights(
    key: str, lost: tuple[int, ...], untouched: list[dict[str, float]], tmp_path: Path, said: Said
) -> None:
    world = World()
    with world.open_trainer(tmp_path, [*TWO_SERVERS, "logger.terminal=true"]) as trainer:
        servers, version = get_servers(trainer), {"iteration-2/round-1": 1, "evaluation-0": 0, "evaluation-2": 2}[key]
        world.on_token = Disturbance(lambda: servers.lose(*lost), key=key).on_token
        trainer.run()
        # Brought again before the call is repeated, to all servers.
        assert trainer.components.sync.published == sorted([0, 1, 2, version])
        assert trainer.components.sync.num_reconnects == 1
        assert [server.num_starts for server in servers.all.values()] == [1 + (number in lost) for number in (0, 1)]
        assert {server.version for server in servers.all.values()} == {2}
        assert [asked for asked, _ in trainer.components.engine.asked].count(key) == 2
    assert load_untimed(tmp_path) == untouched
    names = "; ".join(f"SGLang server {i}/2 was lost: it exited with status 137" for i in lost)
    assert f"{names}; restart 1 of at most 3" in said()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_server_lost_in_a_sync_is_started_again_and_the_sync_repeated(
    number: int, untouched: list[dict[str, float]], tmp_path: Path
) -> None:
    world = World()
    with world.open_trainer(tmp_path, TWO_SERVERS) as trainer:
        servers = get_servers(trainer)
        world.watch = Disturbance(lambda: servers.lose(1), "servers", "publish", number).watch
        trainer.run()
        version = number - 1
        # `refill` before the repeated publish is that publish's own weights.
        assert trainer.components.sync.published[number - 1 : number + 1] == [version, version]
    assert load_untimed(tmp_path) == untouched


@pytest.mark.parametrize(
    ("given", "lost"),
    [(TWO_SERVERS, "iteration-1/round-1"), ((*STALE, "rollout.num_servers=2", "train.num_iterations=4"), "group-8")],
)
def test_a_server_that_is_lost_again_and_again_ends_the_run(
    given: tuple[str, ...], lost: str, tmp_path: Path, said: Said
) -> None:
    """Each rollout or sync may restart it twice: group 8 may be lost in the first one, which does not need it."""
    world = World()
    given = (*given, "rollout.max_server_restarts=2", "logger.terminal=true")
    with world.open_trainer(tmp_path, given) as trainer:
        servers = get_servers(trainer)
        world.on_token = lambda key, _number: servers.lose(0) if (key or "").startswith(lost) else None
        with pytest.raises(RuntimeError) as caught:
            trainer.run()
        num_starts = servers.all["SGLang server 0/2"].num_starts
    restarts = re.findall(r"restart (\d) of at most 2", said())
    assert num_starts == 1 + len(restarts)
    assert restarts[-2:] == ["1", "2"]
    assert set(restarts) == {"1", "2"}
    assert "rollout.max_server_restarts=2 have been made in a row" in caught.value.__notes__[0]


@contextmanager
def staleness_of_one(tmp_path: Path, *overrides: str) -> Iterator[tuple[Trainer, World]]:
    world = World()
    given = [*STALE, "logger.save_rollouts=true", *overrides]
    with world.open_trainer(tmp_path, given) as trainer:
        yield trainer, world


def step(trainer: Trainer, iteration: int) -> tuple[Rollout, Metrics, Experience, TrainingSamples]:
    """One iteration, and the weights that it has made to the servers."""
    rollout, metrics = trainer.source.take(iteration)
    experience, _ = trainer.roles.score(rollout, 1)
    samples, _ = trainer.algorithm.build_targets(experience, 1)
    trainer.roles.update(samples, iteration)
    trainer.fleet.publish(iteration)
    return rollout, metrics, experience, samples


def get_number(key: str | None) -> int:
    """Of a group that runs ahead; -1: the call is another."""
    return int(key.removeprefix("group-")) if key and key.startswith("group-") else -1


def list_numbers(run_dir: Path) -> list[list[int]]:
    """Numbers of the groups of each iteration, in the order in which they were complete."""
    return [
        [int(sample.group_number or 0) for sample in rollout.samples[::4]]
        for rollout in load_rollouts(run_dir / "rollouts.jsonl")
    ]


def check_taken(run_dir: Path, num_iterations: int) -> None:
    """Each iteration has six groups, and each group is in one."""
    taken = list_numbers(run_dir)
    assert [len(numbers) for numbers in taken] == [6] * num_iterations
    assert sorted(number for numbers in taken for number in numbers) == list(range(6 * num_iterations))


def test_at_staleness_one_an_iteration_learns_from_two_versions_each_with_its_own_logprobs(tmp_path: Path) -> None:
    """Each group ahead is held at its second token until the weights have changed."""
    published = {iteration: threading.Event() for iteration in range(1, 5)}

    def on_token(key: str | None, number: int) -> None:
        iteration = get_number(key) // 6
        assert number != 1 or iteration < 1 or published[iteration].wait(DEADLINE_S)

    with staleness_of_one(tmp_path, "train.num_iterations=4") as (trainer, world):
        world.on_token = on_token
        trainer.fleet.publish(0)
        for iteration in range(1, 5):
            rollout, metrics, experience, _ = step(trainer, iteration)
            published[iteration].set()
            versions = [v for sample in rollout.samples for v in sample.response.weight_versions.expand()]
            behind = iteration - 1 - torch.tensor(versions)
            assert metrics["rollout/staleness_max"] == behind.max() == (iteration > 1)
            assert metrics["rollout/staleness_mean"] == pytest.approx(float(behind.double().mean()))
            assert (metrics["rollout/mixed_frac"] > 0) == (iteration > 1)
            assert metrics["rollout/too_stale_frac"] == 0
            gap = (experience.old_logprobs - experience.rollout_logprobs)[experience.mask].abs()
            # mu is the trainer's own where it still has the weights that sampled, else the rollout engine's.
            assert (experience.scored[experience.mask] == (behind == 0)).all()
            mu, own = experience.sampling_logprobs, experience.scored
            assert torch.equal(mu[own], experience.old_logprobs[own])
            assert torch.equal(mu[~own], experience.rollout_logprobs[~own])
            # The present policy is that of the tokens that are not behind, and of no others.
            assert gap[behind == 0].max() < 1e-5
            assert iteration == 1 or gap[behind == 1].max() > 1e-3
        assert trainer.source.groups.close() == 0
        inputs = load([*STALE, "logger.save_rollouts=true", "train.num_iterations=4"])[1]
    # The prompts are those of a run that waits.
    saved = list(load_rollouts(tmp_path / "rollouts.jsonl"))
    names = {sample.group_number: sample.prompt.id for rollout in saved for sample in rollout.samples}
    drawn = PromptSampler(inputs.data.train, trainer.config.seed).next_batch(24)
    assert [names[number] for number in range(24)] == [prompt.id for prompt in drawn]
    assert [rollout.weight_version for rollout in saved] == [0, 1, 2, 3]


def test_no_group_is_begun_more_than_its_staleness_ahead_and_each_is_learned_from_once(tmp_path: Path) -> None:
    with staleness_of_one(tmp_path, "train.num_iterations=5") as (trainer, world):
        begun: list[tuple[int, int]] = []
        world.on_token = lambda key, number: (
            begun.append((get_number(key), trainer.fleet.version)) if number == 0 and get_number(key) >= 0 else None
        )
        trainer.run()
    assert len(begun) == 5 * 6 * 4
    assert all(number // 6 - version <= 1 for number, version in begun)
    check_taken(tmp_path, 5)


def test_a_straggler_delays_nobody_and_its_tokens_that_are_older_than_allowed_are_not_learned_from(
    tmp_path: Path,
) -> None:
    published = threading.Event()

    def on_token(key: str | None, number: int) -> None:
        assert get_number(key) != 0 or number != 3 or published.wait(DEADLINE_S)

    with staleness_of_one(tmp_path, "train.num_iterations=4") as (trainer, world):
        world.on_token = on_token
        trainer.fleet.publish(0)
        for iteration in range(1, 5):
            rollout, metrics, experience, samples = step(trainer, iteration)
            if metrics["rollout/too_stale_frac"]:
                assert experience.too_stale is not None
                too_old = torch.zeros_like(experience.mask)
                for row, sample in enumerate(rollout.samples):
                    versions = torch.tensor(sample.response.weight_versions.expand())
                    too_old[row, : len(versions)] = versions < iteration - 1 - 1
                assert torch.equal(experience.too_stale, too_old & experience.mask)
                # The straggler's first tokens, of version 0; nobody had waited for it.
                rows = torch.tensor([sample.group_number == 0 for sample in rollout.samples])
                assert torch.equal(experience.too_stale[rows][:, :3], experience.mask[rows][:, :3])
                assert not (samples.loss_mask & experience.too_stale).any()
                assert torch.equal(samples.mask, experience.mask)
                assert samples.loss_mask[rows].any() or not rows.any()
                frac = experience.too_stale.sum() / experience.mask.sum()
                assert metrics["rollout/too_stale_frac"] == pytest.approx(float(frac))
            if iteration == 2:
                published.set()
        assert trainer.source.groups.close() == 0
    taken = list_numbers(tmp_path)
    assert 0 in taken[2] + taken[3]
    assert sorted(number for numbers in taken for number in numbers) == list(range(4 * 6))


def test_with_staleness_an_evaluation_goes_on_beside_the_next_iteration_and_its_line_is_its_own(tmp_path: Path) -> None:
    """Each evaluation but the last is held until the next update has begun: what waited for it would never end."""
    begun = {iteration: threading.Event() for iteration in range(5)}

    def on_token(key: str | None, number: int) -> None:
        if key is not None and key.startswith("evaluation-") and number == 0:
            assert int(key.removeprefix("evaluation-")) == 4 or begun[int(key[-1])].wait(DEADLINE_S)

    keys = ["train.num_iterations=4", "train.eval_every=1"]
    with staleness_of_one(tmp_path, *keys) as (trainer, world):
        world.on_token = on_token
        world.watch = lambda role, verb: (
            begun[trainer.iteration].set() if (role, verb) == ("policy", "update") else None
        )
        trainer.run()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    assert all("reward/heldout" in line for line in lines)


def test_a_run_that_reaches_its_end_says_what_it_drops_and_ends_its_thread(tmp_path: Path, said: Said) -> None:
    """The third iteration's responses are under way when the second is the last."""
    under_way = threading.Event()

    def on_token(key: str | None, _number: int) -> None:
        if get_number(key) == 17:
            under_way.set()

    given = ["train.num_iterations=9", "train.max_samples=48", "logger.terminal=true"]
    with staleness_of_one(tmp_path, *given) as (trainer, world):
        world.on_token = on_token
        world.watch = lambda role, verb: (
            None if (role, verb, trainer.iteration) != ("policy", "update", 1) else under_way.wait(DEADLINE_S) and None
        )
        assert trainer.run().num_iterations == 2
        assert trainer.source.num_samples == 48
    assert "24 responses that ran ahead of iteration 2 are dropped" in said()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert lines[2]["sampling/total_samples"] == 48
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("place", [{"key": "group-8"}, {"role": "policy", "verb": "update"}])
def test_a_server_lost_while_it_generates_ahead_comes_back_and_its_groups_are_begun_again(
    place: dict[str, str], tmp_path: Path, said: Said
) -> None:
    given = ["train.num_iterations=4", "rollout.num_servers=2", "logger.terminal=true"]
    with staleness_of_one(tmp_path, *given) as (trainer, world):
        servers = get_servers(trainer)
        disturbance = Disturbance(lambda: servers.lose(0), **place)
        world.on_token, world.watch = disturbance.on_token, disturbance.watch
        assert trainer.run().num_iterations == 4
        assert servers.all["SGLang server 0/2"].num_starts == 2
        assert servers.all["SGLang server 1/2"].num_starts == 1
    assert "SGLang server 0/2 was lost: it exited with status 137; restart 1 of at most 3" in said()
    check_taken(tmp_path, 4)
    assert [line["iteration"] for line in load_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


JOB = (
    *("algo=vapo", "algo.value_pretrain.steps=2", "algo.value_pretrain.patience=null", "rollout.num_servers=2"),
    *("train.num_iterations=3", "train.eval_every=1", "checkpoint.save_every=1", "policy.frozen_iterations=1"),
)


def read_numbers(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("sync/")} for line in load_untimed(run_dir)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    World().run_job(run_dir, JOB)
    return read_numbers(run_dir)


@pytest.mark.parametrize("offload", ["kv_cache", "all"])
def test_a_run_is_the_same_with_value_pretraining_frozen_iterations_evaluations_and_checkpoints(
    offload: str, kept: list[dict[str, Any]], run_dir: Path
) -> None:
    world = World()
    world.run_job(run_dir, [*JOB, f"rollout.offload={offload}"])
    assert read_numbers(run_dir) == kept
    # Once for each rollout of value pretraining and each iteration, also for that of the start.
    assert world.components[0].sync.published == [0, 0, 0, 0, 1, 2]  # type: ignore[attr-defined]


def test_servers_lost_in_a_rollout_or_a_role_lost_in_an_update_make_all_servers_begin_anew(
    kept: list[dict[str, Any]], run_dir: Path
) -> None:
    world = World()
    rollout = Disturbance(lambda: world.components[0].servers.lose(0), key="iteration-2/round-1")
    update = Disturbance(lambda: WorkerError("policy rank 0/1 died", lost=True), "policy", "update", 2)
    world.on_token, world.watch = rollout.on_token, update.watch
    world.run_job(run_dir, [*JOB, "rollout.offload=all"])
    assert rollout.has_come
    assert update.has_come
    assert read_numbers(run_dir) == kept
    servers = world.components[-1].servers
    assert servers is not None
    assert [server.num_starts for server in servers.all.values()] == [3, 3]  # type: ignore[attr-defined]


def test_a_signal_in_a_rollout_saves_with_the_servers_memory_given_back(run_dir: Path) -> None:
    world = World(on_token=Disturbance(stop, key="iteration-3/round-1").on_token)
    job = [*JOB, "rollout.offload=all", "checkpoint.save_every=100"]
    with stopping_on_signals(), pytest.raises(Stopped):
        world.run_job(run_dir, job)
    assert ("policy", "begin_save") in world.log[-6:]
    servers = world.components[0].servers
    assert servers is not None
    for server in servers.all.values():  # type: ignore[attr-defined]
        assert (server.released, server.version) == ({"kv_cache", "weights"}, UNPUBLISHED)


FIRST, LAST = 9, 29
"""Iterations that are compared; each is the last before a checkpoint"""
RUN = (
    *("algo=vapo", "algo.value_pretrain.steps=0", f"train.num_iterations={LAST}", "train.eval_every=10"),
    *("environment=class", f"environment.path={__name__}:Raising", "environment.turn_length=5"),
    *("reward.max_failed_frac=0.9", "checkpoint.save_every=10", "logger.num_token_records=2"),
)
AHEAD = ("rollout.max_staleness=1", "algo.mismatch.correction=tis")


class Raising(Environment):
    numbers: Iterator[int] = itertools.count()

    def step(self, action: Action) -> Step:
        if next(self.numbers) % 10 == 0:
            raise ValueError("one in ten")
        return Step("a", done=len(action.token_ids) > 2)


def look(run_dir: Path) -> dict[str, int]:
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "files of the journal": sum(path.is_file() for path in (run_dir / "journal").rglob("*")),
    }


@pytest.mark.parametrize("overrides", [(), AHEAD], ids=["waiting", "ahead"])
def test_nothing_grows_with_the_iterations(overrides: tuple[str, ...], run_dir: Path) -> None:
    seen = list[dict[str, int]]()

    def watch(role: str, verb: str) -> None:
        if (role, verb) == ("policy", "update"):
            seen.append(look(run_dir) if len(seen) + 1 in (FIRST, LAST) else {})

    World(watch=watch).run_job(run_dir, [*RUN, *overrides])
    first, last = seen[FIRST - 1], seen[LAST - 1]
    # Each sample that is kept has several; what is under way ahead of its use varies.
    assert last["objects"] - first["objects"] < 50 * (LAST - FIRST), (first, last)
    for what, spread in {"descriptors": 3, "threads": 24}.items():
        assert last[what] <= first[what] + spread, (what, first, last)
    # Of the iterations since the older of the two checkpoints that are kept, and those ahead; ahead a file per group.
    assert last["files of the journal"] <= 22 * (6 if overrides else 1)
    assert any(line["reward/failed_frac"] > 0 for line in load_metrics(run_dir / "metrics.jsonl")[1:])
