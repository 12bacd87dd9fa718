"""The sizes and variants of a model, as the rest of megarl reads them."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Architecture:
    """Sizes and variants of a decoder with RMSNorm, rotary positions and SwiGLU."""

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
    rope_theta: float
    rope_factor: float | None
    """Llama 3's frequency scaling; None: unscaled"""
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

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def has_unlike_layers(self) -> bool:
        """Some layers have experts and others do not."""
        return 0 < self.num_expert_layers < self.num_layers

    @property
    def mlp_sizes(self) -> dict[str, int]:
        """Rows of each kind of MLP that tensor parallelism splits, in training and in serving, by what it is."""
        sizes = {}
        if self.num_expert_layers < self.num_layers:
            sizes["an MLP"] = self.ffn_size
        if self.experts is not None and self.experts.shared_ffn_size:
            sizes["the shared experts"] = self.experts.shared_ffn_size
        return sizes
