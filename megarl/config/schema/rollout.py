"""The `rollout` group: generation with SGLang."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.schema.roles import Dtype


class Transport(Enum):
    """How weights travel from the policy to the servers."""

    colocated = "colocated"
    """Memory that the processes of one machine share"""
    split = "split"
    """Point to point over a process group (NCCL; gloo on a CPU)"""
    disk = "disk"
    """A checkpoint directory that policy and servers see"""


@dataclass
class RolloutConfig:
    response_length: int = 1024
    """Most tokens of a response."""
    temperature: float = 1.0
    """Logits are divided by this, in sampling and in every log-prob of training; evaluation in training is greedy."""
    dtype: Dtype = Dtype.bfloat16
    """Type of the servers' weights, activations and KV cache."""
    num_servers: int = 1
    """SGLang servers, among which the requests are spread."""
    tp: int = 1
    """GPUs of one server, which share each matrix (SGLang's tensor parallelism)."""
    max_running_requests: int = 128
    """Most requests that a server generates for at the same time."""
    kv_cache_tokens: int | None = None
    """Tokens of KV cache per server; null lets SGLang decide (on a CPU it must be a number)."""
    num_threads: int = 1
    """CPU threads of a server's model forward; without effect on a GPU."""
    startup_deadline_s: float = 300.0
    """Seconds until a server that was started must answer."""
    request_deadline_s: float = 600.0
    """Seconds that one request for responses may take; with max_staleness it also waits for the weight syncs and
    evaluations in between."""
    sync_deadline_s: float = 300.0
    """Seconds that one weight sync may take, its proof included."""
    transport: Transport = Transport.colocated
    """How weights travel from the policy to the servers."""
    sync_bucket_mb: int = 64
    """Most bytes of one message of weights, in MiB. Each rank holds two; with transport=colocated, shared memory does
    for each pair of a training and a server rank that have something to exchange."""
    max_server_restarts: int = 3
    """Servers that are lost in a rollout or a sync are started again and get the current weights, up to this often for
    the same rollout or sync; then the run ends with the error. 0: at once. What runs ahead (max_staleness) is not
    repeated: a server that is lost then ends the run."""
    max_staleness: int = 0
    """Policy updates by which the weights that sampled a token may be behind those trained on it. 0: on-policy, servers
    wait for each update. n: up to n iterations' responses are generated while the trainer works, and continue with
    the new weights after each update."""
    max_probe_logprob_gap: float | None = None
    """Largest |log-prob difference| / max(1, |log-prob|) allowed on any token of the probe text after a sync; null:
    1e-4 in float32, 0.5 where the policy or the rollout is in bfloat16."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Passed through as SGLang server arguments (underscored names); each key is checked against the real ones."""
