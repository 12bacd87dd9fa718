"""Bytes of the weight sync from its plan, and seconds by assumed link speeds, of layouts that do not fit here.

    python tools/bench/sync_at_scale.py [--layers N]

A computation: every byte crosses nodes, the busiest GPU's port decides; no latency and no contention.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.model.architecture import Architecture, Experts
from megarl.sync.pieces import predict_ranks, predict_server_rank
from megarl.sync.plan import build_plan, compute_bound, compute_broadcast

QWEN32B = Architecture(
    "qwen2", 64, 5120, 27648, 40, 8, 128, 152064, 131072, 1e-6, 1e6, None, qkv_bias=True, qk_norm=False, tied=False
)
QWEN235B = Architecture(
    "qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, 40960, 1e-6, 1e6, None,
    qkv_bias=False, qk_norm=True, tied=False, experts=Experts(128, 8, 1536, normalized=True),
)  # fmt: skip
NIC, NVLINK = 50e9, 300e9
"""Bytes per second and GPU that are assumed: one 400 Gb/s port, NVLink at two thirds of 450 GB/s."""


def simulate(name: str, arch: Architecture, parallel: ParallelConfig, tp: int, num_servers: int, megatron: Any) -> None:
    """One line: bytes of the plan, and seconds where every byte crosses nodes and the busiest GPU's port decides."""
    start = time.perf_counter()
    sources = predict_ranks(arch, parallel, megatron)
    one = [predict_server_rank(arch, tp, rank) for rank in range(tp)]
    targets = {server * tp + rank: one[rank] for server in range(num_servers) for rank in range(tp)}
    dtypes = {piece.tensor: "bfloat16" for pieces in one for piece in pieces}
    plan = build_plan(sources, targets, dtypes)
    planning = time.perf_counter() - start
    broadcast = compute_broadcast(sources, targets, dtypes)
    busiest = max(*plan.sent.values(), *plan.received.values())
    whole = sum(plan.received.values()) / num_servers
    # A pipelined broadcast: every server rank takes the whole model through its port, after one rank gathered it.
    peers = whole / NIC + whole / NVLINK
    print(
        f"| {name} | {plan.num_bytes / 1e9:.1f} | {plan.num_bytes / compute_bound(targets, dtypes):.2f} |"
        f" {broadcast / 1e9:.1f} | {busiest / 1e9:.2f} | {busiest / NIC:.2f} | {peers:.2f} | {planning:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="of both models, a multiple of 12; default: their own")
    layers = parser.parse_args().layers
    dense, moe = (replace(arch, num_layers=layers or arch.num_layers) for arch in (QWEN32B, QWEN235B))
    print("A computation: links at 50 GB/s a GPU between nodes, 300 GB/s inside; no latency, no contention.")
    print(
        "| | plan GB | over the least | gather and broadcast GB | busiest GPU GB | seconds | peers' way | planning s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    layout = ParallelConfig(num_processes=32, tp=8, sp=True, pp=4)
    simulate("qwen32b, TP8 x PP4 to 8 servers of TP4", dense, layout, 4, 8, {})
    layout = ParallelConfig(num_processes=96, tp=4, sp=True, pp=6, ep=16)
    ends = {"num_layers_in_first_pipeline_stage": 15, "num_layers_in_last_pipeline_stage": 15}
    simulate("qwen3_235b_a22b, 96 GPUs (TP4 PP6 EP16) to 8 servers of TP8", moe, layout, 8, 8, {} if layers else ends)


if __name__ == "__main__":
    main()
