"""SGLang's own server arguments: which ones the installed release has, and how they are written on a command line."""

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig

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
    "enable_return_routed_experts": "rollout.router_replay",
    "api_key": "no key: each run makes one",
    "enable_memory_saver": "rollout.offload",
    "admin_api_key": "no key: each run makes one",
}
"""Arguments that megarl sets itself, with the key that determines them"""


REFUSED_VARIABLES = (
    *("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_MAX_THINK_TOKENS", "SGLANG_PLUGINS"),
    *("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "SGLANG_RUST_SERVER"),
    *("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "SGLANG_USE_MODELSCOPE"),
)
"""Variables of the environment by which servers report or generate something else than the trainer takes"""

FLOAT32_ATTENTION = ("triton", "torch_native", "flex_attention")
"""SGLang's attention backends that take float32; those of FlashAttention, FlashInfer and TensorRT-LLM do not"""


def _is_number(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: _is_number(value, int), "an integer"),
    "float": (lambda value: _is_number(value, int, float), "a number"),
    # A dictionary is written as JSON.
    "str": (lambda value: _is_number(value, str, int, float, Mapping), "a text"),
}
"""The types of SGLang's options: which values have them, and their name in a message"""


@dataclass(frozen=True)
class Option:
    """One of SGLang's server arguments, as far as its source tells."""

    flag: str
    type: str
    """As it is written there, without Optional: `int`, `bool`, `List[str]`, ..."""
    choices: tuple[Any, ...] = ()
    """The values that it takes; empty where they are not listed"""
    is_parsed: bool = False
    """SGLang has a parser of its own for the text"""


@functools.cache
def load_options() -> dict[str, Option]:
    """SGLang's server arguments, by field name, read from the installed source.

    Importing SGLang takes seconds and loads its whole runtime, so the source is parsed instead. Raises ConfigError
    where SGLang is not installed or its source has another form.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(["rollout: SGLang is not installed; `make install` brings the pinned release"])
    root = Path(spec.submodule_search_locations[0]) / "srt"
    options: dict[str, Option] = {}
    for source in [root / "server_args.py", *sorted(root.glob("arg_groups/fields/*.py"))]:
        if source.is_file():
            options.update(_parse_fields(ast.parse(source.read_text())))
    if "model_path" not in options:
        raise ConfigError([f"rollout.sglang: found no server arguments in {root}; sglang 0.5.23 has them there"])
    return options


def _parse_fields(tree: ast.Module) -> dict[str, Option]:
    """The options of class-body lines of the form `name: A[type, help or Arg(...)]` that have a flag."""
    options: dict[str, Option] = {}
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
            parts = line.annotation.slice
            kind = ast.unparse(parts.elts[0] if isinstance(parts, ast.Tuple) else parts)
            if kind.startswith("Optional["):
                kind = kind.removeprefix("Optional[").removesuffix("]")
            listed = keywords.get("choices")
            if kind.startswith("Literal["):
                listed = ast.literal_eval(f"({kind.removeprefix('Literal[').removesuffix(']')},)")
            choices = tuple(listed) if isinstance(listed, list | tuple) else ()
            is_parsed = "type_parser" in keywords or "action_kwargs" in keywords
            options[line.target.id] = Option(str(flag), kind, choices, is_parsed)
    return options


def _find_arg_keywords(annotation: ast.AST) -> dict[str, Any]:
    """The keywords of `Arg(...)`; None as the value of one that is no literal."""
    for call in ast.walk(annotation):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Arg":
            return {keyword.arg: _read_literal(keyword.value) for keyword in call.keywords if keyword.arg}
    return {}


def _read_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def check_options(options: Mapping[str, Any]) -> list[str]:
    """Problems of `rollout.sglang`, one message each: unknown keys, keys that megarl sets itself, wrong types."""
    known = load_options()
    problems = []
    for key, value in options.items():
        if key in OWN_OPTIONS:
            problems.append(f"rollout.sglang.{key}: megarl sets it (by {OWN_OPTIONS[key]}); remove it here")
        elif key not in known:
            nearest = find_nearest_key(key, known)
            hint = f"; did you mean rollout.sglang.{nearest}?" if nearest else ""
            problems.append(f"rollout.sglang.{key}: SGLang has no such server argument{hint}")
        elif value is not None and (right := _find_right(known[key], value)) is not None:
            problems.append(f"rollout.sglang.{key}: found {value!r}; SGLang takes {right}")
    return problems


def check_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """One message for each variable by which servers would report something else than the policy's log-probs."""
    for name in sorted(environment):
        if name in REFUSED_VARIABLES or name.startswith(("SGLANG_SIMULATE_", "SGLANG_KV_CANARY_PERTURB_")):
            value = environment[name]
            if value.strip().lower() not in ("", "0", "false", "no", "off", "-1"):
                yield (
                    f"{name}: found {value!r} in the environment, with which servers report or generate something else"
                    " than samples of the policy; unset it"
                )


def check_attention(config: RolloutConfig) -> Iterator[str]:
    """One message for each attention backend of a GPU in `rollout.sglang` that does not take rollout.dtype=float32."""
    if config.dtype is Dtype.float32:
        for key in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            found = config.sglang.get(key)
            if found is not None and found not in FLOAT32_ATTENTION:
                yield (
                    f"rollout.sglang.{key}: found {found!r} with rollout.dtype=float32, which it does not take;"
                    f" {' or '.join(FLOAT32_ATTENTION)}, or rollout.dtype=bfloat16"
                )


def _find_right(option: Option, value: Any) -> str | None:
    """What SGLang takes instead of this value; None where it takes it, as far as the source tells."""
    if option.choices:
        return None if value in option.choices else f"one of {', '.join(map(str, option.choices))}"
    if option.type == "bool":
        return None if isinstance(value, bool) else "true or false"
    if option.is_parsed:
        # A number may have a unit, as in 64K; true would be written as a flag without a value.
        is_number = _is_number(value, int) or (isinstance(value, str) and re.match(r"\d", value) is not None)
        if option.type == "int":
            return None if is_number else "an integer, which may have a unit (64K)"
        return "a value" if isinstance(value, bool) else None
    element = re.fullmatch(r"[Ll]ist\[(\w+)\]", option.type)
    if element is None:
        is_right, right = _TYPES.get(option.type, (lambda _: True, ""))
        return None if is_right(value) else right
    is_right, right = _TYPES.get(element[1], (lambda _: True, ""))
    values = value if isinstance(value, list | tuple) else [value]
    return None if all(map(is_right, values)) else f"a list, each {right}"


def render_options(options: Mapping[str, Any]) -> list[str]:
    """The options as command-line arguments.

    True: the bare flag. False or None: nothing. Lists: several arguments. Dictionaries: JSON.
    """
    known = load_options()
    words: list[str] = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        words.append(known[key].flag)
        if isinstance(value, list | tuple):
            words.extend(str(item) for item in value)
        elif isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif value is not True:
            words.append(str(value))
    return words
