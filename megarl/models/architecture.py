"""The sizes and variants of a model, as the rest of megarl reads them, and how a config.json is read: values, and clear
refusals of what is not built here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from megarl.models.rope import KINDS, REFUSED_KINDS, Rope


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that takes the place of the dense MLP."""

    num_experts: int
    top_k: int
    """Number of experts that each token goes to"""
    ffn_size: int
    """Rows of one expert's MLP"""
    normalized: bool
    """The weights of a token's experts are their scores divided by their sum, not the scores as they are."""
    num_dense_layers: int = 0
    """The first layers of the model, which keep a dense MLP of `Architecture.ffn_size`"""
    shared_ffn_size: int = 0
    """Rows of the MLP that every token passes besides its experts; 0: there is none"""
    score_function: str = "softmax"
    """What makes scores of the router's logits: softmax or sigmoid"""
    scaling_factor: float | None = None
    """The weights of the experts are multiplied by it"""
    has_correction_bias: bool = False
    """A constant float32 bias is added to the scores where experts are chosen, and not where they are weighed."""
    num_groups: int = 1
    """Equal parts of the experts, of which those of a token come from `top_groups`: the ones with the largest sum of
    their two best scores"""
    top_groups: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (2405.04434, section 2.1): queries, and keys with values, are made of vectors of a
    few numbers, which are normalized; the numbers that positions turn are the same for the keys of all heads.
    """

    query_rank: int | None
    """None: queries are made of the hidden states"""
    rank: int
    """Of keys and values"""
    content_size: int
    """Numbers of a query or key head that positions leave as they are; the first ones"""
    turned_size: int
    value_size: int


@dataclass(frozen=True)
class Architecture:
    """Sizes and variants of a decoder with RMSNorm, rotary positions and a gated MLP."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_length: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The output layer is the embedding."""
    experts: Experts | None = None
    """None: a dense model"""
    rotary_share: float = 1.0
    """Share of each head's numbers that its position turns; the first ones"""
    output_norms: bool = False
    """The outputs of attention and of the MLP are normalized before they are added to the residual stream."""
    input_norms: bool = True
    """The inputs of attention and of the MLP are normalized."""
    joins_heads: bool = False
    """`qk_norm` normalizes all query heads of a token together, and all its key heads, not each head."""
    window: int = 0
    """Tokens that each sees in the layers `windowed`, itself included"""
    windowed: tuple[bool, ...] = ()
    """By layer, whether it has the window; empty: none has"""
    local_rope: Rope | None = None
    """Of the layers `windowed`; None: `rope`"""
    unturned: tuple[bool, ...] = ()
    """By layer, whether it has no positions at all; empty: all have"""
    activation: str = "silu"
    """Of the gates of MLPs: silu, gelu in its approximation by tanh, or quick_gelu, x * sigmoid(1.702 x)"""
    clamp: float | None = None
    """Of gates and what they multiply, to which 1 is added then"""
    has_biases: bool = False
    """The projection at the end of attention, router and experts have biases too, and scores a learned number for each
    head that takes its share of the softmax and gives nothing (a sink)."""
    embedding_scale: float = 1.0
    """The embedding's outputs are multiplied by it."""
    logits_scale: float = 1.0
    """The logits are multiplied by it."""
    latent: Latent | None = None
    """None: query, key and value heads are made of the hidden states"""
    query_size: float | None = None
    """Scores are divided by its root; None: `head_size`"""
    serves_whole_embedding: bool = False
    """Each rank of a server has all of the embedding, and no padding rows."""

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def value_size(self) -> int:
        """Numbers of a value head"""
        return self.latent.value_size if self.latent else self.head_size

    @property
    def has_unlike_layers(self) -> bool:
        """Some layers have experts and others do not."""
        return 0 < self.num_expert_layers < self.num_layers

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """`rope`, and `local_rope` where there is one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def find_rope(self, layer: int) -> int:
        """Which of `ropes` the layer has."""
        return int(self.local_rope is not None and self.windowed[layer])

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Rows of each kind of MLP that tensor parallelism splits, in training and in serving, by what it is."""
        sizes = {}
        if self.num_expert_layers < self.num_layers:
            sizes["an MLP"] = self.ffn_size
        if self.experts is not None and self.experts.shared_ffn_size:
            sizes["the shared experts"] = self.experts.shared_ffn_size
        return sizes


WITHOUT_EFFECT = frozenset(
    (
        # Names and versions; the dtype is rollout.dtype's, and the class is checked where it is served
        *("_name_or_path", "name_or_path", "_commit_hash", "model_type", "architectures", "transformers_version"),
        *("torch_dtype", "dtype", "unsloth_version", "unsloth_fixed", "transformers.js_config", "is_llama_config"),
        *("license", "tokenizer_class", "prefix", "megarl_critic_prompt", "megarl_value_range"),
        # Tokens, which rollout/server.py reads and the tokenizer knows
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id"),
        *("mask_token_id", "decoder_start_token_id"),
        # Training elsewhere, outputs and caches of transformers, and how it spreads a model over devices
        *("initializer_range", "use_cache", "gradient_checkpointing", "neftune_noise_alpha", "router_aux_loss_coef"),
        *("output_router_logits", "router_jitter_noise", "output_attentions", "output_hidden_states"),
        *("tie_last_hidden_states", "return_dict", "torchscript", "use_bfloat16", "tf_legacy_loss", "pretraining_tp"),
        *("chunk_size_feed_forward", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention_2", "experts_implementation"),
        *("base_model_tp_plan", "base_model_pp_plan"),
        # Heads of classifiers
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        # Sampling by transformers: a server does what a request says
        *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens",),
        # Where sliding windows would begin, of which there are none (use_sliding_window)
        *("max_window_layers",),
    )
)
"""Keys of config.json that change nothing that the trainer or a server computes, whatever their values"""

ONLY_VALUES: dict[str, Any] = {
    "is_causal": True,
    "is_decoder": (True, False),
    "rope_is_neox_style": True,
    "moe_layer_freq": 1,
}
"""Keys that one of the engines would honour at another value than this one or these; of others nothing, zero and off
are taken"""

QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""How the weights are quantized; null where they are not"""

SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
"""The server reads its model from there wherever such a key is, even where it is null"""

EFFECTIVE = re.compile(
    "attn|attention|head|rope|rotary|rotate|yarn|ntk|posit|alibi|window|sliding|chunk|sink|causal|bidirection"
    "|soft_?cap|clip|logit|norm|scal|multipl|mup|factor|alpha|residual|resid_|hidden|intermediate|ffn|ff_|dff|mlp"
    "|act_|_act|activ|gelu|glu|gate|gating|layer|block|depth|loop|cycles|embe?d|emb_|vocab|expert|moe|rout|top_?k"
    "|group|shared|dense|sparse|index|n_?gram|mem_|_mem|memory|mamba|ssm|state_size|conv|linear|recurr|delta|kv|mla"
    "|qk|lora|lowrank|rank|adapter|peft|prompt|quant|compress|prun|bits|fp8|fp4|awq|gptq|vision|image|video|audio"
    "|speech|sound|chroma|codebook|modal|encoder|decoder|talker|language|lang_|mtp|nextn|predict|draft|spec(?!ial)"
    "|eagle|medusa|pool|matryoshka|bias|hc_|mhc|dim|width|size|rel_|cross|skip|mask|length|_len|context|auto_map"
    "|interleave|alt_?up|laurel|parallel|centroid|eps$|eps_|epsilon|expand|expansion|ple_|d_model|d_inner|n_ctx"
    "|n_inner|type$|types$|num_|every|tie_|tied|time_step|patch|vq|cca|kernel|sparsity|per_|pronunciation|shape"
    "|mode$|clamp|prefix_lm|use_|query|hybrid|heterogen|scoring|noise|pos_"
)
"""What names of keys have in them that change a model, of transformers' and SGLang's kinds of models alike"""
_DROPOUT = re.compile("dropout|_pdrop$|layerdrop")


class ConfigJson:
    """The content of a config.json. Every refusal is a ValueError that names the file, the key and what was found."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        """path: what the messages name."""
        self.content, self.path = content, path
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if self.get(key) is None:
            raise ValueError(f"{self.path}: {key} is missing")
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the default where the key is missing or null."""
        self._read.add(key)
        found = self.content.get(key)
        return default if found is None else found

    def read_size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; without a default the key must be there."""
        found = self[key] if default is None else self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise ValueError(f"{self.path}: {key} is {found!r}; a whole number from {least} on was expected")
        return found

    def read_size_of(self, key: str, other: str) -> int:
        """A whole number that has two names, of which the checkpoint has one or both."""
        found = {each: self.read_size(each) for each in (key, other) if self.get(each) is not None}
        if len(set(found.values())) > 1:
            raise ValueError(f"{self.path}: {key} is {found[key]} and {other} {found[other]}, which are one thing")
        return next(iter(found.values())) if found else self.read_size(key)

    def ignore(self, key: str) -> None:
        """Take the key for one without effect: with use_sliding_window false, Qwen's classes drop sliding_window."""
        self._read.add(key)

    def read_number(self, key: str, default: float) -> float:
        return self._check_number(key, self.get(key, default))

    def read_flag(self, key: str, default: bool) -> bool:
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise ValueError(f"{self.path}: {key} is {found!r}; true or false was expected")
        return found

    def require(self, key: str, value: Any, why: str = "") -> None:
        """Refuse every other value than this one, which is also what a missing key stands for."""
        if self.get(key, value) != value:
            found = self.content[key]
            raise ValueError(f"{self.path}: {key} is {found!r}; only {value!r}{why} is supported")

    def _check_number(self, key: str, found: Any) -> float:
        if not isinstance(found, int | float) or isinstance(found, bool) or not (isfinite(found) and found > 0):
            raise ValueError(f"{self.path}: {key} is {found!r}; a number above 0 was expected")
        return float(found)

    def read_rope(self, theta: float = 10000.0, layers: str = "") -> Rope:
        """Of rope_parameters (transformers 5) or rope_theta and rope_scaling. What is said twice must be the same:
        transformers and servers take one of them alone.

        theta: the base where none is given. layers: those of layer_types that are meant, where rope_parameters has a
        section for each.
        """
        sections = {key: self.get(key) for key in ("rope_scaling", "rope_parameters") if self.get(key)}
        self.get("rope_theta")
        outer = {"rope_theta": self.content["rope_theta"]} if "rope_theta" in self.content else {}
        nested = sections.get("rope_parameters")
        if layers and isinstance(nested, Mapping) and layers in nested:
            if outer or len(sections) > 1:
                raise ValueError(f"{self.path}: rope_parameters and rope_theta or rope_scaling; keep rope_parameters")
            sections = {f"rope_parameters.{layers}": nested[layers]}
        for name, section in sections.items():
            if not isinstance(section, Mapping):
                raise ValueError(f"{self.path}: {name} is {section!r}; an object was expected")
        bases = {f"{key}.rope_theta": each["rope_theta"] for key, each in sections.items() if "rope_theta" in each}
        bases |= outer
        for key, value in bases.items():
            self._check_number(key, value)
        without = [{k: v for k, v in each.items() if k != "rope_theta"} for each in sections.values()]
        if len(set(bases.values())) > 1 or without[1:] != without[:1] * len(without[1:]):
            raise ValueError(f"{self.path}: {', '.join({**bases, **sections})} say different things; keep one of them")
        name, section = next(iter(sections.items()), ("", {}))
        return self._read_kind(name, section, float(next(iter(bases.values()), theta)))

    def read_local_rope(self, theta: float) -> Rope:
        """Of the layers with a window, which no rope_scaling changes. theta: where rope_parameters has no section."""
        nested = self.get("rope_parameters") or {}
        found = nested.get("sliding_attention") if isinstance(nested, Mapping) else None
        if found is None:
            return Rope(theta)
        return self._read_kind("rope_parameters.sliding_attention", found, float(found.get("rope_theta", theta)))

    def _read_kind(self, name: str, section: Mapping[str, Any], theta: float) -> Rope:
        kinds = {section[key] for key in ("rope_type", "type") if section.get(key) is not None} or {"default"}
        kind = next(iter(kinds))
        if len(kinds) > 1 or kind not in KINDS:
            why = REFUSED_KINDS.get(kind, f"supported: {', '.join(KINDS)}")
            raise ValueError(f"{self.path}: rope scaling {dict(section)!r} is not supported; {why}")
        needed, others = KINDS[kind]
        allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *others}
        if other := sorted(key for key, value in section.items() if key not in allowed and value is not None):
            raise ValueError(f"{self.path}: {name} has {', '.join(other)}; {', '.join(sorted(allowed))} are supported")
        found = {key: section.get(key) for key in (*needed, *others)}
        fields = {key: x for key, x in found.items() if key in needed or x is not None}
        truncates, given = fields.pop("truncate", True), fields.pop("attention_factor", None)
        numbers = {key: self._check_number(f"{name}.{key}", value) for key, value in fields.items()}
        rope = Rope(theta, kind, truncate=bool(truncates), **numbers)
        if given is not None and abs(given - rope.attention_factor) > 1e-6:
            usual = f"{rope.attention_factor:.7g}, which follows from the factor, is supported"
            raise ValueError(f"{self.path}: {name}.attention_factor is {given!r}, which SGLang does not read; {usual}")
        return rope

    def read_rotary_share(self, default: float) -> float:
        """Share of each head that positions turn; the key stands in rope_parameters or beside it."""
        outside = self.get("partial_rotary_factor", default)
        section = self.get("rope_scaling") or self.get("rope_parameters") or {}
        return self._check_number("partial_rotary_factor", section.get("partial_rotary_factor", outside))

    def read_windows(self, pattern: Sequence[bool], window: int = 0) -> dict[str, Any]:
        """The fields of sliding windows: sliding_window of the layers that layer_types names sliding_attention.

        pattern: which these are where there is no layer_types. window: what a missing sliding_window stands for. One
        that is no shorter than the longest sequence is none: 0.
        """
        names = {"full_attention": False, "sliding_attention": True}
        num_layers, found = self.read_size("num_hidden_layers"), self.get("layer_types")
        if found is not None and (len(found) != num_layers or not set(found) <= names.keys()):
            what = f"one of {', '.join(names)} for each of {num_layers} layers"
            raise ValueError(f"{self.path}: layer_types is {_shorten(found)}; {what} was expected")
        windowed = tuple(pattern) if found is None else tuple(names[kind] for kind in found)
        size = self.read_size("sliding_window", 0, 0) if "sliding_window" in self.content else window
        is_shorter = any(windowed) and size < self._read_max_length()
        return {"window": size if is_shorter else 0, "windowed": windowed}

    def refuse_windows(self, window: int) -> "ConfigJson":
        """Of families that SGLang serves without them, in every layer; window: what a missing key stands for."""
        if found := self.read_windows([True] * self.read_size("num_hidden_layers"), window)["window"]:
            why = "shorter than the longest sequence; SGLang 0.5.23 serves this family without windows"
            raise ValueError(f"{self.path}: sliding_window is {found}, {why}. null is supported")
        return self

    def read_decoder(self, **changes: Any) -> Architecture:
        """What the families have in common; `changes` are the fields that they do not.

        Refuses another activation than SiLU, biases outside the query, key and value projections, and, where `changes`
        do not have them, sliding windows.
        """
        self.require("hidden_act", "silu")
        self.require("mlp_bias", False)
        if "qkv_bias" not in changes:
            self.require("attention_bias", False)
        self.require("use_sliding_window", False)
        kinds = ["full_attention"] * self.read_size("num_hidden_layers")
        if (found := self.get("layer_types", kinds)) != kinds and "window" not in changes:
            what = "of every layer, full_attention, is supported"
            raise ValueError(f"{self.path}: layer_types is {_shorten(found)}; only one {what}")
        num_heads, hidden_size = self.read_size("num_attention_heads"), self.read_size("hidden_size")
        num_kv_heads = self.read_size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            found = f"num_key_value_heads is {num_kv_heads}, which does not divide num_attention_heads, {num_heads}"
            raise ValueError(f"{self.path}: {found}")
        fields: dict[str, Any] = {
            "family": self["model_type"],
            "num_layers": self.read_size("num_hidden_layers"),
            "hidden_size": hidden_size,
            "ffn_size": self.read_size("intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": self.read_size("head_dim", max(1, hidden_size // num_heads)),
            "vocab_size": self.read_size("vocab_size"),
            "max_length": self._read_max_length(),
            "norm_eps": self.read_number("rms_norm_eps", 1e-6),
            "rope": changes["rope"] if "rope" in changes else self.read_rope(),
            "qkv_bias": False,
            "qk_norm": False,
            "tied": self.read_flag("tie_word_embeddings", False),
        }
        if "rotary_share" not in changes and (share := self.read_rotary_share(1.0)) != 1:
            raise ValueError(f"{self.path}: partial_rotary_factor is {share:g}; only 1 is supported in this family")
        return Architecture(**{**fields, **changes})

    def _read_max_length(self) -> int:
        """The least of the keys that the server takes for the longest sequence, of which it prefers the first ones."""
        keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
        lengths = [self.read_size(key) for key in keys if self.get(key) is not None]
        return min([*lengths, self.read_size("max_position_embeddings", 32768)])

    def check_rest(self, only: Mapping[str, Any]) -> list[str]:
        """Refuse the keys that nothing has read and that change a model; returns the others, of no known effect.

        only: what the family adds to ONLY_VALUES and replaces of it.
        """
        only, refused, unknown = {**ONLY_VALUES, **only}, [], []
        for key, value in self.content.items():
            if key in SECTIONS:
                refused.append(f"{key} is there, from which a server reads the model")
            elif value is None or key in self._read or key in WITHOUT_EFFECT:
                continue
            elif key in only:
                allowed = only[key] if isinstance(only[key], tuple) else (only[key],)
                if value not in allowed:
                    refused.append(f"{key} is {_shorten(value)}, not {' or '.join(map(_shorten, allowed))}")
            elif key in QUANTIZED or (EFFECTIVE.search(key.lower()) and not _is_neutral(key, value)):
                refused.append(f"{key} is {_shorten(value)}")
            elif value and (not EFFECTIVE.search(key.lower()) or _DROPOUT.search(key)):
                unknown.append(f"{self.path}: {key} is not known here and taken to have no effect")
        if refused:
            raise ValueError(
                f"{self.path}: {'; '.join(refused)}; not built here: the trainer and the servers could compute"
                " different models. Where the weights do not need it, remove it from config.json"
            )
        return unknown

    def check_experts(self, experts: Experts) -> Experts:
        """The experts, where the router chooses some of them and can be trained."""
        found = f"{self.path}: num_experts_per_tok is {experts.top_k}"
        if not 1 <= experts.top_k <= experts.num_experts:
            raise ValueError(f"{found}, num_experts {experts.num_experts}; it must be 1 to that")
        if experts.top_k == 1 and experts.normalized:
            raise ValueError(f"{found}, whose weight is always 1 and trains no router; norm_topk_prob must be false")
        return experts


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:96]} ..."


def _is_neutral(key: str, value: Any) -> bool:
    """Nothing, zero or off; dropout, which neither engine applies; or a factor of 1."""
    if not value or _DROPOUT.search(key):
        return True
    return value == 1 and value is not True and re.search("multiplier|scale$|scaling$", key) is not None
