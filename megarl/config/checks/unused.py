"""Keys that were set and have no effect: those of the algorithm (algo.py), and the table of all others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megarl.algo.declarations import is_on
from megarl.algo.registry import needs_critic
from megarl.config.checks.algo import Dead, find_dead_keys
from megarl.config.old_logprobs import reuses_logprobs
from megarl.config.placement import find_server_offload
from megarl.config.schema.roles import LrDecay, ModelSource, OptimizerConfig, Recompute, TrainedRoleConfig
from megarl.config.schema.root import Config
from megarl.config.schema.run import Transport
from megarl.config.schema.task import FileDataConfig


@dataclass(frozen=True)
class Rule:
    """When keys have an effect. A key that none of the rules names always has."""

    keys: tuple[str, ...]
    """Dotted keys, each with everything below it."""
    counts: Callable[[Config], bool]
    reason: str
    """Why they have none and what would give them one; {c} is the configuration."""
    switch: bool = False
    """Whether a value that means off (null, false, 0, none) is allowed all the same: there is nothing to switch off."""
    but: tuple[str, ...] = ()
    """Keys below `keys` that have an effect all the same."""


def _decays(optimizer: OptimizerConfig) -> bool:
    return optimizer.decay is not LrDecay.constant


def _list_role_rules(role: str) -> list[Rule]:
    """Of keys that policy and critic both have; those of a critic that is not there are refused with its others."""

    def counts(condition: Callable[[TrainedRoleConfig], bool]) -> Callable[[Config], bool]:
        return lambda c: (role == "critic" and not needs_critic(c.algo)) or condition(getattr(c, role))

    optimizer, node = f"{role}.optimizer", f"{{c.{role}"
    return [
        Rule(
            (f"{optimizer}.warmup_steps",),
            counts(lambda it: it.optimizer.warmup_ratio is None),
            f"with {optimizer}.warmup_ratio={node}.optimizer.warmup_ratio}}; it counts with warmup_ratio=null",
            switch=True,
        ),
        Rule(
            (f"{optimizer}.decay_iterations",),
            counts(lambda it: _decays(it.optimizer) and it.optimizer.decay_steps is None),
            f"under {optimizer}.decay={node}.optimizer.decay.name}} and {optimizer}.decay_steps="
            f"{node}.optimizer.decay_steps}}; it counts with linear or cosine and decay_steps=null",
            switch=True,
        ),
        Rule(
            (f"{optimizer}.min_lr",),
            counts(lambda it: _decays(it.optimizer)),
            f"under {optimizer}.decay=constant; it counts with linear or cosine",
            switch=True,
        ),
        Rule(
            (f"{role}.recompute_method", f"{role}.recompute_num_layers"),
            counts(lambda it: it.recompute is Recompute.full),
            f"under {role}.recompute={node}.recompute.name}}; it counts with full",
        ),
        Rule(
            (f"{role}.fp8_recipe",),
            counts(lambda it: it.fp8 is not None),
            f"with {role}.fp8=null; it counts with hybrid or e4m3",
        ),
    ]


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


RULES: tuple[Rule, ...] = (
    *_list_role_rules("policy"),
    *_list_role_rules("critic"),
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
        ("logger.wandb_project",),
        lambda c: c.logger.wandb is not None,
        "with logger.wandb=null; it counts with offline or online",
    ),
    Rule(
        ("logger.mlflow_experiment",),
        lambda c: c.logger.mlflow is not None,
        "with logger.mlflow=null; it counts with a tracking URI",
    ),
    Rule(
        ("train.reuse_logprobs",),
        lambda c: reuses_logprobs(c) or not c.train.reuse_logprobs,
        "where the policy scores the responses before its update (several optimizer steps in an iteration,"
        " algo.kl.in_reward, topr, rollout.router_replay, FP8), or nothing reads old_logprobs; it counts with one"
        " optimizer step and none of these",
        switch=True,
    ),
    Rule(
        ("policy.lora.alpha", "policy.lora.layers"),
        lambda c: c.policy.lora.rank > 0,
        "with policy.lora.rank=0; it counts with 1 or more",
    ),
    Rule(
        ("data.critic_prompt",),
        lambda c: needs_critic(c.algo),
        "under algo.advantage={c.algo.advantage}, which has no critic; it counts with one that has, as under algo=vapo",
        switch=True,
    ),
    Rule(
        ("data.critic_prompt_length",),
        lambda c: needs_critic(c.algo) and c.data.critic_prompt is not None,
        "without a critic that reads data.critic_prompt",
    ),
    Rule(
        ("model.random",),
        lambda c: c.model.source is ModelSource.random,
        "under model.source={c.model.source.name}; set model.source=random, or leave it out",
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
        ("rollout.offload",),
        lambda c: find_server_offload(c) is not None,
        "where servers share no GPU with a role; it counts with cluster.placement=colocated",
        switch=True,
    ),
    Rule(
        ("logger.token_record_kb", "logger.token_passes"),
        lambda c: c.logger.num_token_records > 0,
        "with logger.num_token_records=0; it counts with 1 or more",
        switch=True,
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

COMMAND_RULES: dict[str, tuple[Rule, ...]] = {
    "train": (
        Rule(("evaluate",), lambda c: False, "in training; it counts in python -m megarl.evaluate"),
        *SAVED_RULES,
        Rule(
            ("policy", "reference", "reward", "rollout.file", "logger.save_rollouts", "train.max_samples"),
            lambda c: not c.has_critic_alone,
            "where the critic alone learns, from saved rollouts; it counts with train.num_iterations above 0 or with"
            " algo.value_pretrain.rollouts=null",
            switch=True,
            but=("reward.wrong",),
        ),
    ),
    "evaluate": (
        Rule(
            ("algo", "policy", "critic", "reference", "train", "checkpoint", "reward.wrong"),
            lambda c: False,
            "in an evaluation, which trains nothing; it counts in python -m megarl.train",
            but=("train.num_eval_prompts",),
        ),
        Rule(
            ("train.num_eval_prompts",),
            lambda c: c.evaluate.heldout,
            "in an evaluation of whole sets, of which evaluate.num_problems=N takes a part; it counts with"
            " evaluate.heldout=true",
        ),
        Rule(
            ("data.critic_prompt", "data.critic_prompt_length"),
            lambda c: False,
            "in an evaluation, which has no critic; it counts in python -m megarl.train",
            switch=True,
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
                *("rollout.transport", "rollout.sync_bucket_mb", "rollout.offload", "rollout.file", "cluster.hardware"),
            ),
            lambda c: False,
            "in an evaluation, which has no training processes; it counts in python -m megarl.train",
            but=("logger.capture_output",),
        ),
        Rule(
            ("data.num_heldout",),
            lambda c: c.evaluate.heldout or not isinstance(c.data, FileDataConfig),
            "in an evaluation on a set from files, which takes all of it; evaluate.num_problems=N takes a part, and"
            " evaluate.heldout=true the part that training holds out",
        ),
        Rule(
            ("model.random",),
            lambda c: c.model.source is ModelSource.random,
            "under model.source={c.model.source.name}; set model.source=random, or leave it out",
        ),
    ),
}


def find_unused(config: Config, keys: Iterable[str], command: str | None = "train") -> Iterator[tuple[str, str]]:
    """(key, why it has no effect and what would make it count) for those of `keys` that have none.

    `keys` are the dotted ones that somebody set; what a preset leaves unused is nobody's mistake. command: None leaves
    out what only one of the commands has no use for.
    """
    rules = (*(() if command is None else COMMAND_RULES[command]), *(() if command == "evaluate" else RULES))
    failing_rules = [rule for rule in rules if not rule.counts(config)]
    dead = [Dead(it.keys, it.reason.format(c=config), it.switch, but=it.but) for it in failing_rules]
    if command != "evaluate":
        dead += find_dead_keys(config.algo)
    for key in dict.fromkeys(keys):
        failing = [it for it in dead if _covers(it, key)]
        if failing and not (any(it.switch for it in failing) and not is_on(_read(config, key))):
            yield key, f"has no effect {failing[0].reason}"


def _covers(dead: Dead, key: str) -> bool:
    return key not in dead.but and any(key == name or key.startswith(f"{name}.") for name in dead.keys)


def _read(config: Config, key: str) -> object:
    """The value of the key; None where a node on the way to it is null."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
