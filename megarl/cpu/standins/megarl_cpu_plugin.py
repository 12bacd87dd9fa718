"""A plugin of SGLang for a CPU: attention for many sequences in one call, and cheap sampling that follows a seed.

SGLang loads it through its entry point group `sglang.srt.plugins`: see the .dist-info folder here.

Attention: `torch_native` calls torch's attention once per sequence and layer, most of a decode step of a small model; a
subclass takes its name in SGLang's registry. Sampling: torch.multinomial draws a random number for every entry of the
vocabulary; here each token takes one, of its request's `sampling_seed` and its place in the sequence. (SGLang reads
the seed only with --enable-deterministic-inference, which no CPU has the kernels for.) Products: for a few sequences
BLAS takes half of the time with the weights as the left factor. Processes are forked, with one import for all of them.
Memory that SGLang would lock for a GPU's copies stays as it is.
"""

import gc
import logging
import multiprocessing

import torch
from megarl_kernels import attend, build_group, is_faster, multiply, plan_groups, sample, sample_limited
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

logger = logging.getLogger(__name__)


class BatchedAttnBackend(TorchNativeAttnBackend):
    """`torch_native` with causal attention in groups; every other kind goes to the stock loops."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.dtype = model_runner.dtype
        self.groups = []
        if model_runner.use_mla_backend:
            from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

            # By default keys and values of a prompt would not come from the cache, from which they are taken here.
            method = handlers.AttnForwardMethod.MLA
            handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method)
        logger.info("megarl_cpu_plugin: sequences are attended in groups")

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        num_keys = forward_batch.seq_lens.long()
        if forward_batch.forward_mode.is_decode_or_idle():
            num_queries = torch.ones_like(num_keys)
        elif forward_batch.extend_seq_lens is not None:
            num_queries = forward_batch.extend_seq_lens.long()
        else:
            self.groups = None
            return
        first_query = num_queries.cumsum(0) - num_queries
        rows = forward_batch.req_pool_indices.long()
        table = self.req_to_token_pool.req_to_token
        self.groups = [
            build_group(members, first_query, num_queries, num_keys, rows, table, self.dtype)
            for members in plan_groups(num_queries.tolist(), num_keys.tolist())
        ]

    def _can_batch(self, layer):
        plain = not layer.is_cross_attention and layer.attn_type != AttentionType.ENCODER_ONLY
        return self.groups is not None and plain and not self.use_sliding_window_kv_pool

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks=None):
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        window = layer.sliding_window_size if windowed else None
        for group in self.groups:
            attend(group, query, keys, values, output, layer.scaling, window, sinks)
        return output.flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **sinks):
        forward = self._forward if self._can_batch(layer) else super().forward_decode
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **sinks)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **sinks):
        forward = self._forward if self._can_batch(layer) else super().forward_extend
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **sinks)


def build_sampling_info(stock, cls, batch, vocab_size):
    """SGLang's SamplingBatchInfo of a batch, with everyone's seed: filters and merges carry it along."""
    info = stock(cls, batch, vocab_size)
    info.sampling_seed = torch.tensor([pick_seed(r.sampling_params) for r in batch.reqs], dtype=torch.int64)
    return info


def pick_seed(params):
    """The request's own; without one a fresh one, from the generator that all ranks of a server have in step."""
    if params.sampling_seed is not None:
        return params.sampling_seed
    return 0 if params.top_k == 1 else torch.randint(2**63 - 1, ()).item()  # Greedy requests draw nothing.


def sample_from_probs(stock, probs, sampling_seed=None, positions=None):
    """SGLang's sampling_from_probs_torch: int32 [B]."""
    return stock(probs) if sampling_seed is None else sample(probs, sampling_seed, positions)


def sample_from_top_probs(
    stock, probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options
):
    """SGLang's top_k_top_p_min_p_sampling_from_probs_torch: int32 [B].

    A request that asks for no limit samples here, beside one that does, as it would without it.
    """
    if sampling_seed is None or options.get("return_filtered_probs"):
        limits = (top_ks, top_ps, min_ps, need_min_p_sampling)
        return stock(probs, *limits, None, positions, **options)
    return sample_limited(probs, top_ks, top_ps, min_ps, sampling_seed, positions)


def apply_linear(stock, method, layer, x, bias=None):
    """SGLang's UnquantizedLinearMethod.apply: x [rows, K] times a layer's weight [N, K] -> [rows, N]."""
    if bias is None and is_faster(x, layer.weight):
        return multiply(x, layer.weight)
    return stock(method, layer, x, bias)


def compute_logits(stock, processor, hidden, head, embedding_bias=None, **options):
    """SGLang's LogitsProcessor._compute_lm_head: hidden [rows, K] -> logits [rows, V]."""
    if embedding_bias is None and options.get("out") is None and is_faster(hidden, head.weight):
        return multiply(hidden, head.weight)
    return stock(processor, hidden, head, embedding_bias, **options)


def fork_processes(stock, server_args):
    """SGLang's _set_envs_and_config, the last that it does before it starts the scheduler and the detokenizer.

    It has them spawned, which a process that uses CUDA needs; forked they have this one's imports, of 10 s of CPU each.
    What is imported stays: without it the garbage collection of each /flush_cache takes 5 ms in place of 300.
    """
    stock(server_args)
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


def lock_nothing(stock, buffer, granularity=None):
    """SGLang's _cuda_host_register, which asks CUDA to lock the pages."""


def build_rope(stock, head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, *options):
    """SGLang's get_rope_cpu, by which DeepSeek's layers make rotary embeddings of one kind of scaling alone."""
    if rope_scaling is not None:
        return stock(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *options)
    return get_rope(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)


def register():
    """Take the name `torch_native` in SGLang's registry of backends, and wrap what is named above."""
    register_attention_backend("torch_native")(BatchedAttnBackend)
    # The one for a CPU that SGLang takes for models with sinks
    register_attention_backend("intel_amx")(BatchedAttnBackend)
    sampler, batch_info = "sglang.srt.layers.sampler", "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    layers = "sglang.srt.layers"
    for target, hook in {
        f"{layers}.quantization.unquant.UnquantizedLinearMethod.apply": apply_linear,
        f"{layers}.logits_processor.LogitsProcessor._compute_lm_head": compute_logits,
        f"{layers}.rotary_embedding.factory.get_rope_cpu": build_rope,
        f"{batch_info}.from_schedule_batch": build_sampling_info,
        f"{sampler}.sampling_from_probs_torch": sample_from_probs,
        f"{sampler}.top_k_top_p_min_p_sampling_from_probs_torch": sample_from_top_probs,
        "sglang.srt.entrypoints.engine._set_envs_and_config": fork_processes,
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register": lock_nothing,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)
