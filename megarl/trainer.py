"""The training loop: rollout, experience, targets, update, checkpoint, publish; the same for every algorithm."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from megarl.algo.diagnostics import compute_batch_metrics, compute_engine_taper, measure_engine_noise
from megarl.algo.kl import KlController
from megarl.algo.rewards import update_reward_moments
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import compute_targets
from megarl.config.schema.algo import AlgoConfig, needs_reward_moments, uses_topr
from megarl.config.schema.algo_choices import KLEstimator
from megarl.config.schema.environment import MultiTurnEnvironmentConfig
from megarl.config.schema.root import Config
from megarl.data.sampler import PromptSampler
from megarl.interfaces import Pending, RolloutEngine, RolloutServers, TrainBackend, WeightSync, wait_all
from megarl.report.failures import TooManyFailuresError, check_failures, describe_failures
from megarl.report.report import Report
from megarl.report.scores import compute_heldout_metrics, compute_score_metrics
from megarl.rollout.collector import Collector
from megarl.rollout.dynamic_sampling import join_groups
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import RolloutWriter
from megarl.rollout.source import GroupSource
from megarl.rollout.tensors import build_tensors, find_too_stale
from megarl.run.recovery import Recovery
from megarl.run.saving import LoopSaver, NoSaver
from megarl.run.signals import deferring_stops
from megarl.run.trainer_state import TrainerState
from megarl.types import Experience, Metrics, Prompt, Rollout, Sample, TrainingSamples

T = TypeVar("T")


@dataclass(frozen=True)
class TrainerComponents:
    """The components of the loop; all but the sampler and the report run in other processes."""

    policy: TrainBackend
    critic: TrainBackend | None
    reference: TrainBackend | None
    engine: RolloutEngine
    collector: Collector
    sync: WeightSync
    sampler: PromptSampler
    heldout: Sequence[Prompt]
    report: Report
    rollout_file: RolloutWriter | None = None
    """Writes every sampled response of training, with logger.save_rollouts; None: they are not saved"""
    servers: RolloutServers | None = None
    """None: the servers are not this run's own, and losing one ends it"""
    saver: LoopSaver = field(default_factory=NoSaver)
    offloader: ServerOffloader = field(default_factory=ServerOffloader)
    """Which memory the servers have given back for the roles' calls"""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    num_iterations: int
    heldout_reward: float


class Trainer:
    """Runs the iterations of one configuration over its components."""

    def __init__(self, config: Config, components: TrainerComponents):
        self.config = config
        self.components = components
        self.report, self.saver = components.report, components.saver
        self.recovery = Recovery(
            components.servers,
            components.report.message,
            config.rollout.max_server_restarts,
            self.reconnect,
            restarts_all=components.offloader.offload is not None,
        )
        self.has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig)
        self.kl = KlController.start(config.algo.kl)
        self.reward_moments = RunningMoments()
        self.engine_noise: float | None = None
        self.source = GroupSource(
            config, components.engine, components.collector, components.sampler, self.with_servers
        )
        self.version = self.num_samples = 0
        self.heldout_reward = float("nan")
        self.started = time.monotonic()
        self.commit(self.get_state(0, {}))

    @property
    def iteration(self) -> int:
        """The last iteration whose update is done."""
        return self.state.iteration

    def run(self) -> Summary:
        """Iterate until the last iteration, the target of the held-out reward, or the limit of time or samples.

        A signal that raises Stopped, and any error, makes the newest whole state be saved first.
        """
        try:
            with self.saver.saving_newest():
                self.publish_and_evaluate()
                while not self.is_last() and not self.reached_goal():
                    self.train(self.iteration + 1)
                    self.saver.save_if_due()
                    self.publish_and_evaluate()
                self.saver.save()
        finally:
            num_dropped = self.source.close()
        if num_dropped:
            self.report.message(f"{num_dropped} responses that ran ahead of iteration {self.iteration} are dropped")
        return Summary(self.iteration, self.heldout_reward)

    def train(self, iteration: int) -> None:
        """One iteration up to its update; `publish_and_evaluate` does the rest."""
        rollout, metrics = self.collect(iteration)
        self.saver.proceed()
        experience, experience_metrics = self.build_experience(rollout)
        self.source.keep_logprobs(experience.old_logprobs)
        samples, target_metrics = self.build_targets(experience, self.config.algo)
        metrics |= experience_metrics | target_metrics
        # The weights and the loop's own state change together, even when a signal arrives.
        with deferring_stops():
            self.saver.begin_update()
            metrics |= self.update(samples, iteration)
            self.kl, kl_metrics = self.kl.update(experience)
            self.commit(self.get_state(iteration, metrics | kl_metrics))

    def publish_and_evaluate(self) -> None:
        """Publish the iteration's weights to the servers, evaluate where it is due, and log the iteration."""
        metrics = self.state.metrics | self.publish(self.iteration)
        if self.is_last() or self.iteration % self.config.train.eval_every == 0:
            metrics |= self.evaluate()
        self.report.log(self.iteration, metrics)
        self.saver.score(metrics.get(self.config.checkpoint.best_metric))

    def get_state(self, iteration: int, metrics: Metrics) -> TrainerState:
        """The loop's own state for a checkpoint."""
        return TrainerState(
            iteration=iteration,
            metrics=metrics,
            num_samples=self.num_samples,
            heldout_reward=None if math.isnan(self.heldout_reward) else self.heldout_reward,
            kl_coef=self.kl.coef,
            reward_moments=self.reward_moments,
            source=self.source.state(),
            sizes=self.saver.measure_files(),
        )

    def restore(self, state: TrainerState) -> None:
        """Resume from `state`; the roles have been loaded."""
        self.num_samples, self.reward_moments = state.num_samples, state.reward_moments
        self.heldout_reward = float("nan") if state.heldout_reward is None else state.heldout_reward
        self.kl = replace(self.kl, coef=state.kl_coef)
        self.source.restore(state.source)
        self.state = state
        self.saver.restore(state)

    def commit(self, state: TrainerState) -> None:
        """Record `state`, with which the roles' weights now agree."""
        self.state = state
        self.saver.commit(state)

    def collect(self, iteration: int) -> tuple[Rollout, Metrics]:
        """The groups of one iteration and their metrics.

        With `algo.dynamic_sampling` only groups whose rewards differ; with `algo.replay` also older groups.
        """
        with self.report.phase("rollout"):
            batch = self.source.take(iteration, self.version)
        for samples in batch.sampled:
            self.record(Rollout(samples, self.version), iteration)
        self.check_failures([s for samples in batch.sampled for s in samples], f"iteration-{iteration}")
        fresh = [sample for group in batch.fresh for sample in group]
        metrics = batch.metrics | compute_score_metrics(fresh, with_environment=self.has_turns)
        rollout = join_groups(batch.fresh + batch.replayed, self.version)
        return rollout, metrics | {"sampling/total_samples": self.num_samples}

    def is_last(self) -> bool:
        """Whether the number of iterations, or the limit of time or samples, allows no further iteration."""
        return self.iteration >= self.config.train.num_iterations or self.reached_limit()

    def generate(self, prompts: Sequence[Prompt], key: str) -> Rollout:
        """Scored responses of the policy before its first update; key: as in `RolloutEngine.generate`."""
        num_responses = self.config.train.responses_per_prompt
        rollout = self.with_servers(
            lambda: self.components.collector.collect(prompts, num_responses, weight_version=self.version, key=key)
        )
        self.record(rollout, 0)
        self.check_failures(rollout.samples, key)
        return rollout

    def check_failures(self, samples: Sequence[Sample], key: str) -> None:
        """Say which responses have no reward, and why. Raises TooManyFailuresError; resumed, they are sampled again."""
        try:
            check_failures(samples, self.config.reward.max_failed_frac)
        except TooManyFailuresError:
            self.source.close()
            if journal := self.components.collector.journal:
                journal.drop_failed()
            raise
        if text := describe_failures(samples):
            self.report.message(f"warning: {key}: {text}; they are not learned from")

    def record(self, rollout: Rollout, iteration: int) -> None:
        """Count the responses and, with logger.save_rollouts, save them."""
        self.num_samples += len(rollout.samples)
        if self.components.rollout_file:
            self.components.rollout_file.write(rollout, iteration)

    def check_servers(self) -> None:
        """Check that every server answers, and restart lost ones. Raises RuntimeError naming a server that is down."""
        self.with_servers(self.components.engine.check_health)

    def with_servers(self, ask: Callable[[], T]) -> T:
        """The result of `ask`, repeated where servers were lost, once they run again with the current weights.

        Servers that have given memory back take it again first, and get the current weights.
        """
        sync, offloader = self.components.sync, self.components.offloader

        def ask_ready() -> T:
            if offloader.has_released:
                sync.publish(self.version)
            return ask()

        return self.recovery.run(ask_ready, lambda: sync.publish(self.version))

    def reconnect(self) -> None:
        """Discard all state about the servers, after some were restarted."""
        self.components.sync.reconnect()
        self.components.offloader.forget()
        self.source.begin_again()

    def build_experience(self, rollout: Rollout) -> tuple[Experience, Metrics]:
        """The responses with the log-probs and values of policy, reference and critic.

        They compute in parallel, or in turns where they share GPUs (megarl/cluster/turns.py).
        """
        tensors = build_tensors(rollout)
        sequences, temperature = tensors.sequences, self.config.rollout.temperature
        kl = self.config.algo.kl
        full_kl = kl.in_reward and kl.reward_estimator is KLEstimator.full
        with self.report.phase("experience"):
            old = self.components.policy.logprobs(sequences, temperature)
            ref_kl = self.components.policy.reference_kl(sequences, temperature) if full_kl else None
            ref = self.components.reference.logprobs(sequences, temperature) if self.components.reference else None
            values = self.components.critic.values(sequences) if self.components.critic else None
            wait_all([pending for pending in (old, ref_kl, ref, values) if pending])
            experience = tensors.build_experience(
                old.result(),
                ref_logprobs=ref.result() if ref else None,
                ref_kl=ref_kl.result() if ref_kl else None,
                values=values.result() if values else None,
            )
            experience = replace(experience, too_stale=find_too_stale(rollout, self.config.rollout.max_staleness))
        return experience, compute_batch_metrics(experience)

    def build_targets(self, experience: Experience, algo: AlgoConfig) -> tuple[TrainingSamples, Metrics]:
        """Advantages and returns over the global batch, with the running statistics over the iterations."""
        response_length, wrong = self.config.rollout.response_length, self.config.reward.wrong
        if needs_reward_moments(algo):
            self.reward_moments = update_reward_moments(self.reward_moments, experience, algo, response_length, wrong)
        samples, metrics = compute_targets(
            experience,
            algo,
            self.kl.coef,
            response_length=response_length,
            reward_moments=self.reward_moments,
            wrong=wrong,
        )
        if uses_topr(algo):
            # Iterations without a token of the present weights go by the last one that had some.
            noise = measure_engine_noise(experience)
            self.engine_noise = self.engine_noise if noise is None else noise
            metrics |= compute_engine_taper(samples, experience.scored, algo.topr.ratio_level, self.engine_noise)
        return samples, metrics

    def update(self, samples: TrainingSamples, iteration: int) -> Metrics:
        """Optimizer steps of critic and policy on the same minibatches: they are independent."""
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, iteration)
        running: list[Pending[list[Metrics]]] = []
        with self.report.phase("update"):
            if self.components.critic is not None:
                repeats = self.config.critic.updates_per_policy_update
                running.append(self.components.critic.update(samples, minibatches * repeats))
            running.append(self.components.policy.update(samples, minibatches))
            wait_all(running)
            return {name: value for call in running for name, value in average_steps(call.result()).items()}

    def publish(self, version: int) -> Metrics:
        """Publish the policy's weights to the servers as `version`, verified."""
        with self.report.phase("sync"):
            metrics = self.recovery.run(lambda: self.components.sync.publish(version))
        self.version = version
        return metrics

    def evaluate(self) -> Metrics:
        """Mean greedy reward on the held-out prompts."""
        with self.report.phase("evaluate"):
            rollout = self.with_servers(
                lambda: self.components.collector.collect_greedy(
                    self.components.heldout, weight_version=self.version, key=f"evaluation-{self.iteration}"
                )
            )
        self.report.samples(rollout.samples)
        if text := describe_failures(rollout.samples):
            self.report.message(f"warning: evaluation-{self.iteration}: {text}; they count as wrong")
        metrics = compute_heldout_metrics(rollout.samples, with_environment=self.has_turns)
        self.heldout_reward = metrics["reward/heldout"]
        return metrics

    def reached_goal(self) -> bool:
        goal = self.config.train.stop_at_heldout_reward
        return goal is not None and self.heldout_reward >= goal

    def reached_limit(self) -> bool:
        minutes, samples = self.config.train.max_minutes, self.config.train.max_samples
        out_of_time = minutes is not None and time.monotonic() - self.started > 60 * minutes
        return out_of_time or (samples is not None and self.num_samples >= samples)


def split_minibatches(config: Config, num_samples: int, iteration: int) -> list[Tensor]:
    """Row numbers (int64) of each optimizer step: a new order in every epoch, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + iteration)
    size = config.train.minibatch_size
    return [
        rows
        for _ in range(config.train.epochs_per_iteration)
        for rows in torch.split(torch.randperm(num_samples, generator=generator), size)
    ]


def average_steps(steps: Sequence[Metrics]) -> Metrics:
    """One value per metric: the maximum over the optimizer steps for names ending in _max, else the mean."""
    values = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name].append(value)
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}
