"""Sizes that are given in one of two ways: when each key has an effect."""

from megarl.algo.registry import needs_critic
from megarl.config.checks.rule import Rule
from megarl.config.schema.roles import LrDecay, OptimizerConfig


def decays(optimizer: OptimizerConfig) -> bool:
    return optimizer.decay is not LrDecay.constant


SIZE_RULES: tuple[Rule, ...] = (
    Rule(
        ("policy.optimizer.warmup_steps",),
        lambda c: c.policy.optimizer.warmup_ratio is None,
        "with policy.optimizer.warmup_ratio={c.policy.optimizer.warmup_ratio}; it counts with warmup_ratio=null",
        switch=True,
    ),
    Rule(
        ("critic.optimizer.warmup_steps",),
        lambda c: not needs_critic(c.algo) or c.critic.optimizer.warmup_ratio is None,
        "with critic.optimizer.warmup_ratio={c.critic.optimizer.warmup_ratio}; it counts with warmup_ratio=null",
        switch=True,
    ),
    Rule(
        ("train.samples_per_iteration",),
        lambda c: c.train.prompts_per_iteration is None,
        "with train.prompts_per_iteration={c.train.prompts_per_iteration}, which makes {c.train.num_samples} samples of"
        " {c.train.responses_per_prompt} responses to each prompt; it counts with train.prompts_per_iteration=null",
        switch=True,
    ),
    Rule(
        ("train.samples_per_minibatch",),
        lambda c: c.train.num_minibatches is None,
        "with train.num_minibatches={c.train.num_minibatches}, which makes minibatches of {c.train.minibatch_size}"
        " samples; it counts with train.num_minibatches=null",
    ),
    Rule(
        ("policy.optimizer.decay_iterations",),
        lambda c: decays(c.policy.optimizer) and c.policy.optimizer.decay_steps is None,
        "under policy.optimizer.decay={c.policy.optimizer.decay.name} and policy.optimizer.decay_steps="
        "{c.policy.optimizer.decay_steps}; it counts with linear or cosine and decay_steps=null",
        switch=True,
    ),
    Rule(
        ("critic.optimizer.decay_iterations",),
        lambda c: not needs_critic(c.algo) or (decays(c.critic.optimizer) and c.critic.optimizer.decay_steps is None),
        "under critic.optimizer.decay={c.critic.optimizer.decay.name} and critic.optimizer.decay_steps="
        "{c.critic.optimizer.decay_steps}; it counts with linear or cosine and decay_steps=null",
        switch=True,
    ),
)
