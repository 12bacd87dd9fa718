"""What generation needs to know of a checkpoint directory: vocabulary size and end-of-sequence tokens."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.rollout import RolloutConfig
from megarl.data.render import Renderer
from megarl.families.registry import FAMILIES
from megarl.json_text import parse_json
from megarl.rollout.encoding import find_turn_end


@dataclass(frozen=True)
class GenerationSpec:
    vocab_size: int
    """Rows of the embedding: every token id below it is safe to send."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response; they are its last token."""


def load_generation_spec(checkpoint: Path) -> GenerationSpec:
    """Read config.json and generation_config.json, of both of which servers take the end-of-sequence tokens. Raises
    ConfigError naming file and key.
    """
    config = load_json(checkpoint / "config.json")
    generation = checkpoint / "generation_config.json"
    overrides = load_json(generation) if generation.is_file() else {}
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise ConfigError([f"{checkpoint / 'config.json'}: vocab_size is {vocab_size!r}; a number was expected"])
    found = [*_read_token_ids(generation, overrides), *_read_token_ids(checkpoint / "config.json", config)]
    stop = list(dict.fromkeys(found))
    if not stop:
        raise ConfigError(
            [f"{checkpoint}: no eos_token_id in generation_config.json or config.json; without it no response ends"]
        )
    outside = [token for token in stop if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError([f"{checkpoint}: eos_token_id {outside} is outside the vocabulary of {vocab_size}"])
    return GenerationSpec(vocab_size, tuple(stop))


def _read_token_ids(file: Path, content: dict[str, Any]) -> list[int]:
    """eos_token_id: a number, or a list of them; none where it is null."""
    value = content.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    # true is a number to Python.
    if any(type(token) is not int for token in tokens):
        raise ConfigError([f"{file}: eos_token_id is {value!r}; a token's number was expected, or a list of them"])
    return tokens


def add_turn_end(config: RolloutConfig, spec: GenerationSpec, renderer: Renderer) -> tuple[RolloutConfig, str]:
    """The configuration with the token among rollout.stop_token_ids with which the chat template ends an answer, and a
    sentence on what ends responses. Base models have such templates without that token among their own.

    Raises ConfigError as `find_stop_tokens`.
    """
    tokenizer = renderer.tokenizer
    stop, end = find_stop_tokens(config, spec, tokenizer), find_turn_end(renderer)
    names = {token: f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in stop}
    if end is not None and end not in stop and end < spec.vocab_size:
        names[end] = f"{tokenizer.convert_ids_to_tokens(end)} ({end}), with which the chat template ends an answer"
        config = replace(config, stop_token_ids=[*config.stop_token_ids, end])
    return config, f"responses end with {', '.join(names.values())}"


def find_stop_tokens(config: RolloutConfig, spec: GenerationSpec, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a response, those of rollout.stop and rollout.stop_token_ids included.

    Raises ConfigError for a text that is not one token of the tokenizer, and a number outside of the vocabulary.
    """
    found = dict.fromkeys(spec.stop_token_ids)
    for text in config.stop:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or tokenizer.decode(ids) != text:
            pieces = [tokenizer.decode([each]) for each in ids]
            raise ConfigError(
                [
                    f"rollout.stop: found {text!r}, which the model's tokenizer writes as {pieces}; servers are"
                    " sent and send tokens, so that a response can end at one token only"
                ]
            )
        if ids[0] >= spec.vocab_size:
            raise ConfigError(
                [f"rollout.stop: found {text!r}, token {ids[0]}, outside the vocabulary of {spec.vocab_size}"]
            )
        found[ids[0]] = None
    outside = [token for token in config.stop_token_ids if not 0 <= token < spec.vocab_size]
    if outside:
        raise ConfigError([f"rollout.stop_token_ids: found {outside}, outside the vocabulary of {spec.vocab_size}"])
    return tuple(found | dict.fromkeys(config.stop_token_ids))


def load_family_options(checkpoint: Path) -> dict[str, Any]:
    """Arguments of the server that the model's family needs; none for a checkpoint of no family here.

    Raises ConfigError where config.json does not name the class that the server is to load.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        return {}
    config = load_json(path)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return {}
    classes, usual = config.get("architectures"), f"{family.hf_class}ForCausalLM"
    if not isinstance(classes, list) or not classes:
        raise ConfigError(
            [
                f"{path}: architectures is {classes!r}; servers choose the class by it: write"
                f' "architectures": ["{usual}"]'
            ]
        )
    return dict(family.server_options)


def check_served_class(checkpoint: Path) -> None:
    """Raise ConfigError where the server would load a class of the family that does not generate."""
    config = load_json(checkpoint / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and config.get("architectures") != [usual := f"{family.hf_class}ForCausalLM"]:
        found = config.get("architectures")
        raise ConfigError(
            [
                f"{checkpoint / 'config.json'}: architectures is {found!r}; servers choose the class by it, and"
                f' to generate it must be "architectures": ["{usual}"]'
            ]
        )


def load_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError naming the file."""
    try:
        content = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file}: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"{file}: holds a {type(content).__name__}; an object was expected"])
    return content
