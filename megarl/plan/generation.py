"""Seconds in which the servers generate the responses of an iteration."""

from math import ceil

from megarl.config.schema.root import Config
from megarl.plan.assumptions import (
    DECODE_BANDWIDTH,
    DECODE_SHARE,
    DECODE_STEP_S,
    PREFILL_SHARE,
)
from megarl.plan.passes import Work, count_multiply_adds
from megarl.plan.roles import RoleJob
from megarl.plan.serving import ServerMemory


def compute_generation(config: Config, job: RoleJob, work: Work, server: ServerMemory) -> float:
    """Seconds of prefill and of one step per token: for the sequences that run at once, and for the end, when none
    waits any more, the running ones finish, the last of them at the length limit.

    Lengths are taken to be uniform around their mean, the longest at the limit. Then what is left of a running response
    is (mean^2 + variance) / (2 mean) on average, as of any renewal process (Cox, Renewal Theory, section 5.4).
    """
    rollout, limit = config.rollout, config.rollout.response_length
    waiting = work.num_samples / rollout.num_servers
    room = server.kv_tokens / work.length
    running = max(1.0, min(waiting, rollout.max_running_requests, room))
    mean = work.response
    context = work.prompt + mean / 2

    def step(sequences: float) -> float:
        return compute_step(config, job, server, sequences, context)

    per_token, _, _ = count_multiply_adds(job.arch, False)
    peak = rollout.tp * config.cluster.hardware.bf16_tflops * 1e12
    prefill = 2 * per_token * work.prompt * waiting / (peak * PREFILL_SHARE)
    if waiting <= running:
        return prefill + limit * step(waiting * min(1.0, mean / limit))
    shortest = max(0.0, 2 * mean - limit)
    variance = (limit - shortest) ** 2 / 12
    left = min(limit, (mean**2 + variance) / (2 * mean))
    full = max(0.0, (waiting * mean - running * left) / running)
    return prefill + full * step(running) + limit * step(max(1.0, running * left / limit))


def compute_step(config: Config, job: RoleJob, server: ServerMemory, sequences: float, context: float) -> float:
    """One token for each of so many sequences: the weights are read once and multiplied with all of them, whichever
    takes longer, and each sequence's KV cache is read. Of experts those are read that some token goes to.
    """
    hardware, arch = config.cluster.hardware, job.arch
    bandwidth = hardware.hbm_gb_s * 1e9 * DECODE_BANDWIDTH
    per_token, _, per_response = count_multiply_adds(arch, False)
    products = 2 * sequences * (per_token + per_response)
    products /= config.rollout.tp * hardware.bf16_tflops * 1e12 * DECODE_SHARE
    weights = float(server.weights)
    if arch.experts:
        experts = arch.experts
        matrices = arch.num_expert_layers * experts.num_experts * 3 * arch.hidden_size * experts.ffn_size
        size = 2 * matrices / config.rollout.tp
        weights -= size * (1 - experts.top_k / experts.num_experts) ** ceil(sequences)
    cache = sequences * context * server.bytes_per_token
    return max(weights / bandwidth, products) + cache / bandwidth + DECODE_STEP_S
