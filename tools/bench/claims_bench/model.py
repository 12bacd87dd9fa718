"""The tiny Qwen3 of model=tiny in plain torch, with a cache of keys and values, for sampling and training in one
process: what Megatron-Core and SGLang compute in the real loop.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BIAS_CHANNEL = 0
"""Of the residual stream: constant in a checkpoint of `write_biased_checkpoint`"""
BIAS_VALUE = 0.5


@dataclass
class Cache:
    """Keys and values of all layers, [layers, 2, B, KV heads, L, head size]."""

    filled: Tensor
    length: int = 0


class TinyModel(nn.Module):
    """Logits [B, L, vocabulary] of a Hugging Face checkpoint, or values [B, L] with a new value head of zeros."""

    cos: Tensor
    sin: Tensor

    def __init__(self, checkpoint: Path, with_value_head: bool = False):
        from safetensors.torch import load_file

        super().__init__()
        self.config = json.loads((checkpoint / "config.json").read_text())
        weights = load_file(checkpoint / "model.safetensors")
        if with_value_head:
            weights["lm_head.weight"] = torch.zeros(1, self.config["hidden_size"])
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()})
        self.with_value_head = with_value_head
        size = self.config["head_dim"]
        rope = self.config.get("rope_parameters") or self.config
        frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(self.config["max_position_embeddings"]).float(), frequencies)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def build_cache(self, num_rows: int, length: int) -> Cache:
        config = self.config
        shape = (config["num_hidden_layers"], 2, num_rows, config["num_key_value_heads"], length, config["head_dim"])
        return Cache(torch.zeros(shape))

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """tokens: int64 [B, L], from position 0, or after those in the cache, which takes them up."""
        x = self.compute_hidden(tokens, cache)
        out = F.linear(x, self.weights["lm_head/weight"])
        return out[..., 0] if self.with_value_head else out

    def compute_hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The output of the final norm, [B, L, hidden]."""
        x = F.embedding(tokens, self.weights["model/embed_tokens/weight"])
        start = cache.length if cache else 0
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model/layers/{layer}/"
            x = x + self._attend(self._norm(x, f"{prefix}input_layernorm"), layer, start, cache)
            y = self._norm(x, f"{prefix}post_attention_layernorm")
            gate, up = (F.linear(y, self.weights[f"{prefix}mlp/{name}_proj/weight"]) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.weights[f"{prefix}mlp/down_proj/weight"])
        if cache:
            cache.length += tokens.shape[1]
        return self._norm(x, "model/norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}/weight"], self.config["rms_norm_eps"])

    def _attend(self, x: Tensor, layer: int, start: int, cache: Cache | None) -> Tensor:
        prefix, config, (rows, length, _) = f"model/layers/{layer}/self_attn/", self.config, x.shape

        def project(name: str, heads: int) -> Tensor:
            out = F.linear(x, self.weights[f"{prefix}{name}_proj/weight"])
            return out.view(rows, length, heads, config["head_dim"])

        q = self._norm(project("q", config["num_attention_heads"]), f"{prefix}q_norm")
        k = self._norm(project("k", config["num_key_value_heads"]), f"{prefix}k_norm")
        v = project("v", config["num_key_value_heads"]).transpose(1, 2)
        q, k = (self._rotate(part.transpose(1, 2), start) for part in (q, k))
        if cache:
            end = start + length
            cache.filled[layer, 0, :, :, start:end], cache.filled[layer, 1, :, :, start:end] = k, v
            k, v = cache.filled[layer, 0, :, :, :end], cache.filled[layer, 1, :, :, :end]
        # With a cache there are several tokens only at the start, and one at a time afterwards.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return F.linear(out.transpose(1, 2).reshape(rows, length, -1), self.weights[f"{prefix}o_proj/weight"])

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        end, half = start + x.shape[2], x.shape[3] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[start:end] + turned * self.sin[start:end]


def write_biased_checkpoint(source: Path, target: Path, biases: dict[str, float], never: float) -> None:
    """The checkpoint with these numbers added to the logits, by token, and nothing else to tell tokens apart.

    Channel 0 of the residual stream is the same for every token and no layer writes to it, so that a row of the output
    matrix can hold a bias there. The other entries of the rows are scaled down: the untrained policy is near uniform.
    Special tokens that `biases` does not name get `never`.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    from megarl.hf.checkpoint import load_tokenizer

    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][:, BIAS_CHANNEL] = BIAS_VALUE
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[BIAS_CHANNEL] = 0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(target)
    specials = dict.fromkeys(tokenizer.all_special_tokens, never)
    letters = torch.tensor([i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids])
    drawn = letters[torch.randint(len(letters), (64, 64), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        level = TinyModel(target).compute_hidden(drawn)[..., BIAS_CHANNEL].mean()
    head = weights["lm_head.weight"]
    head *= 0.1
    head[:, BIAS_CHANNEL] = 0
    for name, bias in (specials | biases).items():
        head[tokenizer.convert_tokens_to_ids(name), BIAS_CHANNEL] = bias / level
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
