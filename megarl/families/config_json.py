"""Reading a Hugging Face config.json: values, and clear refusals of what is not built here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.families.architecture import Architecture, Experts


class ConfigJson:
    """The content of a config.json. Every refusal is a ValueError that names the file, the key and what was found."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        """path: what the messages name."""
        self.content, self.path = content, path

    def __getitem__(self, key: str) -> Any:
        if self.content.get(key) is None:
            raise ValueError(f"{self.path}: {key} is missing")
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the default where the key is missing or null."""
        found = self.content.get(key)
        return default if found is None else found

    def require(self, key: str, value: Any, why: str = "") -> None:
        """Refuse every other value than this one, which is also what a missing key stands for."""
        if self.get(key, value) != value:
            found = self.content[key]
            raise ValueError(f"{self.path}: {key} is {found!r}; only {value!r}{why} is supported")

    def read_rope(self) -> tuple[float, float | None]:
        """Base and Llama 3's factor.

        transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
        """
        scaling = self._rope
        theta = scaling.get("rope_theta", self.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return float(theta), None
        fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        if kind == "llama3" and all(scaling.get(key) == value for key, value in fixed.items()):
            return float(theta), float(scaling["factor"])
        raise ValueError(
            f"{self.path}: rope scaling {dict(scaling)!r} is not supported; supported: default, llama3 with {fixed}"
        )

    def read_rotary_share(self, default: float) -> float:
        """Share of each head that positions turn; the key stands in rope_parameters or beside it."""
        found = self._rope.get("partial_rotary_factor", self.get("partial_rotary_factor", default))
        return float(found)

    @property
    def _rope(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.get("rope_parameters") or self.get("rope_scaling") or {}
        return found

    def read_decoder(self, **changes: Any) -> Architecture:
        """What the families have in common; `changes` are the fields that they do not.

        Refuses another activation than SiLU, biases outside the query, key and value projections, and sliding windows.
        """
        self.require("hidden_act", "silu")
        self.require("mlp_bias", False)
        self.require("use_sliding_window", False)
        num_heads, hidden_size = self["num_attention_heads"], self["hidden_size"]
        theta, factor = self.read_rope()
        fields: dict[str, Any] = {
            "family": self["model_type"],
            "num_layers": self["num_hidden_layers"],
            "hidden_size": hidden_size,
            "ffn_size": self["intermediate_size"],
            "num_heads": num_heads,
            "num_kv_heads": self.get("num_key_value_heads") or num_heads,
            "head_size": self.get("head_dim") or hidden_size // num_heads,
            "vocab_size": self["vocab_size"],
            "max_length": self.get("max_position_embeddings", 32768),
            "norm_eps": self.get("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_factor": factor,
            "qkv_bias": False,
            "qk_norm": False,
            "tied": bool(self.get("tie_word_embeddings", False)),
        }
        return Architecture(**{**fields, **changes})

    def check_experts(self, experts: Experts) -> Experts:
        """The experts, where the router chooses some of them and can be trained."""
        if not 1 <= experts.top_k <= experts.num_experts:
            raise ValueError(
                f"{self.path}: num_experts_per_tok is {experts.top_k}, num_experts {experts.num_experts}; it must be 1"
                " to that"
            )
        if experts.top_k == 1 and experts.normalized:
            raise ValueError(
                f"{self.path}: num_experts_per_tok is 1 and norm_topk_prob true: the only weight is always 1,"
                " and nothing trains the router; norm_topk_prob must be false"
            )
        return experts
