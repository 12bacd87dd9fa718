"""Checks with the real processes of roles, as a run starts them: which GPU each has, whether every layout computes what
one process does, and whether a saved state goes on.
"""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.cluster.actors import WorkerGroup
from megarl.cluster.opened import Cluster, open_ray
from megarl.config.placement import Group, place
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import ClusterConfig, Placement
from megarl.mcore.spec import Role
from megarl.tools.gpu.lines import Line, fail, judge, skip
from megarl.tools.gpu.setting import (
    CPU,
    SMALL,
    SMALL_VOCAB,
    Setting,
    build_small_spec,
    describe_random,
    make_small_samples,
    write_checkpoint,
)
from megarl.tools.gpu.training import BOUNDS, find_small_checkpoint

START_S = 240.0
CPU_PROCESSES = 2
"""In place of the GPUs of the node"""
DENSE: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp, sp": {"tp": 2, "sp": True},
    "pp": {"pp": 2},
    "pp, vpp": {"pp": 2, "vpp": 2},
    "cp": {"cp": 2},
    "tp, sp, pp": {"tp": 2, "sp": True, "pp": 2},
    "tp, sp, pp, cp": {"tp": 2, "sp": True, "pp": 2, "cp": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {"ep": {"ep": 2}}
"""Layouts on all GPUs, of which the rest are data-parallel"""
MOST_OF_STEP = {Dtype.float32: 1e-3, Dtype.bfloat16: 0.05}
"""Relative difference of a gradient's norm"""


def count_processes(setting: Setting) -> int:
    return CPU_PROCESSES if setting.device == CPU else torch.cuda.device_count()


@contextmanager
def open_cluster(setting: Setting) -> Iterator[Cluster]:
    number = count_processes(setting)
    with open_ray(ClusterConfig(gpus_per_node=number, worker_start_deadline_s=START_S), 2 * number) as cluster:
        yield cluster


def start(
    setting: Setting, cluster: Cluster, stack: ExitStack, parallel: ParallelConfig, first: int = 0, **changes: Any
) -> WorkerGroup:
    """A role's processes on the GPUs from `first` on. changes: of the policy's WorkerSpec. Raises as a run does."""
    own = {"role": Role.policy, "checkpoint": find_small_checkpoint(setting), **changes}
    spec = build_small_spec(setting, dtype=setting.config.policy.dtype, parallel=parallel, **own)
    placed = [Group("others", first, 1, 1), Group("role", parallel.num_processes, 1, 1)]
    node = ClusterConfig(gpus_per_node=len(cluster.nodes[0].gpus), placement=Placement.apart)
    logs = setting.scratch / "logs" / uuid.uuid4().hex[:8]
    group = WorkerGroup(spec, logs, cluster, place(node, placed)["role"], START_S)
    stack.enter_context(closing(group))
    group.start().result()
    return group


def run_step(group: WorkerGroup) -> tuple[torch.Tensor, float]:
    """Log-probs before an update of one step, and its gradient's norm."""
    samples = make_small_samples()
    before = group.logprobs(samples.sequences, 1.0).result() if group.role != Role.critic.value else torch.zeros(1)
    (metrics,) = group.update(samples, [torch.arange(samples.sequences.num_samples)]).result()
    return before, metrics[f"{group.role}/grad_norm"]


def check_ranks(setting: Setting) -> Iterator[Line]:
    """Two roles of a process on each GPU, together and on halves of them, with their order and a step of each."""
    number, norms = count_processes(setting), {}
    with open_cluster(setting) as cluster:
        for what, size, first in (("together", number, 0), ("apart", number // 2, number // 2)):
            if not size:
                yield skip("ranks", what, "one GPU")
                continue
            with ExitStack() as stack:
                tp = 2 if size % 2 == 0 else 1
                try:
                    parallel = ParallelConfig(num_processes=size, tp=tp)
                    policy = start(setting, cluster, stack, parallel)
                    critic = start(setting, cluster, stack, parallel, first, role=Role.critic)
                    places = policy._call("tensor_ranks", list).result()
                    norms[what] = [run_step(group)[1] for group in (policy, critic)]
                except Exception as error:
                    yield fail("ranks", what, f"{type(error).__name__}: {error}")
                    continue
                gpus = [gpu.uuid or gpu.name for gpu in cluster.nodes[0].gpus]
                seen = f"policy on {', '.join(gpus[:size])}; critic on {', '.join(gpus[first : first + size])}"
                yield judge("ranks", f"{what}: processes on GPUs of their own", size, least=size, reason=seen)
                wrong = sum(own[0] != rank % tp for rank, own in enumerate(places))
                yield judge("ranks", f"{what}: order of tensor-parallel ranks", wrong, most=0, unit="ranks")
    if len(norms) == 2:
        bound = MOST_OF_STEP[setting.config.policy.dtype]
        gap = max(abs(a / b - 1) for a, b in zip(norms["apart"], norms["together"], strict=True))
        yield judge("ranks", "gradient norms, apart and together", gap, most=bound, unit="relative difference")


def find_experts(setting: Setting) -> Path:
    """A small model with experts, of random weights, written once."""
    directory = setting.scratch / "small-experts"
    if not directory.exists():
        fields = describe_random(replace(SMALL, family="qwen3_moe"), SMALL_VOCAB)
        write_checkpoint(fields, directory, torch.float32, torch.device("cpu"))
    return directory


def check_layouts(setting: Setting) -> Iterator[Line]:
    """Each layout on the node's GPUs against one process: log-probs, and the gradient's norm of a step."""
    number = count_processes(setting)
    if number < 2:
        yield skip("layouts", "all of them", "one GPU")
        return
    with open_cluster(setting) as cluster:
        for checkpoint, layouts in ((find_small_checkpoint(setting), DENSE), (find_experts(setting), EXPERTS)):
            alone = None
            for name, sizes in {"one process": {}, **layouts}.items():
                taken = 1
                for axis in ("tp", "pp", "cp", "ep"):
                    taken *= sizes.get(axis, 1)
                if number % taken:
                    yield skip("layouts", name, f"takes {taken} GPUs")
                    continue
                parallel = ParallelConfig(num_processes=number if alone else 1, **sizes)
                with ExitStack() as stack:
                    try:
                        found = run_step(start(setting, cluster, stack, parallel, checkpoint=checkpoint))
                    except Exception as error:
                        yield fail("layouts", name, f"{type(error).__name__}: {error}")
                        if alone is None:
                            break
                        continue
                if alone is None:
                    alone = found
                else:
                    yield from compare_layouts(name, found, alone, setting.config.policy.dtype)


def compare_layouts(
    name: str, found: tuple[torch.Tensor, float], alone: tuple[torch.Tensor, float], dtype: Dtype
) -> Iterator[Line]:
    gap = float((found[0] - alone[0]).abs().max())
    yield judge("layouts", f"{name}: log-probs", gap, most=BOUNDS[dtype.value].before, unit="largest difference")
    yield judge(
        "layouts",
        f"{name}: gradient norm",
        abs(found[1] / alone[1] - 1),
        most=MOST_OF_STEP[dtype],
        unit="relative difference",
    )


def check_checkpoint(setting: Setting) -> Iterator[Line]:
    """A state of all GPUs, saved before the first step and after one, and loaded into new processes."""
    yield from save_and_load(setting, "checkpoint")


def save_and_load(setting: Setting, check: str, model: str = "", **changes: Any) -> Iterator[Line]:
    """model: what the lines call it. changes: of the policy's WorkerSpec."""
    number = count_processes(setting)
    even = number % 2 == 0
    layouts = {"the same layout": ParallelConfig(num_processes=number, tp=2 if even else 1, sp=even)}
    layouts |= {"one process": ParallelConfig()} if number > 1 else {}
    samples, dtype = make_small_samples(), setting.config.policy.dtype
    with open_cluster(setting) as cluster:
        for num_steps, when in ((0, "before the first step"), (1, "after a step")):
            directory = setting.scratch / f"{check}{model}-state-{num_steps}"
            with ExitStack() as stack:
                group = start(setting, cluster, stack, layouts["the same layout"], **changes)
                for _ in range(num_steps):
                    run_step(group)
                group.begin_save(directory).result()
                group.finish_save().result()
                before, _ = run_step(group)
                after = group.logprobs(samples.sequences, 1.0).result()
            for name, parallel in layouts.items():
                with ExitStack() as stack:
                    group = start(setting, cluster, stack, parallel, **changes)
                    group.load(directory).result()
                    own, _ = run_step(group)
                    gap = float((own - before).abs().max())
                    exact = 0.0 if name == "the same layout" else BOUNDS[dtype.value].before
                    what = f"{model and f'{model}: '}saved {when}, loaded into {name}"
                    yield judge(check, f"{what}: log-probs", gap, most=exact, unit="largest difference")
                    # Adam's moments show in the step after it.
                    gap = float((group.logprobs(samples.sequences, 1.0).result() - after).abs().max())
                    what += ", after the next step"
                    yield judge(check, what, gap, most=BOUNDS[dtype.value].before, unit="largest difference")
