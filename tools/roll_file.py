"""Reads a configuration file of ROLL's RLVR pipeline: its keys one by one, interpolations followed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
"""Most values of a file, those behind aliases and interpolations counted wherever they appear."""
MAX_DEPTH = 8
"""Longest chain of interpolations that is followed."""
MAX_TEXT = 10_000
"""Longest text that interpolations may grow to."""
_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
_OTHER_PIPELINES = {
    **{"custom_envs": "agentic", "train_env_manager": "agentic", "sft_train": "SFT"},
    **{"student_train": "distillation", "student": "distillation", "chosen_key": "DPO"},
}
"""Keys that only another pipeline's files have."""


@dataclass(frozen=True)
class RollFile:
    leaves: dict[str, Any]
    """By dotted key; lists are values."""
    unresolved: dict[str, str]
    """By dotted key: an interpolation that leads nowhere in the file."""
    variables: frozenset[str]
    """Keys at the top that other values refer to."""


def read_roll_file(path: Path) -> RollFile:
    """Raises ValueError, OSError or YAMLError for what is no file of the RLVR pipeline."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes found; a configuration has at most {MAX_BYTES}")
    text = path.read_text("utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ValueError("the file is empty; a configuration of ROLL's RLVR pipeline was expected")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("a mapping of ROLL's keys was expected")
        if _count(root, {}) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values found, with its aliases written out")
        # OmegaConf's loader is YAML's safe one, with the numbers that ROLL reads (1e-6).
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    assert isinstance(raw, dict)
    _check_pipeline(raw)
    return _Reader(raw).read(frozenset(name.split(".")[0] for name in _REFERENCE.findall(text)))


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Values below a node with every alias written out, without writing it out."""
    if id(node) in counted:
        if counted[id(node)] == 0:
            raise ValueError("an alias stands for something that contains it")
        return counted[id(node)]
    counted[id(node)] = 0
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_count(key, counted) + _count(value, counted) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, counted) for item in node.value)
    counted[id(node)] = total
    return total


def _check_pipeline(raw: Mapping[Any, Any]) -> None:
    for key, pipeline in _OTHER_PIPELINES.items():
        if raw.get(key) is not None:
            raise ValueError(f"{key} found: a file of ROLL's {pipeline} pipeline; those of RLVR are imported")
    missing = [name for name in ("actor_train", "actor_infer") if not isinstance(raw.get(name), dict)]
    if missing:
        found = ", ".join(str(key) for key in list(raw)[:8])
        raise ValueError(
            f"no configuration of ROLL's RLVR pipeline: {' and '.join(missing)}, with the keys of a role, not found;"
            f" found {found or 'nothing'}"
        )


class _Reader:
    def __init__(self, raw: dict[Any, Any]) -> None:
        self._raw = raw
        self._budget = MAX_VALUES
        self._unresolved: dict[str, str] = {}

    def read(self, variables: frozenset[str]) -> RollFile:
        leaves = dict(self._walk(self._raw, "", 0))
        return RollFile(leaves, self._unresolved, variables)

    def _walk(self, tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        for name, child in tree.items():
            key = f"{prefix}{name}"
            try:
                value = self._resolve(child, depth) if not isinstance(child, dict) else child
            except LookupError:
                self._unresolved[key] = str(child)
                continue
            if isinstance(value, dict) and value:
                yield from self._walk(value, f"{key}.", depth + (value is not child))
            else:
                yield key, value

    def _resolve(self, value: Any, depth: int) -> Any:
        """The value with its interpolations replaced. Raises LookupError where one leads nowhere."""
        self._budget -= 1
        if self._budget < 0:
            raise ValueError(f"more than {MAX_VALUES} values found, with its interpolations written out")
        if isinstance(value, list):
            return [self._resolve(item, depth) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth == MAX_DEPTH:
            raise LookupError(value)
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._resolve(self._select(whole.group(1)), depth + 1)
        text = _REFERENCE.sub(lambda match: self._to_text(match.group(1), depth + 1), value)
        if "${" in text or len(text) > MAX_TEXT:
            raise LookupError(value)
        return text

    def _to_text(self, name: str, depth: int) -> str:
        value = self._resolve(self._select(name), depth)
        if isinstance(value, dict | list):
            raise LookupError(name)
        return str(value)

    def _select(self, name: str) -> Any:
        value: Any = self._raw
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise LookupError(name)
            value = value[part]
        return value
