"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it.

    python -m megarl.tools.import_roll FILE.yaml [--write NAME [--config-dir DIR]]

The overrides go to standard output, one a line, to be given to `python -m megarl.train`; the report goes to standard
error. What the file leaves out has ROLL's default, and an override is printed for it where ours differs. The overrides
are composed and checked before they are printed: exit code 0 where they load, 1 where they do not, 2 where the file
cannot be read. --write also saves them as experiment/NAME.yaml in DIR, a directory of your own (megarl's conf/
where none is given), for `python -m megarl.train --config-dir DIR experiment=NAME`.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from yaml import YAMLError, safe_dump

from megarl.config.checks.unused import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.roll.aliases import ALIASES
from megarl.config.roll.resolve import Value, resolve_aliases
from megarl.config.search_path import CONF_DIR
from megarl.tools.roll_keys import (
    NOTHING_HERE,
    OF_A_ROLE,
    PRESETS,
    RENAMED,
    ROLES,
    ROLL_DEFAULTS,
    SPECIAL,
    TRAINING_DEFAULTS,
    to_text,
)

DEFAULT = "ROLL's default"


@dataclass(frozen=True)
class Outcome:
    """What became of a key."""

    key: str
    found: str
    verdict: str
    """kept, renamed, nothing here, no effect, not resolved, not known, or ROLL's default"""
    overrides: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        to = " ".join(f"{key}={text}" for key, text in self.overrides.items())
        note = f" ({self.note})" if self.note else ""
        return f"{self.key}: {self.found}  {self.verdict}" + (f" -> {to}" if to else "") + note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", metavar="NAME", help="save as DIR/experiment/NAME.yaml, too")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, default=CONF_DIR, help="default: megarl's conf/")
    arguments = parser.parse_args()
    target = arguments.config_dir / "experiment" / f"{arguments.write}.yaml"
    try:
        if arguments.write and target.exists():
            raise ValueError(f"--write: {target} is there already; choose another name")
        leaves, unresolved = read_leaves(arguments.file)
    except (OSError, YAMLError, ValueError) as error:
        print(f"error: {arguments.file}: {error}", file=sys.stderr)
        sys.exit(2)
    outcomes, problems = import_roll(leaves, unresolved)
    overrides = list_overrides(outcomes)
    print("\n".join(f"{key}={text}" for key, text in overrides.items()))
    for outcome in outcomes:
        print(outcome, file=sys.stderr)
    print(*(f"error: {problem}" for problem in problems), sep="\n", end="", file=sys.stderr)
    print(f"\n{len(overrides)} overrides, which {'do not load' if problems else 'load'}", file=sys.stderr)
    if arguments.write and not problems:
        write_experiment(target, overrides, arguments.file.name)
    sys.exit(1 if problems else 0)


def read_leaves(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(dotted key -> value, dotted key -> the interpolation that could not be resolved); lists are values.

    OmegaConf's loader is YAML's safe one, with the numbers that ROLL reads. Raises ValueError where it is no mapping.
    """
    tree = OmegaConf.load(path)
    raw = OmegaConf.to_container(tree, resolve=False)
    if not isinstance(raw, dict):
        raise ValueError("a mapping of ROLL's keys was expected")
    leaves: dict[str, Any] = {}
    unresolved: dict[str, str] = {}
    for key, value in _walk(raw, ""):
        leaves[key] = value
        for _ in range(8):
            reference = re.fullmatch(r"\$\{([\w.]+)\}", str(leaves[key]))
            if reference is None:
                break
            leaves[key] = OmegaConf.select(OmegaConf.create(raw), reference.group(1))
        if "${" in str(leaves[key]):
            unresolved[key] = str(leaves.pop(key))
    return leaves, unresolved


def _walk(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from _walk(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def import_roll(leaves: Mapping[str, Any], unresolved: Mapping[str, str]) -> tuple[list[Outcome], list[str]]:
    """What became of every key, and what keeps the overrides from loading."""
    estimator = str(leaves.get("adv_estimator", ROLL_DEFAULTS["adv_estimator"]))
    outcomes = [Outcome("adv_estimator", estimator, "the preset below it", {"algo": PRESETS.get(estimator, "ppo")})]
    outcomes += _import_aliases(leaves)
    outcomes += [_import_key(key, value, leaves) for key, value in leaves.items() if key not in ALIASES]
    outcomes += [Outcome(key, text, "not resolved", note="an interpolation") for key, text in unresolved.items()]
    outcomes += _import_defaults(leaves)
    try:
        config = compose_config(_list_texts(outcomes))
        outcomes = list(_drop_unused(outcomes, dict(find_unused(config, list_overrides(outcomes)))))
        load_config(_list_texts(outcomes))
    except ConfigError as error:
        return outcomes, list(error.problems)
    return outcomes, []


def list_overrides(outcomes: list[Outcome]) -> dict[str, str]:
    """Our key -> text of its value."""
    return {key: text for outcome in outcomes for key, text in outcome.overrides.items()}


def _list_texts(outcomes: list[Outcome]) -> list[str]:
    return [f"{key}={text}" for key, text in list_overrides(outcomes).items()]


def _import_aliases(leaves: Mapping[str, Any]) -> list[Outcome]:
    """The keys of megarl/config/roll/aliases.py; one that ROLL does not read beside another is left out."""
    left_out = dict(_find_ignored(leaves))
    given = {key: value for key, value in leaves.items() if key in ALIASES and key not in left_out}
    outcomes = [Outcome(key, to_text(leaves[key]), "nothing here", note=why) for key, why in left_out.items()]
    while True:
        try:
            rewritings = resolve_aliases({key: Value(to_text(value), value) for key, value in given.items()})
            break
        except ConfigError as error:
            for problem in error.problems:
                key, _, why = problem.partition(": ")
                if key in given:
                    outcomes.append(Outcome(key, to_text(given.pop(key)), "nothing here", note=why))
    for rewriting in rewritings:
        names, found = ", ".join(rewriting.names), ", ".join(to_text(given[key]) for key in rewriting.names)
        same = all(key.endswith(f".{rewriting.names[0]}") for key in rewriting.assignments)
        outcomes.append(
            Outcome(names, found, "kept" if same else "renamed", dict(rewriting.assignments), rewriting.text)
        )
    return outcomes


def _find_ignored(leaves: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that ROLL itself does not read beside another one."""
    if "loss_agg_mode" in leaves and "token_level_loss" in leaves:
        yield "token_level_loss", "ROLL reads loss_agg_mode instead"
    if not leaves.get("use_pg_clip_range"):
        for key in {"pg_clip_low", "pg_clip_high"} & set(leaves):
            yield key, "ROLL reads it only with use_pg_clip_range=true"
    elif "pg_clip" in leaves and not leaves.get("dual_clip_loss"):
        yield "pg_clip", "ROLL reads pg_clip_low and pg_clip_high instead"
    if leaves.get("adv_estimator") == "grpo":
        for key in ("reward_norm", "norm_mean_type", "norm_std_type"):
            if key in leaves and leaves[key] != "group":
                yield key, "ROLL normalises by the group under adv_estimator=grpo, whatever is given"


def _import_key(key: str, value: Any, leaves: Mapping[str, Any]) -> Outcome:
    role, _, rest = key.partition(".")
    found = to_text(value)
    if key in SPECIAL:
        overrides, note = SPECIAL[key](value, leaves)
        return Outcome(key, found, "renamed" if overrides else "nothing here", overrides, note)
    if role == "rewards" and rest.endswith(".worker_cls"):
        domains = {other.split(".")[1] for other in leaves if other.startswith("rewards.")}
        if len(domains) == 1 and found.endswith(".MathRuleRewardWorker"):
            return Outcome(key, found, "renamed", {"reward": "math"}, "math-verify")
    target = RENAMED.get(key)
    if role in ROLES and rest in OF_A_ROLE:
        target = f"{ROLES[role]}.{OF_A_ROLE[rest]}"
    if target is not None:
        return Outcome(key, found, "kept" if target == key else "renamed", {target: found})
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        why = NOTHING_HERE.get(".".join(parts[:size]))
        if why is not None:
            return Outcome(key, found, "nothing here", note=why)
    return Outcome(key, found, "not known")


def _import_defaults(leaves: Mapping[str, Any]) -> Iterator[Outcome]:
    """What ROLL takes where the file is silent."""
    top = {key: value for key, value in ROLL_DEFAULTS.items() if key not in leaves}
    aliases = {key: Value(to_text(value), value) for key, value in top.items() if key in ALIASES}
    for rewriting in resolve_aliases(aliases):
        yield Outcome(rewriting.names[0], "-", DEFAULT, rewriting.assignments)
    for key in set(top) - set(ALIASES):
        yield Outcome(key, "-", DEFAULT, {RENAMED[key]: to_text(top[key])})
    for role in ("actor_train", "critic"):
        for name, value in TRAINING_DEFAULTS.items():
            key = f"{role}.training_args.{name}"
            if key not in leaves:
                yield replace(_import_key(key, value, leaves), found="-", verdict=DEFAULT)


def _drop_unused(outcomes: list[Outcome], unused: Mapping[str, str]) -> Iterator[Outcome]:
    for outcome in outcomes:
        dead = [key for key in outcome.overrides if key in unused]
        kept = {key: text for key, text in outcome.overrides.items() if key not in unused}
        if dead and not kept and outcome.verdict != DEFAULT:
            yield replace(outcome, verdict="no effect", overrides={}, note=f"{dead[0]} {unused[dead[0]]}")
        elif kept or outcome.verdict != DEFAULT:
            yield replace(outcome, overrides=kept)


def write_experiment(path: Path, overrides: Mapping[str, str], source: str) -> None:
    """The overrides as an option of the group experiment; never over an existing file."""
    tree: dict[str, Any] = {}
    groups = [{f"override /{key}": text} for key, text in overrides.items() if key in ("algo", "data", "reward")]
    for key, text in overrides.items():
        *parents, leaf = key.split(".")
        if not parents and leaf != "seed":
            continue
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        value = OverridesParser.create().parse_override(f"{leaf}={text}").value()
        node[leaf] = getattr(value, "text", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(f"# @package _global_\n# From ROLL's {source}, by tools/import_roll.py.\n")
        file.write(safe_dump({"defaults": groups, **tree}, sort_keys=False))


if __name__ == "__main__":
    main()
