"""The generation servers as the loop has them: with the current weights, restarted where they were lost; and what the
iterations learn from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from megarl.config.schema.root import Config
from megarl.config.schema.task import MultiTurnEnvironmentConfig
from megarl.interfaces import DeadlineError, RolloutServers, TrainBackend, WeightSync
from megarl.report.report import Report
from megarl.report.scores import (
    TooManyFailuresError,
    check_failures,
    compute_heldout_metrics,
    compute_score_metrics,
    describe_failures,
)
from megarl.report.tokens import TokenFile
from megarl.rollout.client import wait_left_over
from megarl.rollout.collector import Collector
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.offload import ServerOffloader
from megarl.rollout.rollout_file import RolloutWriter, SavedGroups
from megarl.rollout.source import NoSync, build_source, join_groups
from megarl.task.data import PromptSampler
from megarl.task.render import CriticPrompt
from megarl.types import Metrics, Prompt, Rollout

T = TypeVar("T")

LEFT_OVER_DEADLINE_S = 60.0
"""How long to wait for abandoned calls, more than their connects and clean-up calls may take."""


@dataclass(frozen=True)
class TrainerComponents:
    """The components of the loop; all but the sampler and the report run in other processes."""

    policy: TrainBackend | None
    """None: nothing but the critic learns, from saved rollouts"""
    critic: TrainBackend | None
    reference: TrainBackend | None
    report: Report
    sync: WeightSync = field(default_factory=NoSync)
    engine: SGLangEngine | None = None
    """None, as collector and sampler: nothing is generated (`saved`)"""
    collector: Collector | None = None
    sampler: PromptSampler[Prompt] | None = None
    heldout: Sequence[Prompt] = ()
    saved: SavedGroups | None = None
    """What rollout.file has; None: responses are generated"""
    rollout_file: RolloutWriter | None = None
    """With logger.save_rollouts"""
    token_file: TokenFile | None = None
    """Has some responses token by token, with logger.num_token_records > 0"""
    servers: RolloutServers | None = None
    """None: the servers are not this run's own, and losing one ends it"""
    offloader: ServerOffloader = field(default_factory=ServerOffloader)
    """Which memory the servers have given back for the roles' calls"""
    critic_prompt: CriticPrompt | None = None
    """With data.critic_prompt"""


@dataclass(frozen=True)
class Recovery:
    """Repeats calls that failed because servers were lost, after restarting those servers."""

    servers: RolloutServers | None
    """None: they cannot be restarted"""
    say: Callable[[str], None]
    max_restarts: int
    """In a row, for one call of `run`"""
    reconnect: Callable[[], None] = lambda: None
    """Called after each restart"""
    restarts_all: bool = False
    """Where one is lost, the others are restarted too"""

    def run(self, ask: Callable[[], T], refill: Callable[[], object] = lambda: None) -> T:
        """The result of `ask`, repeated where servers were lost.

        refill: sends the current weights to all servers after a restart, before `ask`; not needed where `ask` does.
        Raises what `ask` or `refill` raises where no server was lost, and after the last restart.
        """
        num_restarts = 0
        while True:
            try:
                if num_restarts:
                    refill()
                return ask()
            except RuntimeError as error:
                if not self._restore(error, num_restarts):
                    raise
                num_restarts += 1

    def _restore(self, error: RuntimeError, num_restarts: int) -> bool:
        """Whether lost servers caused `error` and have been restarted."""
        if self.servers is None or self.max_restarts == 0:
            return False
        try:
            wait_left_over(LEFT_OVER_DEADLINE_S)
        except DeadlineError as late:
            error.add_note(str(late))
            return False
        lost = self.servers.find_lost()
        losses = "; ".join(f"{name} was lost: {reason}" for name, reason in lost.items())
        if lost and num_restarts == self.max_restarts:
            error.add_note(f"{losses}; rollout.max_server_restarts={self.max_restarts} have been made in a row")
        if not lost or num_restarts == self.max_restarts:
            return False
        self.say(f"{losses}; restart {num_restarts + 1} of at most {self.max_restarts}")
        self.servers.restart(self.servers.names if self.restarts_all else lost)
        self.reconnect()
        return True


class Fleet:
    """The generation servers of a run, with the trainer's weights."""

    def __init__(self, config: Config, components: TrainerComponents):
        self.version = 0
        """Of the weights that the servers have"""
        self.forget_groups: Callable[[], None] = lambda: None
        """Breaks off what is under way, after servers were restarted"""
        self._components, self._offloader, say = components, components.offloader, components.report.message
        self._has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig)
        restarts_all, most = self._offloader.offload is not None, config.rollout.max_server_restarts
        self._recovery = Recovery(components.servers, say, most, self._reconnect, restarts_all)

    def publish(self, version: int) -> Metrics:
        """Send the policy's weights to the servers as `version`, verified."""
        with self._components.report.phase("sync"):
            metrics = self._recovery.run(lambda: self._components.sync.publish(version))
        self.version = version
        return metrics

    def ask(self, ask: Callable[[], T]) -> T:
        """The result of `ask` with the current weights on all servers, repeated where some were lost."""

        def ask_ready() -> T:
            if self._offloader.has_released:
                self._components.sync.publish(self.version)
            return ask()

        return self._recovery.run(ask_ready, lambda: self._components.sync.publish(self.version))

    def evaluate(self, iteration: int) -> Metrics:
        """Mean greedy reward on the held-out prompts, and what train.eval_sets adds; nothing without servers."""
        it, key = self._components, f"evaluation-{iteration}"
        if (collector := it.collector) is None:
            return {}
        with it.report.phase("evaluate"):
            rollout, further = self.ask(lambda: collector.evaluate(it.heldout, weight_version=self.version, key=key))
        it.report.samples(rollout.samples)
        if it.token_file is not None:
            it.token_file.write_heldout(iteration, rollout)
        if text := describe_failures(rollout.samples):
            it.report.message(f"warning: {key}: {text}; they count as wrong")
        return compute_heldout_metrics(rollout.samples, with_environment=self._has_turns) | further

    def _reconnect(self) -> None:
        """Discard all state about the servers, after some were restarted."""
        self._components.sync.reconnect()
        self._offloader.forget()
        self.forget_groups()


class Source:
    """What each iteration learns from: counted, recorded, and refused where too many responses have no reward."""

    def __init__(self, config: Config, components: TrainerComponents, fleet: Fleet):
        self.num_samples = 0
        """Responses sampled so far"""
        self._components, self._fleet, self._max_failed_frac = components, fleet, config.reward.max_failed_frac
        self._has_turns = isinstance(config.environment, MultiTurnEnvironmentConfig)
        it, say = components, components.report.message
        self._groups = build_source(config, it.saved, it.engine, it.collector, it.sampler, fleet.ask, say)
        fleet.forget_groups = self._groups.begin_again

    def take(self, iteration: int) -> tuple[Rollout, Metrics]:
        """The groups of one iteration and their metrics. Raises TooManyFailuresError; a resumed run samples those
        responses again."""
        it, version = self._components, self._fleet.version
        with it.report.phase("rollout"):
            batch = self._groups.take(iteration, version)
        for samples in batch.sampled:
            self.num_samples += len(samples)
            if it.rollout_file:
                it.rollout_file.write(Rollout(samples, version), iteration)
        sampled = [sample for samples in batch.sampled for sample in samples]
        try:
            check_failures(sampled, self._max_failed_frac)
        except TooManyFailuresError:
            self._groups.close()
            if it.collector and it.collector.journal:
                it.collector.journal.drop_failed()
            raise
        if text := describe_failures(sampled):
            it.report.message(f"warning: iteration-{iteration}: {text}; they are not learned from")
        metrics = batch.metrics | {"sampling/total_samples": self.num_samples}
        if iteration > 0:
            fresh = [sample for group in batch.fresh for sample in group]
            metrics |= compute_score_metrics(fresh, with_environment=self._has_turns)
        return join_groups(batch.fresh + batch.replayed, version), metrics

    def keep_logprobs(self, old_logprobs: Tensor) -> None:
        """The policy's of the rollout taken last, float32 [B, T], for when its samples are replayed."""
        self._groups.keep_logprobs(old_logprobs)

    def state(self) -> dict[str, Any]:
        """The fields of a `TrainerState` that are the source's."""
        reward = self._components.collector.reward_state() if self._components.collector else None
        return {"num_samples": self.num_samples, "source": self._groups.state(), "reward": reward}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` gave; other names are ignored."""
        self.num_samples = state["num_samples"]
        if self._components.collector and state["reward"] is not None:
            self._components.collector.load_reward_state(state["reward"])
        self._groups.restore(state["source"])

    def close(self) -> int:
        """End what runs ahead; returns how many requested responses are dropped."""
        return self._groups.close()
