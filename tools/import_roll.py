"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it.

    python -m megarl.tools.import_roll FILE.yaml [--allow-loss] [--write NAME [--config-dir DIR]]

The overrides go to standard output, one a line, to be given to `python -m megarl.train`; the report goes to standard
error. What the file leaves out has ROLL's default. Nothing comes from the tiny task or from a preset that ROLL's file
does not say.

Exit code 0: the overrides load, and nothing that is learned is lost, neither data, reward, objective nor model. 1:
they do not load, or something of these is lost; the last line says what. 2: the file is none of ROLL's RLVR pipeline.
--allow-loss accepts what is lost. --write also saves the overrides, where the code is 0, as experiment/NAME.yaml in
DIR, a directory of your own (megarl's conf/ where none is given), for `python -m megarl.train --config-dir DIR
experiment=NAME`.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
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
from megarl.config.schema.reward import RewardConfig
from megarl.config.schema.root import Config
from megarl.config.search_path import CONF_DIR
from megarl.tools.roll_file import RollFile, read_roll_file
from megarl.tools.roll_handlers import HANDLERS
from megarl.tools.roll_keys import (
    OF_A_ROLE,
    PRESETS,
    RENAMED,
    ROLES,
    ROLL_DEFAULTS,
    TRAINED,
    TRAINING_DEFAULTS,
    find_kind,
    find_loss,
    find_reason,
    to_text,
)
from megarl.tools.roll_learned import Conversion, convert_filter, convert_reward, find_variant, list_math_domains

DEFAULT = "ROLL's default"
LEARNED_KINDS = ("data", "reward", "objective", "model")
GROUPS = ("model", "cluster", "algo", "data", "reward")


@dataclass(frozen=True)
class Outcome:
    """What became of a key."""

    key: str
    found: str
    verdict: str
    """kept, renamed, nothing here, no effect, not resolved, not known, or ROLL's default"""
    overrides: dict[str, str] = field(default_factory=dict)
    note: str = ""
    lost: str = ""
    """what of what is learned is lost with it: data, reward, objective or model; "" for nothing"""

    def __str__(self) -> str:
        to = " ".join(f"{key}={text}" for key, text in self.overrides.items())
        note = f" ({self.note})" if self.note else ""
        lost = f"  LOST: {self.lost}" if self.lost else ""
        return f"{self.key}: {self.found}  {self.verdict}" + (f" -> {to}" if to else "") + note + lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--allow-loss", action="store_true", help="exit code 0 although some of what is learned is lost"
    )
    parser.add_argument("--write", metavar="NAME", help="save as DIR/experiment/NAME.yaml, too")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, default=CONF_DIR, help="default: megarl's conf/")
    arguments = parser.parse_args()
    target = arguments.config_dir / "experiment" / f"{arguments.write}.yaml"
    try:
        if arguments.write and target.exists():
            raise ValueError(f"--write: {target} is there already; choose another name")
        file = read_roll_file(arguments.file)
    except (OSError, YAMLError, ValueError) as error:
        print(f"error: {arguments.file}: {error}", file=sys.stderr)
        sys.exit(2)
    outcomes, problems = import_roll(file)
    overrides = list_overrides(outcomes)
    print("\n".join(f"{key}={text}" for key, text in overrides.items()))
    for line in (*outcomes, *(f"error: {problem}" for problem in problems)):
        print(line, file=sys.stderr)
    print(f"\n{summarize(outcomes, problems, arguments.allow_loss)}", file=sys.stderr)
    code = get_exit_code(outcomes, problems, arguments.allow_loss)
    if arguments.write and code == 0:
        write_experiment(target, overrides, arguments.file.name)
    sys.exit(code)


def get_exit_code(outcomes: Sequence[Outcome], problems: Sequence[str], allow_loss: bool = False) -> int:
    return int(bool(problems) or (any(each.lost for each in outcomes) and not allow_loss))


def summarize(outcomes: Sequence[Outcome], problems: Sequence[str], allow_loss: bool) -> str:
    """The last line: whether the overrides load, and what of what is learned is lost."""
    loads = f"{len(list_overrides(outcomes))} overrides, which {'do not load' if problems else 'load'}"
    lost = list_losses(outcomes)
    if not lost:
        return f"{loads}; nothing that is learned is lost"
    named = "; ".join(f"{kind} ({', '.join(keys)})" for kind, keys in lost.items())
    accepted = "accepted by --allow-loss" if allow_loss else "--allow-loss accepts it"
    return f"{loads}; LOST of what is learned: {named}; {accepted}"


def list_losses(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """data, reward, objective, model -> ROLL's keys that are lost."""
    lost = {kind: [each.key for each in outcomes if each.lost == kind] for kind in LEARNED_KINDS}
    return {kind: keys for kind, keys in lost.items() if keys}


def import_roll(file: RollFile) -> tuple[list[Outcome], list[str]]:
    """What became of every key, and what keeps the overrides from loading."""
    leaves = file.leaves
    estimator = str(leaves.get("adv_estimator", ROLL_DEFAULTS["adv_estimator"]))
    variant = find_variant(leaves)
    preset = variant if variant == "topr" else PRESETS.get(estimator, "ppo")
    base = {"model": "checkpoint", "cluster": "gpu", "algo": preset}
    outcomes = [Outcome("adv_estimator", estimator, "the presets below it", base)]
    outcomes += _import_aliases(leaves)
    outcomes += [
        _import_key(key, value, file) for key, value in leaves.items() if key not in ALIASES or key in HANDLERS
    ]
    outcomes += [
        Outcome(key, text, "not resolved", {}, "an interpolation", "objective" if key in ALIASES else find_kind(key))
        for key, text in file.unresolved.items()
    ]
    outcomes += _find_missing(file)
    outcomes += _import_defaults(file, list_overrides(outcomes))
    outcomes += _undo_preset(preset, list_overrides(outcomes))
    try:
        config = compose_config(_list_texts(outcomes))
        outcomes = list(_drop_unused(outcomes, dict(find_unused(config, list_overrides(outcomes)))))
        load_config(_list_texts(outcomes))
    except ConfigError as error:
        return outcomes, list(error.problems)
    return outcomes, []


def list_overrides(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Our key -> text of its value."""
    return {key: text for outcome in outcomes for key, text in outcome.overrides.items()}


def _list_texts(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{key}={text}" for key, text in list_overrides(outcomes).items()]


def _import_aliases(leaves: Mapping[str, Any]) -> list[Outcome]:
    """The keys of megarl/config/roll/aliases.py; one that ROLL does not read beside another is left out."""
    left_out = dict(_find_ignored(leaves))
    names = [key for key in leaves if key in ALIASES and key not in HANDLERS]
    outcomes = [Outcome(key, to_text(leaves[key]), "nothing here", note=why) for key, why in left_out.items()]
    given = {key: leaves[key] for key in names if key not in left_out}
    while True:
        try:
            rewritings = resolve_aliases({key: Value(to_text(value), value) for key, value in given.items()})
            break
        except ConfigError as error:
            for problem in error.problems:
                key, _, why = problem.partition(": ")
                if key in given:
                    lost = "objective" if ALIASES[key].is_read else ""
                    outcomes.append(Outcome(key, to_text(given.pop(key)), "nothing here", {}, why, lost))
    for rewriting in rewritings:
        names_text, found = ", ".join(rewriting.names), ", ".join(to_text(given[key]) for key in rewriting.names)
        same = all(key.endswith(f".{rewriting.names[0]}") for key in rewriting.assignments)
        outcomes.append(
            Outcome(names_text, found, "kept" if same else "renamed", dict(rewriting.assignments), rewriting.text)
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
    if "importance_sampling" in leaves and find_variant(leaves) != "ppo":
        yield "importance_sampling", "ROLL reads it only without a pg_variant"


def _import_key(key: str, value: Any, file: RollFile) -> Outcome:
    found = to_text(value)
    try:
        conversion = _convert(key, value, file)
    except (ValueError, TypeError, ArithmeticError) as error:
        conversion = Conversion(note=str(error), lost="objective")
    if conversion is not None:
        verdict = "nothing here"
        if conversion.overrides:
            verdict = "kept" if list(conversion.overrides) == [key] else "renamed"
        return Outcome(key, found, verdict, conversion.overrides, conversion.note, conversion.lost)
    why = find_reason(key)
    if why is not None:
        return Outcome(key, found, "nothing here", {}, why, find_loss(key, value))
    if key.split(".")[0] in file.variables:
        return Outcome(key, found, "nothing here", note="other values refer to it")
    return Outcome(key, found, "not known", note="no key of ROLL's at the commit read", lost="objective")


def _convert(key: str, value: Any, file: RollFile) -> Conversion | None:
    """What a key becomes; None where it has no counterpart."""
    role, _, rest = key.partition(".")
    if role == "rewards" and rest.endswith(".worker_cls"):
        return convert_reward(rest.split(".")[0], value, file.leaves)
    if role == "rewards" and rest.endswith(".query_filter_config.type"):
        return convert_filter(rest.split(".")[0], value, file.leaves)
    if key in HANDLERS:
        return HANDLERS[key](value, file.leaves)
    target = RENAMED.get(key)
    if role in ROLES and rest in OF_A_ROLE and (role in TRAINED or OF_A_ROLE[rest].startswith("parallel.")):
        target = f"{ROLES[role]}.{OF_A_ROLE[rest]}"
        if value is None:
            return Conversion(note="off, as here")
    return None if target is None else Conversion({target: to_text(value)})


def _find_missing(file: RollFile) -> Iterator[Outcome]:
    """What a run needs and the file does not say."""
    known = {**file.leaves, **file.unresolved}
    needed = {
        "pretrain": ("model", {}, "model.path=DIRECTORY_OR_NAME is needed"),
        "actor_train.data_args.file_name": ("data", {"data": "jsonl"}, "data.path=FILE is needed"),
    }
    for key, (lost, overrides, note) in needed.items():
        if key not in known:
            yield Outcome(key, "-", "not given", overrides, note, lost)
    if not {"response_length", "sequence_length"} & set(known):
        yield Outcome("response_length", "-", "not given", {}, "needed in ROLL, too", "objective")
    if not list_math_domains(file.leaves):
        # Never another reward in its place: without a path these overrides do not load.
        yield Outcome(
            "rewards", "-", "none here", {"reward": "function"}, "reward.path=package.module:callable", "reward"
        )


def _import_defaults(file: RollFile, given: Mapping[str, str]) -> Iterator[Outcome]:
    """What ROLL takes where the file is silent."""
    top = {key: value for key, value in ROLL_DEFAULTS.items() if key not in file.leaves}
    aliases = {key: Value(to_text(value), value) for key, value in top.items() if key in ALIASES}
    found = [
        *(Outcome(each.names[0], "-", DEFAULT, each.assignments) for each in resolve_aliases(aliases)),
        *(Outcome(key, "-", DEFAULT, {RENAMED[key]: to_text(top[key])}) for key in top if key not in ALIASES),
    ]
    for role in TRAINED:
        for name, value in TRAINING_DEFAULTS.items():
            key = f"{role}.training_args.{name}"
            if key not in file.leaves:
                found.append(replace(_import_key(key, value, file), found="-", verdict=DEFAULT))
    for outcome in found:
        yield replace(outcome, overrides={k: text for k, text in outcome.overrides.items() if k not in given})


def _undo_preset(name: str, given: Mapping[str, str]) -> Iterator[Outcome]:
    """The schema's default of every key that the preset of the algorithm sets and ROLL's file and defaults do not."""
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "algo" / f"{name}.yaml"))
    assert isinstance(tree, dict)
    for key in _list_keys(tree, ""):
        if key not in given and key not in ("algo.name", "defaults"):
            value: Any = Config(reward=RewardConfig())
            for part in key.split("."):
                value = getattr(value, part)
            text = to_text(value.name if isinstance(value, Enum) else value)
            yield Outcome(key, "-", DEFAULT, {key: text}, f"not the one of algo={name}")


def _list_keys(tree: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from _list_keys(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _drop_unused(outcomes: Sequence[Outcome], unused: Mapping[str, str]) -> Iterator[Outcome]:
    for outcome in outcomes:
        dead = [key for key in outcome.overrides if key in unused]
        kept = {key: text for key, text in outcome.overrides.items() if key not in unused}
        if dead and not kept and outcome.verdict != DEFAULT:
            yield replace(outcome, verdict="no effect", overrides={}, note=f"{dead[0]} {unused[dead[0]]}")
        elif kept or outcome.lost or outcome.verdict != DEFAULT:
            yield replace(outcome, overrides=kept)


def write_experiment(path: Path, overrides: Mapping[str, str], source: str) -> None:
    """The overrides as an option of the group experiment; never over an existing file."""
    tree: dict[str, Any] = {}
    groups = [{f"override /{key}": text} for key, text in overrides.items() if key in GROUPS]
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
