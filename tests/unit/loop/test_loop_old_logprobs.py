"""The policy scores the responses before its update where something reads its log-probs, and only there."""

from pathlib import Path

import pytest
import torch
from fakes.disturbed import add_engine_noise
from fakes.run import World

from megarl.algo.registry import reuses_logprobs
from megarl.config.load import list_options
from megarl.report.metrics import load_metrics


@pytest.mark.parametrize("surrogate", ["dis", "dppo"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_without_a_reader_the_policy_does_not_score_and_updates_as_if_it_had(
    surrogate: str, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log-probs are off by 0.1, which both have in their ratios."""
    given = [f"algo.surrogate={surrogate}", "algo.value_pretrain.steps=0", "train.num_iterations=3"]
    weights, metrics = [], []
    for scored in (False, True):
        if scored:
            for module in ("megarl.experience", "megarl.algo.targets"):
                monkeypatch.setattr(f"{module}.reads_old_logprobs", lambda _algo: True)
        world = World()
        overrides = ["algo=vapo", *given, f"rollout.max_staleness={staleness}"]
        with world.open_trainer(tmp_path / str(scored), overrides) as trainer:
            add_engine_noise(trainer, 0.1)
            trainer.run()
            weights.append(trainer.components.policy.copy_weights())
        assert (("policy", "logprobs") in world.log) == scored
        metrics.append(load_metrics(tmp_path / str(scored) / "metrics.jsonl")[1:])
    left_out = {name for line in metrics[1] for name in line} - {name for line in metrics[0] for name in line}
    assert left_out == {name for name in left_out if name.startswith("mismatch/")}
    assert "mismatch/kl" in left_out
    if staleness == 0:  # else the order in which groups are complete is chance's
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        for name in ("policy/loss", "policy/clip_frac", "policy/grad_norm"):
            assert [line[name] for line in metrics[0]] == [line[name] for line in metrics[1]]


@pytest.mark.parametrize("more", ["algo.kl.in_reward=true", "algo.kl.in_loss=true", "algo.topr.positive_loss_coef=1"])
def test_the_policy_scores_where_something_reads_its_logprobs(more: str, tmp_path: Path) -> None:
    world = World()
    given = ["algo=lite_ppo", "algo.surrogate=dis", more, "train.num_iterations=1"]
    with world.open_trainer(tmp_path, given) as trainer:
        trainer.run()
    assert ("policy", "logprobs") in world.log
    assert "mismatch/kl" in load_metrics(tmp_path / "metrics.jsonl")[1]


@pytest.mark.parametrize("algo", list_options("algo"))
def test_one_step_with_the_updates_own_logprobs_is_that_with_a_pass_and_logs_the_same(
    algo: str, tmp_path: Path
) -> None:
    given = [f"algo={algo}", "train.num_minibatches=1", "train.num_iterations=2", "train.eval_every=2"]
    given += ["policy.frozen_iterations=0"] if algo in ("bpco", "sao") else []
    weights, metrics, scored = [], [], []
    for reuses in (True, False):
        world, run_dir = World(), tmp_path / str(reuses)
        keys = [*given, f"++train.reuse_logprobs={str(reuses).lower()}"] if not reuses else given
        with world.open_trainer(run_dir, keys) as trainer:
            expected = reuses_logprobs(trainer.config)
            add_engine_noise(trainer, 0.1)
            trainer.run()
            weights.append(trainer.components.policy.copy_weights())
        assert (("policy", "updated_logprobs") in world.log) == expected
        scored.append(("policy", "logprobs") in world.log)
        lines = load_metrics(run_dir / "metrics.jsonl")
        metrics.append([{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines])
    assert scored[0] <= scored[1]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])
    for with_own, with_pass in zip(*metrics, strict=True):
        assert with_own == pytest.approx(with_pass, rel=1e-4, abs=1e-5)
