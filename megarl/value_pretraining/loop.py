"""Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import linear_regression

from megarl.algo.diagnostics import compute_explained_variance
from megarl.algo.registry import load_state, read_state
from megarl.algo.rewards import update_reward_moments
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import compute_targets, monte_carlo, warn_of_returns
from megarl.checkpoint.manifest import CheckpointError
from megarl.config.schema.algo import AlgoConfig, ValuePretrainConfig, needs_reward_moments
from megarl.config.schema.root import Config
from megarl.interfaces import TrainBackend
from megarl.minibatches import average_steps, split_minibatches
from megarl.report.report import Report
from megarl.rollout.rollout_file import read_rollouts
from megarl.rollout.source import SourceState
from megarl.rollout.tensors import build_tensors
from megarl.run.saving import LoopSaver, NoSaver
from megarl.run.signals import deferring_stops
from megarl.run.trainer_state import TrainerState
from megarl.task.render import CriticPrompt
from megarl.trainer import Trainer
from megarl.types import Experience, Rollout, TrainingSamples
from megarl.value_pretraining.checkpoints import EXPLAINED, ResumePoint
from megarl.value_pretraining.result import CRITIC, PretrainedState, copy_rollouts, split_times


@dataclass(frozen=True)
class PretrainingSummary:
    """How value pretraining ended."""

    num_rollouts: int
    explained_variance: float
    """Explained variance on the last rollout, before the critic learned from it; NaN where there was none"""
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    """Running reward moments, with which training must continue"""


class ValuePretraining:
    """Regresses a critic on the Monte-Carlo returns of rollouts.

    Explained variance is measured before the critic trains on a rollout, so that it is a held-out figure.
    """

    def __init__(
        self,
        config: Config,
        critic: TrainBackend,
        report: Report,
        trainer: Trainer | None = None,
        saver: LoopSaver | None = None,
        critic_prompt: CriticPrompt | None = None,
    ):
        """trainer: has policy and reference, for a KL in the reward; None without one. saver: None: no checkpoints.
        critic_prompt: with data.critic_prompt.
        """
        self.config = config
        self.settings = config.algo.value_pretrain
        self.algo = build_pretraining_algo(config.algo)
        self.critic = critic
        self.report = report
        self.trainer = trainer
        self.saver = saver or NoSaver()
        self.critic_prompt = critic_prompt
        self.curve: list[float] = []
        """Explained variance of each step so far"""
        self.reward_moments = RunningMoments()
        load_state(self.algo)

    def restore(self, resume_point: ResumePoint) -> None:
        """Resume after a saved step. Raises CheckpointError where the data have changed."""
        with self.report.phase("load"):
            self.critic.load(resume_point.directory / CRITIC).result()
        self.curve, self.reward_moments = list(resume_point.curve), resume_point.state.reward_moments
        load_state(self.algo, resume_point.state.estimator)
        if self.trainer:
            self.trainer.num_samples = resume_point.state.num_samples
            self.trainer.load_own_state(resume_point.state)
            try:
                self.trainer.source.restore(resume_point.state.source)
            except ValueError as error:
                raise CheckpointError(f"{resume_point.directory}: value pretraining had other data: {error}") from error
        self.saver.restore(resume_point.state)

    def run(self, rollouts: Iterable[Rollout]) -> PretrainingSummary:
        """One step for each rollout, `algo.value_pretrain.steps` at most, including those before `restore`.

        It ends early at `stop_at_explained_variance`, and where the explained variance no longer rises (`find_end`). A
        signal that raises Stopped, and any error, makes the newest whole step be saved.
        """
        with self.saver.saving_newest():
            reason = find_end(self.settings, self.curve)
            for rollout in itertools.islice(rollouts, 0 if reason else self.settings.num_steps - len(self.curve)):
                self.take_step(rollout)
                reason = find_end(self.settings, self.curve)
                if reason or len(self.curve) == self.settings.num_steps:
                    # The caller saves the critic.
                    break
                self.saver.save_if_due()
            if reason is None and len(self.curve) < self.settings.num_steps:
                reason = "train.max_minutes or train.max_samples is reached, before algo.value_pretrain.steps"
            if reason:
                self.report.message(f"value pretraining ends after {len(self.curve)} rollouts: {reason}")
            if self.curve and self.curve[-1] <= NOTHING:
                self.report.message(
                    f"warning: the critic explains nothing after value pretraining (explained variance"
                    f" {self.curve[-1]:.3f}): do the rewards differ at all? More of algo.value_pretrain.steps, another"
                    " critic.optimizer.lr, or more of critic.updates_per_policy_update"
                )
            self.saver.settle()
        explained = self.curve[-1] if self.curve else float("nan")
        return PretrainingSummary(len(self.curve), explained, self.reward_moments)

    def take_step(self, rollout: Rollout) -> None:
        """Measure explained variance on one rollout, then train on it."""
        step = len(self.curve) + 1
        self.saver.proceed()
        experience = self.build_experience(rollout)
        samples = self.build_targets(experience)
        assert samples.returns is not None
        assert experience.values is not None
        explained = compute_explained_variance(experience.values, samples.returns, samples.mask)
        # The weights and the recorded state change together, even when a signal arrives.
        with deferring_stops():
            self.saver.begin_update()
            metrics = {EXPLAINED: explained, "pretrain/loss": self.update(samples, step)}
            self.report.log_pretraining(step, self.settings.num_steps, metrics)
            self.curve.append(explained)
            self.saver.commit(self.get_state())

    def update(self, samples: TrainingSamples, step: int) -> float:
        """The critic's optimizer steps; returns their mean loss."""
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, -step)
        with self.report.phase("update"):
            updates = self.critic.update(
                samples.for_critic(), minibatches * self.config.critic.updates_per_policy_update
            )
            return average_steps(updates.result())["critic/loss"]

    def get_state(self) -> TrainerState:
        """The state of the current step, for a checkpoint."""
        return TrainerState(
            iteration=len(self.curve),
            metrics={},
            num_samples=self.trainer.num_samples if self.trainer else 0,
            heldout_reward=None,
            kl_coef=self.algo.kl.coef,
            reward_moments=self.reward_moments,
            source=self.trainer.source.state() if self.trainer else SourceState({}, ()),
            estimator=read_state(self.algo),
            reward=self.trainer.reward_state() if self.trainer else None,
            sizes=self.saver.measure_files(),
        )

    def build_experience(self, rollout: Rollout) -> Experience:
        """The responses with the critic's values and, with a KL in the reward, log-probs of policy and reference."""
        if self.trainer and self.algo.kl.in_reward:
            return self.trainer.build_experience(rollout)[0]
        tensors = build_tensors(rollout, self.critic_prompt)
        with self.report.phase("experience"):
            values = self.critic.values(tensors.critic_input).result()
        # Without a KL the returns do not depend on the training engine's log-probs; the rollout's are used instead.
        return tensors.build_experience(tensors.rollout_logprobs, values=values)

    def build_targets(self, experience: Experience) -> TrainingSamples:
        response_length, wrong = self.config.rollout.response_length, self.config.reward.wrong
        if needs_reward_moments(self.algo):
            self.reward_moments = update_reward_moments(
                self.reward_moments, experience, self.algo, response_length, wrong
            )
        samples, _ = compute_targets(
            experience,
            self.algo,
            self.algo.kl.coef,
            response_length=response_length,
            reward_moments=self.reward_moments,
            wrong=wrong,
        )
        warn_of_returns(samples, self.config.critic.value_range)
        return samples


NOTHING = 0.01
"""Explained variance up to which a critic is no better than a constant"""
NUM_ERRORS = 1.5
"""Standard errors of the rise that must lie below min_improvement. One would end a tenth of the runs whose explained
variance rises by 0.004 a step under noise of 0.05; two would miss half of the plateaus for 15 steps and longer."""


def find_end(settings: ValuePretrainConfig, curve: Sequence[float]) -> str | None:
    """Why value pretraining ends after steps of this explained variance; None: it continues.

    It ends at `stop_at_explained_variance`, and at a plateau: a line fitted to the last `patience` steps rises by less
    than `min_improvement`, with 1.5 standard errors to spare. The error comes from the scatter around the line, so that
    noise makes value pretraining go on and does not end it.
    """
    goal, patience, least = settings.stop_at_explained_variance, settings.patience, settings.min_improvement
    if goal is not None and curve and curve[-1] >= goal:
        return f"explained variance has reached {curve[-1]:.3f} (aimed at: {goal:g})"
    if patience is None or len(curve) < patience:
        return None
    rise, error = fit_rise(curve[-patience:])
    if rise + NUM_ERRORS * error < least:
        return f"explained variance has risen by {rise:.3f} +- {error:.3f} in the last {patience} (min {least:g})"
    return None


def fit_rise(values: Sequence[float]) -> tuple[float, float]:
    """(rise over the n steps of the values on the least-squares line, its standard error); n is 3 or more."""
    steps = range(len(values))
    slope, start = linear_regression(steps, values)
    residuals = sum((value - start - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    spread = len(values) * (len(values) ** 2 - 1) / 12
    return len(values) * slope, len(values) * sqrt(residuals / (len(values) - 2) / spread)


def build_pretraining_algo(algo: AlgoConfig) -> AlgoConfig:
    """The algorithm with the same rewards, returns and advantages without bootstrapping, and no KL in the loss."""
    return replace(monte_carlo(algo), lambda_policy=1.0, kl=replace(algo.kl, in_loss=False))


def pretrain_critic(
    trainer: Trainer, saver: LoopSaver | None = None, resume_point: ResumePoint | None = None
) -> PretrainingSummary:
    """Value pretraining with a trainer's components, on its policy's responses or on `algo.value_pretrain.rollouts`.

    The policy is not updated. Training continues with the running reward moments that the critic has learned with.
    saver: None: no checkpoints. resume_point: where to resume; None: it starts.
    """
    settings = trainer.config.algo.value_pretrain
    if settings.num_steps == 0:
        return PretrainingSummary(0, float("nan"))
    components = trainer.components
    assert components.critic is not None
    pretraining = ValuePretraining(
        trainer.config, components.critic, trainer.report, trainer, saver, components.critic_prompt
    )
    if resume_point is not None:
        pretraining.restore(resume_point)
    num_done = len(pretraining.curve)
    if settings.rollouts is None:
        rollouts = sample_rollouts(trainer, num_done)
    else:
        rollouts = repeat_rollouts(Path(settings.rollouts).expanduser(), trainer.report.message, num_done)
    summary = pretraining.run(take_until(lambda: trainer.find_limit() is not None, rollouts))
    trainer.reward_moments = summary.reward_moments
    save_start(trainer)
    return summary


def start_pretrained(trainer: Trainer, state: PretrainedState, directory: Path, run_dir: Path) -> None:
    """Instead of `pretrain_critic`: bring components, trainer and files of `run_dir` into the state it would leave.

    Raises CheckpointError where the data are not those of the value pretraining.
    """
    critic, report = trainer.components.critic, trainer.report
    assert critic is not None
    with report.phase("load"):
        critic.load(directory / CRITIC).result()
    for step, metrics in split_times(state.curve):
        report.log_pretraining(step, trainer.config.algo.value_pretrain.num_steps, metrics)
    if trainer.components.rollout_file:
        copy_rollouts(directory, run_dir)
    sampler = trainer.components.sampler
    try:
        if state.sampler is not None and sampler is not None:
            sampler.restore(state.sampler)
    except ValueError as error:
        raise CheckpointError(f"{directory}: value pretraining had other data: {error}") from error
    trainer.num_samples, trainer.reward_moments = state.num_samples, state.reward_moments
    save_start(trainer)


def save_start(trainer: Trainer) -> None:
    """Write the checkpoint that training starts from, in the background."""
    # Stopped before that, a run resumes from the newest step of value pretraining.
    trainer.commit(trainer.get_state(0, {}))
    with trainer.saver.saving_newest():
        trainer.saver.save(wait=False)


def sample_rollouts(trainer: Trainer, num_done: int = 0) -> Iterator[Rollout]:
    """Endless fresh responses of the policy; `num_done` rollouts have been sampled before."""
    sampler = trainer.components.sampler
    assert sampler is not None
    trainer.publish(0)
    for step in itertools.count(num_done + 1):
        with trainer.report.phase("rollout"):
            trainer.check_servers()
            prompts = sampler.next_batch(trainer.config.train.num_prompts)
            rollout = trainer.generate(prompts, f"pretraining-{step}")
        yield rollout


def repeat_rollouts(path: Path, say: Callable[[str], None], num_done: int = 0) -> Iterator[Rollout]:
    """The rollouts of a file in order, repeated endlessly, without the first `num_done`.

    say: called with a message at the end of each pass. Raises as `read_rollouts`.
    """
    left_out = num_done
    for number in itertools.count(1):
        num_rollouts = 0
        for rollout in read_rollouts(path):
            num_rollouts += 1
            if left_out:
                left_out -= 1
            else:
                yield rollout
        say(
            f"pass {number} over the {num_rollouts} rollouts of {path} is complete; from here on explained variance is"
            " of responses that the critic has learned from"
        )


def take_until(stop: Callable[[], bool], rollouts: Iterator[Rollout]) -> Iterator[Rollout]:
    """The rollouts, until `stop()` is true."""
    while not stop():
        yield next(rollouts)
