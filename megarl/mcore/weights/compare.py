"""Two checkpoints side by side: every tensor, and what the models compute of a text."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.manifest import CheckpointError
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.weights.hf_check import compare_shapes
from megarl.mcore.weights.source import MegatronSource, WeightSource, find_largest_difference
from megarl.mcore.worker_spec import Role
from megarl.types import Sequences

LOGITS_BOUND = 1e-4
"""Up to which a difference of float32 logits, relative to the largest of them, is rounding"""


@dataclass(frozen=True)
class TensorDifference:
    name: str
    largest: float
    """largest |a - b|, in float32"""
    dtypes: tuple[torch.dtype, torch.dtype]

    def __str__(self) -> str:
        own, other = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        dtypes = "" if own == other else f"; {own} against {other}"
        return f"{self.name}: differs by up to {self.largest:.3g}{dtypes}"


@dataclass(frozen=True)
class OutputDifference:
    what: str
    """logits or values"""
    num_tokens: int
    largest: float
    """largest |a - b|"""
    scale: float
    """largest |b|"""

    @property
    def relative(self) -> float:
        """Infinite for NaN."""
        if self.largest == 0:
            return 0.0
        ratio = self.largest / self.scale if self.scale else float("inf")
        return ratio if ratio == ratio else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.num_tokens} tokens: differ by up to {self.largest:.3g}, {self.relative:.2g} of the"
            f" largest of {self.scale:.4g}; the bound is {LOGITS_BOUND:g}"
        )


def compare_tensors(
    a: WeightSource, b: WeightSource, report: Callable[[int], None] = lambda num_bytes: None
) -> list[TensorDifference]:
    """The tensors that are not equal bit by bit. Raises CheckpointError where the names, shapes or roles differ."""
    if a.role is not b.role:
        raise CheckpointError(f"{a.directory} is a {a.role.value}, {b.directory} a {b.role.value}")
    if problems := compare_shapes(a.shapes, b.shapes, f"in {b.directory} it is"):
        raise CheckpointError(f"{a.directory}: {'; '.join(problems)}")
    differences = []
    for entry in a.entries:
        for (name, own), (_, other) in zip(a.read(entry), b.read(entry), strict=True):
            report(own.nbytes)
            if own.dtype != other.dtype or not torch.equal(own, other):
                largest = find_largest_difference(own, other)
                differences.append(TensorDifference(name, largest, (own.dtype, other.dtype)))
    return differences


def compare_outputs(a: WeightSource, b: WeightSource, tokens: Tensor) -> OutputDifference:
    """Outputs as `compute_outputs` gives them."""
    own, other = compute_outputs(a, tokens), compute_outputs(b, tokens)
    what = "values" if a.role is Role.critic else "logits"
    return OutputDifference(what, len(tokens), float((own - other).abs().max()), float(other.abs().max()))


def compute_outputs(source: WeightSource, tokens: Tensor) -> Tensor:
    """float32 on the CPU: a policy's logits [n - 1, V] of all tokens but the last, a critic's values [n - 1].

    tokens: int64 [n], two at least. Hugging Face's form is run by transformers, Megatron's by Megatron's own loader and
    model, both in float32. The whole model is in memory.
    """
    if len(tokens) < 2 or int(tokens.max()) >= source.arch.vocab_size:
        raise ValueError(
            f"{source.directory}: token ids {tokens.tolist()}; two or more within the vocabulary of"
            f" {source.arch.vocab_size} are needed"
        )
    with torch.inference_mode():
        return _run_megatron(source, tokens) if isinstance(source, MegatronSource) else _run_hf(source, tokens)


def _run_hf(source: WeightSource, tokens: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    critic = source.role is Role.critic
    kind = transformers.AutoModelForSequenceClassification if critic else transformers.AutoModelForCausalLM
    model: Any = kind.from_pretrained(
        source.directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    model.eval()
    if critic:
        states = model.base_model(tokens[None, :-1]).last_hidden_state[0]
        values: Tensor = (states @ model.score.weight.T).squeeze(1)
        return values
    logits: Tensor = model(tokens[None, :-1]).logits[0]
    return logits


def _run_megatron(source: WeightSource, tokens: Tensor) -> Tensor:
    # Megatron is loaded only where it computes.
    from megarl.mcore import process_groups
    from megarl.mcore.batch import build_batch
    from megarl.mcore.model.build import build_chunks, build_config, wrap_chunks
    from megarl.mcore.step import run_stage
    from megarl.mcore.weights.training_state import load_weights

    parallel, critic = ParallelConfig(), source.role is Role.critic
    with tempfile.TemporaryDirectory(prefix="megarl-verify-") as scratch:
        process_groups.initialize(parallel, 0, 1, f"file://{Path(scratch)}/init", 1, 300.0)
        try:
            config = build_config(source.arch, parallel, Dtype.float32, {})
            chunks = build_chunks(source.arch, config, with_value_head=critic)
            load_weights(source.directory, chunks)
            (model,) = wrap_chunks(chunks, config, None)
            sequences = Sequences(tokens, torch.tensor([len(tokens)]), torch.tensor([1]))
            out = run_stage(model, build_batch(sequences, [0])).float().cpu()
        finally:
            process_groups.destroy()
    return out if critic else out[:, : source.arch.vocab_size]
