"""SGLang's own server arguments: which ones the installed release has, and how they are written on a command line."""

import ast
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, find_nearest_key

OWN_OPTIONS = {
    "model_path": "model.path",
    "host": "cluster.listen_host",
    "port": "no key: a free one is picked",
    "dtype": "rollout.dtype",
    "random_seed": "seed",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.kv_cache_tokens",
    "skip_tokenizer_init": "no key: megarl sends and receives token ids",
    "custom_weight_loader": "no key: weight syncs use it",
    "weight_version": "no key: the trainer sets it",
    "tp_size": "rollout.tp",
    "api_key": "no key: one is made for servers that listen on the network",
    "admin_api_key": "no key: one is made for servers that listen on the network",
}
"""Arguments that megarl sets itself, with the key that determines them"""


@functools.cache
def load_option_names() -> dict[str, str]:
    """The flag of each of SGLang's server arguments, by field name, read from the installed source.

    Importing SGLang takes seconds and loads its whole runtime, so the source is parsed instead. Raises ConfigError
    where SGLang is not installed or its source has another form.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(["rollout: SGLang is not installed; `make install` brings the pinned release"])
    root = Path(spec.submodule_search_locations[0]) / "srt"
    options: dict[str, str] = {}
    for source in [root / "server_args.py", *sorted(root.glob("arg_groups/fields/*.py"))]:
        if source.is_file():
            options.update(_parse_fields(ast.parse(source.read_text())))
    if "model_path" not in options:
        raise ConfigError([f"rollout.sglang: found no server arguments in {root}; sglang 0.5.23 has them there"])
    return options


def _parse_fields(tree: ast.Module) -> dict[str, str]:
    """The flags of class-body lines of the form `name: A[type, help or Arg(...)]`, without those that have no flag."""
    options: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            if not isinstance(line.annotation, ast.Subscript) or ast.unparse(line.annotation.value) != "A":
                continue
            keywords = _find_arg_keywords(line.annotation)
            if keywords.get("no_cli") is True:
                continue
            flag = keywords.get("cli_name") or "--" + line.target.id.replace("_", "-")
            options[line.target.id] = str(flag)
    return options


def _find_arg_keywords(annotation: ast.AST) -> dict[str, Any]:
    for call in ast.walk(annotation):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Arg":
            return {k.arg: k.value.value for k in call.keywords if k.arg and isinstance(k.value, ast.Constant)}
    return {}


def check_options(options: Mapping[str, Any]) -> list[str]:
    """Problems of `rollout.sglang`, one message each: unknown keys, and keys that megarl sets itself."""
    known = load_option_names()
    problems = []
    for key in options:
        if key in OWN_OPTIONS:
            problems.append(f"rollout.sglang.{key}: megarl sets it (by {OWN_OPTIONS[key]}); remove it here")
        elif key not in known:
            nearest = find_nearest_key(key, known)
            hint = f"; did you mean rollout.sglang.{nearest}?" if nearest else ""
            problems.append(f"rollout.sglang.{key}: SGLang has no such server argument{hint}")
    return problems


def render_options(options: Mapping[str, Any]) -> list[str]:
    """The options as command-line arguments.

    True: the bare flag. False or None: nothing. Lists: several arguments. Dictionaries: JSON.
    """
    flags = load_option_names()
    words: list[str] = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        words.append(flags[key])
        if isinstance(value, list | tuple):
            words.extend(str(item) for item in value)
        elif isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif value is not True:
            words.append(str(value))
    return words
