"""Seconds of an iteration by phase: floating-point operations and bytes over the assumed shares of the peaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.config.old_logprobs import scores_first
from megarl.config.schema.cluster import Placement
from megarl.config.schema.roles import Offload
from megarl.config.schema.root import Config
from megarl.plan.assumptions import LINK_SHARE, MEAN_RESPONSE
from megarl.plan.generation import compute_generation
from megarl.plan.passes import Work, compute_forward, compute_update, count_multiply_adds
from megarl.plan.roles import RoleJob, StageMemory
from megarl.plan.serving import ServerMemory
from megarl.plan.transfer import Transfer, compute_sync_seconds


@dataclass(frozen=True)
class PretrainingStep:
    """One rollout of value pretraining (megarl/value_pretraining/loop.py)."""

    generation: float
    """0 with saved rollouts"""
    scoring: float
    """Values, and with a KL in the reward also log-probs of policy and reference"""
    update: float
    """The critic's update"""

    @property
    def total(self) -> float:
        return self.generation + self.scoring + self.update


@dataclass(frozen=True)
class Seconds:
    generation: float
    scoring: float
    """Log-probs and values of policy, reference and critic"""
    update: float
    sync: float
    offload: float
    """Moving weights and optimizer between GPU and host"""
    mfu: Mapping[str, float]
    """Model FLOPs utilization of each role's update: without what is computed twice"""
    pretraining: PretrainingStep | None
    """None: there is no value pretraining"""
    overlaps: bool = False
    """rollout.max_staleness: the next responses are generated while the roles compute"""

    @property
    def training(self) -> float:
        """What the training processes do between two rollouts, without the sync."""
        return self.scoring + self.update + self.offload

    @property
    def iteration(self) -> float:
        """With max_staleness responses are generated while the roles compute, and wait during the sync
        (megarl/rollout/scheduler.py): the slower of both decides.
        """
        if self.overlaps:
            return max(self.generation, self.training) + self.sync
        return self.generation + self.training + self.sync


def describe_work(config: Config, mean_response: float | None = None) -> Work:
    """mean_response: tokens; None: MEAN_RESPONSE of the limit."""
    mean = MEAN_RESPONSE * config.rollout.response_length if mean_response is None else mean_response
    train = config.train
    return Work(train.num_samples, train.minibatch_size, config.data.prompt_length, mean, train.tokens_per_microbatch)


def find_work(config: Config, job: RoleJob, work: Work) -> Work:
    """What this role computes; a critic reads data.critic_prompt as well."""
    return replace(work, prompt=work.prompt + config.data.num_critic_tokens) if job.has_value_head else work


def estimate_seconds(
    config: Config,
    jobs: Mapping[str, RoleJob],
    stages: Mapping[str, tuple[StageMemory, ...]],
    server: ServerMemory | None,
    transfer: Transfer,
    work: Work,
) -> Seconds:
    place = (config.cluster.hardware, config.cluster.gpus_per_node)
    works = {name: find_work(config, job, work) for name, job in jobs.items()}
    forward = {name: compute_forward(job, stages[name], works[name], *place) for name, job in jobs.items()}
    updates = {
        name: compute_update(job, stages[name], works[name], *place) * count_updates(config, job)
        for name, job in jobs.items()
        if job.is_trained
    }
    # Roles that share GPUs take turns on them.
    join = max if config.cluster.placement is Placement.apart else sum
    generation = compute_generation(config, jobs["policy"], work, server) if server else 0.0
    scoring = join([forward[name] for name, job in jobs.items() if scores_rollouts(config, job)] or [0.0])
    pretraining = None
    settings = config.algo.value_pretrain
    if "critic" in jobs and settings.num_steps > 0 and settings.taken_from is None:
        pretraining = PretrainingStep(
            generation=generation if settings.rollouts is None else 0.0,
            scoring=scoring if config.algo.kl.in_reward else forward["critic"],
            update=updates["critic"],
        )
    return Seconds(
        generation,
        scoring,
        join(updates.values()),
        compute_sync_seconds(config, transfer),
        join(compute_offload(config, job, stages[name]) for name, job in jobs.items()),
        {name: compute_mfu(config, jobs[name], works[name], part) for name, part in updates.items()},
        pretraining,
        overlaps=config.rollout.max_staleness > 0,
    )


def scores_rollouts(config: Config, job: RoleJob) -> bool:
    """Whether the role has a forward pass over an iteration's samples before the update: log-probs or values."""
    return job.name != "policy" or scores_first(config)


def count_updates(config: Config, job: RoleJob) -> int:
    """Passes of a role over an iteration's samples in its update."""
    repeats = config.critic.updates_per_policy_update if job.has_value_head else 1
    return config.train.epochs_per_iteration * repeats


def compute_mfu(config: Config, job: RoleJob, work: Work, seconds: float) -> float:
    """Of an update: a forward pass and a backward pass of twice as many operations, over the bfloat16 peak."""
    per_token, per_square, per_response = count_multiply_adds(job.arch, job.has_value_head)
    sample = work.length * per_token + work.length**2 * per_square + work.response * per_response
    flops = 6 * sample * work.num_samples * count_updates(config, job)
    return flops / (job.parallel.num_processes * config.cluster.hardware.bf16_tflops * 1e12 * seconds)


def compute_offload(config: Config, job: RoleJob, stages: Sequence[StageMemory]) -> float:
    """Every call brings the weights and takes them away again: log-probs or values, the update and, of the policy, the
    sync; the update moves the optimizer too (megarl/mcore/offload.py).
    """
    if job.offload is None:
        return 0.0
    calls = scores_rollouts(config, job) + job.is_trained + (job.name == "policy")
    weights = calls if job.offload is Offload.all else 0
    moved = max(2 * (weights * stage.weights + stage.optimizer) for stage in stages)
    return moved / (config.cluster.hardware.pcie_gb_s * 1e9 * LINK_SHARE)
