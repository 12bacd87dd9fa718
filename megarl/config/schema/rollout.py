"""The `rollout` group: generation with SGLang."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.schema.roles import Dtype

NO_QUANTIZED_WEIGHTS = (
    "servers hold the policy's weights in rollout.dtype=float32 or bfloat16: SGLang replaces weights by quantized ones"
    " of another shape as it loads them, which a weight sync cannot write and its checksums cannot verify"
    " (docs/weight-sync.md, Quantized servers)"
)


class Transport(Enum):
    """How weights travel from the policy to the servers."""

    colocated = "colocated"
    """Within a node memory that its processes share, of the GPU where they have one; between nodes as `split`"""
    split = "split"
    """Point to point over a process group (NCCL; gloo on a CPU)"""
    disk = "disk"
    """A checkpoint directory that policy and servers see"""


class ServerOffload(Enum):
    """What the servers give back of their GPUs' memory while roles that share these GPUs compute."""

    kv_cache = "kv_cache"
    """The KV cache"""
    all = "all"
    """The same and the weights"""


@dataclass
class RolloutConfig:
    response_length: int = 1024
    """Maximum length of a response in tokens."""
    temperature: float = 1.0
    """Sampling temperature: logits are divided by it, in sampling and in every log-prob of training. The evaluations
    during training are greedy."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response besides the end-of-sequence token, each one token of the model, such as "</answer>"
    where the model has one: servers see tokens alone, and a response ends with the token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """The same by their numbers in the vocabulary."""
    dtype: Dtype = Dtype.bfloat16
    """Type of the servers' weights, activations and KV cache. Weights are not quantized (docs/weight-sync.md)."""
    num_servers: int = 1
    """Number of SGLang servers; requests are distributed among them."""
    tp: int = 1
    """Tensor parallelism of SGLang: the number of GPUs of one server."""
    max_running_requests: int = 128
    """Maximum number of requests that a server processes at the same time."""
    kv_cache_tokens: int | None = None
    """Tokens of KV cache per server; null lets SGLang decide (on a CPU it must be a number)."""
    offload: ServerOffload | None = None
    """What the servers give back of their GPUs' memory while roles that share these GPUs compute, and take again before
    they generate; null: nothing. Needs max_staleness=0."""
    num_threads: int | None = None
    """CPU threads of a server's forward pass; without effect on a GPU. null: decided as cluster.cpu_threads_per_worker;
    with rollout.max_staleness=0 the servers share all cores, since they generate while the roles rest."""
    startup_deadline_s: float = 300.0
    """Deadline in seconds for a server to answer after it was started."""
    request_deadline_s: float = 600.0
    """Deadline in seconds of one request for responses; with max_staleness it also waits for the weight syncs and
    evaluations in between."""
    sync_deadline_s: float = 300.0
    """Deadline in seconds of one weight sync, verification included. Presets of large models set a longer one."""
    transport: Transport = Transport.colocated
    """How weights travel from the policy to the servers."""
    sync_bucket_mb: int = 64
    """Maximum size of one message of weights, in MiB. Each rank holds two; with transport=colocated a training rank
    holds two, on its GPU from the first sync on or in shared memory, and a server rank one during the sync."""
    max_server_restarts: int = 3
    """How many times servers that are lost in the same rollout or sync are restarted with the current weights, before
    the run ends with the error. 0: no restart. With max_staleness > 0 all responses under way are begun again."""
    max_staleness: int = 0
    """Maximum staleness of a token: by how many policy updates the weights that sampled it may be older than those that
    train on it. 0: on-policy, the servers wait for each update. n: the groups of up to n further iterations are
    generated while the trainer works, and continue with the new weights after each update; an iteration learns from
    the groups that are complete first, and in a slow one not from the tokens that are older than n. The loss then
    needs algo.mismatch.correction, or is that of algo=topr."""
    router_replay: bool = False
    """Only for a mixture of experts: the policy sends each token to the experts to which the servers sent it (R3,
    2510.11370), and how often its own routers would have chosen the same is logged. false, because of what it costs, a
    byte for each token, layer and expert; mismatch/* tells whether a model needs it."""
    file: str | None = None
    """A rollouts.jsonl of an earlier run (logger.save_rollouts), on whose responses policy and critic are trained
    without a server: nothing is generated, synced or evaluated. Each pass over the file takes its groups in another
    order. The loss must weight them by the policy that sampled them, as with max_staleness. null: responses are
    generated."""
    max_probe_logprob_gap: float | None = None
    """A larger median |log-prob difference|, in nats per token of the probe text, between servers and policy after the
    first weight sync ends the run: the two compute different models. null: the bound is what rounding explains
    (docs/weight-sync.md)."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Passed through as SGLang server arguments (underscored names); each key is checked against the real ones, and
    those by which responses would not be samples of the policy are refused."""
