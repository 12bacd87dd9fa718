"""Decoder models of the families that Megatron is set up for, as SGLang defines them."""

from sglang.srt.models import llama, qwen2, qwen3, qwen3_moe

EntryClass = [*llama.EntryClass, qwen2.EntryClass, qwen3.EntryClass, qwen3_moe.EntryClass]
