"""What limits an iteration as a cluster grows: its planned seconds in parts."""

from math import ceil

from megarl.config.schema.root import Config
from megarl.plan.estimate import JobPlan
from megarl.plan.generation import split_generation
from megarl.plan.passes import (
    Work,
    compute_forward,
    compute_update,
    count_microbatches,
    count_waited,
    reduce_gradients,
)
from megarl.plan.roles import RoleJob
from megarl.plan.seconds import count_updates, describe_work, find_work, scores_rollouts

PARTS = {
    "decoding": "generation while responses wait for a place",
    "longest": "generation of the last responses",
    "computing": "micro-batches of log-probs, values, update",
    "waiting": "pipelines that fill and empty",
    "reducing": "gradients and weights between replicas",
    "moving": "offload and weight sync",
}
"""The parts of an iteration's seconds, and their names"""


def split_iteration(config: Config, plan: JobPlan) -> dict[str, float]:
    """The seconds of an on-policy iteration on GPUs that all roles share, by PARTS: their sum is the iteration's.

    Raises ValueError for a job that generates nothing or ahead of its use: some parts are then not waited for.
    """
    if plan.server is None or plan.seconds.overlaps:
        raise ValueError("seconds are split of an iteration that generates its own responses")
    work, place = describe_work(config), (config.cluster.hardware, config.cluster.gpus_per_node)
    decoding, longest = split_generation(config, plan.jobs["policy"], work, plan.server)
    waiting = reducing = 0.0
    for name, job in plan.jobs.items():
        stages, own = plan.stages[name], find_work(config, job, work)
        if scores_rollouts(config, job):
            waiting += _find_waited_share(job, own, own.num_samples) * compute_forward(job, stages, own, *place)
        if job.is_trained:
            sent = own.num_samples / own.minibatch * max(reduce_gradients(job, stage, *place) for stage in stages)
            update = compute_update(job, stages, own, *place)
            reducing += count_updates(config, job) * sent
            waiting += count_updates(config, job) * _find_waited_share(job, own, own.minibatch) * (update - sent)
    return {
        "decoding": decoding,
        "longest": longest,
        "computing": plan.seconds.scoring + plan.seconds.update - waiting - reducing,
        "waiting": waiting,
        "reducing": reducing,
        "moving": plan.seconds.offload + plan.seconds.sync,
    }


def _find_waited_share(job: RoleJob, work: Work, num_samples: int) -> float:
    """Share of a pass over so many samples in which a pipeline stage waits for others."""
    waited = count_waited(job.parallel)
    return waited / (waited + count_microbatches(job, work, ceil(num_samples / job.parallel.dp))[0])
