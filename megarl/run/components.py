"""The parts of the loop: what the iterations learn from (Source), what the roles say of it and the optimizer steps that
learn from it (Roles), and the servers with the current weights, restarted where they were lost (Fleet).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.algo.algorithm import build_pretraining_algo, measure_old_logprobs
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.losses import measure_pairs
from megarl.algo.objective import reads_old_logprobs
from megarl.config.schema.algo import KLEstimator, compares_pairs, needs_reference
from megarl.config.schema.mix import Source as MixSource
from megarl.config.schema.mix import has_turns, list_sources
from megarl.config.schema.root import Config
from megarl.interfaces import DeadlineError, Pending, RolloutServers, TrainBackend, WeightSync, wait_all
from megarl.mcore.spec import Role
from megarl.report import evaluation
from megarl.report.report import Report
from megarl.report.tokens import TokenFile
from megarl.rollout import demonstrations, pairs
from megarl.rollout.client import ServerOffloader, wait_left_over
from megarl.rollout.collector import Collector, Evaluated, build_tensors
from megarl.rollout.engine import SGLangEngine
from megarl.rollout.rollout_file import RolloutWriter
from megarl.rollout.source import GivenSource, GroupSource, SavedPretraining, SavedSource, join_groups
from megarl.run.inputs import Inputs
from megarl.task.mix import build_sampler
from megarl.task.render import CriticPrompt
from megarl.types import (
    Experience,
    FinishReason,
    Metrics,
    Prompt,
    Response,
    Rollout,
    Sample,
    Score,
    Sequences,
    TrainingSamples,
)

T = TypeVar("T")

RATIOS = ("policy/ratio_mean", "policy/ratio_max", "policy/approx_kl")
"""Metrics of the ratio to the policy before the update"""
LEFT_OVER_DEADLINE_S = 60.0
"""How long to wait for abandoned calls, more than their connects and clean-up calls may take."""


class NoSync:
    """The `WeightSync` of a run without servers."""

    def publish(self, version: int) -> Metrics:
        return {}

    def reconnect(self) -> None: ...


@dataclass(frozen=True)
class TrainerComponents:
    """The components of the loop; all but the inputs, the report and the files run in other processes."""

    inputs: Inputs
    report: Report
    roles: Mapping[Role, TrainBackend]
    """Those that the algorithm needs; without a policy nothing but the critic learns, from saved rollouts"""
    token_file: TokenFile | None = None
    """Has some responses token by token, with logger.num_token_records > 0"""
    rollout_file: RolloutWriter | None = None
    """With logger.save_rollouts"""
    engine: SGLangEngine | None = None
    """None, as collector and servers: nothing is generated (Inputs.saved_groups)"""
    collector: Collector | None = None
    sync: WeightSync = field(default_factory=NoSync)
    servers: RolloutServers | None = None
    offloader: ServerOffloader = field(default_factory=ServerOffloader)
    """Which memory the servers have given back for the roles' calls"""


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
        by_source = groupby(components.inputs.data.heldout, key=lambda prompt: prompt.source)
        self.heldout = [it for _, own in by_source for it in islice(own, config.train.num_eval_prompts)]
        self._has_turns = has_turns(config)
        restarts_all, most = self._offloader.offload is not None, config.rollout.max_server_restarts
        self._recovery = Recovery(components.servers, say, most, self._reconnect, restarts_all)
        self._evaluates_beside = config.rollout.max_staleness > 0

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

    def begin_evaluation(self, iteration: int) -> Future[Evaluated] | None:
        """Ask for what `evaluate` of this iteration then takes, while servers and roles go on; None: these do not work
        at the same time."""
        collector = self._components.collector
        if collector is None or not self._evaluates_beside:
            return None
        return collector.begin_evaluation(self.heldout, weight_version=self.version, key=f"evaluation-{iteration}")

    def evaluate(self, iteration: int, begun: Future[Evaluated] | None = None) -> Metrics:
        """Mean greedy reward on the held-out prompts, and what train.eval_sets adds; nothing without servers.

        begun: by `begin_evaluation`, of the weights that the servers still have.
        """
        it, key = self._components, f"evaluation-{iteration}"
        if (collector := it.collector) is None:
            return {}

        def ask() -> Evaluated:
            if begun is not None:
                with suppress(RuntimeError):  # Servers may have been lost or restarted meanwhile.
                    return begun.result()
            return collector.evaluate(self.heldout, weight_version=self.version, key=key)

        with it.report.phase("evaluate"):
            rollout, further = self.ask(ask)
        it.report.samples(rollout.samples)
        if it.token_file is not None:
            it.token_file.write_heldout(iteration, rollout)
        if text := evaluation.describe_failures(rollout.samples):
            it.report.message(f"warning: {key}: {text}; they count as wrong")
        further |= evaluation.compute_heldout_by_source(rollout.samples)
        return evaluation.compute_heldout_metrics(rollout.samples, with_environment=self._has_turns) | further

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
        self._has_turns = has_turns(config)
        it, inputs = components, components.inputs
        self._pretraining: SavedPretraining | None = None
        if inputs.saved_rollouts is not None:
            self._pretraining = SavedPretraining(config.algo.value_pretrain, inputs.saved_rollouts, it.report.message)
        self.groups: GroupSource | SavedSource
        if inputs.pairs is not None:
            self.groups = GivenSource(inputs.pairs.train, pairs.build_group, config.train.num_prompts, config.seed)
        elif inputs.demonstrations is not None:
            given, build = inputs.demonstrations.train, demonstrations.build_group
            self.groups = GivenSource(given, build, config.train.num_prompts, config.seed)
        elif inputs.saved_groups is not None:
            self.groups = SavedSource(inputs.saved_groups, config.train.num_prompts, config.seed)
        else:
            assert it.engine
            assert it.collector
            sampler = build_sampler(config, inputs.data.train)
            find_values = self._find_values if Role.critic in it.roles else None
            self.groups = GroupSource(config, it.engine, it.collector, sampler, fleet.ask, find_values)
        fleet.forget_groups = self.groups.begin_again

    def take(self, iteration: int) -> tuple[Rollout, Metrics]:
        """The groups of one iteration and their metrics. Raises TooManyFailuresError; a resumed run samples those
        responses again."""
        it, version = self._components, self._fleet.version
        with it.report.phase("rollout"):
            if self._pretraining is not None and iteration <= 0:
                batch = self._pretraining.take(iteration)
            else:
                batch = self.groups.take(iteration, version)
        for samples in batch.sampled:
            self.num_samples += len(samples)
            if it.rollout_file:
                it.rollout_file.write(Rollout(samples, version), iteration)
        sampled = [sample for samples in batch.sampled for sample in samples]
        try:
            evaluation.check_failures(sampled, self._max_failed_frac)
        except evaluation.TooManyFailuresError:
            self.groups.close()
            if it.collector and it.collector.journal:
                it.collector.journal.drop_failed()
            raise
        if text := evaluation.describe_failures(sampled):
            it.report.message(f"warning: iteration-{iteration}: {text}; they are not learned from")
        metrics = batch.metrics | {"sampling/total_samples": self.num_samples}
        metrics |= evaluation.compute_source_metrics(batch.sampled, batch.fresh)
        if iteration > 0:
            fresh = [sample for group in batch.fresh for sample in group]
            metrics |= evaluation.compute_score_metrics(fresh, with_environment=self._has_turns)
        return join_groups(batch.fresh + batch.replayed, version), metrics

    def _find_values(self, prompts: Sequence[Prompt]) -> list[float]:
        """The critic's value of each prompt, in the state before its response."""
        # Of which no token has a say in its own value.
        token = Response((0,), "", (0.0,), (True,), (0,), FinishReason.length)
        samples = tuple(Sample(prompt, token, Score(0.0, False), number) for number, prompt in enumerate(prompts))
        tensors = build_tensors(Rollout(samples, 0), self._components.inputs.critic_prompt)
        found: list[float] = self._components.roles[Role.critic].values(tensors.critic_input).result()[:, 0].tolist()
        return found

    def state(self) -> dict[str, Any]:
        """The fields of a `TrainerState` that are the source's."""
        reward = self._components.collector.scorer.state() if self._components.collector else None
        return {"num_samples": self.num_samples, "source": self.groups.state(), "reward": reward}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` gave; other names are ignored."""
        self.num_samples = state["num_samples"]
        if self._components.collector and state["reward"] is not None:
            self._components.collector.scorer.load_state(state["reward"])
        self.groups.restore(state["source"])


RowsCall = tuple[Tensor, Pending[Tensor]]
"""Row numbers (int64 [b]), and a call that gives a float32 [b, T] of them"""


@dataclass
class Roles:
    """The models of a run, and what an iteration asks of them."""

    config: Config
    policy: TrainBackend | None
    """None: nothing but the critic learns"""
    critic: TrainBackend | None
    reference: TrainBackend | None
    critic_prompt: CriticPrompt | None = None
    """With data.critic_prompt"""
    kept: tuple[TrainingSamples, ...] = ()
    """Of the last critic.replay_iterations, the newest first: what the critic has learned from"""

    @cached_property
    def sources(self) -> Mapping[str, MixSource] | None:
        """Of data=mix."""
        return list_sources(self.config) or None

    def state(self) -> dict[str, Any]:
        """The field of a `TrainerState` that is the roles'."""
        return {"critic_replay": self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` gave; other names are ignored."""
        self.kept = state["critic_replay"]

    def score(self, rollout: Rollout, iteration: int, *, reuses_logprobs: bool = False) -> tuple[Experience, Metrics]:
        """The responses with log-probs and values of policy, reference and critic, as far as the algorithm needs them,
        computed in parallel, or in turns on shared GPUs; and metrics, from iteration 1 on.

        reuses_logprobs: old_logprobs are then the rollout engine's, until `add_old_logprobs`.
        """
        algo = self.config.algo if iteration > 0 else build_pretraining_algo(self.config.algo)
        is_pairs = compares_pairs(algo)
        reads_policy = reads_old_logprobs(algo) and not reuses_logprobs if iteration > 0 else algo.kl.in_reward
        policy, critic, reference = self.policy, self.critic, self.reference
        parts = algo.reward_norm.parts
        tensors = build_tensors(rollout, self.critic_prompt, self.config.rollout.oldest_learned, parts, self.sources)
        sequences, temperature = tensors.sequences, self.config.rollout.temperature
        full_kl = algo.kl.in_reward and algo.kl.reward_estimator is KLEstimator.full
        old = policy.logprobs(sequences, temperature) if policy and reads_policy else None
        ref_kl = policy.reference_kl(sequences, temperature) if policy and full_kl else None
        of_reference = self._ask_reference(reference, rollout, sequences) if needs_reference(algo) else []
        values = critic.values(tensors.critic_input) if critic and not is_pairs else None
        wait_all([call for call in (old, ref_kl, *(ref for _, ref in of_reference), values) if call])
        experience = tensors.build_experience(
            old.result() if old else tensors.rollout_logprobs,
            ref_logprobs=join_rows(of_reference, tensors.mask) if of_reference else None,
            ref_kl=ref_kl.result() if ref_kl else None,
            values=values.result() if values else None,
        )
        return experience, compute_batch_metrics(experience) if iteration > 0 else {}

    def _ask_reference(self, reference: TrainBackend | None, rollout: Rollout, sequences: Sequences) -> list[RowsCall]:
        """Log-probs of all rows, each of the teacher of its source, by rows."""
        if reference is None:
            return []
        numbers = {name: number for number, name in enumerate(self.config.reference.by_source, 1)}
        by_teacher = defaultdict[int, list[int]](list)
        for row, sample in enumerate(rollout.samples):
            by_teacher[numbers.get(sample.prompt.source, 0)].append(row)
        temperature, calls = self.config.rollout.temperature, list[RowsCall]()
        for teacher, rows in sorted(by_teacher.items()):
            chosen = torch.tensor(rows)
            own = sequences.select(chosen) if len(by_teacher) > 1 else sequences
            calls.append((chosen, reference.logprobs(own, temperature, teacher)))
        return calls

    def update(self, samples: TrainingSamples, iteration: int) -> Metrics:
        """Optimizer steps of critic and policy on the same minibatches: they are independent.

        A frozen policy makes none: neither its weights nor its learning rate's schedule move.
        """
        number = iteration if iteration > 0 else -self.config.algo.value_pretrain.count_step(iteration)
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, number)
        running: list[Pending[list[Metrics]]] = []
        if self.critic is not None:
            of_critic, own, num_kept = samples.for_critic(), minibatches, self.config.critic.replay_iterations
            if num_kept:
                parts = (strip_for_replay(of_critic), *self.kept)
                own = add_replayed(self.config, minibatches, [len(part.positive) for part in parts], number)
                of_critic, self.kept = join_samples(parts), parts[:num_kept]
            running.append(self.critic.update(of_critic, own * self.config.critic.updates_per_policy_update))
        if self.policy is not None and not self.config.policy.is_frozen(iteration):
            running.append(self.policy.update(samples.for_policy(), minibatches))
        wait_all(running)
        found = {name: value for call in running for name, value in average_steps(call.result()).items()}
        # A demonstration was sampled by no policy: the ratio to the one before the update is not known.
        return {name: x for name, x in found.items() if not self.config.rollout.from_data or name not in RATIOS}

    def score_heldout(self, inputs: Inputs) -> Metrics:
        """What is measured without servers on train.num_eval_prompts of what is held out: nothing else is."""
        if inputs.pairs is not None:
            return self._compare_pairs(inputs.pairs)
        return {} if inputs.demonstrations is None else self._score_demonstrations(inputs.demonstrations)

    def _score_demonstrations(self, given: demonstrations.Demonstrations) -> Metrics:
        """heldout/logprob, the mean log-prob of the tokens that would be learned."""
        assert self.policy is not None
        chosen = given.heldout[: self.config.train.num_eval_prompts]
        tensors = build_tensors(join_groups(list(map(demonstrations.build_group, chosen)), 0))
        logprobs = self.policy.logprobs(tensors.sequences, self.config.rollout.temperature).result()
        return {"heldout/logprob": float(logprobs[tensors.mask].double().mean())}

    def _compare_pairs(self, given: pairs.Pairs) -> Metrics:
        """heldout/pair_accuracy, pair_margin and loss."""
        assert self.critic is not None
        chosen = given.heldout[: self.config.train.num_eval_prompts]
        rollout = join_groups(list(map(pairs.build_group, chosen)), 0)
        scores = self.critic.values(build_tensors(rollout).sequences).result()[:, 0].double()
        loss, accuracy, margin = map(float, measure_pairs(scores[0::2] - scores[1::2], len(scores) // 2))
        return {"heldout/loss": loss, "heldout/pair_accuracy": accuracy, "heldout/pair_margin": margin}

    def add_old_logprobs(self, experience: Experience) -> tuple[Experience, Metrics]:
        """The experience with the old_logprobs that the update on it has computed, and their metrics."""
        assert self.policy is not None
        experience = replace(experience, old_logprobs=self.policy.updated_logprobs(experience.sequences).result())
        return experience, measure_old_logprobs(experience, self.config.algo)


def join_rows(calls: Sequence[RowsCall], mask: Tensor) -> Tensor:
    """float32 [B, T] of the calls' rows, padded with 0. mask: bool [B, T]."""
    joined = torch.zeros(mask.shape)
    for rows, call in calls:
        found = call.result()
        joined[rows, : found.shape[1]] = found
    return joined


def split_minibatches(config: Config, num_samples: int, iteration: int) -> list[Tensor]:
    """Row numbers (int64) of each optimizer step: a new order in every epoch, the same for the same seed. Pairs stay
    together."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + iteration)
    size, unit = config.train.minibatch_size, 2 if compares_pairs(config.algo) else 1
    return [
        (unit * units[:, None] + torch.arange(unit)).flatten()
        for _ in range(config.train.epochs_per_iteration)
        for units in torch.split(torch.randperm(num_samples // unit, generator=generator), size // unit)
    ]


def strip_for_replay(samples: TrainingSamples) -> TrainingSamples:
    """What the critic's loss reads of samples for the critic; the rest is zeros that take no memory."""
    unused = torch.zeros(()).expand(samples.mask.shape)
    return TrainingSamples(
        sequences=replace(samples.sequences, routed_experts=None),
        mask=samples.mask,
        loss_mask=samples.loss_mask,
        positive=samples.positive,
        advantages=unused,
        rollout_logprobs=unused,
        **dict.fromkeys(("old_logprobs", "sampling_logprobs", "ref_logprobs", "old_values")),
        returns=samples.returns,
        critic_mask=samples.mask if samples.critic_mask is None else samples.critic_mask,
    )


def join_samples(parts: Sequence[TrainingSamples]) -> TrainingSamples:
    """All rows of these, which have the same fields, in order, padded to the longest response."""
    longest = max(part.mask.shape[1] for part in parts)

    def join(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        if isinstance(found[0], Sequences):
            rows = [row for each in found for row in each.segments or [()] * each.num_samples]
            joined = {
                name: torch.cat([getattr(each, name) for each in found])
                for name in ("tokens", "lengths", "prompt_lengths")
            }
            return Sequences(**joined, segments=tuple(rows) if any(rows) else None)
        if found[0] is None:
            return None
        return torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[1])) if x.dim() == 2 else x for x in found])

    return TrainingSamples(**{each.name: join(each.name) for each in fields(TrainingSamples)})


def add_replayed(config: Config, minibatches: Sequence[Tensor], sizes: Sequence[int], iteration: int) -> list[Tensor]:
    """The minibatches of the first `sizes[0]` rows, each with its share of the rows of every further part: in an epoch
    each row once, in a new order, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + iteration)
    num_steps = len(minibatches) // config.train.epochs_per_iteration
    starts, found = list(accumulate(sizes)), []
    for step, rows in enumerate(minibatches):
        if step % num_steps == 0:
            orders = [
                start + torch.randperm(n, generator=generator) for start, n in zip(starts, sizes[1:], strict=False)
            ]
        shares = [order.tensor_split(num_steps)[step % num_steps] for order in orders]
        found.append(torch.cat([rows, *shares]))
    return found


def average_steps(steps: Sequence[Metrics]) -> Metrics:
    """One value per metric: over the optimizer steps the maximum for names ending in _max, the sum for those ending in
    _sum, else the mean.
    """
    values = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name].append(value)
    return {
        name: max(v) if name.endswith("_max") else sum(v) / (1 if name.endswith("_sum") else len(v))
        for name, v in values.items()
    }
