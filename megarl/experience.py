"""What the roles say of a rollout, log-probs and values, and the optimizer steps that learn from it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algo.algorithm import build_pretraining_algo
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.registry import reads_old_logprobs
from megarl.algo.targets import measure_old_logprobs
from megarl.config.schema.algo import KLEstimator, needs_reference
from megarl.config.schema.root import Config
from megarl.interfaces import Pending, TrainBackend, wait_all
from megarl.rollout.tensors import build_tensors
from megarl.task.render import CriticPrompt
from megarl.types import Experience, Metrics, Rollout, TrainingSamples


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

    def score(self, rollout: Rollout, iteration: int, *, reuses_logprobs: bool = False) -> tuple[Experience, Metrics]:
        """The responses with log-probs and values of policy, reference and critic, as far as the algorithm needs them,
        computed in parallel, or in turns on shared GPUs; and metrics, from iteration 1 on.

        reuses_logprobs: old_logprobs are then the rollout engine's, until `add_old_logprobs`.
        """
        algo = self.config.algo if iteration > 0 else build_pretraining_algo(self.config.algo)
        reads_policy = reads_old_logprobs(algo) and not reuses_logprobs if iteration > 0 else algo.kl.in_reward
        policy, critic, reference = self.policy, self.critic, self.reference
        tensors = build_tensors(rollout, self.critic_prompt, self.config.rollout.max_staleness)
        sequences, temperature = tensors.sequences, self.config.rollout.temperature
        full_kl = algo.kl.in_reward and algo.kl.reward_estimator is KLEstimator.full
        old = policy.logprobs(sequences, temperature) if policy and reads_policy else None
        ref_kl = policy.reference_kl(sequences, temperature) if policy and full_kl else None
        ref = reference.logprobs(sequences, temperature) if reference and needs_reference(algo) else None
        values = critic.values(tensors.critic_input) if critic else None
        wait_all([call for call in (old, ref_kl, ref, values) if call])
        experience = tensors.build_experience(
            old.result() if old else tensors.rollout_logprobs,
            ref_logprobs=_take(ref),
            ref_kl=_take(ref_kl),
            values=_take(values),
        )
        return experience, compute_batch_metrics(experience) if iteration > 0 else {}

    def update(self, samples: TrainingSamples, iteration: int) -> Metrics:
        """Optimizer steps of critic and policy on the same minibatches: they are independent.

        A frozen policy makes none: neither its weights nor its learning rate's schedule move.
        """
        number = iteration if iteration > 0 else -self.config.algo.value_pretrain.count_step(iteration)
        minibatches = split_minibatches(self.config, samples.sequences.num_samples, number)
        running: list[Pending[list[Metrics]]] = []
        if self.critic is not None:
            repeats = self.config.critic.updates_per_policy_update
            running.append(self.critic.update(samples.for_critic(), minibatches * repeats))
        if self.policy is not None and not self.config.policy.is_frozen(iteration):
            running.append(self.policy.update(samples.for_policy(), minibatches))
        wait_all(running)
        return {name: value for call in running for name, value in average_steps(call.result()).items()}

    def add_old_logprobs(self, experience: Experience) -> tuple[Experience, Metrics]:
        """The experience with the old_logprobs that the update on it has computed, and their metrics."""
        assert self.policy is not None
        experience = replace(experience, old_logprobs=self.policy.updated_logprobs(experience.sequences).result())
        return experience, measure_old_logprobs(experience, self.config.algo)


def _take(call: Pending[Tensor] | None) -> Tensor | None:
    return call.result() if call else None


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
