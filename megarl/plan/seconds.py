"""Seconds of an iteration by phase: floating-point operations and bytes over the assumed shares of the peaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from megarl.config.schema.cluster import Placement
from megarl.config.schema.roles import Recompute
from megarl.config.schema.rollout import Transport
from megarl.config.schema.root import Config
from megarl.mcore.row_costs import compute_row_costs
from megarl.plan.assumptions import (
    DECODE_BANDWIDTH,
    DECODE_STEP_S,
    FORWARD_MFU,
    LINK_SHARE,
    MEAN_RESPONSE,
    PREFILL_MFU,
    UPDATE_MFU,
)
from megarl.plan.roles import RoleJob
from megarl.plan.serving import ServerMemory
from megarl.plan.transfer import Transfer
from megarl.types import Sequences


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
    sync: float | None
    """None: not estimated (rollout.transport=disk)"""
    pretraining: PretrainingStep | None
    """None: there is no value pretraining"""

    @property
    def iteration(self) -> float:
        """The whole iteration, without a sync that is not estimated."""
        return self.generation + self.scoring + self.update + (self.sync or 0.0)


def estimate_seconds(config: Config, jobs: Mapping[str, RoleJob], server: ServerMemory, transfer: Transfer) -> Seconds:
    num_samples = config.train.num_samples
    forward = {name: _compute_forward(config, job, num_samples) for name, job in jobs.items()}
    updates = {name: _compute_update(config, job, forward[name]) for name, job in jobs.items() if job.is_trained}
    # Roles that share GPUs take turns on them.
    join = max if config.cluster.placement is Placement.apart else sum
    generation = _compute_generation(config, jobs["policy"], num_samples, server)
    scoring = join(forward.values())
    pretraining = None
    settings = config.algo.value_pretrain
    if "critic" in jobs and settings.num_steps > 0 and settings.taken_from is None:
        pretraining = PretrainingStep(
            generation=generation if settings.rollouts is None else 0.0,
            scoring=scoring if config.algo.kl.in_reward else forward["critic"],
            update=updates["critic"],
        )
    return Seconds(generation, scoring, join(updates.values()), compute_sync_seconds(transfer, config), pretraining)


def _compute_update(config: Config, job: RoleJob, forward: float) -> float:
    """A role's update in one iteration, over all epochs. forward: seconds of its forward pass over the samples."""
    repeats = config.critic.updates_per_policy_update if job.has_value_head else 1
    # Backward: twice the forward pass; what is recomputed: once more (2205.05198, section 5).
    passes = 4 if job.saving.recompute is Recompute.full else 3
    return forward * FORWARD_MFU / UPDATE_MFU * passes * config.train.epochs_per_iteration * repeats


def _compute_forward(config: Config, job: RoleJob, num_samples: int) -> float:
    """One forward pass over an iteration's samples; a pipeline idles (pp - 1) / (m vpp) of it (2104.04473, 2.2)."""
    hardware = config.cluster.hardware
    peak = (hardware.fp8_tflops if job.fp8 else hardware.bf16_tflops) * 1e12
    flops = 2 * compute_mean_cost(config, job) * num_samples
    bubble = (job.parallel.pp - 1) / (job.num_microbatches * job.parallel.vpp)
    return flops / (job.parallel.num_processes * peak * FORWARD_MFU) * (1 + bubble)


def compute_mean_cost(config: Config, job: RoleJob) -> float:
    """Multiply-adds of a forward pass over one sample of mean length (megarl/mcore/row_costs.py)."""
    prompt = config.data.prompt_length
    length = prompt + ceil(MEAN_RESPONSE * config.rollout.response_length)
    sample = Sequences(torch.zeros(length, dtype=torch.int64), torch.tensor([length]), torch.tensor([prompt]))
    return compute_row_costs(job.arch, sample, with_value_head=job.has_value_head)[0]


def _compute_generation(config: Config, job: RoleJob, num_samples: int, server: ServerMemory) -> float:
    """Prefill, then one step per token for the sequences that run at once; each step reads the weights and their KV
    cache. At least the time of one response of full length.
    """
    rollout, hardware = config.rollout, config.cluster.hardware
    response = MEAN_RESPONSE * rollout.response_length
    context = config.data.prompt_length + response / 2
    waiting = num_samples / rollout.num_servers
    running = max(1.0, min(waiting, rollout.max_running_requests, server.kv_tokens / (context + response / 2)))
    bandwidth = hardware.hbm_gb_s * 1e9 * DECODE_BANDWIDTH

    def step(sequences: float) -> float:
        return (server.weights + sequences * context * server.bytes_per_token) / bandwidth + DECODE_STEP_S

    prefill = 2 * compute_mean_cost(config, job) * config.data.prompt_length / (config.data.prompt_length + response)
    prefill *= waiting / (rollout.tp * hardware.bf16_tflops * 1e12 * PREFILL_MFU)
    return prefill + max(waiting * response / running * step(running), rollout.response_length * step(1))


def compute_sync_seconds(transfer: Transfer, config: Config) -> float | None:
    """Seconds of a sync by its busiest port, over the network or, on a single node, NVLink. None with transport=disk:
    the speed of the file system is not known.
    """
    if config.rollout.transport is Transport.disk:
        return None
    hardware = config.cluster.hardware
    link = hardware.network_gb_s if config.cluster.num_nodes > 1 else hardware.nvlink_gb_s
    return transfer.busiest / (link * 1e9 * LINK_SHARE)
