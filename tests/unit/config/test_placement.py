"""Which GPU each process has, what Slurm gave to a job, and what does not fit."""

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
    find_ray_address,
    is_sharing,
    list_groups,
    place,
    read_allocation,
)
from megarl.config.schema.run import SERVERS, ClusterConfig, Placement

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
