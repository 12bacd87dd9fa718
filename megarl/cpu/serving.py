"""How a server runs without a GPU: by SGLang's CPU engine, with stand-ins for what it imports of CUDA's packages."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.config.schema.run import RolloutConfig

STANDINS = Path(__file__).parent / "standins"


class CpuServing:
    """`megarl.rollout.server.GpuServing` has the same attributes."""

    depends_on_batch = True
    """The log-probs of a token depend on what is computed beside it"""
    default_tokens = 16384
    """Of the KV cache of `megarl serve`"""
    folders = (str(STANDINS),)
    """First on the server's import path"""

    def check(self, config: RolloutConfig) -> Iterator[str]:
        if config.kv_cache_tokens is None:
            # By default SGLang takes most of the machine's memory and zero-fills it for minutes.
            yield "rollout.kv_cache_tokens: null; on a CPU it must be a number of tokens"

    def list_options(self, config: RolloutConfig) -> dict[str, Any]:
        return {"device": "cpu", "attention_backend": "torch_native"}

    def prepare(self, environment: dict[str, str], config: RolloutConfig) -> dict[str, str]:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.num_threads or 1)}
        # Threads that spin while they wait slow down other processes on the same cores.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        # A split embedding would be compiled, for which torch needs Triton, of which there is only a stand-in.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if config.tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind_ranks(sorted(os.sched_getaffinity(0)), config.tp)
        return environment


def bind_ranks(cpus: Sequence[int], tp: int) -> str:
    """The value of SGLANG_CPU_OMP_THREADS_BIND: one CPU per rank of a server, round robin where CPUs are fewer."""
    return "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))
