"""Which GPU each process has, what Slurm gave to a job, and what does not fit; what a CPU decides: the threads of each
process, by which of them work at the same time, and small models' dtype.
"""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import (
    Allocation,
    DeviceSlot,
    Group,
    check_allocation,
    check_cluster,
    count_gpus,
    find_ray_address,
    is_sharing,
    list_groups,
    place,
    read_allocation,
)
from megarl.config.schema import root
from megarl.config.schema.root import SERVERS, ClusterConfig, Placement
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

POLICY, CRITIC, TWO_SERVERS = Group("policy", 2, 1, 1), Group("critic", 2, 1, 1), Group(SERVERS, 2, 2, 2)
GROUPS = [POLICY, CRITIC, TWO_SERVERS]
FIRST = ((0, (0,)), (0, (1,)))
SEATS = {
    Placement.apart: [FIRST, ((0, (2,)), (0, (3,))), ((1, (0, 1)), (1, (2, 3)))],
    Placement.split: [FIRST, FIRST, ((0, (2, 3)), (1, (0, 1)))],
    Placement.colocated: [FIRST, FIRST, ((0, (0, 1)), (0, (2, 3)))],
}
TINY = ("algo=vapo", "model=tiny")
TWO_NODES = ("cluster.num_nodes=2", "cluster.ray_address=h:1", "cluster.listen_host=auto", "cluster.gpus_per_node=2")
NODES = ("algo=grpo", "model=qwen32b", "cluster=h100x64", "cluster.ray_address=h:1", "cluster.placement=colocated")


@pytest.mark.parametrize("placement", Placement)
def test_each_placement_gives_the_processes_their_gpus(placement: Placement) -> None:
    slots = place(ClusterConfig(gpus_per_node=4, num_nodes=2, placement=placement), GROUPS)
    assert list(slots.values()) == [tuple(DeviceSlot(*each) for each in seats) for seats in SEATS[placement]]
    assert is_sharing(slots) == (placement is Placement.colocated)


def test_gpus_that_are_not_counted_are_not_given_and_servers_share_none_without_others() -> None:
    assert place(ClusterConfig(), GROUPS)[SERVERS] == (DeviceSlot(0, ()), DeviceSlot(0, ()))
    assert not is_sharing(place(ClusterConfig(placement=Placement.colocated), GROUPS))
    colocated = ClusterConfig(gpus_per_node=4, placement=Placement.colocated)
    assert not is_sharing(place(colocated, [POLICY, Group(SERVERS, 0, 1, 1)]))
    assert not is_sharing(place(colocated, [TWO_SERVERS]))


def test_a_tensor_parallel_group_that_fits_a_node_does_not_cross_into_the_next() -> None:
    slots = place(ClusterConfig(gpus_per_node=4, num_nodes=3), [Group("policy", 3, 1, 1), Group("critic", 4, 1, 2)])
    assert slots["critic"] == tuple(DeviceSlot(1, (gpu,)) for gpu in range(4))


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    roles = draw(st.lists(st.sampled_from(["policy", "critic", "reference"]), unique=True))
    units = [(name, draw(st.integers(1, 6))) for name in roles]
    tp = draw(st.integers(1, 4))
    made = [Group(name, unit * draw(st.integers(1, 4)), 1, unit) for name, unit in units]
    return [*made, Group(SERVERS, draw(st.integers(1, 5)), tp, tp)]


@given(groups(), st.sampled_from(Placement), st.integers(4, 8))
def test_no_two_processes_of_a_group_share_a_gpu_and_apart_no_two_at_all(
    made: list[Group], placement: Placement, per_node: int
) -> None:
    slots = place(ClusterConfig(gpus_per_node=per_node, placement=placement), made)
    taken = {name: [(slot.node, gpu) for slot in each for gpu in slot.gpus] for name, each in slots.items()}
    for group in made:
        assert len(set(taken[group.name])) == len(taken[group.name]) == group.num_gpus
        assert all(0 <= gpu < per_node for _, gpu in taken[group.name])
    together = [gpu for each in taken.values() for gpu in each]
    if placement is Placement.apart:
        assert len(set(together)) == len(together)
    if placement is Placement.split:
        trained = {gpu for name, each in taken.items() if name != SERVERS for gpu in each}
        assert not trained & set(taken[SERVERS])


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        (["cluster.gpus_per_node=2"], ["cluster: policy 1 + critic 1 + servers 1 GPUs, placed apart, need 2 n"]),
        (["cluster.gpus_per_node=2", "cluster.placement=split"], []),
        (["cluster.gpus_per_node=2", "rollout.tp=4"], ["rollout.tp: found 4; a server is on one node"]),
        (["cluster.num_nodes=2"], ["cluster.ray_address", "cluster.listen_host", "cluster.gpus_per_node"]),
        *[([*TWO_NODES, f"rollout.transport={it}"], []) for it in ("colocated", "disk")],
        ([*NODES, "rollout.transport=colocated"], []),
        ([*NODES, "rollout.transport=split"], ["rollout.transport"]),
        (["cluster.ray_address=head"], ["cluster.ray_address: found 'head'; it must be HOST:PORT, auto for"]),
        (["cluster.ray_address='ray://head:10001'"], ["cluster.ray_address: found 'ray:"]),
        (["cluster.ray_address=auto"], []),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(overrides: list[str], starts: list[str]) -> None:
    preset = [] if overrides[:1] == ["algo=grpo"] else TINY
    found = list(check_cluster(load_config([*preset, *overrides])))
    assert [problem.startswith(start) for problem, start in zip(found, starts, strict=True)] == [True] * len(starts)
    assert not found or not found[0].startswith("cluster: ") or "cluster.placement=split has room" in found[0]


@pytest.mark.parametrize(("variable", "shown"), [("http://head:8265", "http://head:8265; a job of"), ("", "not set")])
def test_auto_is_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, shown: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert (find_ray_address("auto"), find_ray_address("head:1")) == ("10.0.0.1:6379", "head:1")
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS, and that is {shown}"):
        find_ray_address("auto")


def test_offline_value_pretraining_places_the_critic_alone_and_an_evaluation_the_servers() -> None:
    config = load_config([*TINY, "algo.value_pretrain.rollouts=x.jsonl", "train.num_iterations=0"])
    assert [(each.name, each.num_processes) for each in list_groups(config)] == [("critic", 1), (SERVERS, 0)]
    assert [each.name for each in list_groups(config, "evaluate")] == [SERVERS]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


def test_the_nodes_and_gpus_of_a_job_are_those_that_slurm_says_and_may_not_be_less_than_is_asked_for(
    monkeypatch,
) -> None:
    assert read_allocation(JOB) == Allocation("7", 2, 0)
    assert read_allocation(JOB | {"SLURM_GPUS_ON_NODE": "8"}) == Allocation("7", 2, 8)
    for name, text in [("SLURM_JOB_ID", ""), ("SLURM_JOB_NUM_NODES", "two"), ("SLURM_GPUS_ON_NODE", "many")]:
        with pytest.raises(ConfigError, match=f"^{name}: "):
            read_allocation(JOB | {name: text})
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(ConfigError, match=r"cluster: slurm takes its nodes from a Slurm job.*sbatch slurm/train.sh"):
        load_config(["cluster=slurm"])
    nodes, gpus = check_allocation(ClusterConfig(num_nodes=4, gpus_per_node=8), Allocation("7", 2, 4))
    assert nodes == "cluster.num_nodes: found 4; job 7 has 2: sbatch --nodes=4"
    assert gpus == "cluster.gpus_per_node: found 8; job 7 has 4 on a node: sbatch --gpus-per-node=8"
    # Processes are counted where there is no GPU.
    for num_nodes, found in ((1, 4), (2, 0)):
        asked = ClusterConfig(num_nodes=num_nodes, gpus_per_node=2)
        assert not list(check_allocation(asked, Allocation("7", 2, found)))


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
