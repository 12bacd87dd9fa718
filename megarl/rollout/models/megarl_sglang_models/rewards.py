"""Scalar reward models: SGLang's classes, with the head that transformers gives the same checkpoint."""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import llama_reward, qwen2_classification, qwen3_classification


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


EntryClass = [
    llama_reward.LlamaForSequenceClassification,
    _without_bias(qwen2_classification.Qwen2ForSequenceClassification),
    _without_bias(qwen3_classification.Qwen3ForSequenceClassification),
]
