"""What a CPU decides: the threads of each process, by which of them work at the same time, and small models' dtype."""

import os
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.placement import count_gpus
from megarl.config.schema import root
from megarl.cpu import process as threads
from megarl.cpu.process import (
    SERVER_KEY,
    WORKER_KEY,
    count_cores,
    describe_threads,
    list_threads,
    settle_threads,
    share_cores,
)

STALE = ("rollout.max_staleness=1", "algo.mismatch.correction=tis")
ALONE = ("algo.value_pretrain.rollouts=/x.jsonl", "train.num_iterations=0")


@pytest.mark.parametrize(
    ("overrides", "num_cores", "command", "expected"),
    [
        # Policy and critic update at the same time; the server generates while they rest.
        ((), 16, "train", (8, 16)),
        # Without a critic the policy has all of them.
        (("algo=grpo", "algo.kl.in_loss=true", "algo.kl.loss_coef=0.01"), 2, "train", (2, 2)),
        (("algo=grpo", "policy.parallel.num_processes=2", "policy.parallel.tp=2"), 8, "train", (4, 8)),
        (("rollout.num_servers=3",), 8, "train", (4, 2)),
        (("rollout.num_servers=2", "rollout.tp=2"), 8, "train", (4, 2)),
        # The server generates beside the updates.
        (STALE, 12, "train", (4, 4)),
        (("algo=grpo", *STALE), 2, "train", (1, 1)),
        (("algo=grpo",), 7, "evaluate", (7, 7)),
        (ALONE, 16, "train", (16, 16)),
        # GPUs are counted: the threads have no effect on them.
        (("cluster.gpus_per_node=8", "cluster.placement=split"), 64, "train", (1, 1)),
    ],
)
def test_the_cores_are_shared_by_the_processes_that_work_at_the_same_time(overrides, num_cores, command, expected):
    config = load_config([*overrides], None)
    assert share_cores(config, count_gpus(config, command), num_cores) == expected


def test_a_number_that_is_given_or_recorded_stays_and_the_other_is_decided():
    chosen, given = (
        load_config(["algo=grpo", key]) for key in ("cluster.cpu_threads_per_worker=3", "rollout.num_threads=2")
    )
    gpus = count_gpus(given)
    settled = settle_threads(chosen, gpus, num_cores=8)
    assert list_threads(settled) == {WORKER_KEY: 3, SERVER_KEY: 8}
    assert describe_threads(settled, gpus) == "CPU threads: 3 of each training process, 8 of each server"
    recorded = list_threads(settle_threads(load_config(["algo=grpo"]), gpus, num_cores=8))
    assert list_threads(settle_threads(given, gpus, recorded=recorded, num_cores=2)) == {WORKER_KEY: 8, SERVER_KEY: 2}
    assert describe_threads(load_config(["cluster.gpus_per_node=8"]), gpus) == ""


@pytest.mark.parametrize(
    ("limit", "quota", "expected"),
    [("", "max 100000", 6), ("4,2", "max 100000", 4), ("many", "max 100000", 6), ("64", "max 100000", 6),
     ("", "250000 100000", 3), ("", "1000 100000", 1), ("0", "max 100000", 1)],
)  # fmt: skip
def test_cores_are_those_of_affinity_quota_and_environment(monkeypatch, tmp_path, limit, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    monkeypatch.setattr(threads, "CGROUP_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert count_cores() == expected


FLAGS = {
    "flags\t\t: fpu avx512f avx512_bf16 avx512_vnni": "bfloat16",
    "flags\t\t: fpu avx512f amx_tile amx_bf16": "bfloat16",
    "Features\t: fp asimd i8mm bf16": "bfloat16",
    "flags\t\t: fpu avx2 avx512f avx512_vnni": "float32",
    "model name\t: bf16": "float32",
}


def list_dtypes(*overrides: str) -> set[str]:
    config = load_config(["model=smollm2_135m", *overrides])
    return {part.dtype.name for part in (config.policy, config.critic, config.reference, config.rollout)}


@pytest.mark.parametrize("line", FLAGS)
def test_the_small_model_is_in_bfloat16_where_the_cpu_has_instructions_for_it(line, monkeypatch, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n")
    monkeypatch.setattr(root, "CPU_INFO", tmp_path / "cpuinfo")
    assert list_dtypes("algo=ppo") == list_dtypes("algo=grpo") == {FLAGS[line]}
    assert list_dtypes("algo=ppo", "cluster.gpus_per_node=2") == {"bfloat16"}
    assert list_dtypes("policy.dtype=bfloat16") == {"bfloat16", FLAGS[line]}
