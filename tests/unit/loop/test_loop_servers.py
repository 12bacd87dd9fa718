"""Lost servers, failed syncs and generation ahead, over the fakes (tests/fakes)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fakes.rollout import FakeServers
from fakes.run import World, load

from megarl.data.sampler import PromptSampler
from megarl.interfaces import UNPUBLISHED
from megarl.report.metrics import load_metrics
from megarl.rollout.rollout_file import load_rollouts
from megarl.trainer import Trainer

DEADLINE_S = 30.0
TWO_SERVERS = ("algo=ppo", "rollout.num_servers=2", "train.num_iterations=2", "train.eval_every=2")
STALE = ("algo=grpo", "rollout.max_staleness=1", "algo.mismatch.correction=tis")
METRICS = ("reward/mean", "policy/loss", "critic/loss", "mismatch/kl", "sync/bytes", "reward/heldout")


def read_numbers(run_dir: Path) -> list[dict[str, float]]:
    lines = load_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def get_servers(trainer: Trainer) -> FakeServers:
    assert isinstance(trainer.components.servers, FakeServers)
    return trainer.components.servers


def lose_once(servers: FakeServers, *numbers: int) -> Callable[[], None]:
    pending = [numbers]
    return lambda: servers.lose(*pending.pop()) if pending else None


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    run_dir = tmp_path_factory.mktemp("untouched")
    with World().open_trainer(run_dir, TWO_SERVERS) as trainer:
        trainer.run()
    return read_numbers(run_dir)


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("key", ["iteration-2/round-1", "evaluation-0", "evaluation-2"])
def test_servers_lost_in_a_rollout_or_an_evaluation_come_back_with_the_current_weights(
    key: str,
    lost: tuple[int, ...],
    untouched: list[dict[str, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()
    with world.open_trainer(tmp_path, [*TWO_SERVERS, "logger.terminal=true"]) as trainer:
        servers, version = get_servers(trainer), {"iteration-2/round-1": 1, "evaluation-0": 0, "evaluation-2": 2}[key]
        lose = lose_once(servers, *lost)
        world.on_token = lambda asked, number: lose() if (asked, number) == (key, 3) else None
        trainer.run()
        # Brought again before the call is repeated, to all servers.
        assert trainer.components.sync.published == sorted([0, 1, 2, version])
        assert trainer.components.sync.num_reconnects == 1
        assert [server.num_starts for server in servers.all.values()] == [1 + (number in lost) for number in (0, 1)]
        assert {server.version for server in servers.all.values()} == {2}
        assert [asked for asked, _ in trainer.components.engine.asked].count(key) == 2
    assert read_numbers(tmp_path) == untouched
    names = "; ".join(f"SGLang server {i}/2 was lost: it exited with status 137" for i in lost)
    assert f"{names}; restart 1 of at most 3" in capsys.readouterr().out


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_server_lost_in_a_sync_is_started_again_and_the_sync_repeated(
    number: int, untouched: list[dict[str, float]], tmp_path: Path
) -> None:
    world = World()
    with world.open_trainer(tmp_path, TWO_SERVERS) as trainer:
        lose, seen = lose_once(get_servers(trainer), 1), []

        def watch(role: str, verb: str) -> None:
            if (role, verb) == ("servers", "publish"):
                seen.append(verb)
                if len(seen) == number:
                    lose()

        world.watch = watch
        trainer.run()
        version = number - 1
        # `refill` before the repeated publish is that publish's own weights.
        assert trainer.components.sync.published[number - 1 : number + 1] == [version, version]
    assert read_numbers(tmp_path) == untouched


def test_a_server_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    world = World()
    with world.open_trainer(tmp_path, [*TWO_SERVERS, "rollout.max_server_restarts=2"]) as trainer:
        servers = get_servers(trainer)
        world.on_token = lambda key, _number: servers.lose(0) if key == "iteration-1/round-1" else None
        with pytest.raises(RuntimeError) as caught:
            trainer.run()
        assert servers.all["SGLang server 0/2"].num_starts == 3
    assert "rollout.max_server_restarts=2 have been made in a row" in caught.value.__notes__[0]


def test_a_server_that_was_just_started_is_never_asked_before_a_sync(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, TWO_SERVERS) as trainer:
        assert {server.version for server in get_servers(trainer).all.values()} == {UNPUBLISHED}
        with pytest.raises(RuntimeError, match="servers' weight version -1; the trainer's is 0"):
            trainer.collect(1)


@contextmanager
def staleness_of_one(tmp_path: Path, *overrides: str) -> Iterator[tuple[Trainer, World]]:
    world = World()
    given = [*STALE, "logger.save_rollouts=true", *overrides]
    with world.open_trainer(tmp_path, given) as trainer:
        yield trainer, world


def test_at_staleness_one_an_iteration_learns_from_two_versions_each_with_its_own_logprobs(tmp_path: Path) -> None:
    """Each rollout ahead is held at its fourth token until the weights have changed."""
    published = {iteration: threading.Event() for iteration in range(1, 5)}

    def on_token(key: str | None, number: int) -> None:
        if key and key.startswith("iteration-") and number == 3:
            iteration = int(key.split("/")[0].removeprefix("iteration-"))
            assert iteration == 1 or published[iteration - 1].wait(DEADLINE_S)

    with staleness_of_one(tmp_path, "train.num_iterations=4") as (trainer, world):
        world.on_token = on_token
        trainer.publish(0)
        for iteration in range(1, 5):
            rollout, metrics = trainer.collect(iteration)
            experience, _ = trainer.build_experience(rollout)
            versions = [v for sample in rollout.samples for v in sample.response.weight_versions.expand()]
            behind = trainer.version - torch.tensor(versions)
            assert metrics["rollout/staleness_max"] == behind.max() == (iteration > 1)
            assert metrics["rollout/staleness_mean"] == pytest.approx(float(behind.double().mean()))
            assert (metrics["rollout/mixed_frac"] > 0) == (iteration > 1)
            gap = (experience.old_logprobs - experience.rollout_logprobs)[experience.mask].abs()
            # mu is the trainer's own where it still has the weights that sampled, else the rollout engine's.
            assert (experience.scored[experience.mask] == (behind == 0)).all()
            mu, own = experience.sampling_logprobs, experience.scored
            assert torch.equal(mu[own], experience.old_logprobs[own])
            assert torch.equal(mu[~own], experience.rollout_logprobs[~own])
            # The present policy is that of the tokens that are not behind, and of no others.
            assert gap[behind == 0].max() < 1e-5
            assert iteration == 1 or gap[behind == 1].max() > 1e-3
            samples, _ = trainer.build_targets(experience, trainer.config.algo)
            trainer.update(samples, iteration)
            trainer.publish(iteration)
            published[iteration].set()
        assert trainer.source.close() == 0
        inputs = load([*STALE, "logger.save_rollouts=true", "train.num_iterations=4"])[1]
    # One rollout an iteration, its prompts those of a run that waits.
    saved = list(load_rollouts(tmp_path / "rollouts.jsonl"))
    drawn = PromptSampler(inputs.data.train, trainer.config.seed)
    assert [[s.prompt.id for s in rollout.samples[::4]] for rollout in saved] == [
        [prompt.id for prompt in drawn.next_batch(6)] for _ in range(4)
    ]
    assert [rollout.weight_version for rollout in saved] == [0, 1, 2, 3]


def test_no_rollout_is_more_than_its_staleness_ahead(tmp_path: Path) -> None:
    with staleness_of_one(tmp_path, "train.num_iterations=5") as (trainer, world):
        begun: list[tuple[int, int]] = []
        world.on_token = lambda key, number: (
            begun.append((int(key.split("/")[0].removeprefix("iteration-")), trainer.version))
            if key and key.startswith("iteration") and number == 0
            else None
        )
        trainer.run()
    assert [iteration for iteration, _ in begun] == [1, 2, 3, 4, 5]
    assert all(iteration - 1 - version <= 1 for iteration, version in begun)
    assert all(a <= b for (_, a), (_, b) in pairwise(begun))


def test_tokens_behind_the_staleness_end_the_run(tmp_path: Path) -> None:
    with staleness_of_one(tmp_path, "train.num_iterations=4") as (trainer, _):
        trainer.publish(0)
        trainer.collect(1)
        trainer.version = 2
        with pytest.raises(RuntimeError, match=r"rollout\.max_staleness is 1"):
            trainer.collect(2)
        trainer.source.close()


def test_a_run_that_reaches_its_end_says_what_it_drops_and_ends_its_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third iteration's responses are under way when the second is the last."""
    under_way = threading.Event()

    def on_token(key: str | None, _number: int) -> None:
        if key == "iteration-3/round-1":
            under_way.set()

    given = ["train.num_iterations=9", "train.max_samples=48", "logger.terminal=true"]
    with staleness_of_one(tmp_path, *given) as (trainer, world):
        world.on_token = on_token
        world.watch = lambda role, verb: (
            None if (role, verb, trainer.iteration) != ("policy", "update", 1) else under_way.wait(DEADLINE_S) and None
        )
        assert trainer.run().num_iterations == 2
        assert trainer.num_samples == 48
    assert "24 responses that ran ahead of iteration 2 are dropped" in capsys.readouterr().out
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert lines[2]["sampling/total_samples"] == 48
    assert not any(thread.name == "megarl-ahead" for thread in threading.enumerate())


def test_a_server_lost_while_it_generates_ahead_ends_the_run(tmp_path: Path) -> None:
    with staleness_of_one(tmp_path, "train.num_iterations=4") as (trainer, world):
        servers = get_servers(trainer)
        world.on_token = lambda key, _number: servers.lose(0) if key == "iteration-2/round-1" else None
        with pytest.raises(RuntimeError, match="it exited with status 137"):
            trainer.run()
