"""Megatron's GPT for a Hugging Face checkpoint: configuration, the model with its head, wrapping.

Shapes: S packed tokens, R response tokens, V vocabulary of this tensor-parallel rank (padded), h hidden size.
"""

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.errors import find_nearest_key
from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig, Trainable
from megarl.mcore import layers as engine
from megarl.mcore import process_groups
from megarl.mcore.batch import PackedParams
from megarl.mcore.checkpoints import HEAD, padded_vocab_size
from megarl.mcore.device import device
from megarl.mcore.layers import find_kernels, find_layers
from megarl.mcore.spec import ROLE_KEYS, StageParameters, WorkerSpec, check_layout, choose_recomputed
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES


def build_expert_fields(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """The fields of TransformerConfig about experts that the checkpoint, the layout or this engine decides."""
    fields: dict[str, Any] = {
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }
    experts = arch.experts
    if experts is None:
        return fields
    if not arch.has_unlike_layers:
        # There is no dense layer: the same size in both fields keeps the experts on this very configuration, of
        # which Megatron would make them a copy.
        fields["ffn_hidden_size"] = experts.ffn_size
    else:
        fields["moe_layer_freq"] = [int(arch.has_experts(layer)) for layer in range(arch.num_layers)]
    return {
        **fields,
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_size,
        # The router here adds its own terms by moe_aux_loss_coeff and moe_z_loss_coeff.
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": experts.score_function,
        # The softmax over the chosen experts is the softmax over all of them, normalized to the chosen ones. Of the
        # sigmoid Megatron normalizes always.
        "moe_router_pre_softmax": experts.score_function == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
        "moe_router_group_topk": experts.top_groups if experts.num_groups > 1 else None,
        "moe_router_enable_expert_bias": experts.has_correction_bias,
        # The router counts no tokens for an update: the bias is the checkpoint's.
        **({"moe_router_bias_update_rate": 0.0} if experts.has_correction_bias else {}),
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_grouped_gemm": find_layers().groups_experts,
    }


def check_expert_options(megatron: dict[str, Any], with_experts: bool) -> Iterator[str]:
    """What is wrong with model.megatron's keys about experts; one message each."""
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = megatron.get(key)
        if value is not None and not with_experts:
            yield f"model.megatron.{key}: found {value!r}, but the model has no experts; leave it out"
        elif value is not None and (not isinstance(value, int | float) or value < 0):
            yield f"model.megatron.{key}: found {value!r}; it must be a number of 0 or more"
    dispatcher = megatron.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher not in ("alltoall", "flex"):
        # Every other one asks for micro-batches of one length; flex needs DeepEP's package and network.
        yield f"model.megatron.moe_token_dispatcher_type: found {dispatcher!r}; it must be alltoall or flex"
    if "moe" in (megatron.get("recompute_modules") or ()):
        # The router is told its micro-batch by the layer, which is not run again.
        yield "model.megatron.recompute_modules: found moe, which is not built here; recompute=full is"


def mark_experts(model: torch.nn.Module) -> None:
    """Mark the experts' weights as such: their gradients are summed over the ranks that hold the same experts.

    Megatron does so only where expert parallelism is above 1. Without it, tensor-parallel ranks with experts of another
    tensor parallelism would silently keep different gradients of the same weights.
    """
    for name, param in model.named_parameters():
        if ".mlp.experts." in name:
            setattr(param, "allreduce", False)  # noqa: B010
            # Megatron would add up biases of experts once more, over the tensor-parallel ranks.
            setattr(param, "sequence_parallel", False)  # noqa: B010
            if not hasattr(param, "tensor_model_parallel"):
                # Not a copy of another rank's weight, whatever the tensor parallelism of the rest of the model.
                set_tensor_model_parallel_attributes(param, True, 0 if "linear_fc1" in name else 1, 1)


# Not what stands beside them under mlp.: the router, a shared expert's gate, and the norm that Transformer Engine keeps
# in linear_fc1, or a family in linear_fc2. Grouped experts number their weights.
_MLP = re.compile(r"\.mlp\.(?:[\w.]+\.)?linear_fc[12]\.(?:weight|bias)\d*$")


def is_mlp(name: str) -> bool:
    """Whether a parameter, by its name in Megatron's model, is a projection of an MLP, an expert or a shared expert."""
    return _MLP.search(name) is not None


def freeze(chunks: Iterable[torch.nn.Module], trainable: Trainable) -> None:
    """Freeze the weights that are not trained; what is built on the model afterwards has no gradients of them."""
    for name, param in (named for chunk in chunks for named in chunk.named_parameters()):
        if trainable is Trainable.mlp:
            param.requires_grad_(is_mlp(name) or name == HEAD)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def _own_fields(arch: Architecture, parallel: ParallelConfig, dtype: Dtype) -> dict[str, Any]:
    """The fields of TransformerConfig that the checkpoint, the layout or this engine decides."""
    torch_dtype, interleaved = DTYPES[dtype], parallel.vpp > 1
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_size,
        "layernorm_epsilon": arch.norm_eps,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": {"silu": F.silu, "quick_gelu": quick_gelu}.get(arch.activation, gelu_tanh),
        "softmax_scale": None if arch.query_size is None else arch.query_size**-0.5,
        # Transformer Engine counts the tokens before a token, without itself.
        "window_size": (arch.window - 1, 0) if arch.window else None,
        "window_attn_skip_freq": list(map(int, arch.windowed)) or None,
        "no_rope_freq": list(map(int, arch.unturned)) or None,
        "add_bias_linear": arch.has_biases,
        "softmax_type": "learnable" if arch.has_biases else "vanilla",
        **({} if arch.clamp is None else {"activation_func_clamp_value": arch.clamp, "glu_linear_offset": 1.0}),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": torch_dtype,
        "pipeline_dtype": torch_dtype,
        "bf16": dtype is Dtype.bfloat16,
        "fp16": False,
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        # Two stages that send each other forward and backward tensors in one batch of operations mix them up.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": parallel.cp,
        # Packed micro-batches differ in length.
        "variable_seq_lengths": True,
        # Weights come from the checkpoint.
        "perform_initialization": False,
        # Losses are already divided by the global counts: gradients are pure sums over micro-batches and ranks.
        "calculate_per_token_loss": True,
        **build_expert_fields(arch, parallel),
        **FAMILIES[arch.family].megatron_fields(arch),
    }


_DEFAULTS: dict[str, Any] = {"moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall"}
"""Defaults that model.megatron may change, beside those of `build_fast_fields`"""
_OTHER_ACTIVATION = ("bias_activation_fusion", "activation_func_clamp_value", "glu_linear_offset")
"""Fields of model.megatron with which MLPs do not compute the local layers' `swiglu`."""


def build_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: Dtype,
    megatron: dict[str, Any],
    role_fields: dict[str, Any] | None = None,
) -> TransformerConfig:
    """The TransformerConfig of a checkpoint in a layout; `megatron` (model.megatron) and `role_fields`
    (`build_role_fields`) add to it. Raises ValueError that names the key for what does not fit.
    """
    own, kernels = _own_fields(arch, parallel, dtype), find_kernels()
    problems = [*_check_fields(megatron, own), *engine.check_fast_fields(arch, megatron)]
    problems += check_layout(arch, parallel, "parallel", megatron)
    if problems:
        raise ValueError("; ".join(problems))
    fast = engine.build_fast_fields(arch, megatron, kernels)
    # By it Megatron takes the activation of the layer spec.
    takes_ours = find_layers().has_activation and not any(megatron.get(field) for field in _OTHER_ACTIVATION)
    takes_ours = takes_ours and arch.activation == "silu"
    fast["use_te_activation_func"] = takes_ours
    modules = {"recompute_modules": list(choose_recomputed(arch.experts is not None, on_gpu=kernels.te))}
    return _find_class(arch)(**{**_DEFAULTS, **fast, **modules, **own, **megatron, **(role_fields or {})})


def _find_class(arch: Architecture) -> Any:
    return TransformerConfig if arch.latent is None else MLATransformerConfig


def check_options(arch: Architecture, spec: WorkerSpec) -> list[str]:
    """What is wrong with a role's model.megatron; one message each, naming the key, or Megatron's own words."""
    own = _own_fields(arch, spec.parallel, spec.dtype)
    problems = [*_check_fields(spec.megatron, own), *engine.check_fast_fields(arch, spec.megatron)]
    if not problems:
        try:
            _find_class(arch)(**{**_DEFAULTS, **own, **spec.megatron})
        except (ValueError, AssertionError, ImportError) as error:
            problems.append(f"model.megatron: refused by Megatron with this layout: {error}")
    return problems


def _check_fields(megatron: dict[str, Any], own: dict[str, Any]) -> list[str]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    decided = {key: f"set policy.{name} and critic.{name} instead" for key, name in ROLE_KEYS.items()}
    decided["deterministic_mode"] = "set train.deterministic instead"
    in_dtype = "weights are kept in the role's dtype, in which they are sent to the servers, offloaded and saved"
    decided |= {key: f"{in_dtype}; it must be false" for key in ("fp8_param", "fp4_param") if megatron.get(key)}
    decided |= {key: f"the checkpoint, the layout or the dtype decides it: {value!r}" for key, value in own.items()}
    problems = list(check_expert_options(megatron, with_experts="num_moe_experts" in own))
    for key, value in megatron.items():
        if key not in known:
            nearest = find_nearest_key(key, known)
            hint = f"; did you mean {nearest}?" if nearest else ""
            problems.append(f"model.megatron.{key}: not a field of Megatron's TransformerConfig{hint}")
        elif key in decided:
            problems.append(f"model.megatron.{key}: found {value!r}; {decided[key]}")
    return problems


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark the split weights as such, which Megatron does only where it initialises them: others count as copies, of
    which the gradient norm has the first rank's alone.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            axis = 0
        elif isinstance(module, RowParallelLinear):
            axis = 1
        else:
            continue
        if module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, axis, getattr(module, "stride", 1))


def squash(z: Tensor, low: float, high: float) -> Tensor:
    """low + (high - low) * (1/2 + atan(z)/pi), between low and high (BPCO 2608.23566, equation 9); of any shape."""
    return low + (high - low) * (0.5 + torch.atan(z) / math.pi)


class ValueHead(MegatronModule):  # type: ignore[misc]
    """Linear(h, 1) in float32, the same on every tensor-parallel rank, in place of the output layer."""

    value_range: tuple[float, float] | None = None
    """The bounds of `squash`, which the values then go through"""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        # Zero: the first values are exactly 0 (with a range its middle), and the first gradient goes into the head
        # alone.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[R, 1, h] -> float32 [R, 1, 1]"""
        values = F.linear(hidden.float(), self.weight.float())
        return values if self.value_range is None else squash(values, *self.value_range), None


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's GPT over packed sequences, whose head sees only the positions that predict response tokens: the last
    stage returns logits [R, V] in the model's dtype, or values float32 [R] with a value head.
    """

    def __init__(
        self, arch: Architecture, config: TransformerConfig, with_value_head: bool, vp_stage: int | None = None
    ) -> None:
        """vp_stage: which of this rank's pieces of the model it is; None: the only one."""
        fuses = config.gradient_accumulation_fusion
        # Megatron's own layers, of which the output layer is one, ask for Apex' kernel.
        config.gradient_accumulation_fusion = fuses and find_kernels().apex
        super().__init__(
            config=config,
            transformer_layer_spec=engine.build_block_spec(arch, config, vp_stage),
            vocab_size=padded_vocab_size(arch.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_length,
            pre_process=is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            # A critic has no output weights to share.
            share_embeddings_and_output_weights=arch.tied and not with_value_head,
            position_embedding_type="rope",
        )
        self.rotary_pos_emb = engine.Angles(arch, config)
        config.gradient_accumulation_fusion = fuses
        if fuses:
            # Transformer Engine's layers add their weight gradients to the float32 ones in the product itself. By
            # Megatron's own field for it its output layer would refuse to be built without Apex.
            for module in self.modules():
                if hasattr(module, "fuse_wgrad_accumulation"):
                    module.fuse_wgrad_accumulation = True
        self.arch, self.with_value_head = arch, with_value_head
        if self.post_process:
            if with_value_head:
                self.output_layer = ValueHead(config)
            else:
                # The head gets whole sequences: see _postprocess.
                self.output_layer.sequence_parallel = False
        self.picks_angles = find_layers().picks_angles
        if self.picks_angles:
            # Rotary angles are chosen by the tokens' positions: see _preprocess.
            self.rotary_pos_emb.cp_group = None
        mark_tensor_parallel(self)
        mark_experts(self)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out: tuple[Any, ...] = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if self.pre_process and self.arch.embedding_scale != 1:
            out = (out[0] * self.arch.embedding_scale, *out[1:])
        if self.config.recompute_granularity is not None and self.pre_process and torch.is_grad_enabled():
            # Recomputation leaves out the backward pass of a block of layers whose input needs no gradient, as behind
            # a frozen embedding, whatever weights the block has.
            out[0].requires_grad_()
        if not self.picks_angles or out[1] is None:
            return out
        # Rotary angles of the packed positions, once for all layers; Megatron's own way loops over sequences.
        return out[0], out[1].index_select(-4, position_ids.view(-1)), *out[2:]

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedParams, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # What follows gives every rank the whole gradient, so that each takes its part of it.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        assert packed_seq_params.predictors is not None, "batches say what predicts their responses"
        hidden_states = hidden_states.index_select(0, packed_seq_params.predictors)
        if not self.with_value_head and self.arch.logits_scale != 1:
            hidden_states = hidden_states * self.arch.logits_scale
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out: Tensor
        out, _ = self.output_layer(hidden_states, weight=weight)
        return out.view(-1) if self.with_value_head else out.squeeze(1)


def build_chunks(arch: Architecture, config: TransformerConfig, with_value_head: bool) -> list[PackedGPT]:
    """This rank's pieces of the model, in the order of their layers: one, or vpp under the interleaved schedule."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if num_chunks is None else list(range(num_chunks))
    return [PackedGPT(arch, config, with_value_head, stage) for stage in stages]


def wrap_chunks(
    chunks: Sequence[PackedGPT], config: TransformerConfig, optimizer: OptimizerConfig | None
) -> list[torch.nn.Module]:
    """Megatron's Float16Module where the dtype is bfloat16, and its DistributedDataParallel where they are
    trained (there is an `optimizer`, after `resolve_overlap`).
    """
    wrapped: list[torch.nn.Module] = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    for chunk in wrapped:
        chunk.to(device())
    if optimizer is None:
        return [chunk.requires_grad_(False).eval() for chunk in wrapped]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bool(optimizer.overlap_grad_reduce),
        overlap_param_gather=bool(optimizer.overlap_param_gather),
    )
    # The communication of later pieces runs beside the computation of others in any case: one bucket each.
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(wrapped)
    ]


class _Meta(TorchFunctionMode):
    """Puts on the meta device also what asks for a GPU, and leaves there what is to move."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def count_stages(
    arch: Architecture, parallel: ParallelConfig, dtype: Dtype, megatron: dict[str, Any], with_value_head: bool
) -> tuple[StageParameters, ...]:
    """The parameters of a rank of each pipeline stage. megatron: model.megatron. Raises ValueError for a layout that
    does not fit the model, RuntimeError in a process that has joined a process group.
    """
    stages = []
    for stage in range(parallel.pp):
        with _playing(stage * (parallel.num_processes // parallel.pp), parallel):
            config = build_config(arch, parallel, dtype, megatron, {"init_model_with_meta_device": True})
            with torch.device("meta"), _Meta():
                chunks = build_chunks(arch, config, with_value_head)
        counts: Counter[str] = Counter()
        for name, param in (named for chunk in chunks for named in chunk.named_parameters()):
            kinds = {
                "experts": ".mlp.experts." in name,
                "dense": ".mlp.experts." not in name,
                "embedding": "embedding.word_embeddings." in name,
                "head": name == HEAD,
                "mlp": is_mlp(name) and ".mlp.experts." not in name,
            }
            counts.update({kind: param.numel() * is_one for kind, is_one in kinds.items()})
        stages.append(StageParameters(sum(len(chunk.decoder.layers) for chunk in chunks), **counts))
    return tuple(stages)


@contextmanager
def _playing(rank: int, parallel: ParallelConfig) -> Iterator[None]:
    """Play rank `rank` of `parallel.num_processes`."""
    if dist.is_initialized():
        raise RuntimeError("the parameters of a layout are counted in a process that has joined no process group")
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        # Megatron asks for the current GPU in order to put tensors on it, and with context parallelism for a stream;
        # torch would set up the first GPU for either, whose memory the driver then held during the run.
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(patch.object(torch.cuda, "Stream", lambda *args, **kwargs: None))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.num_processes)
        try:
            process_groups.initialize_groups(parallel, create_gloo_process_groups=False)
            yield
        finally:
            process_groups.destroy()
