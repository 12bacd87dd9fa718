"""Memory of one rank of an SGLang server, in bytes."""

from dataclasses import dataclass

from megarl.config.schema.rollout import RolloutConfig, ServerOffload
from megarl.mcore.model.architecture import Architecture
from megarl.plan.activations import ELEMENT_BYTES
from megarl.plan.assumptions import GIB, SERVER_GIB
from megarl.sync.serving_pieces import predict_server_rank
from megarl.sync.slices import Piece

DEFAULT_FRACTION = 0.87
"""SGLang's approximate default on a GPU of 80 GB, where rollout.sglang.mem_fraction_static is not set"""


@dataclass(frozen=True)
class ServerMemory:
    weights: int
    kv_cache: int
    """Bytes; 0 or less: there is no memory for it"""
    kv_tokens: int
    """Tokens of one server, of which each rank has its own heads"""
    bytes_per_token: int
    """Bytes of KV cache per token, on each rank"""
    num_longest: int
    """Number of sequences of full length that fit at once"""
    fraction: float
    """mem_fraction_static"""
    reserve: int
    """Bytes that the fraction leaves free for everything else"""

    @property
    def total(self) -> int:
        return self.weights + max(0, self.kv_cache) + int(SERVER_GIB * GIB)

    def compute_rest(self, offload: ServerOffload | None) -> int:
        """Bytes that stay while roles compute: CUDA's context, NCCL's buffers and CUDA graphs are never given back."""
        given = {None: 0, ServerOffload.kv_cache: max(0, self.kv_cache), ServerOffload.all: self.total}[offload]
        return max(int(SERVER_GIB * GIB), self.total - given)

    def compute_loading(self, offload: ServerOffload | None) -> int:
        """Bytes in a weight sync: the KV cache comes back after it."""
        return self.total if offload is None else self.compute_rest(ServerOffload.kv_cache)


def compute_server_weights(arch: Architecture, rollout: RolloutConfig) -> int:
    """Bytes of the weights on one rank, without padding rows of the vocabulary."""
    return sum(piece.region.size for piece in list_pieces(arch, rollout)) * ELEMENT_BYTES[rollout.dtype]


def list_pieces(arch: Architecture, rollout: RolloutConfig) -> list[Piece]:
    """The pieces of rank 0; the other ranks hold as much."""
    return predict_server_rank(arch, rollout.tp, 0)


def estimate_server(arch: Architecture, rollout: RolloutConfig, weights: int, free: int, longest: int) -> ServerMemory:
    """free: bytes of the GPU before the server starts. longest: tokens of the longest sequence.

    SGLang's pool takes what the weights leave free, less (1 - mem_fraction_static) of what was free before them
    (mem_cache/kv_cache_configurator.py, _profile_available_bytes): mem_fraction_static * free - weights. A token
    takes 2 * layers * key-value heads of this rank * size of a head elements, at least one head a rank.
    """
    heads = max(1, arch.num_kv_heads // rollout.tp)
    per_token = 2 * arch.num_layers * heads * arch.head_size * count_cache_bytes(rollout)
    fraction = float(rollout.sglang.get("mem_fraction_static") or DEFAULT_FRACTION)
    room = int(fraction * free) - weights
    if rollout.kv_cache_tokens is not None:
        room = min(room, rollout.kv_cache_tokens * per_token)
    tokens = max(0, room) // per_token
    return ServerMemory(weights, room, tokens, per_token, tokens // longest, fraction, int((1 - fraction) * free))


def count_cache_bytes(rollout: RolloutConfig) -> int:
    """Bytes of a number in the KV cache: of rollout.sglang.kv_cache_dtype, or as the servers' activations."""
    dtype = str(rollout.sglang.get("kv_cache_dtype") or "auto")
    if dtype.startswith("fp8"):
        return 1
    return 2 if dtype in ("bfloat16", "bf16") else ELEMENT_BYTES[rollout.dtype]
