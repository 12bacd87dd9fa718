"""A model's layers: who computes them, the router of a mixture of experts, and which of Megatron-Core's (0.16.1) faster
ways this process takes. None of these changes a result but by rounding, and a key of model.megatron or of the optimizer
decides instead where it is given.

The router's load-balancing terms are sums over whole sequences and over tokens, divided by the counts of the whole
minibatch: their gradient does not depend on the layout or on the cut into micro-batches, about which Megatron's own
are.

Shapes: S tokens of this rank, E experts, K packed sequences of the micro-batch.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.config.schema.roles import OptimizerConfig, ParallelConfig
from megarl.mcore.device import device, find_processor
from megarl.mcore.spec import WorkerSpec, has_transformer_engine
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.rope import compute_frequencies


@dataclass(frozen=True)
class Layers:
    """Who computes a model's layers, and what that asks of the model and of a micro-batch."""

    name: str
    build: Callable[[Architecture, TransformerConfig, int | None], TransformerBlockSubmodules]
    output: tuple[Any, Any]
    """The linear layer at the end of attention and MLP, and the norm"""
    column: Any
    """The linear layer at their beginning, without a norm"""
    qkv_format: str
    """Of Megatron's packing parameters. Under "sbhd" Megatron keeps tensors as [S, 1, H, D] and takes rotary angles as
    they are."""
    plan_attention: Callable[..., Any] = lambda *args: None
    """(sizes, device) -> what its attention needs of a micro-batch beside Megatron's parameters"""
    share_attention: Callable[..., Any] = lambda *args: None
    """The same under context parallelism, further (positions, mine, order, num_ranks, group) as in cpu/layers.py"""
    groups_experts: bool = False
    """One module has all experts of a rank"""
    length_multiple: int = 1
    """The length of the longest sequence that it is told is rounded up to one"""
    picks_angles: bool = False
    """It takes the rotary angles of the packed tokens; else those of positions from 0 on"""
    has_activation: bool = False
    """The activation of its MLPs is in the layer's specification"""


@functools.cache
def find_layers() -> Layers:
    """Transformer Engine's where it can run, the local ones elsewhere."""
    if find_kernels().te:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

        def build(arch: Architecture, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
            if arch.window and config.context_parallel_size > 1 and config.cp_comm_type in (None, "p2p"):
                found = f"found {config.context_parallel_size}; Transformer Engine has windows there with"
                raise ValueError(f"parallel.cp: {found} model.megatron.cp_comm_type=a2a alone; else it must be 1")
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)

        return Layers(
            "Transformer Engine's layers",
            build,
            (TERowParallelLinear, TENorm),
            TEColumnParallelLinear,
            "thd",
            groups_experts=True,
            length_multiple=512,
        )
    from megarl.cpu import layers

    return Layers(
        "local layers",
        layers.build_block_spec,
        (RowParallelLinear, layers.RMSNorm),
        ColumnParallelLinear,
        "sbhd",
        layers.plan_attention,
        layers.share_attention,
        picks_angles=True,
        has_activation=True,
    )


def build_block_spec(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of its piece `vp_stage` where it holds several, with what megarl has of its
    own in them.
    """
    layers = find_layers()
    block = layers.build(arch, config, vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        if parts.mlp.module is MoELayer:
            layer.module = ExpertLayer
            parts.mlp.submodules.router = Router
        if arch.output_norms:
            normalized = add_output_norm(*layers.output)
            parts.self_attention.submodules.linear_proj = normalized
            parts.mlp.submodules.linear_fc2 = normalized
        own = parts.self_attention.submodules
        if not arch.input_norms:
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
            own.linear_qkv = parts.mlp.submodules.linear_fc1 = layers.column
        if arch.joins_heads:
            own.q_layernorm = ModuleSpec(JoinedNorm, params={"num_heads": arch.num_heads})
            own.k_layernorm = ModuleSpec(JoinedNorm, params={"num_heads": arch.num_kv_heads})
        if arch.latent is None and (any(x.attention_factor != 1 for x in arch.ropes) or len(arch.ropes) > 1):
            parts.self_attention.module = turn_by_layer(arch)
    return block


class Angles(RotaryEmbedding):  # type: ignore[misc]
    """Megatron's angles by our frequencies: [positions, 1, 1, numbers], of K ropes [K, positions, 1, 1, numbers]."""

    def __init__(self, arch: Architecture, config: TransformerConfig) -> None:
        super().__init__(arch.head_size, arch.rotary_share, config.rotary_interleaved, use_cpu_initialization=True)
        self.frequencies = [compute_frequencies(rope, int(arch.head_size * arch.rotary_share)) for rope in arch.ropes]

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        angles = []
        for frequencies in self.frequencies:
            self.inv_freq = frequencies
            angles.append(super().get_emb(max_seq_len, offset))
        return angles[0] if len(angles) == 1 else torch.stack(angles)


@functools.cache
def turn_by_layer(arch: Architecture) -> type[SelfAttention]:
    """The attention of a model whose layers have different ropes, or YaRN's factor, which Transformer Engine's kernel
    for packed sequences leaves out: its square, of queries and keys, is multiplied with the queries alone.
    """

    class Attention(SelfAttention):  # type: ignore[misc]
        def forward(
            self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            if len(arch.ropes) > 1:
                rotary_pos_emb = rotary_pos_emb[arch.find_rope(self.layer_number - 1)]
            out: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
            return out

        def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
            factor = arch.ropes[arch.find_rope(self.layer_number - 1)].attention_factor
            if factor != 1 and not (arch.unturned and arch.unturned[self.layer_number - 1]):
                turned = int(arch.head_size * arch.rotary_share)
                query = torch.cat([query[..., :turned] * factor**2, query[..., turned:]], -1)
            return query, key, value

    return Attention


class JoinedNorm(torch.nn.Module):
    """RMSNorm over all heads of a token, of which this rank has some; its weight is the whole model's on every rank,
    whose gradients Megatron adds up as it does those of each head's norm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        self.eps, self.num_heads = eps, num_heads
        self.weight = torch.nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[S, 1, heads of this rank, D] -> the same"""
        group, heads = get_tensor_model_parallel_group(), x.shape[-2]
        # With fewer key heads than ranks several have the same one.
        copies = heads * group.size() // self.num_heads
        squares = x.float().square().sum((-2, -1), keepdim=True)
        if group.size() > 1:
            squares = collectives.all_reduce(squares, group=group) / copies  # type: ignore[no-untyped-call]
        scale = (squares / self.weight.numel() + self.eps).rsqrt()
        weight = self.weight.view(self.num_heads, -1).narrow(0, group.rank() // copies * heads, heads)
        return (x.float() * scale * weight.float()).to(x.dtype)


@functools.cache
def add_output_norm(linear: type[torch.nn.Module], norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The linear layer class with a norm of its output, its parameter post_layernorm.weight."""

    class NormalizedLinear(linear):  # type: ignore[valid-type,misc]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, bias = super().forward(x)
            return self.post_layernorm(out), bias

    return NormalizedLinear


_PERMUTE = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")


@dataclass(frozen=True)
class Kernels:
    """What this process can run."""

    gpu: bool = False
    te: bool = False
    """Transformer Engine's layers are the model's"""
    rope: bool = False
    """Transformer Engine's rotary kernel for packed sequences"""
    permute: bool = False
    """Transformer Engine's kernels that sort tokens by expert"""
    apex: bool = False
    """Apex' fused_weight_gradient_mlp_cuda, which the layers of Megatron itself add weight gradients with"""
    compiler: bool = False
    """What torch.compile needs on a GPU: Triton, and a C compiler for its launchers"""


@functools.cache
def find_kernels() -> Kernels:
    if find_processor().capability is None:
        return Kernels()
    return Kernels(
        gpu=True,
        te=has_transformer_engine(),
        rope=rope_utils.fused_apply_rotary_pos_emb_thd is not None,
        permute=all(getattr(moe_utils, f"fused_{name}", None) is not None for name in _PERMUTE),
        apex=layers._grad_accum_fusion_available,
        compiler=importlib.util.find_spec("triton") is not None
        and any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))),
    )


def build_fast_fields(arch: Architecture, megatron: Mapping[str, Any], kernels: Kernels) -> dict[str, bool]:
    """The fields of TransformerConfig that are on where they can be.

    megatron: model.megatron, of which other fields may exclude one of these.
    """
    fields = {
        "apply_rope_fusion": kernels.te and kernels.rope and not _turns_neighbours(arch),
        "bias_activation_fusion": kernels.compiler
        and not megatron.get("use_te_activation_func")
        and arch.activation == "silu",
        "gradient_accumulation_fusion": kernels.te or kernels.apex,
    }
    if arch.experts is not None:
        fields["moe_permute_fusion"] = kernels.te and kernels.permute
    return {field: is_on and kernels.gpu for field, is_on in fields.items()}


def check_fast_fields(arch: Architecture, megatron: Mapping[str, Any]) -> Iterator[str]:
    """What Megatron itself does not refuse, and computes wrong numbers with."""
    if megatron.get("apply_rope_fusion") and _turns_neighbours(arch):
        yield (
            "model.megatron.apply_rope_fusion: found true, but the model turns neighbouring numbers, of which Megatron"
            " does not tell Transformer Engine's packed kernel; leave it out"
        )


def resolve_overlap(optimizer: OptimizerConfig, parallel: ParallelConfig, gpu: bool) -> OptimizerConfig:
    """The optimizer with true or false for each null of its overlap keys, of which gathering needs reducing."""
    automatic = gpu and parallel.dp * parallel.cp > 1
    reduce, gather = optimizer.overlap_grad_reduce, optimizer.overlap_param_gather
    reduce = reduce if reduce is not None else automatic or bool(gather)
    gather = gather if gather is not None else automatic and reduce
    return replace(optimizer, overlap_grad_reduce=reduce, overlap_param_gather=gather)


def choose_overlap(spec: WorkerSpec) -> WorkerSpec:
    """The spec with the overlap keys of its optimizer decided for this process."""
    if spec.optimizer is None:
        return spec
    return replace(spec, optimizer=resolve_overlap(spec.optimizer, spec.parallel, find_kernels().gpu))


def describe_fast_ways(arch: Architecture, spec: WorkerSpec, fields: Mapping[str, Any]) -> Iterator[str]:
    """The ways that are on and, on a GPU, those that are off, a line each.

    spec: after `choose_overlap`. fields: of the TransformerConfig.
    """
    kernels = find_kernels()
    ways = {field: bool(fields[field]) for field in build_fast_fields(arch, spec.megatron, kernels)}
    if spec.optimizer is not None:
        ways |= {name: bool(getattr(spec.optimizer, name)) for name in ("overlap_grad_reduce", "overlap_param_gather")}
    if kernels.te:
        # Found where an earlier Transformer Engine has them; without, torch splits, and the router's product has casts.
        ways |= {"split of q, k, v in one kernel": attention.SplitAlongDim is not None}
        if arch.experts is not None:
            ways |= {"float32 product of the router": getattr(moe_utils, "te_general_gemm", None) is not None}
    for is_on, what in ((True, "on"), (False, "off")):
        names = [name for name, found in ways.items() if found is is_on]
        if names and (is_on or kernels.gpu):
            yield f"{what}: {', '.join(names)}"


def _turns_neighbours(arch: Architecture) -> bool:
    return bool(FAMILIES[arch.family].megatron_fields(arch).get("rotary_interleaved"))


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


class Replay:
    """Given experts in place of those with the highest scores, which are weighed by the router's own scores (R3,
    2510.11370): the gradient reaches the router through these.

    Megatron's RouterReplay is one list for the whole process: what a recomputed layer takes depends on the order of the
    backward passes, and a reference in the process would replay the policy's routes. Here a layer brings its batch.
    """

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        """[S, top_k], 1 + numbers of experts, or 0 where the router chooses; None: it chooses everywhere"""
        self.is_counting = False
        self.counts: Tensor | None = None
        """float64 [2]: tokens whose set of experts is also the router's own, tokens with given experts"""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """scores [S, E], choose: Megatron's choice -> scores and numbers of the experts of each token [S, topk]."""
        own: Tensor
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return own_scores, own
        given = self.experts.long() - 1
        exists = given[:, :1] >= 0
        if self.is_counting:
            same = (given.sort(-1).values == own.sort(-1).values).all(-1)
            counts = torch.stack([same.sum(), exists.sum()]).double()
            self.counts = counts if self.counts is None else self.counts + counts
        experts = torch.where(exists, given, own)
        # In the order of the router's own choice: where the sets are equal, so is every bit of what follows.
        chosen, order = scores.gather(1, experts).sort(dim=-1, descending=True, stable=True)
        return chosen, experts.gather(1, order)


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
    router_replay: Replay | None
    """None: the router chooses the experts"""

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
        if self.router_replay is not None:
            assert self.packed is not None
            experts = self.packed.routed_experts
            given = None if experts is None else self._take_share(experts[:, self.layer_number - 1])
            # Counted in the evaluation alone, whose weights are those that the servers had: see compute_load_metrics.
            self.router_replay.experts, self.router_replay.is_counting = given, not self.training
        weights, routes = super().routing(logits, padding_mask)
        if not self.training or not torch.is_grad_enabled() or self.load is None:
            return weights, routes
        assert self.packed is not None
        logits = logits.view(-1, self.num_experts)
        numbers = self._take_share(self.packed.sequence_numbers)
        real = numbers >= 0
        # Sums over all tokens, without an index by truth values, whose number the host would wait for.
        self.load.tokens += (routes & real[:, None]).sum(0)
        losses = []
        if self.config.moe_aux_loss_coeff:
            balance = self._balance(logits, routes, numbers)
            losses.append(self.config.moe_aux_loss_coeff * balance)
            self.load.terms[0] += balance.detach()
        if self.config.moe_z_loss_coeff:
            z = (logits.float().logsumexp(-1).square() * real).sum() / self.load.num_tokens
            losses.append(self.config.moe_z_loss_coeff * z)
            self.load.terms[1] += z.detach()
        return (MoEAuxLossAutoScaler.apply(weights, sum(losses)) if losses else weights), routes

    def _take_share(self, tokens: Tensor) -> Tensor:
        """This rank's part of what is given for all tokens of the micro-batch, along the first dimension."""
        if not self.config.sequence_parallel:
            return tokens
        part: Tensor = tokens.chunk(self.tp_group.size())[self.tp_group.rank()]
        return part

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
        # Scores of each token that add up to 1.
        if self.score_function == "softmax":
            scores = logits.softmax(-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        probs = zeros.index_add(0, rows, scores)[:-1]
        routed = routed[:-1]
        num_routes = routed.sum(1).clamp(min=1)
        per_sequence = (routed * probs).sum(1) * self.topk / num_routes.square()
        return per_sequence.sum() * self.num_experts / self.load.num_sequences


class ExpertLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that tells its router which token belongs to which sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.mlp.router.packed = kwargs.get("packed_seq_params")
        out = super().forward(*args, **kwargs)
        # Their graph would keep the layer's input, and its gradient, until the next micro-batch (recompute=full).
        self.mlp.token_dispatcher.probs = None
        return out


def find_routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                yield module


def replay_routes(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the routers take the experts that come with the micro-batches, where they do."""
    for router in find_routers(chunks):
        router.router_replay = Replay()
        # The fused router asks nobody.
        router.config.moe_router_fusion = False


def start_minibatch(chunks: Sequence[torch.nn.Module], num_sequences: int, num_tokens: int) -> None:
    """Tell the routers the counts of the whole minibatch that their terms are divided by."""
    for router in find_routers(chunks):
        tokens = torch.zeros(router.num_experts, dtype=torch.float64, device=router.weight.device)
        router.load = Load(num_sequences, num_tokens, tokens, tokens.new_zeros(2))


def compute_load_metrics(chunks: Sequence[torch.nn.Module], name: str) -> dict[str, float]:
    """Load of the experts in the minibatch, averaged over layers; {} for a dense model. All ranks must call it.

    NAME/moe_max_load: tokens of the busiest expert of a layer over those of an average one; moe_aux_loss, moe_z_loss:
    the terms without their coefficients, where these are not 0. moe_routing_agreement: of routes replayed since the
    last call, the share of tokens and layers whose set of experts is also the router's own choice.
    """
    config: Any = chunks[0].config
    if config.num_moe_experts is None:
        return {}
    size = (config.num_layers, config.num_moe_experts + 4)
    table = torch.zeros(size, dtype=torch.float64, device=device())
    # A stage may have dense layers alone.
    for router in find_routers(chunks):
        assert router.load is not None, "start_minibatch comes before"
        agreed = router.load.terms.new_zeros(2)
        if (replay := router.router_replay) is not None and replay.counts is not None:
            agreed, replay.counts = replay.counts, None
        table[router.layer_number - 1] = torch.cat([router.load.tokens, router.load.terms, agreed])
    dist.all_reduce(table)
    if isinstance(config.moe_layer_freq, list):
        table = table[torch.tensor(config.moe_layer_freq, dtype=torch.bool, device=table.device)]
    tokens, terms, (num_agreed, num_given) = table[:, :-4], table[:, -4:-2].mean(0).tolist(), table[:, -2:].sum(0)
    metrics = {f"{name}/moe_max_load": float((tokens.amax(1) / tokens.mean(1)).mean())}
    if config.moe_aux_loss_coeff:
        metrics[f"{name}/moe_aux_loss"] = terms[0]
    if config.moe_z_loss_coeff:
        metrics[f"{name}/moe_z_loss"] = terms[1]
    if num_given:
        metrics[f"{name}/moe_routing_agreement"] = float(num_agreed / num_given)
    return metrics
