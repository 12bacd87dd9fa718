"""Which weights of a role are trained; imports no Megatron."""

import re
from collections.abc import Iterable

import torch

from megarl.config.schema.roles import Trainable

# Not what stands beside them under mlp.: the router, a shared expert's gate, and the norm that Transformer Engine keeps
# in linear_fc1, or a family in linear_fc2. Grouped experts number their weights.
_MLP = re.compile(r"\.mlp\.(?:[\w.]+\.)?linear_fc[12]\.(?:weight|bias)\d*$")
HEAD = "output_layer."


def is_mlp(name: str) -> bool:
    """Whether a parameter, by its name in Megatron's model, is a projection of an MLP, an expert or a shared expert."""
    return _MLP.search(name) is not None


def freeze(chunks: Iterable[torch.nn.Module], trainable: Trainable) -> None:
    """Freeze the weights that are not trained.

    What is built on the model afterwards, Megatron's DistributedDataParallel and its optimizer, has neither gradients
    nor a state of them.
    """
    if trainable is Trainable.all:
        return
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            param.requires_grad_(is_mlp(name) or name.startswith(HEAD))
