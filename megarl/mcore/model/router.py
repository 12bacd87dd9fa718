"""The router of a mixture of experts, its load-balancing terms, and what it tells of the experts' load.

Megarl's terms are sums over whole sequences and over tokens, divided by the counts of the whole minibatch, so that
their gradient does not depend on the layout or on how the minibatch was cut into micro-batches. Megatron's own are
about a micro-batch, which is here any number of packed sequences.

Shapes: S tokens of this rank, E experts, K packed sequences of the micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.mcore.device import device

# moe_utils asks for it without having defined it where Transformer Engine is absent.
vars(moe_utils).setdefault("te_general_gemm", None)


@dataclass
class Load:
    """What one rank counted in one layer of a minibatch so far."""

    num_sequences: int
    num_tokens: int
    """Both: of the whole minibatch, on all ranks"""
    tokens: Tensor
    """float64 [E]: tokens routed to each expert, padding left out"""
    terms: Tensor
    """float64 [2]: this rank's part of the load-balancing and of the z-loss term, without coefficients"""


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's top-k router, with load-balancing terms per sequence and token in place of its own.

    moe_aux_loss_coeff times the mean over the minibatch's sequences of E * sum_i f_i P_i, where f_i is the share of
    the sequence's routes that went to expert i and P_i the mean of its probability over the sequence's tokens
    (Switch Transformer, 2101.03961, eq. 4, for each sequence as in DeepSeek-V3, 2412.19437, eq. 17-20, where the
    probabilities are the sigmoids over their sum): at best 1.
    moe_z_loss_coeff times the mean over the minibatch's tokens of the squared logsumexp of the router's logits
    (ST-MoE, 2202.08906, eq. 5). Both for each layer, added up.
    """

    num_experts: int
    topk: int
    expert_bias: Tensor | None
    load: Load | None = None
    packed: PackedSeqParams | None = None
    """Parameters of the micro-batch at hand, set by the layer"""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move and convert everything but the correction bias, which is moved and keeps its float32 numbers."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count nothing: the correction bias stays as the checkpoint has it."""

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits as they are: `routing` adds the term."""
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, 1, E] -> weights and bool map [S, E]"""
        weights, routes = super().routing(logits, padding_mask)
        if not self.training or not torch.is_grad_enabled() or self.load is None:
            return weights, routes
        assert self.packed is not None
        logits = logits.view(-1, self.num_experts)
        numbers = self.packed.sequence_numbers
        if self.config.sequence_parallel:
            numbers = numbers.chunk(self.tp_group.size())[self.tp_group.rank()]
        real = numbers >= 0
        self.load.tokens += routes[real].sum(0)
        losses = []
        if self.config.moe_aux_loss_coeff:
            balance = self._balance(logits, routes, numbers)
            losses.append(self.config.moe_aux_loss_coeff * balance)
            self.load.terms[0] += balance.detach()
        if self.config.moe_z_loss_coeff:
            z = logits[real].float().logsumexp(-1).square().sum() / self.load.num_tokens
            losses.append(self.config.moe_z_loss_coeff * z)
            self.load.terms[1] += z.detach()
        return (MoEAuxLossAutoScaler.apply(weights, sum(losses)) if losses else weights), routes

    def _balance(self, logits: Tensor, routes: Tensor, numbers: Tensor) -> Tensor:
        """This rank's part of the load-balancing term: its tokens' probabilities with the whole sequences' routes."""
        assert self.load is not None
        assert self.packed is not None
        # One more row for padding.
        num_rows = self.packed.cu_seqlens_q.numel()
        rows = torch.where(numbers < 0, num_rows - 1, numbers)
        zeros = logits.new_zeros(num_rows, self.num_experts, dtype=torch.float32)
        routed = zeros.index_add(0, rows, routes.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(routed, group=self.tp_cp_group)
        probs = zeros.index_add(0, rows, self._compute_scores(logits))[:-1]
        routed = routed[:-1]
        num_routes = routed.sum(1).clamp(min=1)
        per_sequence = (routed * probs).sum(1) * self.topk / num_routes.square()
        return per_sequence.sum() * self.num_experts / self.load.num_sequences

    def _compute_scores(self, logits: Tensor) -> Tensor:
        """float32 [S, E] that add up to 1 for each token."""
        if self.score_function == "softmax":
            return logits.softmax(-1, dtype=torch.float32)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)


class ExpertLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that tells its router which token belongs to which sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.packed = kwargs.get("packed_seq_params")
        return super().forward(*args, **kwargs)


def find_routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                yield module


def start_minibatch(chunks: Sequence[torch.nn.Module], num_sequences: int, num_tokens: int) -> None:
    """Tell the routers the counts of the whole minibatch that their terms are divided by."""
    for router in find_routers(chunks):
        tokens = torch.zeros(router.num_experts, dtype=torch.float64, device=router.weight.device)
        router.load = Load(num_sequences, num_tokens, tokens, tokens.new_zeros(2))


def compute_load_metrics(chunks: Sequence[torch.nn.Module], name: str) -> dict[str, float]:
    """Load of the experts in the minibatch, averaged over layers; {} for a dense model. All ranks must call it.

    NAME/moe_max_load: tokens of the busiest expert of a layer over those of an average one; NAME/moe_aux_loss and
    NAME/moe_z_loss: the terms without their coefficients, where these are not 0.
    """
    config: Any = chunks[0].config
    if config.num_moe_experts is None:
        return {}
    size = (config.num_layers, config.num_moe_experts + 2)
    table = torch.zeros(size, dtype=torch.float64, device=device())
    # A stage may have dense layers alone.
    for router in find_routers(chunks):
        assert router.load is not None, "start_minibatch comes before"
        table[router.layer_number - 1] = torch.cat([router.load.tokens, router.load.terms])
    dist.all_reduce(table)
    if isinstance(config.moe_layer_freq, list):
        table = table[torch.tensor(config.moe_layer_freq, dtype=torch.bool, device=table.device)]
    tokens, terms = table[:, :-2], table[:, -2:].mean(0).tolist()
    metrics = {f"{name}/moe_max_load": float((tokens.amax(1) / tokens.mean(1)).mean())}
    if config.moe_aux_loss_coeff:
        metrics[f"{name}/moe_aux_loss"] = terms[0]
    if config.moe_z_loss_coeff:
        metrics[f"{name}/moe_z_loss"] = terms[1]
    return metrics
