"""A plan as tables for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import ceil
from typing import Any

from rich import box
from rich.table import Table

from megarl.config.checks import describe_sizes
from megarl.config.errors import ConfigError
from megarl.config.placement import format_numbers
from megarl.config.schema.root import SERVERS, Config, Transport
from megarl.plan import memory as m
from megarl.plan import seconds as s
from megarl.plan.job import Change, JobPlan, find_longest, find_save_every
from megarl.plan.memory import FP8_BYTES, GIB, PHASES, ServerMemory
from megarl.plan.seconds import Seconds

SIGNAL_S = 600
"""How long before a job's time limit Slurm signals it (slurm/train.sh, --signal=B:USR1@600)"""
REQUEUE_S = 60
"""How long before the limit the job is requeued, with or without a checkpoint (slurm/train.sh, MARGIN_S)"""
LONGEST_SIGNAL_S = 65535
"""The largest value that sbatch accepts"""
ENDS = ("patience", "stop_at_explained_variance")
"""Keys of algo.value_pretrain that may end it before its last step"""
PARTS = {
    **{"matrix products": ("bf16_tflops", "fp8_tflops"), "GPU memory": ("hbm_gb_s",), "NVLink": ("nvlink_gb_s",)},
    **{"network": ("network_gb_s",), "PCIe": ("pcie_gb_s",), "disk": ("disk_gb_s",)},
}
"""What takes an iteration's seconds, and its keys under cluster.hardware"""
ENDLESS: Any = 1e12
"""A peak with which a part takes no time"""
TIMES = {
    **{"generation": "generation", "scoring": "log-probs, values", "update": "update", "offload": "offload"},
    **{"sync": "sync", "iteration": "all"},
}
"""The attributes of an iteration's Seconds in their order, and what the tables call each"""


def list_tables(config: Config, plan: JobPlan) -> Iterator[Table | str]:
    """The tables and texts of a plan in order, without the verdict."""
    cluster = config.cluster
    hardware = cluster.hardware
    yield (
        f"{config.algo.name} on {config.model.name}: {cluster.num_nodes} x {cluster.gpus_per_node} {hardware.gpu}, of"
        f" {hardware.memory_gib:g} GiB each; cluster.placement={cluster.placement.value}"
    )
    yield describe_sizes(config)
    yield _tabulate_layouts(config, plan)
    yield _tabulate_ranks(plan)
    if plan.server is not None:
        yield _tabulate_servers(config, plan.server)
    yield _tabulate_phases(config, plan)
    yield _tabulate_seconds(config, plan)
    yield _tabulate_costs(config, plan)
    yield from describe_pretraining(config, plan.seconds)
    yield (
        f"Host memory of the fullest node: {plan.host_bytes / GIB:,.0f} GiB of {hardware.host_memory_gib:,g}:"
        " processes, object store, a checkpoint's copy before it is written, offloaded tensors"
    )
    yield describe_assumptions(plan)


def _build_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        # Words to the left, numbers to the right.
        table.add_column(column, justify="left" if number == 0 or column in ("processes", "details") else "right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _tabulate_layouts(config: Config, plan: JobPlan) -> Table:
    rows: list[Sequence[object]] = []
    for name, job in plan.jobs.items():
        sizes = {axis: getattr(job.parallel, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1] + ["sp"] * job.parallel.sp
        samples = f"{config.train.minibatch_size / job.parallel.dp:g}"
        in_flight = max(stage.in_flight for stage in plan.stages[name]) if job.is_trained else "-"
        batch = (samples, job.num_microbatches, f"{job.batch.num_tokens:,}", in_flight)
        rows.append((name, format_numbers(plan.places[name]), " ".join(words) or "one", job.parallel.dp, *batch))
    if plan.server is not None:
        layout = f"{config.rollout.num_servers} of tp {config.rollout.tp}"
        rows.append((SERVERS, format_numbers(plan.places[SERVERS]), layout, *("-",) * 5))
    columns = ("", "GPUs", "layout", "dp", "samples/rank", "micro-batches", "tokens/rank", "in flight")
    return _build_table("Processes, and the samples and tokens of each", columns, rows)


def _tabulate_ranks(plan: JobPlan) -> Table:
    fp8, rows = any(job.caches_fp8 for job in plan.jobs.values()), []
    for name, stages in plan.stages.items():
        for number, stage in enumerate(stages):
            held = [_gib(stage.weights), *[_gib(stage.fp8)] * fp8]
            trained = [stage.gradients, stage.optimizer, stage.activations, stage.head, stage.work, stage.update]
            parts = [_gib(part) if plan.jobs[name].is_trained else "-" for part in trained]
            label = _name_stage(plan, name, number)
            rows.append((label, f"{stage.parameters.total:,}", *held, *parts, _gib(stage.forward)))
    columns = ["", "parameters", "weights", *["FP8 copies"] * fp8, "gradients", "optimizer", "activations"]
    columns += ["logits", "work", "update", "log-probs"]
    return _build_table("A training process, GiB of tensors", columns, rows)


def _tabulate_servers(config: Config, server: ServerMemory) -> Table:
    columns = ("weights GiB", "KV cache GiB", "bytes/token", "tokens/server", f"of {find_longest(config):,}")
    cache = (_gib(max(0, server.kv_cache)), f"{server.bytes_per_token:,}", f"{server.kv_tokens:,}", server.num_longest)
    limits = (config.rollout.max_running_requests, f"{server.fraction:g}", _gib(server.reserve))
    return _build_table(
        "A GPU of a server: KV cache in tokens, and in sequences of full length",
        (*columns, "max requests", "mem_fraction", "left GiB"),
        [(_gib(server.weights), *cache, *limits)],
    )


def _tabulate_phases(config: Config, plan: JobPlan) -> Table:
    limit, rows = config.cluster.hardware.memory_gib, []
    for gpus in plan.gpus:
        who = [_name_stage(plan, role, stage) for role, stage in gpus.stages.items()] + [SERVERS] * bool(gpus.server)
        left = limit - max(gpus.phases.values()) / GIB
        numbers = [_gib(gpus.phases[phase]) for phase in PHASES]
        mark = "" if left >= 0 else "[red]"
        rows.append((format_numbers(gpus.gpus), ", ".join(who), *numbers, f"{mark}{left:.1f}"))
    return _build_table(f"A GPU by phase, GiB of {limit:g}", ("GPUs", "processes", *PHASES, "left"), rows)


def _name_stage(plan: JobPlan, role: str, stage: int) -> str:
    return role if len(plan.stages[role]) == 1 else f"{role} stage {stage}"


def _tabulate_seconds(config: Config, plan: JobPlan) -> Table:
    seconds, transfer = plan.seconds, plan.transfer
    generated = f"{config.train.num_samples:,} responses of {plan.mean_response:,.0f} tokens on average"
    # The share of the peak that each layout reaches, without what is computed twice.
    shares = "MFU " + ", ".join(f"{share:.2f} of the {name}" for name, share in seconds.mfu.items())
    sent = f"{transfer.total / 1e9:.1f} GB in all; {transfer.busiest / 1e9:.1f} GB through the busiest port"
    if config.rollout.transport is Transport.disk:
        speed = f"{config.cluster.hardware.disk_gb_s:g} GB/s a node"
        sent = f"through a file system of {speed} (cluster.hardware.disk_gb_s)"
    overlap = "the slower of generation and the rest, and the sync (rollout.max_staleness)" if seconds.overlaps else ""
    offload = "weights and optimizer to the host and back"
    remarks = dict(zip(TIMES, (generated, "", shares, offload, sent, overlap), strict=True))
    left_out = {"generation", "sync"} if plan.server is None else set()
    left_out |= set() if seconds.offload else {"offload"}
    shown = [(TIMES[x], f"{getattr(seconds, x):,.1f}", remarks[x]) for x in TIMES if x not in left_out]
    return _build_table("An iteration", ("phase", "seconds", "details"), shown)


def find_costs(config: Config, plan: JobPlan) -> dict[tuple[str, str], float]:
    """What each phase of an iteration, and "iteration", waits for: (part of the hardware, phase) -> the share of an
    iteration that would go if this part took no time; "starts and waits": the share that no hardware shortens. Of parts
    that work at once the slower counts, so that shares may add up to less than 1.
    """
    cluster, work, now = config.cluster, s.describe_work(config, plan.mean_response), plan.seconds

    def free(keys: Iterable[str]) -> Seconds:
        hardware = replace(cluster.hardware, **dict.fromkeys(keys, ENDLESS))
        job = replace(config, cluster=replace(cluster, hardware=hardware))
        return s.estimate_seconds(job, plan.jobs, plan.stages, plan.server, plan.transfer, work)

    found = {part: free(keys) for part, keys in PARTS.items()}
    rest, shares = free(chain.from_iterable(PARTS.values())), dict[tuple[str, str], float]()
    for phase in TIMES:
        saved = {part: getattr(now, phase) - getattr(then, phase) for part, then in found.items()}
        saved |= {"starts and waits": getattr(rest, phase)}
        shares |= {(part, phase): seconds / now.iteration for part, seconds in saved.items()}
    return shares


def _tabulate_costs(config: Config, plan: JobPlan) -> Table:
    costs = {key: share for key, share in find_costs(config, plan).items() if share >= 0.005}
    parts, phases = (list(dict.fromkeys(names)) for names in zip(*costs, strict=True))
    rows = [(part, *(f"{costs[part, x]:.0%}" if (part, x) in costs else "-" for x in phases)) for part in parts]
    columns = ("", *(TIMES[phase] for phase in phases))
    return _build_table("What an iteration would save if a part took no time", columns, rows)


def describe_pretraining(config: Config, seconds: Seconds) -> Iterator[str]:
    """The time of value pretraining, where there is one."""
    step, settings = seconds.pretraining, config.algo.value_pretrain
    if step is None:
        return
    scoring = "log-probs and values" if config.algo.kl.in_reward else "values"
    parts = [f"{scoring} {step.scoring:,.1f}", f"the critic's update {step.update:,.1f}"]
    if settings.rollouts is None:
        parts.insert(0, f"generation {step.generation:,.1f}")
    ends = [f"{key}={getattr(settings, key):g}" for key in ENDS if getattr(settings, key) is not None]
    total = settings.num_steps * step.iteration
    number = f"{'up to ' if ends else ''}{settings.num_steps} step{'s' if settings.num_steps > 1 else ''}"
    yield (
        f"Value pretraining: {number} of {step.iteration:,.1f} s ({', '.join(parts)}),"
        f" {f'{total / 3600:,.1f} hours' if total >= 2 * 3600 else f'{total:,.0f} s'} in all"
        + (f"; it may end earlier (algo.value_pretrain: {', '.join(ends)})" if ends else "")
        + ("" if settings.rollouts is None else "; saved rollouts are taken to be like those of an iteration")
    )


def find_signal(config: Config, seconds: Seconds) -> int | None:
    """How many seconds before a job's time limit Slurm must signal it, at most LONGEST_SIGNAL_S, for the update,
    checkpoint.stop_deadline_s and the requeue; None: those of slurm/train.sh are enough.

    Generation and scoring are aborted by the signal (and responses kept); an update is finished first
    (megarl/signals.py, deferring_stops).
    """
    if seconds.update + REQUEUE_S <= SIGNAL_S:
        return None
    enough = 100 * ceil((seconds.update + config.checkpoint.stop_deadline_s + REQUEUE_S) / 100)
    return min(enough, LONGEST_SIGNAL_S)


def describe_total(config: Config, plan: JobPlan, hours: float | None = None) -> Iterator[str]:
    """What the run takes: hours, GPU-hours of its nodes, disk, and how many starts of a Slurm job of so many hours.

    Raises ConfigError where such a job has less than half of its time left to train.
    """
    cluster, saved, iterations = config.cluster, config.checkpoint, config.train.num_iterations
    pretraining, settings, gpus = plan.seconds.pretraining, config.algo.value_pretrain, cluster.num_nodes
    gpus *= cluster.gpus_per_node
    before = settings.num_steps * pretraining.iteration / 3600 if pretraining else 0.0
    then = iterations * plan.seconds.iteration / 3600
    upper = "up to " * (before > 0 and any(getattr(settings, key) is not None for key in ENDS))
    parts = f"value pretraining {upper}{before:,.1f}, " * (before > 0) + f"{iterations:,} iterations {then:,.1f}"
    on = f"{gpus:,} GPU{'s' * (gpus > 1)}"
    yield f"Total: {upper}{before + then:,.1f} hours on {on}, {gpus * (before + then):,.0f} GPU-hours ({parts})"
    if saved.save_every is not None:
        number, size = saved.keep_last + saved.keep_best + 1, plan.checkpoint_bytes / GIB
        of = f"{number}: those that are kept, and one while it is written"
        yield f"Disk: {size:,.0f} GiB a checkpoint, {number * size:,.0f} for {of}"
    if hours is not None:
        lead = find_signal(config, plan.seconds) or SIGNAL_S
        if not hours * 3600 >= 2 * lead:
            least = f"with {2 * lead / 3600:.1f} half of it is left to train"
            raise ConfigError([f"--hours: found {hours:g}; {least}: the signal comes {lead:,} s before its end"])
        starts = max(1, ceil((before + then) / (hours - lead / 3600)))
        again = "no requeue" if starts == 1 else f"{upper}{starts - 1:,} requeue{'s' * (starts > 2)}"
        yield f"In Slurm jobs of {hours:g} hours: {again}; each trains until {lead:,} s before its end"


def describe_losses(config: Config, plan: JobPlan) -> Iterator[str]:
    """What a job that fits loses: half of the GPUs or more, and far more than an hour of training with a node."""
    cluster, every, iteration = config.cluster, config.checkpoint.save_every, plan.seconds.iteration
    there, nodes = cluster.num_nodes * cluster.gpus_per_node, 1 + plan.last_gpu // cluster.gpus_per_node
    if 2 * plan.num_gpus <= there:
        enough = f"; cluster.num_nodes={nodes} is enough for it as it is" if nodes < cluster.num_nodes else ""
        yield f"{there - plan.num_gpus} of {there} GPUs are idle: --search finds what uses them{enough}"
    fewer = find_save_every(every, iteration)
    if every is not None and fewer is not None and fewer < every:
        yield (
            f"a checkpoint every {every * iteration / 3600:,.1f} hours (checkpoint.save_every={every}), which a lost"
            f" node would cost: checkpoint.save_every={fewer} writes one every {fewer * iteration / 3600:,.1f}"
        )


def describe_assumptions(plan: JobPlan) -> str:
    jobs = plan.jobs.values()
    fp8 = f" (FP8 {s.FP8_SHARE:g})" if any(m.uses_fp8(job.node) for job in jobs) else ""
    text = (
        f"Assumed: matrix products at {s.PRODUCT_SHARE:g} of the peak{fp8}, attention at"
        f" {s.ATTENTION_SHARE:g}, other operations at {s.MEMORY_SHARE:g} of the memory bandwidth,"
        f" {s.LAYER_S * 1000:g} ms a layer and micro-batch besides ({s.EXPERT_LAYER_S * 1000:g} ms with experts),"
        f" nothing hidden of what experts and gradients send; in generation {s.DECODE_SHARE:g} of the peak,"
        f" {s.DECODE_BANDWIDTH:g} of the memory bandwidth and {s.DECODE_STEP_S * 1000:g} ms a step; {s.LINK_SHARE:g} of"
        f" the bandwidth of NVLink, network and PCIe; responses of {plan.mean_response:,.0f} tokens on average"
        f" (--mean-response; only for seconds: memory is that of the limit). In addition to tensors:"
        f" {m.PROCESS_GIB:g} GiB and {m.ALLOCATOR_SHARE:.0%} per training process, {m.SERVER_GIB:g} GiB per GPU of a"
        f" server, {m.HOST_PROCESS_GIB:g} GiB of host memory per process."
    )
    if any(job.arch.experts for job in jobs):
        text += " Experts: the routes are balanced, so that each rank receives as many tokens as it sends."
    if any(job.caches_fp8 for job in jobs):
        text += (
            " FP8: Transformer Engine keeps a copy of each linear layer's weight and its transpose, also between the"
            f" calls, {FP8_BYTES} bytes a parameter."
        )
    return text


def list_found(title: str, found: Sequence[Change]) -> Iterator[str]:
    """The lines of a search: seconds by phase, memory left, and the overrides on a line of their own."""
    yield f"\n{title}{'' if found else ': none of those that were tried fits'}"
    for number, each in enumerate(found, start=1):
        parts = each.plan.seconds
        phases = [x for x in TIMES if x != "iteration" and (x != "offload" or parts.offload)]
        text = ", ".join(f"{TIMES[x]} {getattr(parts, x):,.1f}" for x in phases)
        room = f"{_gib(each.plan.left)} GiB left; {each.plan.num_gpus} GPUs"
        yield f"{number:>3}. {parts.iteration:,.1f} s ({text}); {room}"
        yield "     " + " ".join(each.overrides or ["as it is"])
    if found:
        yield describe_assumptions(found[0].plan)
