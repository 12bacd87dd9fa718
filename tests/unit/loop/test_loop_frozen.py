"""policy.frozen_iterations and algo.advantage=tether in the loop, over the fakes (tests/fakes)."""

import json
from pathlib import Path

import pytest
import torch
from fakes.disturbed import RUN, Disturbance, Killed, run_disturbed, summarize
from fakes.run import World

from megarl.report.metrics import load_metrics
from megarl.types import Score

FROZEN = (
    *("algo=ppo", "critic.optimizer.lr=0.1", "train.num_iterations=4", "train.eval_every=4"),
    *("policy.frozen_iterations=2", "policy.optimizer.decay=linear", "policy.optimizer.decay_iterations=4"),
    *(
        "policy.optimizer.min_lr=0",
        "policy.optimizer.warmup_steps=0",
        "critic.optimizer.warmup_steps=0",
        "logger.save_rollouts=true",
    ),
)


def read_versions(run_dir: Path) -> dict[int, tuple[int, set[int]]]:
    """Of each iteration: the trainer's version, and those of the tokens."""
    found: dict[int, tuple[int, set[int]]] = {}
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens = found.setdefault(record["iteration"], (record["weight_version"], set()))[1]
        tokens.update(record["response"]["weight_versions"])
    return found


def test_in_frozen_iterations_the_critic_alone_learns(tmp_path: Path) -> None:
    world = World()
    with world.open_trainer(tmp_path, FROZEN) as trainer:
        policy, critic = trainer.components.policy, trainer.components.critic
        start = policy.copy_weights()
        for iteration in (1, 2):
            trainer.publish_and_evaluate()
            before = critic.copy_weights()
            trainer.train(iteration)
            assert all(torch.equal(x, start[name]) for name, x in policy.copy_weights().items())
            assert not any(torch.equal(x, before[name]) for name, x in critic.copy_weights().items())
        trainer.run()
        assert trainer.components.sync.published == [0, 1, 2]
        assert not any(torch.equal(x, start[name]) for name, x in policy.copy_weights().items())
    lines = load_metrics(tmp_path / "metrics.jsonl")
    # 2 minibatches, 8 steps of decay from 0.1: the frozen iterations do not count.
    assert [line.get("policy/lr") for line in lines] == [None, None, None, *map(pytest.approx, (0.08125, 0.05625))]
    assert all(line["critic/loss"] > 0 for line in lines[1:])
    assert ["sync/bytes" in line for line in lines] == [True, False, False, True, True]
    assert read_versions(tmp_path) == {1: (0, {0}), 2: (0, {0}), 3: (0, {0}), 4: (1, {1})}


def test_responses_ahead_do_not_become_stale_while_the_policy_is_frozen(tmp_path: Path) -> None:
    given = ["rollout.max_staleness=2", "algo.mismatch.correction=tis", "train.num_iterations=6"]
    with World().open_trainer(tmp_path, [*FROZEN, *given, "policy.frozen_iterations=4"]) as trainer:
        trainer.run()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["rollout/staleness_max"] for line in lines[1:6]] == [0, 0, 0, 0, 0]
    assert all(max(tokens) <= version for version, tokens in read_versions(tmp_path).values())


def test_servers_that_have_given_their_memory_back_get_the_frozen_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, given in (("kept", []), ("offloaded", ["rollout.offload=all"])):
        world = World()
        world.run_job(monkeypatch, tmp_path / name, [*FROZEN, "train.eval_every=1", *given])
        lines = load_metrics(tmp_path / name / "metrics.jsonl")
        found.append(
            [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "sync/"))} for line in lines]
        )
    assert found[0] == found[1]
    assert world.components[0].sync.published == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(("role", "verb", "number"), [("critic", "update", 5), ("critic", "values", 6)])
def test_a_run_killed_while_the_policy_is_frozen_ends_as_an_untouched_one(
    role: str, verb: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("policy.frozen_iterations=2", "checkpoint.save_every=1")
    World().run_job(monkeypatch, tmp_path / "whole", [*RUN, *given])
    disturbance = Disturbance(Killed, role, verb, number)
    with pytest.raises(Killed):
        run_disturbed(monkeypatch, tmp_path / "run", disturbance, *given)
    World().run_job(monkeypatch, tmp_path / "run", [*RUN, *given])
    assert summarize(tmp_path / "run") == summarize(tmp_path / "whole")


def test_each_batch_is_used_with_the_weight_that_the_batches_before_it_gave(tmp_path: Path) -> None:
    given = ["algo=ppo", "algo.advantage=tether", "algo.tether.decay=0.5", "algo.tether.initial=0.25"]
    given += ["critic.optimizer.lr=0.2", "train.num_iterations=5", "train.eval_every=5"]
    with World().open_trainer(tmp_path, given) as trainer:
        trainer.run()
        last = trainer.algorithm.tether_rho
    lines = load_metrics(tmp_path / "metrics.jsonl")[1:]
    rho = 0.25
    for line in lines:
        assert line["advantage/tether_rho"] == rho
        rho = 0.5 * rho + 0.5 * line["advantage/tether_rho_batch"]
    assert last == rho
    assert len({line["advantage/tether_rho"] for line in lines}) == 5


def test_a_return_outside_of_the_range_of_values_is_warned_of(tmp_path: Path) -> None:
    world = World(reward=lambda _prompt, response: Score(2.0 if len(response) > 1 else 0.0, False))
    with world.open_trainer(tmp_path, [*FROZEN, "critic.value_range=[0,1]"]) as trainer:
        trainer.publish_and_evaluate()
        with pytest.warns(RuntimeWarning, match=r"critic\.value_range: found \[0, 1\] and returns from"):
            trainer.train(1)
