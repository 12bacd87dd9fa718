"""Plain decoder models, as SGLang defines them."""

from sglang.srt.models import llama, qwen2, qwen3

EntryClass = [*llama.EntryClass, qwen2.EntryClass, qwen3.EntryClass]
