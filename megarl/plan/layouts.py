"""The layouts of a model over a number of GPUs, and the parameters of their ranks without building each of them."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.model.architecture import Architecture, check_layout
from megarl.mcore.model.parameter_count import count_stages
from megarl.mcore.worker_spec import StageParameters
from megarl.plan.changes import Values
from megarl.plan.estimate import count_job
from megarl.plan.roles import RoleJob

SIZES = (1, 2, 4, 8, 16)
"""Tensor, pipeline and context parallel sizes"""
EXPERT_SIZES = (1, 2, 4, 8, 16, 32, 64)
FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    cp: int
    ep: int
    vpp: int
    ends: int | None
    """Layers of the first and of the last stage, where the stages cannot all have as many"""

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp

    def build(self, num_processes: int) -> ParallelConfig:
        return ParallelConfig(num_processes, self.tp, self.tp > 1, self.pp, self.vpp, self.cp, self.ep)

    def list_values(self, role: str, num_processes: int) -> Values:
        parallel = self.build(num_processes)
        names = ("num_processes", "tp", "sp", "pp", "vpp", "cp", "ep", "etp")
        return {f"{role}.parallel.{name}": getattr(parallel, name) for name in names}

    def list_model_values(self, config: Config) -> Values:
        """Keys that all roles share; a number of layers that the configuration has and this layout must not is null."""
        given = config.model.megatron
        keys = (FIRST, LAST) if self.ends is not None or given.get(FIRST) or given.get(LAST) else ()
        return {f"model.megatron.{key}": self.ends for key in keys}


def list_layouts(arch: Architecture, num_processes: int, per_node: int) -> Iterator[Layout]:
    """Tensor parallelism within a node."""
    for tp, pp, cp in ((tp, pp, cp) for tp in SIZES for pp in SIZES for cp in SIZES):
        if tp > per_node or num_processes % (tp * pp * cp):
            continue
        ends = find_ends(arch.num_layers, pp)
        for ep in EXPERT_SIZES if arch.experts else (1,):
            for vpp in (1, 2) if pp > 1 and ends is None else (1,):
                layout = Layout(tp, pp, cp, ep, vpp, ends)
                megatron = {} if ends is None else {FIRST: ends, LAST: ends}
                is_whole = num_processes // pp % ep == 0
                if is_whole and not check_layout(arch, layout.build(num_processes), "", megatron):
                    yield layout


def find_ends(num_layers: int, pp: int) -> int | None:
    """Layers of the first and last stage, which also have embedding and output layer: at most as many as the others."""
    if num_layers % pp == 0 or pp < 3:
        return None
    return next((n for n in range(num_layers // pp, 0, -1) if (num_layers - 2 * n) % (pp - 2) == 0), None)


def count_quickly(config: Config, job: RoleJob) -> tuple[StageParameters, ...]:
    """As `count_job`, from Megatron's models of one and of two layers, where all layers are alike."""
    arch, parallel, megatron = job.arch, job.parallel, dict(config.model.megatron)
    if arch.has_unlike_layers or any(key.startswith(("pipeline_model", "account_for")) for key in megatron):
        return count_job(config, job)
    first, last = megatron.pop(FIRST, None), megatron.pop(LAST, None)
    text = json.dumps(megatron, sort_keys=True)
    group = (parallel.tp, parallel.sp, parallel.ep, parallel.etp)
    one, two = (_count_small(arch, number, group, job.dtype, text, job.has_value_head) for number in (1, 2))
    dense, experts = two.dense - one.dense, two.experts - one.experts
    rest = one.dense - dense - one.embedding - one.head
    ends = {number: size for number, size in ((0, first), (parallel.pp - 1, last)) if size}
    others = (arch.num_layers - sum(ends.values())) // max(1, parallel.pp - len(ends))
    # A tied output layer is a weight of its own on another stage than the embedding.
    head = one.head or (one.embedding if parallel.pp > 1 else 0)
    found = []
    for number in range(parallel.pp):
        size = ends.get(number, others)
        embedding = one.embedding if number == 0 else 0
        own = (head, rest) if number == parallel.pp - 1 else (0, 0)
        count = size * dense + embedding + sum(own)
        found.append(StageParameters(size, count, size * experts, embedding, own[0], size * (two.mlp - one.mlp)))
    return tuple(found)


@functools.cache
def _count_small(
    arch: Architecture,
    num_layers: int,
    group: tuple[int, bool, int, int],
    dtype: Dtype,
    megatron: str,
    with_value_head: bool,
) -> StageParameters:
    tp, sp, ep, etp = group
    num_processes = tp * max(1, -(-ep * etp // tp))
    parallel = ParallelConfig(num_processes, tp, sp, ep=ep, etp=etp)
    options: dict[str, Any] = json.loads(megatron)
    (stage,) = count_stages(replace(arch, num_layers=num_layers), parallel, dtype, options, with_value_head)
    return stage
