"""Jobs that the tests of the plan share: of 64 GPUs whose roles have GPUs of their own, and roles made by hand."""

from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig, PolicyConfig
from megarl.config.schema.root import ClusterConfig, HardwareConfig
from megarl.models.architecture import Architecture
from megarl.models.families import parse_architecture
from megarl.plan.job import PUBLISHED, JobPlan, build_plan, find_models
from megarl.plan.memory import MicroBatch, RoleJob

CLUSTER = ClusterConfig(
    gpus_per_node=8, hardware=HardwareConfig("H100", 79.1, 989, 1979, 3350, 450, 50, host_memory_gib=2048)
)
ARCH_32B = parse_architecture(PUBLISHED["Qwen/Qwen2.5-32B"], Path("qwen32b"))
ARCH_235B = parse_architecture(PUBLISHED["Qwen/Qwen3-235B-A22B"], Path("qwen3"))

PRESET = ("algo=vapo", "model=qwen32b", "cluster=h100x64")
LAYOUT = "{num_processes: 16, tp: 8, sp: true, pp: 1, cp: 2}"
APART = (
    *("cluster.placement=apart", "rollout.transport=split", "rollout.num_servers=8", "rollout.tp=4"),
    *(f"{role}.{value}" for role in ("policy", "critic") for value in (f"parallel={LAYOUT}", "recompute=full")),
    *("policy.offload=null", "critic.offload=null", "rollout.offload=null", "train.tokens_per_microbatch=16384"),
)
QWEN32B = (*PRESET, *APART)


def plan(*overrides: str) -> JobPlan:
    config = load_config(overrides)
    return build_plan(config, find_models(config))


BATCH = MicroBatch(1024, 1000, 512)


def build_role(
    arch: Architecture,
    parallel: ParallelConfig,
    kind: type = PolicyConfig,
    batch: MicroBatch = BATCH,
    caches_fp8: bool = False,
    **keys: Any,
) -> RoleJob:
    """keys: of the role's configuration."""
    return RoleJob("policy", kind(parallel=parallel, **keys), arch, batch, 8, caches_fp8=caches_fp8)
