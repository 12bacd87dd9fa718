"""The folder of one run of a sweep: its swept values, to be read, and a digest of what it computes, to be found again.

`algo.clip_high=0.24,seed=2_1f9c0b`. The digest follows from the configuration alone: a sweep that is started again,
with more values or in another order, finds the folders of the runs that it already has.
"""

import hashlib
import json
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

NOT_COMPUTED = ("hydra", "cluster", "checkpoint", "evaluate", "logger")
"""Nodes that do not decide what a run learns"""
LONGEST_READABLE = 100
DIGITS = 6


def name_run(readable: str, composed: DictConfig) -> str:
    """readable: Hydra's `key=value,key=value`; composed: the whole configuration of the run, resolved here. What
    computes the same under the same names has the same name."""
    nodes = {str(key): composed[key] for key in composed if key not in NOT_COMPUTED}
    plain = {
        key: OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else node
        for key, node in nodes.items()
    }
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:DIGITS]
    text = re.sub(r"[^A-Za-z0-9_.=,+-]", "-", readable)[:LONGEST_READABLE].lstrip(".-")
    return f"{text}_{digest}" if text else digest


def _resolve(readable: Any, *, _root_: DictConfig) -> str:
    return name_run(str(readable), _root_)


def register() -> None:
    """Make `${megarl_run_name:...}` known to OmegaConf; calling it again changes nothing."""
    OmegaConf.register_new_resolver("megarl_run_name", _resolve, replace=True)


# A launcher may have sent a run to another process, in which nobody else calls it.
register()
