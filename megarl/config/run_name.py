"""The folder of one run of a sweep: its swept values, to be read, and a digest of what it computes, to be found again.

`algo.clip_high=0.24,seed=2_1f9c0b`. The digest follows from the configuration alone: a sweep that is started again,
with more values or in another order, finds the folders of the runs that it already has.
"""

import hashlib
import json
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

RESOLVER = "megarl_run_name"
NOT_COMPUTED = ("hydra", "cluster", "checkpoint", "evaluate", "logger")
"""Nodes that do not decide what a run learns"""
LONGEST_READABLE = 100
DIGITS = 6


def name_run(readable: str, composed: DictConfig) -> str:
    """readable: Hydra's `key=value,key=value`; composed: the whole configuration of the run, resolved here."""
    text = re.sub(r"[^A-Za-z0-9_.=,+-]", "-", readable)[:LONGEST_READABLE].lstrip(".-")
    return f"{text}_{digest_config(composed)}" if text else digest_config(composed)


def digest_config(composed: DictConfig) -> str:
    """Hexadecimal digits, equal for configurations that compute the same under the same names."""
    nodes = [key for key in composed if key not in NOT_COMPUTED]
    values = {str(key): _to_plain(composed[key]) for key in nodes}
    return digest(values)


def digest(values: Any, digits: int = DIGITS) -> str:
    """The digest of anything that JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:digits]


def _to_plain(node: Any) -> Any:
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    return node


def _resolve(readable: Any, *, _root_: DictConfig) -> str:
    return name_run(str(readable), _root_)


def register() -> None:
    """Make `${megarl_run_name:...}` known to OmegaConf; calling it again changes nothing."""
    OmegaConf.register_new_resolver(RESOLVER, _resolve, replace=True)


# A launcher may have sent a run to another process, in which nobody else calls it.
register()
