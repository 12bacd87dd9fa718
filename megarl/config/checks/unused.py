"""Keys that were set and have no effect under the chosen algorithm: one table of when each key counts."""

from collections.abc import Iterable, Iterator
from enum import Enum

from megarl.config.checks.rule import Rule
from megarl.config.checks.size_rules import SIZE_RULES, decays
from megarl.config.schema.algo import ADAPTIVE, AlgoConfig, needs_critic, needs_reference
from megarl.config.schema.algo_choices import Advantage, AdvantageStd, NormScope, Surrogate
from megarl.config.schema.data import FileDataConfig
from megarl.config.schema.model import ModelSource
from megarl.config.schema.roles import Recompute
from megarl.config.schema.rollout import Transport
from megarl.config.schema.root import Config


def _in_groups(algo: AlgoConfig) -> bool:
    return algo.advantage in (Advantage.group, Advantage.rloo)


def _is_clipped(algo: AlgoConfig) -> bool:
    return algo.surrogate is Surrogate.clip and algo.rl_loss_coef != 0


_NO_CRITIC = "under algo.advantage={c.algo.advantage.name}, which has no critic; it counts with algo.advantage=gae"
_NO_PRETRAINING = "without value pretraining; it counts with algo.value_pretrain.enabled=true and steps above 0"
_NOT_CLIPPED = (
    "under algo.surrogate={c.algo.surrogate.name} and algo.rl_loss_coef={c.algo.rl_loss_coef:g}; it counts with"
    " algo.surrogate=clip and algo.rl_loss_coef above 0"
)

RULES: tuple[Rule, ...] = (
    *SIZE_RULES,
    Rule(
        ("critic", "algo.lambda_policy", "algo.lambda_critic", "algo.value_loss_agg_mode"),
        lambda c: needs_critic(c.algo),
        _NO_CRITIC,
    ),
    Rule(
        ("algo.value_clip", "algo.value_pretrain", "critic.init"),
        lambda c: needs_critic(c.algo),
        _NO_CRITIC,
        switch=True,
    ),
    Rule(
        tuple(
            f"algo.value_pretrain.{name}"
            for name in ("patience", "rollouts", "stop_at_explained_variance", "taken_from")
        ),
        lambda c: not needs_critic(c.algo) or c.algo.value_pretrain.num_steps > 0,
        _NO_PRETRAINING,
        switch=True,
    ),
    Rule(
        ("algo.value_pretrain.min_improvement",),
        lambda c: not needs_critic(c.algo) or c.algo.value_pretrain.num_steps > 0,
        _NO_PRETRAINING,
    ),
    Rule(
        ("algo.value_pretrain.min_improvement",),
        lambda c: c.algo.value_pretrain.patience is not None,
        "with algo.value_pretrain.patience=null; it counts with a patience",
    ),
    Rule(
        ("algo.length_alpha", "algo.lambda_min"),
        lambda c: needs_critic(c.algo) and c.algo.lambda_policy == ADAPTIVE,
        "under algo.advantage={c.algo.advantage.name} and algo.lambda_policy={c.algo.lambda_policy}; it counts with"
        " algo.advantage=gae and algo.lambda_policy=adaptive",
    ),
    Rule(
        ("algo.gamma",),
        lambda c: not _in_groups(c.algo),
        "under algo.advantage={c.algo.advantage.name}, one number per response; it counts with gae or reinforce",
    ),
    Rule(
        ("algo.advantage_std",),
        lambda c: c.algo.advantage is Advantage.group,
        "under algo.advantage={c.algo.advantage.name}; it counts with algo.advantage=group",
        switch=True,
    ),
    Rule(
        ("algo.std_of",),
        lambda c: c.algo.advantage is Advantage.group and c.algo.advantage_std is AdvantageStd.batch,
        "under algo.advantage={c.algo.advantage.name} and algo.advantage_std={c.algo.advantage_std.name}; it counts"
        " with algo.advantage=group and algo.advantage_std=batch",
        switch=True,
    ),
    Rule(
        ("algo.reward_norm.mean",),
        lambda c: (
            not (_in_groups(c.algo) and c.algo.reward_clip is None and c.algo.reward_norm.mean is not NormScope.group)
        ),
        "under algo.advantage={c.algo.advantage.name}, whose comparison within the group cancels it; it counts with gae"
        " or reinforce, or before an algo.reward_clip",
        switch=True,
    ),
    Rule(
        ("algo.overlong.buffer",),
        lambda c: c.algo.overlong.penalty > 0,
        "with algo.overlong.penalty=0; it counts with a penalty above 0",
        switch=True,
    ),
    Rule(
        ("algo.overlong.filter_critic",),
        lambda c: needs_critic(c.algo) and c.algo.overlong.filter,
        "without a critic and algo.overlong.filter=true; it counts with algo.advantage=gae and that filter",
        switch=True,
    ),
    Rule(
        ("algo.kl.reward_estimator", "algo.kl.coef"),
        lambda c: c.algo.kl.in_reward,
        "without a KL in the reward; it counts with algo.kl.in_reward=true",
    ),
    Rule(
        ("algo.kl.target",),
        lambda c: c.algo.kl.in_reward,
        "without a KL in the reward; it counts with algo.kl.in_reward=true",
        switch=True,
    ),
    Rule(
        ("algo.kl.horizon",),
        lambda c: c.algo.kl.in_reward and c.algo.kl.target is not None,
        "without an adaptive weight of the KL in the reward; it counts with algo.kl.in_reward=true and an"
        " algo.kl.target",
    ),
    Rule(
        ("algo.kl.loss_estimator", "algo.kl.loss_coef"),
        lambda c: c.algo.kl.in_loss,
        "without a KL in the loss; it counts with algo.kl.in_loss=true",
    ),
    Rule(
        ("algo.surrogate",),
        lambda c: c.algo.rl_loss_coef != 0,
        "with algo.rl_loss_coef=0; it counts with a weight above 0",
    ),
    Rule(("algo.clip_low", "algo.clip_high"), lambda c: _is_clipped(c.algo), _NOT_CLIPPED),
    Rule(("algo.dual_clip",), lambda c: _is_clipped(c.algo), _NOT_CLIPPED, switch=True),
    Rule(
        ("algo.topr.ratio_level",),
        lambda c: c.algo.topr.negative_loss_coef != 0,
        "with algo.topr.negative_loss_coef=0; it counts with a weight above 0",
    ),
    Rule(
        ("algo.mismatch.correction",),
        lambda c: c.algo.rl_loss_coef != 0,
        "with algo.rl_loss_coef=0, the surrogate that it weights; it counts with a weight above 0",
        switch=True,
    ),
    Rule(
        ("algo.dynamic_sampling.max_rounds",),
        lambda c: c.algo.dynamic_sampling.enabled,
        "without dynamic sampling; it counts with algo.dynamic_sampling.enabled=true",
    ),
    Rule(
        ("algo.replay.frac",),
        lambda c: c.algo.replay.num_iterations > 0,
        "without replay; it counts with algo.replay.num_iterations above 0",
    ),
    Rule(
        ("reference",),
        lambda c: needs_reference(c.algo),
        "without a reference model of its own; it counts with algo.kl.in_reward=true or algo.kl.in_loss=true and an"
        " estimator other than full, for which the policy's processes hold the reference",
    ),
    Rule(
        ("policy.optimizer.min_lr",),
        lambda c: decays(c.policy.optimizer),
        "under policy.optimizer.decay=constant; it counts with linear or cosine",
        switch=True,
    ),
    Rule(
        ("critic.optimizer.min_lr",),
        lambda c: not needs_critic(c.algo) or decays(c.critic.optimizer),
        "under critic.optimizer.decay=constant; it counts with linear or cosine",
        switch=True,
    ),
    Rule(
        ("policy.recompute_method", "policy.recompute_num_layers"),
        lambda c: c.policy.recompute is Recompute.full,
        "under policy.recompute={c.policy.recompute.name}; it counts with full",
    ),
    Rule(
        ("critic.recompute_method", "critic.recompute_num_layers"),
        lambda c: not needs_critic(c.algo) or c.critic.recompute is Recompute.full,
        "under critic.recompute={c.critic.recompute.name}; it counts with full",
    ),
    Rule(
        ("policy.fp8_recipe",),
        lambda c: c.policy.fp8 is not None,
        "with policy.fp8=null; it counts with hybrid or e4m3",
    ),
    Rule(
        ("critic.fp8_recipe",),
        lambda c: not needs_critic(c.algo) or c.critic.fp8 is not None,
        "with critic.fp8=null; it counts with hybrid or e4m3",
    ),
    Rule(
        ("model.random",),
        lambda c: c.model.source is ModelSource.random,
        "under model.source={c.model.source.name}; set model.source=random, or leave it out",
    ),
    Rule(
        ("model.random.num_experts", "model.random.experts_per_token"),
        lambda c: c.model.source is not ModelSource.random or c.model.random.family == "qwen3_moe",
        "under model.random.family={c.model.random.family}; it counts with qwen3_moe",
    ),
    Rule(
        tuple(
            f"checkpoint.{name}"
            for name in ("keep_last", "keep_best", "best_metric", "stop_deadline_s", "max_restarts")
        ),
        lambda c: c.checkpoint.save_every is not None,
        "with checkpoint.save_every=null; it counts with a number of iterations",
    ),
    Rule(
        ("checkpoint.best_metric",),
        lambda c: c.checkpoint.keep_best > 0,
        "with checkpoint.keep_best=0; it counts with 1 or more",
    ),
    Rule(
        ("rollout.sync_bucket_mb",),
        lambda c: c.rollout.transport is not Transport.disk,
        "with rollout.transport=disk; it counts with colocated or split",
    ),
    Rule(
        ("cluster.placement",),
        lambda c: c.cluster.gpus_per_node > 0,
        "with cluster.gpus_per_node=0, where GPUs are not counted; it counts with their number",
    ),
    Rule(
        ("cluster.hardware",),
        lambda c: c.cluster.hardware.gpu is not None,
        "with cluster.hardware.gpu=null; it counts with a cluster whose GPU is known, such as cluster=h100x8",
        switch=True,
    ),
)

_POLICY_ONLY = (
    *("lambda_policy", "lambda_critic", "length_alpha", "lambda_min", "whiten_advantages", "advantage_clip"),
    *("advantage_std", "std_of", "surrogate", "rl_loss_coef", "clip_low", "clip_high", "dual_clip", "positive_lm_coef"),
    *("entropy_coef", "topr", "mismatch.correction", "loss_agg_mode", "replay", "dynamic_sampling"),
    *("kl.in_loss", "kl.loss_estimator", "kl.loss_coef"),
)
"""Of `algo`: value pretraining regresses Monte-Carlo returns and needs none of them."""

COMMAND_RULES: dict[str, tuple[Rule, ...]] = {
    "train": (Rule(("evaluate",), lambda c: False, "in training; it counts in python -m megarl.evaluate"),),
    "pretrain_value": (
        Rule(("evaluate",), lambda c: False, "in value pretraining; it counts in python -m megarl.evaluate"),
        Rule(
            (
                *("policy.optimizer", "policy.recompute", "policy.recompute_method", "policy.recompute_num_layers"),
                *("rollout.max_staleness", "train.num_iterations"),
                "train.stop_at_heldout_reward",
                *("train.eval_every", "train.num_eval_prompts", "logger.num_logged_samples"),
                *(f"checkpoint.{name}" for name in ("keep_last", "keep_best", "best_metric", "max_restarts")),
                *(f"algo.{name}" for name in _POLICY_ONLY),
            ),
            lambda c: False,
            "in value pretraining, which leaves the policy as it is; it counts in python -m megarl.train",
        ),
        Rule(
            ("algo.value_pretrain.taken_from",),
            lambda c: False,
            "in value pretraining, whose result it names; it counts in python -m megarl.train",
            switch=True,
        ),
        Rule(
            ("reward", "policy", "reference", "logger.save_rollouts", "train.max_samples"),
            lambda c: c.algo.value_pretrain.rollouts is None,
            "where the critic learns from saved rollouts, whose rewards are in the file; it counts with"
            " algo.value_pretrain.rollouts=null",
        ),
    ),
    "evaluate": (
        Rule(
            ("algo", "policy", "critic", "reference", "train", "checkpoint"),
            lambda c: False,
            "in an evaluation, which trains nothing; it counts in python -m megarl.train",
        ),
        Rule(
            ("rollout.temperature",),
            lambda c: False,
            "in an evaluation, which has a key of its own: evaluate.temperature",
        ),
        Rule(
            (
                "logger",
                "model.megatron",
                *("cluster.cpu_threads_per_worker", "cluster.worker_start_deadline_s", "cluster.call_deadline_s"),
                *("rollout.sync_deadline_s", "rollout.max_probe_logprob_gap", "rollout.max_staleness"),
                *("rollout.transport", "rollout.sync_bucket_mb", "cluster.hardware"),
            ),
            lambda c: False,
            "in an evaluation, which has no training processes; it counts in python -m megarl.train",
        ),
        Rule(
            ("data.num_heldout",),
            lambda c: not isinstance(c.data, FileDataConfig),
            "in an evaluation on a set from files, which takes all of it; evaluate.num_problems=N takes a part",
        ),
        Rule(
            ("model.random",),
            lambda c: c.model.source is ModelSource.random,
            "under model.source={c.model.source.name}; set model.source=random, or leave it out",
        ),
    ),
}


def find_unused(config: Config, keys: Iterable[str], command: str = "train") -> Iterator[tuple[str, str]]:
    """(key, why it has no effect and what would make it count) for those of `keys` that have none.

    `keys` are the dotted ones that somebody set; what a preset leaves unused is nobody's mistake.
    """
    rules = (*COMMAND_RULES[command], *(() if command == "evaluate" else RULES))
    for key in dict.fromkeys(keys):
        failing = [rule for rule in rules if _covers(rule, key) and not rule.counts(config)]
        if failing and not (any(rule.switch for rule in failing) and _is_off(config, key)):
            yield key, f"has no effect {failing[0].reason.format(c=config)}"


def _covers(rule: Rule, key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in rule.keys)


def _is_off(config: Config, key: str) -> bool:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    if isinstance(value, Enum):
        return value.name in ("none", "raw")
    return value is None or value == 0
