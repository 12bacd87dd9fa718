"""Which rows are computed together, what each costs, by which ranks are balanced, and the share of padding in that.

It needs no Megatron: the driver plans as the ranks do.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from megarl.mcore.model.architecture import Architecture
from megarl.mcore.packing import pack
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Metrics, Sequences

if TYPE_CHECKING:
    # Of Megatron, which the driver does without.
    from megarl.mcore.batch import PackedBatch

REAL, COMPUTED = "tokens/real", "tokens/computed"


def plan_microbatches(
    spec: WorkerSpec, arch: Architecture, sequences: Sequences, num_ranks: int
) -> list[list[list[int]]]:
    """Data-parallel rank -> micro-batch -> row numbers, as `pack` finds them; tokens may be missing in `sequences`."""
    costs = compute_row_costs(arch, sequences, with_value_head=spec.role is Role.critic)
    return pack(sequences.lengths.tolist(), spec.tokens_per_microbatch * spec.parallel.cp, num_ranks, costs)


def compute_row_costs(arch: Architecture, sequences: Sequences, with_value_head: bool = False) -> list[float]:
    """Multiply-adds of one forward pass, for each row.

    A sequence of L tokens of which R are the response, with d the size of a head, H query and K key-value heads,
    h the hidden size, f the width of a layer's MLP (of a token's experts together) and V the vocabulary: the sum over
    the layers of L * (2 h d (H + K) + 3 h f) + L^2 * H d, and R * h V; the value head's R * h in place of the last.
    Causal attention counts L^2 / 2 for the scores and as many for their product with the values.
    """
    per_token, per_square = count_layer_work(arch)
    per_response_token = arch.hidden_size * (1 if with_value_head else arch.vocab_size)
    return [
        float(length * per_token + length**2 * per_square + response * per_response_token)
        for length, response in zip(sequences.lengths.tolist(), sequences.response_lengths.tolist(), strict=True)
    ]


def count_layer_work(arch: Architecture) -> tuple[int, int]:
    """Multiply-adds of all layers for each token, and for each token times the tokens of its sequence."""
    h, heads = arch.hidden_size, arch.num_heads * arch.head_size
    rows = 3 * arch.ffn_size * (arch.num_layers - arch.num_expert_layers)
    if arch.experts is not None:
        ffn_size = arch.experts.top_k * arch.experts.ffn_size + arch.experts.shared_ffn_size
        rows += arch.num_expert_layers * (3 * ffn_size + arch.experts.num_experts)
    per_token = arch.num_layers * 2 * h * (heads + arch.num_kv_heads * arch.head_size) + h * rows
    return per_token, arch.num_layers * heads


def count_tokens(batch: "PackedBatch", sequences: Sequences) -> dict[str, Tensor]:
    """Tokens of a micro-batch of `sequences` and those that its ranks compute, padding included, as metrics' sums."""
    return {REAL: sequences.lengths[batch.rows].sum(), COMPUTED: batch.params.cu_seqlens_q[-1]}


def describe_work(metrics: Metrics, spec: WorkerSpec, arch: Architecture, sequences: Sequences) -> Metrics:
    """The metrics of an optimizer step with two in place of the counts of tokens.

    ROLE/real_tokens_frac: real tokens / computed ones. ROLE/model_tflop_sum: 1e12 floating-point operations of a
    forward pass and of a backward pass of twice as many, without what is computed again; with adapters, whose own are
    not counted, without the products for the gradients of the frozen weights.
    """
    role = spec.role
    rest = {key: value for key, value in metrics.items() if not key.startswith("tokens/")}
    multiply_adds = sum(compute_row_costs(arch, sequences, with_value_head=role is Role.critic))
    operations = 6 * multiply_adds
    if spec.lora is not None:
        _, per_square = count_layer_work(arch)
        operations -= 2 * (multiply_adds - per_square * float(sequences.lengths.double().square().sum()))
    return {
        **rest,
        f"{role.value}/real_tokens_frac": metrics[REAL] / metrics[COMPUTED],
        f"{role.value}/model_tflop_sum": 1e-12 * operations,
    }
