"""What the roles say of a rollout: log-probs and values."""

from dataclasses import replace

from torch import Tensor

from megarl.algo.registry import reads_old_logprobs
from megarl.algo.targets import measure_old_logprobs
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import KLEstimator
from megarl.config.schema.root import Config
from megarl.interfaces import Pending, TrainBackend, wait_all
from megarl.rollout.tensors import build_tensors, find_too_stale
from megarl.task.render import CriticPrompt
from megarl.types import Experience, Metrics, Rollout


def compute_experience(
    config: Config,
    rollout: Rollout,
    policy: TrainBackend,
    critic: TrainBackend | None,
    reference: TrainBackend | None,
    critic_prompt: CriticPrompt | None = None,
    *,
    reuses_logprobs: bool = False,
) -> Experience:
    """The responses with log-probs and values of policy, reference and critic, computed in parallel, or in turns on
    shared GPUs.

    old_logprobs are the rollout engine's where nothing reads the policy's own, or the update computes them itself
    (reuses_logprobs).
    """
    tensors = build_tensors(rollout, critic_prompt)
    sequences, temperature, algo = tensors.sequences, config.rollout.temperature, config.algo
    full_kl = algo.kl.in_reward and algo.kl.reward_estimator is KLEstimator.full
    scores = reads_old_logprobs(algo) and not reuses_logprobs
    old = policy.logprobs(sequences, temperature) if scores else None
    ref_kl = policy.reference_kl(sequences, temperature) if full_kl else None
    ref = reference.logprobs(sequences, temperature) if reference else None
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
