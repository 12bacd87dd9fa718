"""Which GPU each process has, what Slurm gave to a job, and what does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import (
    SERVERS,
    Allocation,
    DeviceSlot,
    Group,
    check_allocation,
    check_cluster,
    count_nodes,
    find_ray_address,
    is_restarted,
    is_sharing,
    list_groups,
    place,
    read_allocation,
)
from megarl.config.schema.run import ClusterConfig, Placement

POLICY, CRITIC, TWO_SERVERS = Group("policy", 2, 1, 1), Group("critic", 2, 1, 1), Group(SERVERS, 2, 2, 2)
GROUPS = [POLICY, CRITIC, TWO_SERVERS]


ROLES = dict.fromkeys(("policy", "critic"), (DeviceSlot(0, (0,)), DeviceSlot(0, (1,))))
SEATS = {
    Placement.apart: {
        "policy": ROLES["policy"],
        "critic": (DeviceSlot(0, (2,)), DeviceSlot(0, (3,))),
        SERVERS: (DeviceSlot(1, (0, 1)), DeviceSlot(1, (2, 3))),
    },
    Placement.split: {**ROLES, SERVERS: (DeviceSlot(0, (2, 3)), DeviceSlot(1, (0, 1)))},
    Placement.colocated: {**ROLES, SERVERS: (DeviceSlot(0, (0, 1)), DeviceSlot(0, (2, 3)))},
}


@pytest.mark.parametrize("placement", Placement)
def test_each_placement_gives_the_processes_their_gpus(placement: Placement) -> None:
    slots = place(ClusterConfig(gpus_per_node=4, num_nodes=2, placement=placement), GROUPS)
    assert slots == SEATS[placement]
    assert is_sharing(slots) == (placement is Placement.colocated)


def test_gpus_that_are_not_counted_are_not_given() -> None:
    slots = place(ClusterConfig(), GROUPS)
    assert slots[SERVERS] == (DeviceSlot(0, ()), DeviceSlot(0, ()))


def test_servers_share_no_gpus_where_none_are_counted_or_there_is_one_of_them_alone() -> None:
    assert not is_sharing(place(ClusterConfig(placement=Placement.colocated), GROUPS))
    colocated = ClusterConfig(gpus_per_node=4, placement=Placement.colocated)
    assert not is_sharing(place(colocated, [POLICY, Group(SERVERS, 0, 1, 1)]))
    assert not is_sharing(place(colocated, [TWO_SERVERS]))


def test_a_tensor_parallel_group_that_fits_a_node_does_not_cross_into_the_next() -> None:
    slots = place(ClusterConfig(gpus_per_node=4, num_nodes=3), [Group("policy", 3, 1, 1), Group("critic", 4, 1, 2)])
    assert slots["critic"] == (DeviceSlot(1, (0,)), DeviceSlot(1, (1,)), DeviceSlot(1, (2,)), DeviceSlot(1, (3,)))


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    roles = draw(st.lists(st.sampled_from(["policy", "critic", "reference"]), unique=True))
    made = [
        Group(name, unit * draw(st.integers(1, 4)), 1, unit) for name in roles for unit in [draw(st.integers(1, 6))]
    ]
    tp = draw(st.integers(1, 4))
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


def test_policy_critic_and_servers_of_qwen32b_are_64_gpus_each_and_share_8_nodes() -> None:
    config = load_config(["algo=vapo", "model=qwen32b"])
    groups = list_groups(config)
    assert [group.num_gpus for group in groups] == [64, 64, 64]
    assert count_nodes(place(config.cluster, groups)) == 8
    assert count_nodes(place(ClusterConfig(gpus_per_node=8), groups)) == 24


def check(*overrides: str) -> list[str]:
    return list(check_cluster(load_config(overrides)))


def test_more_than_the_cluster_has_is_refused_with_both_numbers_and_a_placement_that_has_room() -> None:
    [problem] = check("algo=vapo", "model=tiny", "cluster.gpus_per_node=2")
    assert problem == (
        "cluster: policy 1 + critic 1 + servers 1 GPUs, placed apart, need 2 nodes of 2 GPUs (cluster.gpus_per_node);"
        " there are 1 (cluster.num_nodes) with 2 in all; cluster.placement=split has room, where the memory suffices"
        " (tools/plan.py tells)"
    )
    assert check("algo=vapo", "model=tiny", "cluster.gpus_per_node=2", "cluster.placement=split") == []


def test_a_server_larger_than_a_node_is_refused() -> None:
    [problem] = check("algo=vapo", "model=tiny", "cluster.gpus_per_node=2", "rollout.tp=4")
    assert problem == "rollout.tp: found 4; a server is on one node, which has 2 GPUs"


def test_several_nodes_need_a_ray_that_spans_them_and_an_address() -> None:
    found = check("algo=vapo", "model=tiny", "cluster.num_nodes=2")
    assert [problem.split(":")[0] for problem in found] == [
        "cluster.ray_address",
        "cluster.listen_host",
        "cluster.gpus_per_node",
    ]
    right = ("cluster.ray_address=h:1", "cluster.listen_host=auto", "cluster.gpus_per_node=2")
    for transport in ("colocated", "split", "disk"):
        given = (*right, f"rollout.transport={transport}")
        assert check("algo=vapo", "model=tiny", "cluster.num_nodes=2", *given) == []


def test_policy_and_servers_share_the_gpus_of_several_nodes_without_a_disk() -> None:
    nodes = ("cluster=h100x64", "cluster.ray_address=h:1", "cluster.placement=colocated")
    given = ("algo=grpo", "model=qwen32b", *nodes)
    assert check(*given, "rollout.transport=colocated") == []
    assert [problem.split(":")[0] for problem in check(*given, "rollout.transport=split")] == ["rollout.transport"]


def test_an_address_without_a_port_is_refused() -> None:
    for wrong in ("head", "http://head:8265", "ray://head:10001"):
        [problem] = check("algo=vapo", "model=tiny", f"cluster.ray_address='{wrong}'")
        assert problem.startswith(f"cluster.ray_address: found '{wrong}'; it must be HOST:PORT, auto for")
    assert check("algo=vapo", "model=tiny", "cluster.ray_address=auto") == []


def test_auto_is_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_ray_address("auto") == "10.0.0.1:6379"
    assert find_ray_address("head:1") == "head:1"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS, and that is http://head:8265; a job of"):
        find_ray_address("auto")
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS, and that is not set"):
        find_ray_address("auto")


def test_offline_value_pretraining_places_the_critic_alone_and_an_evaluation_the_servers() -> None:
    config = load_config(["algo=vapo", "model=tiny", "algo.value_pretrain.rollouts=x.jsonl", "train.num_iterations=0"])
    assert [(each.name, each.num_processes) for each in list_groups(config)] == [("critic", 1), (SERVERS, 0)]
    assert [each.name for each in list_groups(config, "evaluate")] == [SERVERS]


def test_slurms_cluster_outside_a_job_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(ConfigError, match=r"cluster: slurm takes its nodes from a Slurm job.*sbatch slurm/train.sh"):
        load_config(["cluster=slurm"])


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(("variables", "gpus"), [({}, 0), ({"SLURM_GPUS_ON_NODE": "8"}, 8)])
def test_the_nodes_and_gpus_of_a_job_are_those_that_slurm_says(variables: dict[str, str], gpus: int) -> None:
    assert read_allocation(JOB | variables) == Allocation("7", 2, gpus)


@pytest.mark.parametrize(
    ("name", "text"), [("SLURM_JOB_ID", ""), ("SLURM_JOB_NUM_NODES", "two"), ("SLURM_GPUS_ON_NODE", "many")]
)
def test_what_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        read_allocation(JOB | {name: text})


def test_a_job_that_asks_for_more_than_it_has_is_refused_with_both_numbers() -> None:
    cluster = ClusterConfig(num_nodes=4, gpus_per_node=8)
    nodes, gpus = check_allocation(cluster, Allocation("7", 2, 4))
    assert nodes == "cluster.num_nodes: found 4; job 7 has 2: sbatch --nodes=4"
    assert gpus == "cluster.gpus_per_node: found 8; job 7 has 4 on a node: sbatch --gpus-per-node=8"


def test_a_job_may_use_less_and_processes_are_counted_where_there_is_no_gpu() -> None:
    assert not list(check_allocation(ClusterConfig(num_nodes=1, gpus_per_node=2), Allocation("7", 2, 4)))
    assert not list(check_allocation(ClusterConfig(num_nodes=2, gpus_per_node=2), Allocation("7", 2, 0)))


@pytest.mark.parametrize(("count", "restarted"), [(None, False), ("", False), ("0", False), ("1", True), ("12", True)])
def test_a_job_that_was_queued_again_is_known_by_the_count_of_its_restarts(count: str | None, restarted: bool) -> None:
    assert is_restarted({} if count is None else {"SLURM_RESTART_COUNT": count}) is restarted
