"""The training loop: rollout, experience, targets, update, checkpoint, publish; the same for every algorithm.

Value pretraining is its iterations up to 0: the policy is frozen, and the critic regresses Monte-Carlo returns.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.algo.algorithm import Algorithm
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.registry import reads_old_logprobs, reuses_logprobs
from megarl.algo.value_pretraining import build_pretraining_algo, describe_end
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.root import Config
from megarl.config.schema.task import MultiTurnEnvironmentConfig
from megarl.experience import add_old_logprobs, average_steps, compute_experience, split_minibatches
from megarl.interfaces import Pending, RolloutServers, TrainBackend, WeightSync, wait_all
from megarl.report.report import Report
from megarl.report.scores import (
    TooManyFailuresError,
    check_failures,
    compute_heldout_metrics,
    compute_score_metrics,
    describe_failures,
)
from megarl.rollout.collector import Collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import RolloutWriter, SavedGroups
from megarl.rollout.source import build_source, join_groups
from megarl.rollout.token_records import TokenRecorder
from megarl.run.checkpoint import LoopSaver, TrainerState
from megarl.run.limits import Limit, find_goal, find_limit
from megarl.run.process import deferring_stops
from megarl.run.recovery import Fleet
from megarl.task.data import PromptSampler
from megarl.task.render import CriticPrompt
from megarl.types import Experience, Metrics, Prompt, Rollout, Sample, TrainingSamples


@dataclass(frozen=True)
class TrainerComponents:
    """The components of the loop; all but the sampler and the report run in other processes."""

    policy: TrainBackend | None
    """None: nothing but the critic learns, from saved rollouts"""
    critic: TrainBackend | None
    reference: TrainBackend | None
    engine: SGLangEngine | None
    """None, as collector and sampler: nothing is generated (`saved`)"""
    collector: Collector | None
    sync: WeightSync
    sampler: PromptSampler[Prompt] | None
    heldout: Sequence[Prompt]
    report: Report
    saved: SavedGroups | None = None
    """What rollout.file has; None: responses are generated"""
    rollout_file: RolloutWriter | None = None
    """Writes every sampled response of training, with logger.save_rollouts; None: they are not saved"""
    token_recorder: TokenRecorder = field(default_factory=TokenRecorder)
    """Writes some responses token by token, with logger.num_token_records > 0"""
    servers: RolloutServers | None = None
    """None: the servers are not this run's own, and losing one ends it"""
    saver: LoopSaver = field(default_factory=LoopSaver)
    offloader: ServerOffloader = field(default_factory=ServerOffloader)
    """Which memory the servers have given back for the roles' calls"""
    critic_prompt: CriticPrompt | None = None
    """With data.critic_prompt"""


@dataclass(frozen=True)
class Summary:
    """How a run ended. num_iterations: without value pretraining's. heldout_reward: NaN where no server evaluates."""

    num_iterations: int
    heldout_reward: float
    limit: Limit | None = None
    """What ended it before train.num_iterations; None: nothing did"""


class Trainer:
    """Runs the iterations of one configuration over its components."""

    def __init__(self, config: Config, components: TrainerComponents, started: float | None = None):
        """started: on time.monotonic's clock, what train.max_minutes counts from; None: now."""
        self.config, self.components = config, components
        self.report, self.saver = components.report, components.saver
        it, say = components, components.report.message
        self.fleet = Fleet(it.sync, it.offloader, it.servers, config.rollout.max_server_restarts, say)
        self.has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig)
        self.algorithm = Algorithm(config)
        self.reuses_logprobs = False
        """Whether the update of this iteration computes old_logprobs itself"""
        self.source = build_source(config, it.saved, it.engine, it.collector, it.sampler, self.fleet.ask, say)
        self.fleet.forget_groups = self.source.begin_again
        self.num_samples, self.heldout_reward = 0, float("nan")
        self.published: int | None = None
        self.first = -config.algo.value_pretrain.num_steps
        """The iteration that the run starts from"""
        self.started = time.monotonic() if started is None else started
        self.commit(self.get_state(self.first, {}))

    @property
    def version(self) -> int:
        """Of the weights that the servers have."""
        return self.fleet.version

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
                while not self.is_last() and not find_goal(self.config.train, self.heldout_reward):
                    self.train(self.iteration + 1)
                    self.saver.save_if_due()
                    self.publish_and_evaluate()
                self.saver.save()
        finally:
            num_dropped = self.source.close()
        if num_dropped:
            self.report.message(f"{num_dropped} responses that ran ahead of iteration {self.iteration} are dropped")
        return Summary(max(self.iteration, 0), self.heldout_reward, self.find_end())

    def train(self, iteration: int) -> None:
        """One iteration up to its update; `publish_and_evaluate` does the rest."""
        if iteration <= 0:
            self.pretrain(iteration)
            return
        rollout, metrics = self.collect(iteration)
        self.saver.proceed()
        self.reuses_logprobs = reuses_logprobs(self.config, len(rollout.samples), iteration)
        experience, experience_metrics = self.build_experience(rollout)
        self.source.keep_logprobs(experience.old_logprobs)
        samples, target_metrics = self.build_targets(experience)
        metrics |= experience_metrics | target_metrics
        record = self.components.token_recorder.begin(rollout, experience)
        # The weights and the loop's own state change together, even when a signal arrives.
        with deferring_stops():
            self.saver.begin_update()
            metrics |= self.update(samples, iteration)
            if self.reuses_logprobs:
                assert self.components.policy is not None
                experience, found = add_old_logprobs(experience, self.components.policy, self.config.algo)
                metrics |= found
            self.components.token_recorder.finish(record, experience, samples, iteration)
            metrics |= self.algorithm.update_kl(experience, is_frozen=self.config.policy.is_frozen(iteration))
            self.commit(self.get_state(iteration, metrics))

    def pretrain(self, iteration: int) -> None:
        """One step of value pretraining; the one that ends it is iteration 0, whatever its number."""
        algo = build_pretraining_algo(self.config.algo)
        rollout, metrics = self.collect(iteration)
        self.saver.proceed()
        experience = self.score(rollout, algo, scores_policy=algo.kl.in_reward)
        samples, found = self.algorithm.build_pretraining_targets(experience)
        with deferring_stops():
            self.saver.begin_update()
            metrics |= found | self.update(samples, iteration)
            end = self.algorithm.end_step(metrics)
            self.commit(self.get_state(iteration if end is None else 0, metrics))
        if end is not None:
            self.report.message(describe_end(self.algorithm.explained, end))

    def publish_and_evaluate(self) -> None:
        """Publish the iteration's weights, if they are new, evaluate where it is due, and log the iteration."""
        metrics, version = self.state.metrics, self.config.policy.count_versions(self.iteration)
        if version != self.published:
            found, self.published = self.publish(version), version
            # A resumed run publishes a frozen policy once more, and its metrics are those of an uninterrupted one.
            if self.iteration == self.first or not self.config.policy.is_frozen(self.iteration):
                metrics = metrics | found
        is_due = self.iteration >= 0 and self.iteration % self.config.train.eval_every == 0
        if self.components.collector and (is_due or self.is_last()):
            metrics |= self.evaluate(self.components.collector)
        self.report.log(self.iteration, metrics)
        self.saver.score(metrics.get(self.config.checkpoint.best_metric))

    def get_state(self, iteration: int, metrics: Metrics) -> TrainerState:
        """The loop's own state for a checkpoint."""
        return TrainerState(
            iteration=iteration,
            metrics=metrics,
            num_samples=self.num_samples,
            heldout_reward=None if math.isnan(self.heldout_reward) else self.heldout_reward,
            reward=self.components.collector.reward_state() if self.components.collector else None,
            source=self.source.state(),
            sizes=self.saver.measure_files(),
            **self.algorithm.state(),
        )

    def restore(self, state: TrainerState) -> None:
        """Resume from `state`; the roles have been loaded."""
        self.num_samples, self.published = state.num_samples, None
        self.heldout_reward = float("nan") if state.heldout_reward is None else state.heldout_reward
        self.algorithm.restore(vars(state))
        if self.components.collector and state.reward is not None:
            self.components.collector.load_reward_state(state.reward)
        self.source.restore(state.source)
        self.state = state
        self.saver.restore(state)

    def commit(self, state: TrainerState) -> None:
        """Record `state`, with which the roles' weights now agree."""
        self.state = state
        self.saver.commit(state)

    def collect(self, iteration: int) -> tuple[Rollout, Metrics]:
        """The groups of one iteration and their metrics.

        With `algo.dynamic_sampling` only groups whose rewards differ; with `algo.replay` also older groups. Value
        pretraining has neither.
        """
        with self.report.phase("rollout"):
            batch = self.source.take(iteration, self.version)
        for samples in batch.sampled:
            self.record(Rollout(samples, self.version), iteration)
        self.check_failures([s for samples in batch.sampled for s in samples], f"iteration-{iteration}")
        rollout, fresh = join_groups(batch.fresh + batch.replayed, self.version), [s for g in batch.fresh for s in g]
        metrics = batch.metrics | {"sampling/total_samples": self.num_samples}
        if iteration > 0:
            metrics |= compute_score_metrics(fresh, with_environment=self.has_turns)
        return rollout, metrics

    def is_last(self) -> bool:
        """Whether the number of iterations, or the limit of time or samples, allows no further iteration."""
        return self.iteration >= self.config.train.num_iterations or self.find_limit() is not None

    def check_failures(self, samples: Sequence[Sample], key: str) -> None:
        """Say which responses have no reward, and why. Raises TooManyFailuresError; resumed, they are sampled again."""
        try:
            check_failures(samples, self.config.reward.max_failed_frac)
        except TooManyFailuresError:
            self.source.close()
            if (collector := self.components.collector) and collector.journal:
                collector.journal.drop_failed()
            raise
        if text := describe_failures(samples):
            self.report.message(f"warning: {key}: {text}; they are not learned from")

    def record(self, rollout: Rollout, iteration: int) -> None:
        """Count the responses and, with logger.save_rollouts, save them."""
        self.num_samples += len(rollout.samples)
        if self.components.rollout_file:
            self.components.rollout_file.write(rollout, iteration)

    def build_experience(self, rollout: Rollout) -> tuple[Experience, Metrics]:
        """The responses with what the roles say of them, and metrics."""
        algo = self.config.algo
        experience = self.score(rollout, algo, scores_policy=reads_old_logprobs(algo) and not self.reuses_logprobs)
        return experience, compute_batch_metrics(experience)

    def score(self, rollout: Rollout, algo: AlgoConfig, *, scores_policy: bool) -> Experience:
        """What the roles say of the responses, as far as `algo` needs it."""
        it = self.components
        with self.report.phase("experience"):
            roles = it.policy, it.critic, it.reference, it.critic_prompt
            return compute_experience(self.config, algo, rollout, *roles, scores_policy=scores_policy)

    def build_targets(self, experience: Experience) -> tuple[TrainingSamples, Metrics]:
        """Advantages and returns over the global batch."""
        return self.algorithm.build_targets(experience, has_old_logprobs=not self.reuses_logprobs)

    def update(self, samples: TrainingSamples, iteration: int) -> Metrics:
        """Optimizer steps of critic and policy on the same minibatches: they are independent.

        A frozen policy makes none: neither its weights nor its learning rate's schedule move.
        """
        number = iteration if iteration > 0 else -self.config.algo.value_pretrain.count_step(iteration)
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, number)
        running: list[Pending[list[Metrics]]] = []
        with self.report.phase("update"):
            if self.components.critic is not None:
                repeats = self.config.critic.updates_per_policy_update
                running.append(self.components.critic.update(samples.for_critic(), minibatches * repeats))
            if self.components.policy is not None and not self.config.policy.is_frozen(iteration):
                running.append(self.components.policy.update(samples.for_policy(), minibatches))
            wait_all(running)
            return {name: value for call in running for name, value in average_steps(call.result()).items()}

    def publish(self, version: int) -> Metrics:
        """Publish the policy's weights to the servers as `version`, verified."""
        with self.report.phase("sync"):
            return self.fleet.publish(version)

    def evaluate(self, collector: Collector) -> Metrics:
        """Mean greedy reward on the held-out prompts, and what train.eval_sets adds."""
        with self.report.phase("evaluate"):
            rollout, further = self.fleet.ask(
                lambda: collector.evaluate(
                    self.components.heldout, weight_version=self.version, key=f"evaluation-{self.iteration}"
                )
            )
        self.report.samples(rollout.samples)
        self.components.token_recorder.write_heldout(rollout, self.iteration)
        if text := describe_failures(rollout.samples):
            self.report.message(f"warning: evaluation-{self.iteration}: {text}; they count as wrong")
        metrics = compute_heldout_metrics(rollout.samples, with_environment=self.has_turns)
        self.heldout_reward = metrics["reward/heldout"]
        return metrics | further

    def find_limit(self) -> Limit | None:
        return find_limit(self.config.train, (time.monotonic() - self.started) / 60, self.num_samples)

    def find_end(self) -> Limit | None:
        """What ends the run before train.num_iterations, once it has ended."""
        if self.iteration >= self.config.train.num_iterations:
            return None
        return find_goal(self.config.train, self.heldout_reward) or self.find_limit()
