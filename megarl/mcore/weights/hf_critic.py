"""A critic as a Hugging Face checkpoint: ...ForSequenceClassification with one label, its weights in score.weight."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError

from megarl.json_text import load_json_object
from megarl.mcore.weights.hf_reader import CheckpointReader
from megarl.mcore.worker_spec import CRITIC_PROMPT, VALUE_RANGE
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES

VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: float [1, hidden size]"""


def to_classifier_config(
    config: dict[str, Any], dtype: torch.dtype, further: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The config.json of a model with a value head, from that of the model which it was made from.

    further: more keys; those of `config` that are not among them stay.
    """
    changed = {
        **config,
        **further,
        "architectures": [f"{FAMILIES[config['model_type']].hf_class}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    changed.pop("torch_dtype", None)
    return {**changed, "dtype": str(dtype).removeprefix("torch.")}


def check_critic_checkpoint(directory: Path, critic: Architecture, policy: Architecture, longest: int) -> Iterator[str]:
    """Why a checkpoint cannot be a critic of the policy; one message each, what was found and what would be right.

    longest: most tokens of prompt and response together.
    """
    try:
        with CheckpointReader(directory) as reader:
            misplaced = [f"{directory}: {problem}" for problem in reader.find_misplaced(reader.names)]
            yield from misplaced or _check_tensors(reader, directory, critic)
    except (OSError, SafetensorError, ValueError) as error:
        yield f"{directory}: {error}"
    if critic.vocab_size != policy.vocab_size:
        yield (
            f"{directory}: vocab_size is {critic.vocab_size} and the policy's {policy.vocab_size}; the critic reads the"
            " policy's tokens, so they must have the same tokenizer"
        )
    if longest > critic.max_length:
        yield (
            f"{directory}: has {critic.max_length} positions; data.prompt_length and rollout.response_length are"
            f" {longest} tokens together"
        )


def check_critic_prompt(directory: Path, critic_prompt: str | None) -> str | None:
    """Why a critic was not trained with this data.critic_prompt; None where it was or where its checkpoint does not say
    with which.
    """
    fields = _read_config(directory)
    if fields.get(CRITIC_PROMPT, critic_prompt) == critic_prompt:
        return None
    return (
        f"{directory}: was trained with data.critic_prompt {fields[CRITIC_PROMPT]!r}, now {critic_prompt!r}; its"
        " values are of that input: set the key as there, or start from another critic"
    )


def check_value_range(directory: Path, value_range: Sequence[float] | None) -> str | None:
    """Why the value head of a checkpoint does not have this critic.value_range; None where it does."""
    recorded = _read_config(directory).get(VALUE_RANGE)
    found = None if value_range is None else list(value_range)
    if found == recorded:
        return None
    shown = ["null" if each is None else json.dumps(each) for each in (found, recorded)]
    return (
        f"found {shown[0]}; the value head of {directory} (critic.init) was trained with {shown[1]} ({VALUE_RANGE} in"
        f" its config.json), under which alone its values are what it has learned: it must be {shown[1]}"
    )


def _read_config(directory: Path) -> dict[str, Any]:
    return load_json_object(directory / "config.json")


def _check_tensors(reader: CheckpointReader, directory: Path, critic: Architecture) -> Iterator[str]:
    own = [name for name in reader.names if not name.startswith("model.")]
    found = f"its tensors outside the transformer: {', '.join(sorted(own)[:5]) or 'none'}"
    if VALUE_HEAD not in reader:
        yield f"{directory}: has no value head {VALUE_HEAD}, as ...ForSequenceClassification has it; {found}"
    elif (shape := reader.read_shape(VALUE_HEAD)) != (1, critic.hidden_size):
        labels = f"{shape[0]} labels" if len(shape) == 2 and shape[0] != 1 else f"the shape {list(shape)}"
        yield f"{directory}: {VALUE_HEAD} has {labels}; a critic has one label, [1, {critic.hidden_size}]"
    elif "score.bias" in reader:
        yield f"{directory}: has a score.bias; a value head here has a weight alone"
    if "model.embed_tokens.weight" not in reader:
        yield f"{directory}: has no tensor model.embed_tokens.weight, as the supported families have it; {found}"
