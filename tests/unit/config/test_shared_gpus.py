"""rollout.offload and the turns of roles: where they have an effect, and what is refused."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import find_server_offload, take_turns
from megarl.config.schema.rollout import ServerOffload
from megarl.rollout.server import check_options

SHARED = ("algo=vapo", "model=tiny", "cluster.gpus_per_node=1", "cluster.placement=colocated", "rollout.offload=all")
ON_TWO_NODES = ("algo=vapo", "model=qwen3_8b", "cluster=h100x16", "cluster.placement=split", "rollout.transport=split")


def test_servers_give_memory_back_where_they_share_gpus_or_gpus_are_not_counted() -> None:
    assert find_server_offload(load_config(SHARED)) is ServerOffload.all
    assert find_server_offload(load_config([*SHARED, "rollout.offload=kv_cache"])) is ServerOffload.kv_cache
    assert find_server_offload(load_config(["algo=vapo", "model=tiny", "rollout.offload=all"])) is ServerOffload.all
    assert find_server_offload(load_config(SHARED[:-1])) is None
    # A preset's value has no effect where the servers have GPUs of their own, and hinders nothing.
    config = load_config([*ON_TWO_NODES, "rollout.max_staleness=1", "algo.mismatch.correction=tis"])
    assert config.rollout.offload is ServerOffload.all
    assert find_server_offload(config) is None


def test_set_where_no_gpu_is_shared_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.offload: has no effect where servers share no GPU with a role"):
        load_config([*ON_TWO_NODES, "rollout.offload=all"])
    load_config([*ON_TWO_NODES, "rollout.offload=null"])


def test_servers_that_generate_meanwhile_give_nothing_back() -> None:
    with pytest.raises(ConfigError, match=r"rollout.offload: found all with rollout.max_staleness=1"):
        load_config([*SHARED, "rollout.max_staleness=1", "algo.mismatch.correction=tis"])


def test_the_memory_saver_of_sglang_has_a_key() -> None:
    [problem] = check_options({"enable_memory_saver": True})
    assert problem == "rollout.sglang.enable_memory_saver: megarl sets it (by rollout.offload); remove it here"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.gpus_per_node=1", "cluster.placement=colocated"], False),
        (["cluster.gpus_per_node=1", "cluster.placement=colocated", "policy.offload=all"], True),
        (["cluster.gpus_per_node=1", "cluster.placement=colocated", "critic.offload=optimizer"], True),
        (["cluster.gpus_per_node=2", "cluster.placement=split", "policy.offload=all"], True),
        (["cluster.gpus_per_node=3", "policy.offload=all"], False),
        (["policy.offload=all"], False),
    ],
)
def test_roles_take_turns_where_they_share_gpus_and_leave_them(overrides: list[str], expected: bool) -> None:
    assert take_turns(load_config(["algo=vapo", "model=tiny", *overrides])) is expected
