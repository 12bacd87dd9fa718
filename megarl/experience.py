"""What the roles say of a rollout, log-probs and values, and the optimizer steps that learn from it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.algo.targets import measure_old_logprobs
from megarl.config.schema.algo import AlgoConfig, KLEstimator, needs_reference
from megarl.config.schema.root import Config
from megarl.interfaces import Pending, TrainBackend, wait_all
from megarl.rollout.tensors import build_tensors, find_too_stale
from megarl.task.render import CriticPrompt
from megarl.types import Experience, Metrics, Rollout


def compute_experience(
    config: Config,
    algo: AlgoConfig,
    rollout: Rollout,
    policy: TrainBackend | None,
    critic: TrainBackend | None,
    reference: TrainBackend | None,
    critic_prompt: CriticPrompt | None = None,
    *,
    scores_policy: bool,
) -> Experience:
    """The responses with log-probs and values of policy, reference and critic, as far as `algo` needs them, computed in
    parallel, or in turns on shared GPUs.

    scores_policy: whether old_logprobs are the policy's, not the rollout engine's.
    """
    tensors = build_tensors(rollout, critic_prompt)
    sequences, temperature = tensors.sequences, config.rollout.temperature
    full_kl = algo.kl.in_reward and algo.kl.reward_estimator is KLEstimator.full
    old = policy.logprobs(sequences, temperature) if policy and scores_policy else None
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
    return replace(experience, too_stale=find_too_stale(rollout, config.rollout.max_staleness))


def add_old_logprobs(experience: Experience, policy: TrainBackend, algo: AlgoConfig) -> tuple[Experience, Metrics]:
    """The experience with the old_logprobs that the update on it has computed, and their metrics."""
    experience = replace(experience, old_logprobs=policy.updated_logprobs(experience.sequences).result())
    return experience, measure_old_logprobs(experience, algo)


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
