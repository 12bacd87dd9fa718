"""The training loop, the same for every algorithm.

    source.take       prompts in, scored groups out         a Rollout
    roles.score       what policy, critic and reference say of them     an Experience
    algorithm         advantages and returns                TrainingSamples
    roles.update      optimizer steps of critic and policy
    fleet.publish     the new weights to the servers, verified; then a checkpoint and an evaluation where they are due

Value pretraining is its iterations up to 0: the policy is frozen, and the critic regresses Monte-Carlo returns.
"""

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass

from megarl.algo.algorithm import Algorithm, describe_end
from megarl.algo.objective import reuses_logprobs
from megarl.config.schema.algo import compares_pairs
from megarl.config.schema.root import Config, TrainConfig
from megarl.mcore.spec import Role
from megarl.report.record import HELDOUT, HELDOUT_LOGPROB, HELDOUT_PAIRS
from megarl.rollout.collector import Evaluated
from megarl.run.checkpoint import LoopSaver, TrainerState
from megarl.run.components import Fleet, Roles, Source, TrainerComponents
from megarl.run.segments import SegmentedBackend
from megarl.signals import deferring_stops
from megarl.types import Metrics


@dataclass(frozen=True)
class Limit:
    """A limit that a run has reached."""

    key: str
    reached: str
    """`after 4 minutes`"""


@dataclass(frozen=True)
class Summary:
    """How a run ended. num_iterations: without value pretraining's. heldout_reward: NaN where nothing evaluates; of a
    reward model, its accuracy on held-out pairs, and with rollout.from_data the held-out log-prob."""

    num_iterations: int
    heldout_reward: float
    limit: Limit | None = None
    """What ended it before train.num_iterations; None: nothing did"""
    measured: str = HELDOUT
    """The metric that heldout_reward is"""

    @property
    def results(self) -> dict[str, float]:
        """What the last line of a run says, by name."""
        return {"iterations": self.num_iterations, self.measured: self.heldout_reward}


@dataclass(frozen=True)
class Evaluation:
    """One that goes on beside the next iteration."""

    iteration: int
    metrics: Metrics
    times: Metrics
    begun: Future[Evaluated]

    @property
    def unlogged(self) -> tuple[int, Metrics]:
        """What a checkpoint has of it: the iteration without its evaluation."""
        return self.iteration, self.metrics | self.times


class Trainer:
    """Runs the iterations of one configuration over its components."""

    def __init__(
        self,
        config: Config,
        components: TrainerComponents,
        saver: LoopSaver | None = None,
        started: float | None = None,
    ):
        """saver: None saves nothing. started: on time.monotonic's clock, for train.max_minutes; None: now."""
        self.config, self.components, self.report = config, components, components.report
        self.saver = saver or LoopSaver()
        self.fleet = Fleet(config, components)
        self.source = Source(config, components, self.fleet)
        found = map(components.roles.get, (Role.policy, Role.critic, Role.reference))
        policy, critic, reference = (None if role is None else SegmentedBackend(role) for role in found)
        self.roles = Roles(config, policy, critic, reference, components.inputs.critic_prompt)
        self.measured = HELDOUT_LOGPROB if config.rollout.from_data else HELDOUT
        if compares_pairs(config.algo):
            self.measured = HELDOUT_PAIRS
        self.algorithm = Algorithm(config)
        self.heldout_reward = float("nan")
        self.evaluation: Evaluation | None = None
        """The one that goes on"""
        self.published: int | None = None
        self.first = -config.algo.value_pretrain.num_steps
        """The iteration that the run starts from"""
        self.started = time.monotonic() if started is None else started
        self.commit(self.first, {})

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
                while not self.is_last():
                    self.train(self.iteration + 1)
                    self.finish_evaluation()
                    self.saver.save_if_due()
                    self.publish_and_evaluate()
                self.finish_evaluation()
                self.saver.save()
        finally:
            num_dropped = self.source.groups.close()
        if num_dropped:
            self.report.message(f"{num_dropped} responses that ran ahead of iteration {self.iteration} are dropped")
        is_complete = self.iteration >= self.config.train.num_iterations
        limit = None if is_complete else self.find_limit()
        return Summary(max(self.iteration, 0), self.heldout_reward, limit, self.measured)

    def train(self, iteration: int) -> None:
        """One iteration up to its update; `publish_and_evaluate` does the rest.

        The step that ends value pretraining is iteration 0, whatever its number.
        """
        rollout, metrics = self.source.take(iteration)
        self.saver.proceed()
        reuses = reuses_logprobs(self.config, len(rollout.samples), iteration)
        with self.report.phase("experience"):
            experience, found = self.roles.score(rollout, iteration, reuses_logprobs=reuses)
        self.source.groups.keep_logprobs(experience.old_logprobs)
        samples, of_targets = self.algorithm.build_targets(experience, iteration, has_old_logprobs=not reuses)
        metrics |= found | of_targets
        end = None
        # The weights and the loop's own state change together, even when a signal arrives.
        with deferring_stops():
            self.saver.begin_update()
            with self.report.phase("update"):
                metrics |= self.roles.update(samples, iteration)
            if reuses:
                experience, found = self.roles.add_old_logprobs(experience)
                metrics |= found
            if iteration > 0:
                if (file := self.components.token_file) is not None:
                    file.write_training(iteration, rollout, experience, samples)
                metrics |= self.algorithm.update_kl(experience, is_frozen=self.config.policy.is_frozen(iteration))
            else:
                end = self.algorithm.end_step(metrics)
            self.commit(iteration if end is None else 0, metrics)
        if end is not None:
            self.report.message(describe_end(self.algorithm.explained, end))

    def publish_and_evaluate(self) -> None:
        """Publish the iteration's weights, if they are new, evaluate where it is due, and log the iteration.

        With rollout.max_staleness an evaluation that is not the last goes on beside the next iteration, at whose end
        `finish_evaluation` logs it.
        """
        metrics, version = self.state.metrics, self.config.policy.count_versions(self.iteration)
        if version != self.published:
            found, self.published = self.fleet.publish(version), version
            # A resumed run publishes a frozen policy once more, and its metrics are those of an uninterrupted one.
            if self.iteration == self.first or not self.config.policy.is_frozen(self.iteration):
                metrics = metrics | found
        is_last = self.is_last()
        if is_last or (self.iteration >= 0 and self.iteration % self.config.train.eval_every == 0):
            metrics = metrics | self.roles.score_heldout(self.components.inputs)
            begun = None if is_last else self.fleet.begin_evaluation(self.iteration)
            if begun is not None:
                self.evaluation = Evaluation(self.iteration, metrics, self.report.take_times(), begun)
                return
            metrics = metrics | self.fleet.evaluate(self.iteration)
        self._log(self.iteration, metrics)

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that goes on, if any, and log its iteration."""
        if (it := self.evaluation) is not None:
            metrics = it.metrics | self.fleet.evaluate(it.iteration, it.begun)
            self.evaluation = None
            self._log(it.iteration, metrics, it.times)
            self.commit(self.iteration, self.state.metrics)

    def _log(self, iteration: int, metrics: Metrics, times: Metrics | None = None) -> None:
        self.heldout_reward = metrics.get(self.measured, self.heldout_reward)
        self.report.log(iteration, metrics, times)
        self.saver.score(iteration, metrics.get(self.config.checkpoint.best_metric))

    def is_last(self) -> bool:
        """Whether the number of iterations, the target, or the limit of time or samples allows no further iteration."""
        return self.iteration >= self.config.train.num_iterations or self.find_limit() is not None

    def find_limit(self) -> Limit | None:
        minutes = (time.monotonic() - self.started) / 60
        return find_limit(self.config.train, minutes, self.source.num_samples, self.heldout_reward)

    def commit(self, iteration: int, metrics: Metrics) -> None:
        """Record the loop's own state, with which the roles' weights now agree, for a checkpoint."""
        self.state = TrainerState(
            iteration=iteration,
            metrics=metrics,
            heldout_reward=None if math.isnan(self.heldout_reward) else self.heldout_reward,
            sizes=self.saver.measure_files(),
            unlogged=None if self.evaluation is None else self.evaluation.unlogged,
            **self.source.state(),
            **self.roles.state(),
            **self.algorithm.state(),
        )
        self.saver.commit(self.state)

    def restore(self, state: TrainerState) -> None:
        """Resume from `state`; the roles have been loaded."""
        self.heldout_reward = float("nan") if state.heldout_reward is None else state.heldout_reward
        self.published = None
        self.algorithm.restore(vars(state))
        self.roles.restore(vars(state))
        self.source.restore(vars(state))
        self.state = state
        self.saver.restore(state)
        if state.unlogged is not None:
            self.report.log(*state.unlogged, times={})


def find_limit(train: TrainConfig, minutes: float, num_samples: int, heldout_reward: float) -> Limit | None:
    """The target or the limit that is reached. minutes: since the run started. heldout_reward: NaN reaches none."""
    goal = train.stop_at_heldout_reward
    if goal is not None and heldout_reward >= goal:
        reached = f"at the held-out reward {heldout_reward:.4f}, of at least {goal:g}"
        return Limit("train.stop_at_heldout_reward", reached)
    if train.max_minutes is not None and minutes > train.max_minutes:
        return Limit("train.max_minutes", f"after {train.max_minutes:g} minute{'s' * (train.max_minutes != 1)}")
    if train.max_samples is not None and num_samples >= train.max_samples:
        return Limit("train.max_samples", f"after {num_samples} responses, of at least {train.max_samples}")
    return None


def format_limit(limit: Limit, iteration: int, num_iterations: int) -> str:
    """`ended after 4 minutes (train.max_minutes): 3 of 8 iterations`."""
    return f"ended {limit.reached} ({limit.key}): {iteration} of {num_iterations} iterations"
