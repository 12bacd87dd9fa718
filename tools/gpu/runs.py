"""Checks by whole runs of the command, of a random model, without a download: weights by each transport, and a curve
that must rise.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from megarl.config.schema.root import HardwareConfig
from megarl.plan.seconds import LINK_SHARE
from megarl.report.record import METRICS_FILE, load_metrics
from megarl.report.text import LOG_NAME
from megarl.tools.gpu.lines import Line, fail, judge, skip
from megarl.tools.gpu.ranks import count_processes
from megarl.tools.gpu.setting import CPU, CUDA, Setting

REWARD = "reward/mean"
LEAST_RISE = 0.1
"""Of the mean reward of the last three iterations over that of the first"""
MOST_OVER_BOUND = 1.01
COMMON = ["model=tiny", "algo=ppo", "train.eval_every=10", "train.num_eval_prompts=8", "checkpoint.save_every=null"]
SIZES = {
    # The layers of Qwen3-0.6B; characters in place of its vocabulary.
    CUDA: [
        *("cluster=gpu", "cluster.object_store_mb=2048", "rollout.kv_cache_tokens=262144", "rollout.offload=all"),
        *("model.random.num_layers=28", "model.random.hidden_size=1024", "model.random.ffn_size=3072"),
        *("model.random.num_heads=16", "model.random.num_kv_heads=8", "model.random.init_std=0.02"),
        *("policy.dtype=bfloat16", "critic.dtype=bfloat16", "rollout.dtype=bfloat16"),
        *("policy.offload=all", "critic.offload=all", "rollout.sglang.mem_fraction_static=0.5"),
        *("policy.optimizer.lr=2e-4", "policy.optimizer.min_lr=1e-4", "critic.optimizer.lr=2e-4"),
    ],
    CPU: [],
}


def list_sizes(device: str, number: int) -> list[str]:
    """The overrides of a run on so many GPUs."""
    if device == CPU:
        return [*COMMON, *SIZES[CPU]]
    own = [f"cluster.gpus_per_node={number}", f"rollout.num_servers={number}"]
    own += [f"{role}.parallel.num_processes={number}" for role in ("policy", "critic")]
    return [*COMMON, *SIZES[CUDA], *own]


def list_ways(device: str, number: int) -> dict[str, list[str]]:
    """Transports, and the overrides of each besides."""
    ways: dict[str, list[str]] = {"colocated": [], "disk": []}
    if device == CPU:
        return ways | {"split": []}
    half = number // 2
    split = [f"{role}.parallel.num_processes={half}" for role in ("policy", "critic")]
    split += ["cluster.placement=split", f"rollout.num_servers={half}", "rollout.offload=null"]
    return ways | ({"split": split} if half else {})


def train(setting: Setting, name: str, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """The metrics of each iteration, and why the run ended in an error; empty: it did not."""
    directory, sizes = setting.scratch / name, list_sizes(setting.device, count_processes(setting))
    command = [sys.executable, "-m", "megarl.train", *sizes, f"hydra.run.dir={directory}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    (setting.scratch / f"{name}-output.log").write_text(done.stdout + done.stderr)
    metrics = directory / METRICS_FILE
    lines = [line for line in load_metrics(metrics) if line["iteration"] >= 1] if metrics.is_file() else []
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [f"see {directory / LOG_NAME}"]
    return lines, "" if done.returncode == 0 else f"ended with status {done.returncode}: {last[0]}"


def check_sync(setting: Setting) -> Iterator[Line]:
    """Weights from roles to servers by each transport: their bytes beside the fewest possible, and the seconds."""
    number = count_processes(setting)
    for way, own in list_ways(setting.device, number).items():
        found, error = train(setting, f"sync-{way}", f"rollout.transport={way}", "train.num_iterations=2", *own)
        num_senders = number // 2 if way == "split" else number
        yield from judge_sync(way, found, error, setting.config.cluster.hardware, num_senders)
    if number < 2:
        yield skip("sync", "split", "one GPU")


def judge_sync(
    way: str, found: Sequence[dict[str, float]], error: str, hardware: HardwareConfig, num_senders: int
) -> Iterator[Line]:
    """hardware: of which the plan's seconds come."""
    last = found[-1] if found else {}
    if error or "sync/bytes" not in last:
        yield fail("sync", way, error or "the run has no metrics of a sync")
        return
    seconds = {key.removeprefix("sync/seconds_"): x for key, x in last.items() if key.startswith("sync/seconds_")}
    note = f"{last['sync/bytes'] / 1e6:.3g} MB; " + ", ".join(f"{key} {x:.2f} s" for key, x in seconds.items())
    if move := seconds.get("move"):
        note += f"; {last['sync/bytes'] / move / num_senders / 1e9:.3g} GB/s of each GPU"
        note += f", planned {LINK_SHARE * hardware.nvlink_gb_s:.3g}" if hardware.gpu else ""
    over = last.get("sync/bytes_over_bound")
    if over is None:
        yield skip("sync", f"{way}: seconds", note, sum(seconds.values()), "s")
    else:
        bounds = {"least": 1.0, "most": MOST_OVER_BOUND}
        yield judge("sync", f"{way}: bytes", over, **bounds, unit="of the fewest", reason=note)
    gap = last.get("sync/probe_logprob_gap", 0.0)
    yield judge("sync", f"{way}: log-probs of a server", gap, most=0.1, unit="median difference")


def check_run(setting: Setting) -> Iterator[Line]:
    """Ten iterations of PPO: their reward must rise; where their time goes."""
    yield from judge_run(*train(setting, "run", "train.num_iterations=10"))


def judge_run(found: Sequence[dict[str, float]], error: str) -> Iterator[Line]:
    if error:
        yield fail("run", "ten iterations", error)
        return
    rewards = [line[REWARD] for line in found]
    rise = statistics.mean(rewards[-3:]) - rewards[0]
    curve = ", ".join(f"{reward:.3f}" for reward in rewards)
    yield judge("run", "rise of the reward", rise, least=LEAST_RISE, reason=curve)
    last = found[-1]
    times = sorted(((x, key) for key, x in last.items() if key.startswith("time/")), reverse=True)
    note = ", ".join(f"{key.removeprefix('time/')} {x:.1f} s" for x, key in times[:6])
    memory = "; ".join(f"{key[5:]} {x:.1f}" for key, x in last.items() if key.endswith("_peak_memory_gb"))
    yield skip("run", "seconds of an iteration", f"{note}; {memory}", last["perf/time_per_step"], "s")
