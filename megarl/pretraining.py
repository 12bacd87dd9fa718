"""Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns."""

from megarl.algo.diagnostics import compute_explained_variance
from megarl.algo.targets import monte_carlo
from megarl.trainer import Trainer
from megarl.types import Metrics


def pretrain_critic(trainer: Trainer) -> None:
    """Regress the critic on the returns of fresh responses for up to `algo.value_pretrain.steps` rollouts.

    Each rollout is scored before the critic trains on it, so that `pretrain/explained_variance` is a held-out figure;
    it ends early when that has not risen by `min_improvement` for `patience` rollouts. The policy is not updated.
    """
    settings = trainer.config.algo.value_pretrain
    best, best_step = float("-inf"), 0
    for step in range(1, settings.steps + 1):
        if trainer.reached_limit():
            return
        metrics = pretrain_step(trainer, step)
        explained = metrics["pretrain/explained_variance"]
        trainer.report.log_pretraining(step, settings.steps, metrics)
        if explained > best + settings.min_improvement:
            best, best_step = explained, step
        elif settings.patience is not None and step - best_step >= settings.patience:
            trainer.report.message(
                f"value pretraining ends after {step} rollouts: explained variance has been at most {best:.3f}"
                f" + {settings.min_improvement:g} for {settings.patience} of them"
            )
            return


def pretrain_step(trainer: Trainer, step: int) -> Metrics:
    """One rollout, measured and then learned."""
    with trainer.report.phase("rollout"):
        trainer.parts.engine.check_health()
        rollout = trainer.generate(trainer.parts.sampler.next_batch(trainer.config.train.prompts_per_iteration))
    experience, _ = trainer.build_experience(rollout)
    samples, _ = trainer.build_targets(experience, monte_carlo(trainer.config.algo))
    assert samples.returns is not None
    assert experience.values is not None
    explained = compute_explained_variance(experience.values, samples.returns, samples.mask)
    metrics = trainer.update(samples, -step, policy=False)
    return {"pretrain/explained_variance": explained, "pretrain/loss": metrics["critic/loss"]}
