"""Tiny random checkpoints and sequences for the tests of the training engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, ParallelConfig, RandomModelConfig
from megarl.mcore.spec import Role, WorkerSpec
from megarl.models.families import FAMILIES, build_random_fields
from megarl.types import Sequences, TrainingSamples

VOCAB = 53
"""Not a multiple of 64: the padding of the vocabulary is under test too."""
SIZES = RandomModelConfig(
    num_layers=2, hidden_size=64, ffn_size=96, num_heads=4, num_kv_heads=2, max_length=512, init_std=0.02
)


def write_checkpoint(directory: Path, family: str = "qwen3", *, tied: bool = False, **changes: Any) -> Any:
    """Save a transformers model with 2 layers, 4 heads of 16 and 2 key-value heads; returns it."""
    import transformers

    name = FAMILIES[family].hf_class
    fields = build_fields(family)
    fields |= {"tie_word_embeddings": tied or fields["tie_word_embeddings"], **changes}
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(transformers.CONFIG_MAPPING[family](**fields)).float()
    with torch.no_grad():
        for param in [*model.parameters(), *find_constants(model)]:
            # Norms and biases away from 1 and 0, where a swapped or missing one would not show.
            param.add_(torch.randn_like(param) * (0.1 if param.ndim == 1 else 0.05))
    model.save_pretrained(directory)
    return model


def build_fields(family: str) -> dict[str, Any]:
    """Keys of a config.json; experts are half as wide as a dense MLP."""
    fields = {**build_random_fields(replace(SIZES, family=family), VOCAB), "pad_token_id": None, "eos_token_id": 2}
    return fields | ({"moe_intermediate_size": 48} if "moe_intermediate_size" in fields else {})


def find_constants(model: Any) -> list[torch.Tensor]:
    """The buffers that are a part of the checkpoint."""
    return [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]


def build_spec(checkpoint: object = "unused", role: Role = Role.reference, **changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        **{"parallel": ParallelConfig(), "optimizer": None, "dtype": Dtype.float32, "algo": AlgoConfig()},
        **{"temperature": 1.0, "response_length": 32, "tokens_per_microbatch": 10_000},
    }
    return WorkerSpec(role, str(checkpoint), **{**fields, **changes})


def build_sequences(num_rows: int = 9, seed: int = 0, longest: int = 20) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 8, (num_rows,), generator=generator)
    lengths = prompts + torch.randint(1, longest, (num_rows,), generator=generator)
    tokens = torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator)
    return Sequences(tokens, lengths, prompts)


def build_samples(num_rows: int = 12, seed: int = 0) -> TrainingSamples:
    """Samples with every target filled; some tokens are not generated, some have no loss."""
    sequences = build_sequences(num_rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    longest = int(sequences.response_lengths.max())
    shape = (num_rows, longest)
    exists = torch.arange(longest)[None] < sequences.response_lengths[:, None]
    mask = exists & (torch.rand(shape, generator=generator) > 0.1)
    mask[:, 0] = True

    def normal(scale: float, center: float = 0.0) -> torch.Tensor:
        return (center + scale * torch.randn(shape, generator=generator)) * exists

    return TrainingSamples(
        sequences=sequences,
        mask=mask,
        loss_mask=mask & (torch.arange(num_rows)[:, None] != 3),
        positive=torch.rand(num_rows, generator=generator) > 0.5,
        advantages=normal(1.0),
        rollout_logprobs=normal(0.3, -4.0),
        old_logprobs=normal(0.3, -4.0),
        ref_logprobs=normal(0.3, -4.0),
        old_values=normal(0.5),
        returns=normal(1.0),
        sampling_logprobs=normal(0.3, -4.0),
    )


def padded_reference_logprobs(model: Any, sequences: Sequences, temperature: float) -> torch.Tensor:
    """float32 [B, T] by transformers, one sequence at a time."""
    result = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
    rows = sequences.tokens.split(sequences.lengths.tolist())
    for row, (tokens, prompt) in enumerate(zip(rows, sequences.prompt_lengths.tolist(), strict=True)):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
        result[row, : len(tokens) - prompt] = logprobs[prompt - 1 : -1].gather(1, tokens[prompt:, None]).squeeze(1)
    return result


def padded_reference_values(model: Any, sequences: Sequences) -> torch.Tensor:
    """float32 [B, T] by a classifier of transformers, one sequence at a time."""
    result = torch.zeros(sequences.num_samples, int(sequences.response_lengths.max()))
    rows = sequences.tokens.split(sequences.lengths.tolist())
    for row, (tokens, prompt) in enumerate(zip(rows, sequences.prompt_lengths.tolist(), strict=True)):
        with torch.no_grad():
            values = model.score(model.model(tokens[None]).last_hidden_state[0]).squeeze(1)
        result[row, : len(tokens) - prompt] = values[prompt - 1 : -1]
    return result


def compute_padded_kl(model: Any, reference: Any, sequences: Sequences, temperature: float) -> torch.Tensor:
    """[B, T] KL(model, reference) where each response token is chosen, by transformers and torch; differentiable in
    the model's parameters.
    """
    pieces = []
    for tokens, prompt in zip(
        sequences.tokens.split(sequences.lengths.tolist()), sequences.prompt_lengths.tolist(), strict=True
    ):
        with torch.no_grad():
            log_q = torch.log_softmax(reference(tokens[None]).logits[0, prompt - 1 : -1] / temperature, -1)
        log_p = torch.log_softmax(model(tokens[None]).logits[0, prompt - 1 : -1] / temperature, -1)
        pieces.append(torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
