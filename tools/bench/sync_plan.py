"""Bytes of the weight sync from its plan, and seconds by assumed link speeds, of layouts that do not fit here.

A computation: every byte crosses nodes, the busiest GPU's port decides; no latency and no contention. Links have 50
GB/s a GPU between nodes and 300 GB/s inside. The ratio is the least possible over the bytes of the plans.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from typing import Any

from policy_pieces import count_bytes, predict_ranks
from speed import Result

from megarl.config.schema.roles import ParallelConfig
from megarl.models.architecture import Architecture, Experts
from megarl.models.rope import Rope
from megarl.sync.pieces import predict_server_rank
from megarl.sync.plan import ITEM_SIZES, TensorSlice, build_plan, compute_bound

QWEN32B = Architecture(
    "qwen2", 64, 5120, 27648, 40, 8, 128, 152064, 131072, 1e-6, Rope(1e6), qkv_bias=True, qk_norm=False, tied=False
)
QWEN235B = Architecture(
    "qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, 40960, 1e-6, Rope(1e6),
    qkv_bias=False, qk_norm=True, tied=False, experts=Experts(128, 8, 1536, normalized=True),
)  # fmt: skip
NIC, NVLINK = 50e9, 300e9
"""Bytes per second and GPU that are assumed: one 400 Gb/s port, NVLink at two thirds of 450 GB/s."""


def compute_broadcast(sources: Any, targets: Any, dtypes: dict[str, str]) -> int:
    """Bytes that gather and broadcast moves: shards to one rank, from there the whole model to each server rank."""
    wholes = {piece.whole: ITEM_SIZES[dtypes[piece.tensor]] for pieces in targets.values() for piece in pieces}
    sizes: dict[str, dict[TensorSlice, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, pieces in sources.items():
        for piece in pieces:
            if piece.whole in wholes:
                sizes[piece.whole][piece.region].add(rank)
    total = sum(region.size * wholes[name] for name, regions in sizes.items() for region in regions)
    gathered = 0
    for name, regions in sizes.items():
        root = next(iter(regions.values()))
        gathered += sum(region.size * wholes[name] for region, ranks in regions.items() if not ranks & root)
    return gathered + total * len(targets)


def compute_row(
    name: str, arch: Architecture, parallel: ParallelConfig, tp: int, num_servers: int, megatron: Any
) -> dict[str, Any]:
    sources = predict_ranks(arch, parallel, megatron)
    one = [predict_server_rank(arch, tp, rank) for rank in range(tp)]
    targets = {server * tp + rank: one[rank] for server in range(num_servers) for rank in range(tp)}
    dtypes = {piece.tensor: "bfloat16" for pieces in one for piece in pieces}
    plan = build_plan(sources, targets, dtypes)
    sent, received = (count_bytes(plan, side) for side in range(2))
    busiest, total = max(*sent.values(), *received.values()), received.total()
    whole = total / num_servers
    return {
        "layout": name,
        "GB": total / 1e9,
        "over the least": total / compute_bound(targets, dtypes),
        "gather and broadcast GB": compute_broadcast(sources, targets, dtypes) / 1e9,
        "busiest GPU GB": busiest / 1e9,
        "seconds": busiest / NIC,
        # A pipelined broadcast: every server rank takes the whole model through its port, after one rank gathered it.
        "gather and broadcast seconds": whole / NIC + whole / NVLINK,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="of both models, a multiple of 12; default: their own")


def run(args: argparse.Namespace) -> Result:
    dense, moe = (replace(arch, num_layers=args.layers or arch.num_layers) for arch in (QWEN32B, QWEN235B))
    ends = {"num_layers_in_first_pipeline_stage": 15, "num_layers_in_last_pipeline_stage": 15}
    in_32 = ParallelConfig(num_processes=32, tp=8, sp=True, pp=4)
    in_96 = ParallelConfig(num_processes=96, tp=4, sp=True, pp=6, ep=16)
    sparse = "qwen3_235b_a22b, 96 GPUs (TP4 PP6 EP16) to 8 servers of TP8"
    rows = [
        compute_row("qwen32b, TP8 x PP4 to 8 servers of TP4", dense, in_32, 4, 8, {}),
        compute_row(sparse, moe, in_96, 8, 8, {} if args.layers else ends),
    ]
    return Result(rows, 1 / max(row["over the least"] for row in rows), 1)
