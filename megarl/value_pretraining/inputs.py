"""The keys that value pretraining depends on: runs with equal values of them can share one."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.config.checks.unused import find_unused
from megarl.config.schema.root import Config
from megarl.config.values import list_values

NOT_INPUTS = (
    *("algo.name", "algo.value_pretrain.taken_from", "checkpoint.", "cluster.", "evaluate.", "logger."),
    *("rollout.max_probe_logprob_gap", "rollout.num_threads", "data.critic_prompt_length"),
)
"""Prefixes of keys that do not change what the critic learns, beyond the last bits"""
_DEADLINES = ("_deadline_s", ".max_server_restarts")


def list_pretraining_inputs(config: Config) -> dict[str, Any]:
    """The plain value of every key that has an effect on value pretraining, by dotted key.

    Left out are the keys that python -m megarl.pretrain_value refuses as without effect (the policy's loss, its
    optimizer, lambda_policy, the number of iterations ...), and those of where it computes and of deadlines.
    logger.save_rollouts is included: a run that saves its responses needs those of value pretraining too.
    """
    values = dict(list_values(config))
    # A reference model that only the policy's loss needs has no effect either.
    without_loss = replace(config, algo=replace(config.algo, kl=replace(config.algo.kl, in_loss=False)))
    unused = {key for key, _ in find_unused(without_loss, values, "pretrain_value")}
    return {key: value for key, value in values.items() if key not in unused and _is_input(key)}


def _is_input(key: str) -> bool:
    if key == "logger.save_rollouts":
        return True
    return not f"{key}.".startswith(NOT_INPUTS) and not key.endswith(_DEADLINES)


def find_differing(before: Mapping[str, Any], config: Config) -> list[str]:
    """The keys whose values in `before`, inputs read from JSON, differ from the configuration's, sorted, each with both
    values.
    """
    now = json.loads(json.dumps(list_pretraining_inputs(config)))
    before = {key: value for key, value in before.items() if _is_input(key)}
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} ({before.get(key)!r} there, now {now.get(key)!r})" for key in keys]
