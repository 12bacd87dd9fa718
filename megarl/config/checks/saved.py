"""What rollout.file, a file of saved responses to train on without a server, contradicts, and which keys then have no
effect.
"""

from collections.abc import Iterator

from megarl.algo.registry import needs_critic
from megarl.config.checks.algo import check_older_samples
from megarl.config.checks.rule import Rule
from megarl.config.schema.root import Config


def check_saved(config: Config) -> Iterator[str]:
    """One message per key that asks for what only servers can give, or of a loss that cannot learn from the file."""
    rollout, algo = config.rollout, config.algo
    if rollout.file is None:
        return
    yield from check_older_samples(algo, f"rollout.file: {rollout.file} found", off="null")
    where = f"with rollout.file={rollout.file}"
    if algo.replay.num_iterations > 0:
        yield (
            f"algo.replay.num_iterations: {algo.replay.num_iterations} found {where}; each pass over the file takes"
            " every group again: must be 0"
        )
    if algo.dynamic_sampling.enabled:
        yield (
            f"algo.dynamic_sampling.enabled: true found {where}; there is no server to sample other groups in place of"
            " those whose rewards are equal: must be false"
        )
    if rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness: found {rollout.max_staleness} {where}; nothing is generated ahead, and all"
            " responses of the file are learned from, however old: it must be 0"
        )
    if rollout.router_replay:
        yield (
            f"rollout.router_replay: found true {where}; a rollouts.jsonl does not have the experts that the servers"
            " chose: it must be false"
        )
    pretraining = algo.value_pretrain
    if needs_critic(algo) and pretraining.num_steps > 0 and pretraining.rollouts is None:
        yield (
            f"algo.value_pretrain.rollouts: null found {where}; there is no server to sample the responses of value"
            f" pretraining: must be a file, such as {rollout.file}, or algo.value_pretrain.enabled=false"
        )


SAVED_RULES: tuple[Rule, ...] = (
    Rule(
        (
            *("data", "environment", "reward", "rollout", "logger.save_rollouts", "logger.num_logged_samples"),
            *("train.eval_every", "train.num_eval_prompts", "train.stop_at_heldout_reward", "train.max_samples"),
        ),
        lambda c: c.rollout.file is None,
        "with rollout.file, whose prompts, responses and scores are learned from without a server; it counts with"
        " rollout.file=null",
        switch=True,
        but=(
            *("data.prompt_length", "reward.wrong", "rollout.file", "rollout.response_length", "rollout.temperature"),
            *("rollout.max_staleness", "rollout.router_replay"),
            *("data.critic_prompt", "data.critic_prompt_length", "data.chat_template"),
        ),
    ),
    Rule(
        ("data.chat_template",),
        lambda c: c.rollout.file is None or c.data.critic_prompt is not None,
        "with rollout.file, which has the prompts' tokens; it counts with data.critic_prompt or with rollout.file=null",
        switch=True,
    ),
    Rule(
        ("checkpoint.keep_best",),
        lambda c: c.rollout.file is None or not c.checkpoint.best_metric.startswith(("reward/", "heldout/")),
        "with rollout.file and checkpoint.best_metric={c.checkpoint.best_metric}, which only generated responses have;"
        " it counts with another metric of metrics.jsonl",
        switch=True,
    ),
)
"""Of `python -m megarl.train`"""
