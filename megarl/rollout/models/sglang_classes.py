"""The decoder models of all families, as SGLang defines them, and scalar reward models: SGLang's classes, with the head
that transformers gives the same checkpoint. Servers look classes up here before they import all of SGLang's models, by
SGLANG_EXTERNAL_MODEL_PACKAGE, which is this folder: a package without an __init__.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from sglang.srt.models import llama, llama_reward, qwen2_classification, qwen3_classification

from megarl.models.families import FAMILIES


def _list_decoders() -> Iterator[type]:
    """Each module's EntryClass is a class or a list of them; modules are shared by families."""
    for name in sorted({family.sglang_module for family in FAMILIES.values()}):
        found = import_module(f"sglang.srt.models.{name}").EntryClass
        yield from found if isinstance(found, list) else [found]


def _without_bias(base: type) -> type:
    """SGLang 0.5.23 gives the heads of Qwen2 and Qwen3 a bias that their checkpoints do not have, and leaves the random
    numbers in it with which torch makes a layer: every score would be off by a number of its own for each server.
    """

    class Corrected(base):  # type: ignore[misc]
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            torch.nn.init.zeros_(self.score.bias)
            return super().load_weights(weights)

    Corrected.__name__ = Corrected.__qualname__ = base.__name__
    return Corrected


class _NoPositions(torch.nn.Module):
    """In place of a rotary embedding."""

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return query, key


class SmolLM3ForCausalLM(llama.LlamaForCausalLM):  # type: ignore[misc]
    """SGLang 0.5.23 has none: Llama, with layers without positions."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for layer, is_turned in zip(self.model.layers, config.no_rope_layers, strict=True):
            if not is_turned:
                layer.self_attn.rotary_emb = _NoPositions()


EntryClass = [
    SmolLM3ForCausalLM,
    *_list_decoders(),
    llama_reward.LlamaForSequenceClassification,
    _without_bias(qwen2_classification.Qwen2ForSequenceClassification),
    _without_bias(qwen3_classification.Qwen3ForSequenceClassification),
]
