"""A critic as a Hugging Face checkpoint: ...ForSequenceClassification with one label, its weights in score.weight."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megarl.families.architecture import Architecture
from megarl.families.registry import FAMILIES
from megarl.mcore.weights.hf_reader import CheckpointReader

VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: float [1, hidden size]"""


def to_classifier_config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model with a value head, from that of the model which it was made from."""
    changed = {
        **config,
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
            yield from _check_tensors(reader, directory, critic)
    except (FileNotFoundError, SafetensorError) as error:
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
