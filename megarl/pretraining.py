"""Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.algo.diagnostics import compute_explained_variance
from megarl.algo.rewards import update_reward_moments
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import compute_targets, monte_carlo
from megarl.checkpoint.manifest import CheckpointError
from megarl.config.algo import AlgoConfig, needs_reward_moments
from megarl.config.schema import Config
from megarl.pretrained import CRITIC, PretrainedState, copy_rollouts, split_times
from megarl.report.report import Report
from megarl.rollout.rollout_file import read_rollouts
from megarl.rollout.tensors import build_tensors
from megarl.seams import TrainBackend
from megarl.trainer import Trainer, average_steps, split_minibatches
from megarl.types import Experience, Metrics, Rollout, TrainingSamples


@dataclass(frozen=True)
class PretrainingSummary:
    """How value pretraining ended."""

    num_rollouts: int
    explained_variance: float
    """Of the last rollout, before the critic learned from it; NaN where there was none"""
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    """Under which training has to go on"""


class ValuePretraining:
    """Regresses a critic on the Monte-Carlo returns of rollouts.

    Each rollout is scored before the critic trains on it, so that `pretrain/explained_variance` is a held-out figure.
    """

    def __init__(self, config: Config, critic: TrainBackend, report: Report, trainer: Trainer | None = None):
        """`trainer`: asked for policy and reference, which a KL in the reward needs; without one, None."""
        self.config = config
        self.settings = config.algo.value_pretrain
        self.algo = build_pretraining_algo(config.algo)
        self.critic = critic
        self.report = report
        self.trainer = trainer
        self.reward_moments = RunningMoments()

    def run(self, rollouts: Iterable[Rollout]) -> PretrainingSummary:
        """One step for each rollout, up to `algo.value_pretrain.steps` of them.

        It ends early at `stop_at_explained_variance`, and when the explained variance has not risen by
        `min_improvement` for `patience` rollouts.
        """
        settings, step, explained = self.settings, 0, float("nan")
        best, best_step = float("-inf"), 0
        for step, rollout in enumerate(itertools.islice(rollouts, settings.steps), start=1):
            metrics = self.learn(rollout, step)
            explained = metrics["pretrain/explained_variance"]
            self.report.log_pretraining(step, settings.steps, metrics)
            if explained > best + settings.min_improvement:
                best, best_step = explained, step
            reason = self.find_end(explained, best, step - best_step)
            if reason:
                self.report.message(f"value pretraining ends after {step} rollouts: {reason}")
                break
        return PretrainingSummary(step, explained, self.reward_moments)

    def find_end(self, explained: float, best: float, num_without_rise: int) -> str | None:
        """Why it ends here, if it does."""
        settings = self.settings
        goal = settings.stop_at_explained_variance
        if goal is not None and explained >= goal:
            return f"explained variance has reached {explained:.3f} (aimed at: {goal:g})"
        if settings.patience is not None and num_without_rise >= settings.patience:
            bound = f"{best:.3f} + {settings.min_improvement:g}"
            return f"explained variance has been at most {bound} for {num_without_rise} of them"
        return None

    def learn(self, rollout: Rollout, step: int) -> Metrics:
        """One rollout, measured and then learned."""
        experience = self.build_experience(rollout)
        samples = self.build_targets(experience)
        assert samples.returns is not None
        assert experience.values is not None
        explained = compute_explained_variance(experience.values, samples.returns, samples.mask)
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, -step)
        with self.report.phase("update"):
            updates = self.critic.update(samples, minibatches * self.config.critic.updates_per_policy_update)
            metrics = average_steps(updates.result())
        return {"pretrain/explained_variance": explained, "pretrain/loss": metrics["critic/loss"]}

    def build_experience(self, rollout: Rollout) -> Experience:
        """What the critic says of the responses; with a KL in the reward, policy and reference too."""
        if self.trainer and self.algo.kl.in_reward:
            return self.trainer.build_experience(rollout)[0]
        tensors = build_tensors(rollout)
        with self.report.phase("experience"):
            values = self.critic.values(tensors.sequences).result()
        # Without a KL the returns do not depend on the training engine's log-probs: the sampled ones stand in.
        return Experience(
            sequences=tensors.sequences,
            groups=tensors.groups,
            ages=tensors.ages,
            rewards=tensors.rewards,
            truncated=tensors.truncated,
            mask=tensors.mask,
            rollout_logprobs=tensors.rollout_logprobs,
            old_logprobs=tensors.rollout_logprobs,
            ref_logprobs=None,
            ref_kl=None,
            values=values,
        )

    def build_targets(self, experience: Experience) -> TrainingSamples:
        response_length = self.config.rollout.response_length
        if needs_reward_moments(self.algo):
            self.reward_moments = update_reward_moments(self.reward_moments, experience, self.algo, response_length)
        samples, _ = compute_targets(
            experience,
            self.algo,
            self.algo.kl.coef,
            response_length=response_length,
            reward_moments=self.reward_moments,
        )
        return samples


def build_pretraining_algo(algo: AlgoConfig) -> AlgoConfig:
    """The same rewards; returns and advantages without bootstrapping; no policy loss, so no KL in it."""
    return replace(monte_carlo(algo), lambda_policy=1.0, kl=replace(algo.kl, in_loss=False))


def pretrain_critic(trainer: Trainer) -> PretrainingSummary:
    """Value pretraining with a trainer's parts, on its policy's responses or on `algo.value_pretrain.rollouts`.

    The policy is not updated. Training goes on with the running reward moments that the critic has learned under.
    """
    settings = trainer.config.algo.value_pretrain
    if settings.steps == 0:
        return PretrainingSummary(0, float("nan"))
    assert trainer.parts.critic is not None
    pretraining = ValuePretraining(trainer.config, trainer.parts.critic, trainer.report, trainer)
    if settings.rollouts is None:
        rollouts = sample_rollouts(trainer)
    else:
        rollouts = repeat_rollouts(Path(settings.rollouts).expanduser(), trainer.report.message)
    summary = pretraining.run(take_until(trainer.reached_limit, rollouts))
    trainer.reward_moments = summary.reward_moments
    trainer.state = trainer.capture(0, {})
    trainer.save(wait=False)
    return summary


def start_pretrained(trainer: Trainer, state: PretrainedState, directory: Path, run_dir: Path) -> None:
    """In place of `pretrain_critic`: the parts, the trainer and the files of `run_dir` as it would leave them.

    Raises CheckpointError where the data are not those that value pretraining drew from.
    """
    critic, report = trainer.parts.critic, trainer.report
    assert critic is not None
    with report.phase("load"):
        critic.load(directory / CRITIC).result()
    for step, metrics in split_times(state.curve):
        report.log_pretraining(step, trainer.config.algo.value_pretrain.steps, metrics)
    if trainer.parts.rollout_file:
        copy_rollouts(directory, run_dir)
    try:
        if state.sampler is not None:
            trainer.parts.sampler.restore(state.sampler)
    except ValueError as error:
        raise CheckpointError(f"{directory}: value pretraining had other data: {error}") from error
    trainer.num_samples, trainer.reward_moments = state.num_samples, state.reward_moments
    trainer.state = trainer.capture(0, {})
    trainer.save(wait=False)


def sample_rollouts(trainer: Trainer) -> Iterator[Rollout]:
    """Fresh responses of the policy, for ever."""
    trainer.publish(0)
    for step in itertools.count(1):
        with trainer.report.phase("rollout"):
            trainer.check_servers()
            prompts = trainer.parts.sampler.next_batch(trainer.config.train.prompts_per_iteration)
            rollout = trainer.generate(prompts, f"pretraining-{step}")
        yield rollout


def repeat_rollouts(path: Path, say: Callable[[str], None]) -> Iterator[Rollout]:
    """The rollouts of a file in their order, over and over; `say` is told where a pass ends.

    Raises as `read_rollouts`.
    """
    for number in itertools.count(1):
        num_rollouts = 0
        for rollout in read_rollouts(path):
            num_rollouts += 1
            yield rollout
        say(
            f"pass {number} over the {num_rollouts} rollouts of {path} is complete; from here on explained variance is"
            " of responses that the critic has learned from"
        )


def take_until(stop: Callable[[], bool], rollouts: Iterator[Rollout]) -> Iterator[Rollout]:
    """The rollouts, of which none is asked for once `stop()` holds."""
    while not stop():
        yield next(rollouts)
