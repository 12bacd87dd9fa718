"""The allocation of a Slurm job: read from its environment, held against the configuration."""

import pytest

from megarl.config.allocation import (
    Allocation,
    check_allocation,
    count_by_type,
    count_numbers,
    is_restarted,
    read_allocation,
)
from megarl.config.errors import ConfigError
from megarl.config.schema.cluster import ClusterConfig

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0,1"}, 8),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 5),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_GPUS_PER_NODE": "8(x2)"}, 8),
    ],
)
def test_the_gpus_of_a_node_are_counted_in_each_form_that_slurm_has(variables: dict[str, str], gpus: int) -> None:
    assert read_allocation(JOB | variables) == Allocation("7", 2, gpus)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES"),
        ({"SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE"),
        ({"SLURM_JOB_GPUS": "0,x"}, "SLURM_JOB_GPUS"),
    ],
)
def test_what_cannot_be_read_is_named(variables: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        read_allocation(JOB | variables)


@pytest.mark.parametrize("text", ["", "h100", "8(x)", "1,,2"])
def test_other_texts_are_no_counts(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        count_by_type(text)
    with pytest.raises(ValueError, match="must be"):
        count_numbers(text)


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
